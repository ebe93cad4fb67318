"""Catalog of Vela workarounds: finds patterns that Vela miscompiles and rewrites them (``docs/contributors/vela.md``).

``Hardware.vela_bugs`` names the bugs that affect a family; the names are checked when this module is imported. Every
rewrite keeps the results equal to the bit. This module has the workarounds that insert a copy; ``arithmetic``,
``rescales``, ``shapes`` and ``tables`` have the others. A rewrite may create the pattern of another workaround, and
several may match one operator. The graph is therefore rewritten until no predicate matches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.permutation import identity
from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.element_order import restores_order
from arm_backend_core.tosa.passes.fuse import is_rescale_by_one
from arm_backend_core.tosa.passes.layout_modes import is_free_permutation
from arm_backend_core.tosa.passes.merge import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, apply_once, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds import arithmetic, rescales, shapes, tables
from arm_backend_core.tosa.vela_workarounds.arithmetic import copy_operands_where, emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround, is_needed

#: Limit of the fixpoint iteration. 2,074 graphs of the operator tests need at most 1 round, 6,000 random pairs of
#: miscompiled patterns at most 3.
_MAX_ROUNDS = 12
_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")
_CONVOLUTIONS = ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")
#: Operators that Vela may execute as several operations.
_SPLIT = (
    *_CONVOLUTIONS,
    *_REDUCTIONS,
    "ARGMAX",
    "AVG_POOL2D",
    "MATMUL",
    "MAX_POOL2D",
    "REDUCE_SUM",
    "TRANSPOSE_CONV2D",
)


def apply_vela_workarounds(graph: Graph, target: Target) -> None:
    """Apply the workarounds for ``target``'s Vela release until no predicate matches.

    Raises:
        AssertionError: matches are left after the last round, because workarounds undo each other, or the target
            refuses an operator of a rewrite.
    """
    for _ in range(_MAX_ROUNDS):
        found = find_vela_bugs(graph, target)
        if not found:
            return
        _rewrite_graph(graph, target, run_last=all(isinstance(x, Workaround) and x.runs_last for x in found))
    assert_no_vela_bugs(graph, target)


def find_vela_bugs(graph: Graph, target: Target) -> dict[AnyWorkaround, list[Any]]:
    """All patterns in ``graph`` that the Vela release of ``target`` miscompiles.

    Returns:
        the matched operators by workaround; for a ``GraphWorkaround``, what its ``find`` returns.
    """
    found: dict[AnyWorkaround, list[Any]] = {}
    by_kind: dict[str, list[Workaround[Any]]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            if sites := workaround.find(graph, target):
                found[workaround] = list(sites)
            continue
        for kind in workaround.kinds:
            by_kind.setdefault(kind, []).append(workaround)
    rewriter = Rewriter(graph, target)
    for op in graph.ops if by_kind else ():
        for workaround in by_kind.get(op.kind, ()):
            if workaround.find(op, rewriter):
                found.setdefault(workaround, []).append(op)
    return found


def assert_no_vela_bugs(graph: Graph, target: Target) -> None:
    """Assert that ``graph`` has no pattern that Vela is known to miscompile.

    Raises:
        AssertionError: lists the workarounds that match, and where.
    """
    found = find_vela_bugs(graph, target)
    remaining = "; ".join(f"{workaround.name}: {site!r}" for workaround, sites in found.items() for site in sites[:3])
    assert not found, f"{target.name}: patterns that Vela miscompiles are left: {remaining}"


def _needed_workarounds(target: Target) -> list[AnyWorkaround]:
    """The workarounds for the bugs of ``target``'s Vela release, by priority."""
    return [workaround for workaround in WORKAROUNDS if is_needed(workaround, target)]


def _rewrite_graph(graph: Graph, target: Target, *, run_last: bool) -> None:
    """Apply graph workarounds, then at each operator the first workaround that matches."""
    rules: dict[str, list[Rule]] = {}
    for workaround in _needed_workarounds(target):
        if isinstance(workaround, GraphWorkaround):
            workaround.rewrite(graph, target, workaround.find(graph, target))
        elif workaround.runs_last <= run_last:
            for kind in workaround.kinds:
                rules.setdefault(kind, []).append(partial(_rewrite_operator, workaround))
    apply_once(graph, target, rules)


def _rewrite_operator(workaround: Workaround[Any], op: Op, rewriter: Rewriter) -> Value | None:
    found = workaround.find(op, rewriter)
    if not found:
        return None
    try:
        return workaround.rewrite(op, found, rewriter)
    except Unsupported as refusal:
        raise AssertionError(f"workaround {workaround.name}: {op!r} cannot be rewritten: {refusal}") from refusal


def _copy_results(graph: Graph, target: Target, found: Sequence[int]) -> None:
    build = Builder(graph, target)
    for i in found:
        graph.outputs[i] = emit_copy(graph.outputs[i], build)


def _find_returned_masks(graph: Graph, target: Target) -> list[int]:
    """Boolean results of the program that another operator of the program reads too (``returned_mask``: U85, 5.1 and
    5.2).

    The NPU's masks have all bits set. Vela converts a result to ones in place, and the other operator then reads these
    ones as its mask. Returning a copy leaves the mask unchanged.

    Returns:
        indices of such outputs.
    """
    users, found = graph.users(), []
    for i, value in enumerate(graph.outputs):
        source, views = trace_back(value, lambda op: op.kind in ("IDENTITY", "RESHAPE"))
        shared = value in users or any(len(users[view.inputs[0]]) > 1 for view in views)
        if shared and source.data is None and value.dtype is DType.BOOL:
            found.append(i)
    return found


def _find_returned_views(graph: Graph, target: Target) -> list[int]:
    """Results of the program that Vela loses with a RESHAPE or TRANSPOSE (``returned_view``: all NPUs, 5.1 and 5.2).

    - A RESHAPE that a single TRANSPOSE reads, also past RESHAPEs: Vela moves the RESHAPE after the TRANSPOSE.
    - A TRANSPOSE that another TRANSPOSE reads, perhaps one that Vela adds for a MATMUL or REDUCE_SUM: Vela merges both.
    - The input of TRANSPOSEs that undo each other: Vela removes them.

    The compiled program then lacks the result. Returning a copy keeps it.

    Returns:
        indices of such outputs.
    """
    users, found = graph.users(), []

    def is_moved(value: Value) -> bool:
        readers = users.get(value, [])
        only_reader = readers[0].kind if len(readers) == 1 else ""
        return only_reader == "TRANSPOSE" or (only_reader == "RESHAPE" and is_moved(readers[0].output))

    def is_permuted(value: Value) -> bool:
        through = ("RESHAPE", "RESCALE")
        kinds = ("TRANSPOSE", "MATMUL", "REDUCE_SUM")
        return any(r.kind in kinds or (r.kind in through and is_permuted(r.output)) for r in users.get(value, ()))

    for i, value in enumerate(graph.outputs):
        source = skip_through(value, "RESHAPE")
        is_merged = producer(source, "TRANSPOSE") is not None and is_permuted(source)
        if (source is not value and is_moved(value)) or is_merged or _has_cancelling_transposes(source, users):
            found.append(i)
    return found


def _has_cancelling_transposes(value: Value, users: Mapping[Value, Sequence[Op]]) -> bool:
    """Whether a chain of TRANSPOSEs that starts at ``value`` restores its element order."""
    source = skip_through(value, "IDENTITY")
    pending: list[tuple[Value, list[Op]]] = [(source, [])]
    for tensor, moves in pending:  # the loop appends to it
        for op in users.get(tensor, ()):
            if op.kind == "TRANSPOSE" and restores_order(source, [*moves, op]):
                return True
            if op.kind in ("TRANSPOSE", "RESHAPE"):
                pending.append((op.output, [*moves, op]))
    return False


def _loses_slice_offset(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a split operator reads a SLICE (``sliced``: all NPUs, 5.1 and 5.2).

    Vela lets the operator read a part of the SLICE's input. When it splits the operator, it overwrites the offset of
    that part (``docs/contributors/vela.md`` lists the operators and axes). Reading a copy needs no offset.
    """
    axes: Sequence[int] = rewriter.build.target.hardware.axes_lost_on_split(op)
    if axes and op.kind == "MATMUL" and _is_slice_behind_cancelling_transposes(value):
        return True

    def is_passed(before: Op) -> bool:
        keeps_shape = equal_without_ones(before.output.shape, before.inputs[0].shape)
        return keeps_shape and (before.kind == "RESHAPE" or is_rescale_by_one(before))

    value, views = trace_back(value, is_passed)
    if any(view.kind == "RESHAPE" for view in views) and (axes or "axis" in op.attrs):
        axes = range(-6, 0)  # Vela counts the axis in the SLICE's rank
    part = producer(value, "SLICE")
    if part is None:
        return False
    whole = part.inputs[0].shape
    return any(-axis <= value.rank and whole[axis] != value.shape[axis] for axis in axes)


def _is_slice_behind_cancelling_transposes(value: Value) -> bool:
    """Whether the TRANSPOSEs between a SLICE and ``value`` undo each other, so that Vela removes all of them."""
    part, views = trace_back(value, lambda op: op.kind in ("RESHAPE", "TRANSPOSE") or is_rescale_by_one(op))
    moves = [view for view in views if view.kind != "RESCALE"]
    has_transpose = any(move.kind == "TRANSPOSE" for move in moves)
    return has_transpose and producer(part, "SLICE") is not None and restores_order(part, moves)


def _reduces_column(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a reduction along the last axis reads a RESHAPE of a column, [.., n, 1] (``column``: all NPUs, 5.1 and
    5.2).

    Also if another operator reads the same tensor as a column. Vela reduces [.., n, 1] in bricks of 16 channels but
    allocates [.., n]: it writes n elements over 16 n bytes. Reading a copy separates the two tensors.
    """
    column = producer(value, "RESHAPE")
    if column is None or op.attrs["axis"] != value.rank - 1 or value.shape[-1] == 1:
        return False
    whole = column.inputs[0]
    others = [reader.output for reader in rewriter.users(whole) or () if reader.kind == "RESHAPE"]
    return any(x.shape[-1:] == (1,) for x in (whole, *others))


def _loses_concat_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a split operator writes directly into the result of CONCAT or PAD (``joined``: all NPUs, 5.1 and 5.2).

    Vela lets the only producer of an operand write to its place in the larger tensor. When it splits the operator, it
    loses the offset of that place. CONCAT and PAD of a copy avoid that.
    """
    op = skip_through(value, "RESCALE", "RESHAPE").producer
    has_reshape = producer(skip_through(value, "RESCALE"), "RESHAPE") is not None
    if op is None or not rewriter.single_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not has_reshape
    loses_offset = bool(rewriter.build.target.hardware.axes_lost_on_split(op))
    # Vela gives a MATMUL a result of four dimensions, the first of size 1: only a RESHAPE makes it lose the offset.
    return loses_offset and (has_reshape if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not has_reshape)


def _loses_upsampling_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """The same bug for TRANSPOSE_CONV2D, also past RESCALE and RESHAPE (``joined_upsampling``: U55 and U65, 5.2).

    Vela splits a TRANSPOSE_CONV2D by the rows and columns between those of its operand.
    """
    op = producer(skip_through(value, "RESCALE", "RESHAPE"), "TRANSPOSE_CONV2D")
    return op is not None and rewriter.single_use(value)


def _is_table_fused_into_transpose(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela fuses a TABLE or CLAMP into the TRANSPOSE before it and so miscompiles it (5.1 and 5.2).

    Before CONCAT or PAD (``joined_table``: U55, U65), the TRANSPOSE does not write to its place in the larger tensor.
    On U55-32 and U55-64 (``crowded_table``), the internal memory has no room for the table. A copy between TRANSPOSE
    and TABLE prevents the fusion.
    """
    readers = [reader.kind for reader in rewriter.users(op.output) or ()]
    is_lost = readers in (["CONCAT"], ["PAD"]) or (op.kind == "TABLE" and rewriter.build.target.macs in (32, 64))
    return is_lost and producer(skip_through(value, "RESHAPE"), "TRANSPOSE") is not None


def _becomes_nonzero_padding(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a PAD with 0 precedes an unpadded convolution with ``input_zp`` other than 0 (``padded_zero``: all NPUs,
    5.1 and 5.2).

    Vela makes the PAD the convolution's own padding, whose value is ``input_zp`` and not 0. A copy after the PAD
    prevents that.
    """
    return op.attrs["input_zp"] != 0 and _has_foldable_pad(op, value)


def _has_foldable_pad(op: Op, value: Value) -> bool:
    """Whether Vela folds a PAD with 0 before ``value``, also past RESHAPEs, into the unpadded convolution ``op``."""
    source = producer(skip_through(value, "RESHAPE"), "PAD")
    return source is not None and source.attrs["pad_const"] == 0 and not any(op.attrs["pad"])


def _becomes_padding_of_images(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a PAD with 0 and a RESHAPE precede a convolution of several images (``padded_images``: all NPUs, 5.1).

    Vela makes the PAD the convolution's own padding, as if the tensor were one image. A copy prevents that.
    """
    several = value.shape[0] > 1 and value.producer is not None and value.producer.kind == "RESHAPE"
    return several and _has_foldable_pad(op, value)


def _is_read_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether another operator reads ``value`` through a RESHAPE (``reshaped_select``: U85, 5.1 and 5.2).

    Vela then uses the other shape for SELECT: it broadcasts [1, 80, 1] with [80] to 6,400 elements. SELECT of a copy
    has one shape. Results of the program count as read so, since the caller may reshape them.
    """
    source, producers = trace_back(value, lambda op: op.kind == "RESHAPE")
    views = [value, *(view.inputs[0] for view in producers)]
    readers = {reader for view in views for reader in rewriter.users(view) or () if _is_view(reader)}
    return rewriter.users(source) is None or not readers <= {*producers}


def _is_view(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE, or a TRANSPOSE that moves only dimensions of size 1."""
    x = op.inputs[0]
    is_free = op.kind == "TRANSPOSE" and is_free_permutation(x.shape, identity(x.rank), tuple(op.attrs["perms"]))
    return op.kind == "RESHAPE" or is_free


def _broadcasts_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether arithmetic broadcasts a first operand whose shape Vela gets wrong (``reshaped_broadcast``: U55, U65, 5.1
    and 5.2).

    Vela uses the rank of the SLICE, five or six, that the operand comes from. Or, if both operands are broadcast, it
    uses the shape in which another operator reads the first one (as in ``reshaped_select``). A copy has one shape.
    """
    if value is not op.inputs[0] or value.shape == op.output.shape:
        return False
    if (part := skip_through(value, "RESHAPE", "RESCALE")).rank > 4 and producer(part, "SLICE"):
        return True
    if op.inputs[1].shape == op.output.shape:
        return False
    while not _is_read_reshaped(op, value, rewriter):
        if (scaled := producer(value, "RESCALE")) is None:
            return False
        value = scaled.inputs[0]
    return True


def _is_second_table_of_fused(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """TABLE or CLAMP, REVERSE or TRANSPOSE, then TABLE or CLAMP (``turned_table``: U85, 5.1 and 5.2).

    Vela makes one operation of all three, which has one table and one range: the other table or range is lost. A copy
    before the last one prevents the fusion.
    """
    result = skip_through(value, "RESHAPE", "RESCALE")
    source = skip_through(result, "RESHAPE", "RESCALE", "REVERSE", "TRANSPOSE")
    return source is not result and source.producer is not None and source.producer.kind in ("TABLE", "CLAMP")


def _indices_may_be_overwritten(op: Op, rewriter: Rewriter) -> bool:
    """Whether other operations run between a GATHER or SCATTER and the reader of its result (``gathered``: U85, 5.1 and
    5.2).

    Only for computed or input indices. Vela records one byte for each index, which has four. Operations that follow may
    therefore overwrite the indices while the DMA still reads them.
    """
    return op.inputs[1].data is None and not _is_read_by_next_operation(op.output, rewriter)


def _wait_for_gather(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """Emit a copy of the result directly after the GATHER: the copy waits for the DMA."""
    gathered = rewriter.build.emit(op.kind, op.inputs, op.output.dtype, **op.attrs)
    return emit_copy(gathered, rewriter.build)


def _is_read_by_next_operation(value: Value, rewriter: Rewriter) -> bool:
    """Whether the only reader runs directly after the producer: Vela computes an operation's last operand first."""
    readers = rewriter.users(value) or []
    if len(readers) != 1 or readers[0].kind in ("RESHAPE", "RESCALE"):
        return len(readers) == 1 and _is_read_by_next_operation(readers[0].output, rewriter)
    operands = readers[0].inputs
    return all(x.producer is None for x in operands[: operands.index(value)])


#: All workarounds by priority: where two match one operator, the first is applied first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("returned_mask", _find_returned_masks, _copy_results),
    GraphWorkaround("returned_view", _find_returned_views, _copy_results),
    shapes.DILATED,
    copy_operands_where("sliced", (*_SPLIT, *(ELEMENTWISE - UNARY)), _loses_slice_offset),
    *arithmetic.WORKAROUNDS,
    *rescales.WORKAROUNDS,
    copy_operands_where("column", (*_REDUCTIONS, "ARGMAX"), _reduces_column),
    copy_operands_where("joined", ("CONCAT", "PAD"), _loses_concat_offset),
    copy_operands_where("joined_upsampling", ("CONCAT", "PAD"), _loses_upsampling_offset, releases=((5, 2),)),
    copy_operands_where("joined_table", ("TABLE", "CLAMP"), _is_table_fused_into_transpose),
    copy_operands_where("padded_zero", _CONVOLUTIONS, _becomes_nonzero_padding),
    copy_operands_where("padded_images", _CONVOLUTIONS, _becomes_padding_of_images, releases=((5, 1),)),
    copy_operands_where("reshaped_select", ("SELECT",), _is_read_reshaped),
    copy_operands_where("reshaped_broadcast", tuple(ELEMENTWISE - UNARY), _broadcasts_reshaped),
    copy_operands_where("turned_table", ("TABLE", "CLAMP"), _is_second_table_of_fused),
    Workaround("gathered", ("GATHER", "SCATTER"), _indices_may_be_overwritten, _wait_for_gather),
    *shapes.WORKAROUNDS,
    *tables.WORKAROUNDS,
)


def check_names(workarounds: Sequence[AnyWorkaround], hardware: Iterable[Hardware]) -> None:
    """Check that workaround names are unique, and that ``hardware`` names all of them and no others.

    Raises:
        ValueError: lists the names that do not fit.
    """
    names = [workaround.name for workaround in workarounds]
    named = {name for one in hardware for name in one.vela_bugs}
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several workarounds have the same name: {', '.join(sorted(duplicates))}")
    if unknown := named - set(names):
        raise ValueError(f"Hardware.vela_bugs names bugs without a workaround: {', '.join(sorted(unknown))}")
    if unnamed := set(names) - named:
        raise ValueError(f"workarounds that no Hardware.vela_bugs names: {', '.join(sorted(unnamed))}")


check_names(WORKAROUNDS, HARDWARE.values())
