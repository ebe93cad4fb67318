"""Vela workarounds for results of the program that Vela overwrites or removes. Each is returned as a copy."""

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


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("returned_mask", _find_returned_masks, _copy_results),
    GraphWorkaround("returned_view", _find_returned_views, _copy_results),
)
