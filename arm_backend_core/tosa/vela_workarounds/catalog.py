"""Ethos-U: forms that Vela compiles to something else, in forms that it compiles right (``docs/contributors/vela.md``).

``Hardware.vela_bugs`` names those that a family meets; the names are checked when this module is imported. Nothing here
changes a bit of a result. Where a copy helps it is here; ``vela_numbers``, ``vela_shapes`` and ``vela_tables`` have the
other forms. A workaround may make room for another mistake, or an operator may have two: the graph is rewritten until
no predicate of a mistake is true of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import power_of_two
from arm_backend_core.tosa.passes.merge import alike
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, apply_once, producer, skip_through
from arm_backend_core.tosa.vela_workarounds import arithmetic, rescales, shapes, tables
from arm_backend_core.tosa.vela_workarounds.arithmetic import copied, copy_where
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround, is_needed

#: Rewrites of the whole graph; 2,074 graphs of the operator tests needed one at most, 6,000 pairs of mistakes three.
_ROUNDS = 12
_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")
_WINDOWS = ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")
_APART = (*_WINDOWS, *_REDUCTIONS, "ARGMAX", "AVG_POOL2D", "MATMUL", "MAX_POOL2D", "REDUCE_SUM", "TRANSPOSE_CONV2D")


def apply_vela_workarounds(graph: Graph, target: Target) -> None:
    """Apply the workarounds for ``target``'s compiler until no predicate matches.

    Raises:
        AssertionError: mistakes are left, because workarounds undo each other or the target refuses one.
    """
    for _ in range(_ROUNDS):
        found = find_mistakes(graph, target)
        if not found:
            return
        _rewrite(graph, target, late=all(isinstance(mistake, Workaround) and mistake.runs_last for mistake in found))
    check_mistakes(graph, target)


def find_mistakes(graph: Graph, target: Target) -> dict[AnyWorkaround, list[Any]]:
    """What the compiler of ``target`` gets wrong in ``graph``: by mistake operators, or what a GraphMistake finds."""
    found: dict[AnyWorkaround, list[Any]] = {}
    by_kind: dict[str, list[Workaround[Any]]] = {}
    for mistake in _made_by(target):
        if isinstance(mistake, GraphWorkaround):
            if sites := mistake.find(graph, target):
                found[mistake] = list(sites)
            continue
        for kind in mistake.kinds:
            by_kind.setdefault(kind, []).append(mistake)
    rewriter = Rewriter(graph, target)
    for op in graph.ops if by_kind else ():
        for mistake in by_kind.get(op.kind, ()):
            if mistake.find(op, rewriter):
                found.setdefault(mistake, []).append(op)
    return found


def check_mistakes(graph: Graph, target: Target) -> None:
    """Assert that the compiler gets nothing of ``graph`` wrong that is known.

    Raises:
        AssertionError: with the mistakes and where they are.
    """
    found = find_mistakes(graph, target)
    left = "; ".join(f"{mistake.name}: {site!r}" for mistake, sites in found.items() for site in sites[:3])
    assert not found, f"{target.name}: forms that its compiler gets wrong are left: {left}"


def _made_by(target: Target) -> list[AnyWorkaround]:
    """Those that the compiler makes for ``target``, by priority."""
    return [mistake for mistake in WORKAROUNDS if is_needed(mistake, target)]


def _rewrite(graph: Graph, target: Target, *, late: bool) -> None:
    """Rewrite graph-level mistakes, then each operator by the first mistake that is found there."""
    rules: dict[str, list[Rule]] = {}
    for mistake in _made_by(target):
        if isinstance(mistake, GraphWorkaround):
            mistake.rewrite(graph, target, mistake.find(graph, target))
        elif mistake.runs_last <= late:
            for kind in mistake.kinds:
                rules.setdefault(kind, []).append(partial(_replace, mistake))
    apply_once(graph, target, rules)


def _replace(mistake: Workaround[Any], op: Op, rewriter: Rewriter) -> Value | None:
    found = mistake.find(op, rewriter)
    if not found:
        return None
    try:
        return mistake.rewrite(op, found, rewriter)
    except Unsupported as refused:
        raise AssertionError(f"{mistake.name}: {op!r} cannot be written otherwise: {refused}") from refused


def _copy_results(graph: Graph, target: Target, found: Sequence[int]) -> None:
    build = Builder(graph, target)
    for i in found:
        graph.outputs[i] = copied(graph.outputs[i], build)


def _returned_masks(graph: Graph, target: Target) -> list[int]:
    """A mask has all bits set; Vela makes ones of what the program returns, in place, where others go on to read it."""
    users, found = graph.users(), []
    for i, value in enumerate(graph.outputs):
        shared, source = value in users, value
        while (op := source.producer) is not None and op.kind in ("IDENTITY", "RESHAPE"):
            source = op.inputs[0]
            shared = shared or len(users[source]) > 1
        if shared and source.data is None and value.dtype is DType.BOOL:
            found.append(i)
    return found


def _returned_views(graph: Graph, target: Target) -> list[int]:
    """What the program returns is lost where Vela moves or removes the RESHAPE or TRANSPOSE that it is from.

    Past the TRANSPOSE that alone reads the RESHAPE; with such a TRANSPOSE, which may be one that Vela adds; with two
    of one source that undo each other.
    """
    users, found = graph.users(), []

    def moved(value: Value) -> bool:
        readers = users.get(value, [])
        alone = readers[0].kind if len(readers) == 1 else ""
        return alone == "TRANSPOSE" or (alone == "RESHAPE" and moved(readers[0].output))

    def turned(value: Value) -> bool:
        through = ("RESHAPE", "RESCALE")
        kinds = ("TRANSPOSE", "MATMUL", "REDUCE_SUM")
        return any(r.kind in kinds or (r.kind in through and turned(r.output)) for r in users.get(value, ()))

    for i, value in enumerate(graph.outputs):
        source = skip_through(value, "RESHAPE")
        late = producer(source, "TRANSPOSE") is not None and turned(source)
        if (source is not value and moved(value)) or late or _is_turned_back(source, users):
            found.append(i)
    return found


def _is_turned_back(value: Value, users: Mapping[Value, Sequence[Op]]) -> bool:
    """Whether TRANSPOSEs one behind the other, of which one reads ``value``, undo each other."""
    source = skip_through(value, "IDENTITY")
    before = np.arange(source.size, dtype=np.int32)
    waiting = [(source, before)]
    for read, order in waiting:  # grows
        for op in users.get(read, ()):
            if op.kind == "TRANSPOSE":
                turned = order.reshape(read.shape).transpose(op.attrs["perms"]).ravel()
                if np.array_equal(turned, before):
                    return True
                waiting.append((op.output, turned))
            elif op.kind == "RESHAPE":
                waiting.append((op.output, order))
    return False


def _forgets_slice(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela lets an operator read part of what a SLICE reads, and forgets it where it takes the operator apart."""
    axes: Sequence[int] = rewriter.build.target.hardware.axes_lost_on_split(op)
    if axes and op.kind == "MATMUL" and _is_turned_slice(value):
        return True
    while (before := value.producer) is not None and before.kind in ("RESHAPE", "RESCALE"):
        if not alike(value.shape, before.inputs[0].shape) or (before.kind == "RESCALE" and power_of_two(before) != 0):
            return False
        if before.kind == "RESHAPE" and (axes or "axis" in op.attrs):  # an axis is then counted among others
            axes = range(-6, 0)
        value = before.inputs[0]
    if before is None or before.kind != "SLICE":
        return False
    whole = before.inputs[0].shape
    return any(-axis <= value.rank and whole[axis] != value.shape[axis] for axis in axes)


def _is_turned_slice(value: Value) -> bool:
    """Whether TRANSPOSEs between a SLICE and what reads it undo each other: Vela leaves none of them."""
    part, turns = value, []
    while (before := part.producer) is not None and before.kind in ("RESHAPE", "RESCALE", "TRANSPOSE"):
        if before.kind == "RESCALE" and power_of_two(before) != 0:
            return False
        turns.append(before)
        part = before.inputs[0]
    if before is None or before.kind != "SLICE" or all(turn.kind != "TRANSPOSE" for turn in turns):
        return False
    straight = np.arange(part.size, dtype=np.int32)
    order = straight
    for turn in reversed(turns):
        if turn.kind == "TRANSPOSE":
            order = order.reshape(turn.inputs[0].shape).transpose(turn.attrs["perms"])
    return np.array_equal(order.ravel(), straight)


def _is_column(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela reduces the columns, [.., n, 1], that rows were or are for others, in the memory of the rows.

    They are laid out with 16 channels.
    """
    column = producer(value, "RESHAPE")
    if column is None or op.attrs["axis"] != value.rank - 1 or value.shape[-1] == 1:
        return False
    whole = column.inputs[0]
    others = [reader.output for reader in rewriter.users(whole) or () if reader.kind == "RESHAPE"]
    return any(x.shape[-1:] == (1,) for x in (whole, *others))


def _is_misplaced(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela lets an operator write its part of a larger tensor, and forgets which where it takes the operator apart."""
    op = skip_through(value, "RESCALE", "RESHAPE").producer
    reshaped = producer(skip_through(value, "RESCALE"), "RESHAPE") is not None
    if op is None or not rewriter.single_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not reshaped
    forgotten = bool(rewriter.build.target.hardware.axes_lost_on_split(op))
    # Of a MATMUL the results that Vela sees have four dimensions, the first of them 1.
    return forgotten and (reshaped if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not reshaped)


def _is_misplaced_upsampling(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """The same of a TRANSPOSE_CONV2D, which Vela takes apart by the rows and columns between those of its operand."""
    op = producer(skip_through(value, "RESCALE", "RESHAPE"), "TRANSPOSE_CONV2D")
    return op is not None and rewriter.single_use(value)


def _is_misplaced_table(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """A TRANSPOSE that does a TABLE or CLAMP too does not write into part of a larger tensor.

    On the smallest NPUs it has no room for a table.
    """
    readers = [reader.kind for reader in rewriter.users(op.output) or ()]
    misplaced = readers in (["CONCAT"], ["PAD"]) or (op.kind == "TABLE" and rewriter.build.target.macs in (32, 64))
    return misplaced and producer(skip_through(value, "RESHAPE"), "TRANSPOSE") is not None


def _becomes_padding(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela makes PAD with 0 a convolution's own, which is with ``input_zp``."""
    return op.attrs["input_zp"] != 0 and _is_padded_before(op, value)


def _is_padded_before(op: Op, value: Value) -> bool:
    source = producer(skip_through(value, "RESHAPE"), "PAD")
    return source is not None and source.attrs["pad_const"] == 0 and not any(op.attrs["pad"])


def _becomes_padding_of_images(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Behind a RESHAPE, Vela makes a PAD the convolution's own for one image alone."""
    several = value.shape[0] > 1 and value.producer is not None and value.producer.kind == "RESHAPE"
    return several and _is_padded_before(op, value)


def _read_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Another reads a RESHAPE of the value, and Vela takes that shape for it; a result of the graph may be so read."""
    views, own = [value], set[Op]()
    while (view := producer(views[-1], "RESHAPE")) is not None:
        views.append(view.inputs[0])
        own.add(view)
    readers = {reader for view in views for reader in rewriter.users(view) or () if _is_view(reader)}
    return rewriter.users(views[-1]) is None or not readers <= own


def _is_view(op: Op) -> bool:
    """RESHAPE, or TRANSPOSE that moves dimensions of size 1 alone."""
    if op.kind != "TRANSPOSE":
        return op.kind == "RESHAPE"
    longer = [axis for axis in op.attrs["perms"] if op.inputs[0].shape[axis] > 1]
    return longer == sorted(longer)


def _broadcast_reshaped(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela broadcasts the first as the SLICE of five dimensions that it is or, with the second, as another reads it."""
    if value is not op.inputs[0] or value.shape == op.output.shape:
        return False
    if (part := skip_through(value, "RESHAPE", "RESCALE")).rank > 4 and producer(part, "SLICE"):
        return True
    if op.inputs[1].shape == op.output.shape:
        return False
    while not _read_reshaped(op, value, rewriter):
        if (scaled := producer(value, "RESCALE")) is None:
            return False
        value = scaled.inputs[0]
    return True


def _is_second_table(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Vela does a REVERSE or TRANSPOSE with the TABLE or CLAMP before it, and with both the one behind: one is lost."""
    result = skip_through(value, "RESHAPE", "RESCALE")
    source = skip_through(result, "RESHAPE", "RESCALE", "REVERSE", "TRANSPOSE")
    return source is not result and source.producer is not None and source.producer.kind in ("TABLE", "CLAMP")


def _is_gathered_late(op: Op, rewriter: Rewriter) -> bool:
    """Operations that follow a GATHER may write over its indices while they are read.

    Vela sees as many bytes of them as there are indices, of four bytes each.
    """
    return op.inputs[1].data is None and not _is_read_at_once(op.output, rewriter)


def _wait_for_gather(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """A copy waits for it at once."""
    gathered = rewriter.build.emit(op.kind, op.inputs, op.output.shape, op.output.dtype, **op.attrs)
    return copied(gathered, rewriter.build)


def _is_read_at_once(value: Value, rewriter: Rewriter) -> bool:
    """Whether only the operation behind reads it: Vela computes the last operand of an operation first."""
    readers = rewriter.users(value) or []
    if len(readers) != 1 or readers[0].kind in ("RESHAPE", "RESCALE"):
        return len(readers) == 1 and _is_read_at_once(readers[0].output, rewriter)
    operands = readers[0].inputs
    return all(x.producer is None for x in operands[: operands.index(value)])


#: All that are known, by priority: of two at one operator, the first is rewritten first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("returned_mask", _returned_masks, _copy_results),
    GraphWorkaround("returned_view", _returned_views, _copy_results),
    shapes.DILATED,
    copy_where("sliced", (*_APART, *(ELEMENTWISE - UNARY)), _forgets_slice),
    *arithmetic.WORKAROUNDS,
    *rescales.WORKAROUNDS,
    copy_where("column", (*_REDUCTIONS, "ARGMAX"), _is_column),
    copy_where("joined", ("CONCAT", "PAD"), _is_misplaced),
    copy_where("joined_upsampling", ("CONCAT", "PAD"), _is_misplaced_upsampling, releases=((5, 2),)),
    copy_where("joined_table", ("TABLE", "CLAMP"), _is_misplaced_table),
    copy_where("padded_zero", _WINDOWS, _becomes_padding),
    copy_where("padded_images", _WINDOWS, _becomes_padding_of_images, releases=((5, 1),)),
    copy_where("reshaped_select", ("SELECT",), _read_reshaped),
    copy_where("reshaped_broadcast", tuple(ELEMENTWISE - UNARY), _broadcast_reshaped),
    copy_where("turned_table", ("TABLE", "CLAMP"), _is_second_table),
    Workaround("gathered", ("GATHER", "SCATTER"), _is_gathered_late, _wait_for_gather),
    *shapes.WORKAROUNDS,
    *tables.WORKAROUNDS,
)


def check_names(known: Sequence[AnyWorkaround], hardware: Iterable[Hardware]) -> None:
    """Whether mistakes have one name each, and hardware names all of these and no other.

    Raises:
        ValueError: with the names that do not fit.
    """
    names = [mistake.name for mistake in known]
    named = {name for one in hardware for name in one.vela_bugs}
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"mistakes of one name: {', '.join(sorted(twice))}")
    if unknown := named - set(names):
        raise ValueError(f"Hardware.vela_bugs names what no workaround is for: {', '.join(sorted(unknown))}")
    if unnamed := set(names) - named:
        raise ValueError(f"no Hardware.vela_bugs names {', '.join(sorted(unnamed))}")


check_names(WORKAROUNDS, HARDWARE.values())
