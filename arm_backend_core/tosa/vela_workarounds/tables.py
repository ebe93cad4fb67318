"""Tables and the arithmetic before them: what an Ethos-U computes in one operation, or must not."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer
from arm_backend_core.tosa.vela_workarounds.arithmetic import copied
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: What a chain has at most: operations, and operands that are not results within it.
_CHAIN_OPERATIONS, _CHAIN_OPERANDS = 4, 3


def duplicate_cheap_producers(graph: Graph, target: Target) -> None:
    """A TABLE of int16 gets arithmetic of its own where others read the result too, and is no operation any more.

    Alone it takes 2,600 cycles for 100 elements, an addition 100 (U55-128, U85-256).
    """
    if target.hardware.npu:
        apply_once(graph, target, {"TABLE": [_with_arithmetic], "RESHAPE": [_beside_matmul]})


def _beside_matmul(op: Op, rewriter: Rewriter) -> Value | None:
    """RESHAPE of a column that a MATMUL reads, by arithmetic of its own: Vela turns a column for its only reader."""
    b, x = rewriter.build, op.inputs[0]
    rescale = producer(x, "RESCALE")
    first = rescale and rescale.inputs[0].producer
    if rescale is None or first is None or first.kind not in ("ADD", "MUL", "SUB") or x.shape[::2] != (1, 1):
        return None
    if all(user.kind != "MATMUL" for user in rewriter.users(x) or []):
        return None
    again = b.emit(first.kind, first.inputs, first.output.shape, first.output.dtype, **first.attrs)
    return b.reshape(_repeated([rescale], again, b), op.output.shape)


def _with_arithmetic(op: Op, rewriter: Rewriter) -> Value | None:
    rescale = producer(op.inputs[0], "RESCALE")
    first = rescale and rescale.inputs[0].producer
    if rescale is None or first is None or first.kind not in ("ADD", "MUL", "SUB") or op.output.dtype is DType.INT8:
        return None
    if rewriter.single_use(rescale.output) and rewriter.single_use(first.output):
        return None
    return _repeated([op], copied(op.inputs[0], rewriter.build), rewriter.build)


def _chained_tables(op: Op, rewriter: Rewriter) -> list[Op] | None:
    """Arithmetic to TABLE, behind another TABLE, one of them int16, which Vela would make one chain of.

    For a chain the hardware holds one table of int16.
    """
    steps = _from_arithmetic(op, rewriter)
    table = next((step for step in steps if step.kind == "TABLE"), op)
    return steps if steps and _chains(steps[0], table, 0, 0, rewriter) else None


def _separate_tables(op: Op, steps: list[Op], rewriter: Rewriter) -> Value:
    """The arithmetic and what follows, in halves: what reads a SLICE is in no chain.

    Halves cost no more cycles than the whole.
    """
    table = next((step for step in steps if step.kind == "TABLE"), op)
    b, shape = rewriter.build, steps[0].output.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:  # one element: a CLAMP is in the place that the TABLE would have in the chain
        clamped = b.reshape(b.clamp(table.inputs[0], *table.inputs[0].dtype.range), shape)
        return b.reshape(_repeated(steps[steps.index(table) :], clamped, b), op.output.shape)
    middle, halves = shape[axis] // 2, []
    for span in ((0, middle), (middle, shape[axis])):
        inputs = [_part(value, axis, span, rewriter) for value in steps[0].inputs]
        part = (*shape[:axis], span[1] - span[0], *shape[axis + 1 :])
        first = b.emit(steps[0].kind, inputs, part, steps[0].output.dtype, **steps[0].attrs)
        halves.append(_repeated(steps[1:], first, b))
    return b.reshape(b.concat(halves, axis), op.output.shape)


def _from_arithmetic(op: Op, rewriter: Rewriter) -> list[Op]:
    """Arithmetic, RESCALEs, a TABLE and, of int16, its RESCALE, if ``op`` is the last of such; RESHAPEs left out."""
    users = rewriter.users(op.output) or []
    if (op.kind == "TABLE" and len(users) == 1 and users[0].kind == "RESCALE") or (
        op.kind == "RESCALE" and producer(op.inputs[0], "TABLE") is None
    ):
        return []
    steps = [op]
    while steps[0].kind in ("TABLE", "RESCALE", "RESHAPE") and not steps[0].attrs.get("per_channel"):
        before = steps[0].inputs[0]
        if before.producer is None or not rewriter.single_use(before):
            return []
        steps.insert(0, before.producer)
    arithmetic = steps[0].kind in ELEMENTWISE - {"CLAMP", "RESCALE", "TABLE"}
    return [step for step in steps if step.kind != "RESHAPE"] if arithmetic else []


def _chains(op: Op, table: Op, length: int, operands: int, rewriter: Rewriter) -> bool:
    """Whether what ``op`` reads can be in a chain with it behind a TABLE that does not go with ``table``."""
    if op.kind not in (*ELEMENTWISE, "RESHAPE") or length > _CHAIN_OPERATIONS or operands > _CHAIN_OPERANDS:
        return False
    if op.kind == "TABLE" and op is not table:
        wide = DType.INT16 in (op.inputs[0].dtype, table.inputs[0].dtype)
        fits = length < _CHAIN_OPERATIONS and operands + _before_table(op, rewriter) <= _CHAIN_OPERANDS
        if wide and fits and not np.array_equal(op.attrs["table"], table.attrs["table"]):
            return True
    if op.kind not in ("CLAMP", "RESCALE", "RESHAPE", "TABLE"):  # those go with another operation or are none
        length, operands = length + 1, operands + _operands(op) - 1
    before = [value.producer for value in op.inputs if rewriter.single_use(value) and value.producer is not None]
    return any(_chains(one, table, length, operands, rewriter) for one in before)


def _operands(op: Op) -> int:
    """How many of arithmetic are no single number."""
    return max(1, sum(value.data is None or value.size > 1 for value in op.inputs))


def _before_table(op: Op, rewriter: Rewriter) -> int:
    """Operands of the operation that a TABLE goes with, where that is sure to be arithmetic; else one, its own."""
    value = op.inputs[0]
    rescale = producer(value, "RESCALE")
    if rescale is not None and rewriter.single_use(value) and not rescale.attrs["per_channel"]:
        value = rescale.inputs[0]
    before = value.producer
    sure = before is not None and before.kind in ("ADD", "SUB", "MUL") and rewriter.single_use(value)
    return _operands(before) if sure and before is not None else 1


def _repeated(steps: list[Op], value: Value, b: Builder) -> Value:
    for step in steps:
        value = b.emit(step.kind, (value,), value.shape, step.output.dtype, **step.attrs)
    return value


def _part(value: Value, axis: int, span: tuple[int, int], rewriter: Rewriter) -> Value:
    """Of ``value``, which may broadcast; a widening RESCALE stays with the arithmetic, which does it on its way."""
    b, (start, end), op = rewriter.build, span, producer(value, "RESCALE")
    if value.shape[axis] == 1:
        return value
    if op is not None and value.dtype is DType.INT32 and rewriter.single_use(value) and not op.attrs["per_channel"]:
        return _repeated([op], _part(op.inputs[0], axis, span, rewriter), b)
    if value.data is not None:
        return b.const(value.data.take(range(start, end), axis), value.dtype)
    return b.narrow(value, axis, start, end - start)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("two_tables", ("TABLE", "RESCALE"), _chained_tables, _separate_tables),
)
