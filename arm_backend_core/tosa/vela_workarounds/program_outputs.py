"""Vela workarounds for program outputs that Vela overwrites or removes. The program returns a copy instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.element_order import restores_order
from arm_backend_core.tosa.passes.rewrite import producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround


def _copy_outputs(graph: Graph, target: Target, indices: Sequence[int]) -> None:
    build = Builder(graph, target)
    for i in indices:
        graph.outputs[i] = emit_copy(graph.outputs[i], build)


def _find_returned_masks(graph: Graph, target: Target) -> list[int]:
    """Find boolean outputs, except constants, that an operator of the program also reads.

    Bug ``returned_mask``: a true element of an NPU mask has all bits set. Vela converts the true elements of an output
    to 1 in place, so that the operator reads 1 instead of a mask.

    Returns:
        the indices of these outputs.
    """
    users, indices = graph.users(), []
    for i, value in enumerate(graph.outputs):
        source, views = trace_back(value, lambda op: op.kind in ("IDENTITY", "RESHAPE"))
        has_readers = value in users or any(len(users[view.inputs[0]]) > 1 for view in views)
        if has_readers and source.data is None and value.dtype is DType.BOOL:
            indices.append(i)
    return indices


def _find_returned_views(graph: Graph, target: Target) -> list[int]:
    """Find outputs that Vela removes together with a RESHAPE or TRANSPOSE.

    Bug ``returned_view``: the compiled program lacks an output that is

    - a RESHAPE whose only reader is a TRANSPOSE, directly or through RESHAPEs: Vela moves the RESHAPE after the
      TRANSPOSE;
    - a TRANSPOSE that a second TRANSPOSE reads: Vela merges both. The second TRANSPOSE may be one that Vela inserts for
      a MATMUL or REDUCE_SUM;
    - the input of TRANSPOSEs that cancel: Vela removes these TRANSPOSEs.

    Returns:
        the indices of these outputs.
    """
    users, indices = graph.users(), []

    def is_moved_by_transpose(value: Value) -> bool:
        readers = users.get(value, [])
        only_reader = readers[0].kind if len(readers) == 1 else ""
        if only_reader == "RESHAPE":
            return is_moved_by_transpose(readers[0].output)
        return only_reader == "TRANSPOSE"

    def is_permuted(value: Value) -> bool:
        through = ("RESHAPE", "RESCALE")
        kinds = ("TRANSPOSE", "MATMUL", "REDUCE_SUM")
        return any(r.kind in kinds or (r.kind in through and is_permuted(r.output)) for r in users.get(value, ()))

    for i, value in enumerate(graph.outputs):
        source = skip_through(value, "RESHAPE")
        is_merged = producer(source, "TRANSPOSE") is not None and is_permuted(source)
        if (
            (source is not value and is_moved_by_transpose(value))
            or is_merged
            or _has_cancelling_transposes(source, users)
        ):
            indices.append(i)
    return indices


def _has_cancelling_transposes(value: Value, users: Mapping[Value, Sequence[Op]]) -> bool:
    """Whether a chain of TRANSPOSEs that starts at ``value`` restores its element order."""
    source = skip_through(value, "IDENTITY")
    pending: list[tuple[Value, list[Op]]] = [(source, [])]
    for tensor, moves in pending:  # the loop appends to ``pending``
        for op in users.get(tensor, ()):
            if op.kind == "TRANSPOSE" and restores_order(source, [*moves, op]):
                return True
            if op.kind in ("TRANSPOSE", "RESHAPE"):
                pending.append((op.output, [*moves, op]))
    return False


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("returned_mask", _find_returned_masks, _copy_outputs),
    GraphWorkaround("returned_view", _find_returned_views, _copy_outputs),
)
