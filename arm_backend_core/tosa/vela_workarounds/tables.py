"""Vela workarounds for TABLEs, and duplication of cheap arithmetic that a TABLE or MATMUL can fuse."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer
from arm_backend_core.tosa.vela_workarounds.arithmetic import emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: Limits of a chain: operations, and operands that are no results of operations in the chain.
_MAX_CHAIN_OPERATIONS, _MAX_CHAIN_OPERANDS = 4, 3


def duplicate_cheap_producers(graph: Graph, target: Target) -> None:
    """Give a TABLE of int16 an arithmetic producer of its own where other operators read the operand too.

    Vela then fuses the TABLE into this producer. As an operation of its own, a TABLE of 100 elements takes 2,600
    cycles, an addition 100 (U55-128 and U85-256).
    """
    if target.hardware.npu:
        apply_once(graph, target, {"TABLE": [_duplicate_table_operand], "RESHAPE": [_duplicate_matmul_column]})


def _duplicate_matmul_column(op: Op, rewriter: Rewriter) -> Value | None:
    """Duplicate the arithmetic before a column that a MATMUL and a RESHAPE read.

    Vela transposes a column only for its single reader. The RESHAPE reads the duplicate.
    """
    b, x = rewriter.build, op.inputs[0]
    rescale = producer(x, "RESCALE")
    arithmetic = rescale and rescale.inputs[0].producer
    if rescale is None or arithmetic is None or arithmetic.kind not in ("ADD", "MUL", "SUB") or x.shape[::2] != (1, 1):
        return None
    if all(user.kind != "MATMUL" for user in rewriter.users(x) or []):
        return None
    duplicate = b.emit(
        arithmetic.kind, arithmetic.inputs, arithmetic.output.shape, arithmetic.output.dtype, **arithmetic.attrs
    )
    return b.reshape(_emit_unary_steps([rescale], duplicate, b), op.output.shape)


def _duplicate_table_operand(op: Op, rewriter: Rewriter) -> Value | None:
    """TABLE of a copy of its operand, arithmetic and a RESCALE, if one of these has other readers."""
    rescale = producer(op.inputs[0], "RESCALE")
    arithmetic = rescale and rescale.inputs[0].producer
    if (
        rescale is None
        or arithmetic is None
        or arithmetic.kind not in ("ADD", "MUL", "SUB")
        or op.output.dtype is DType.INT8
    ):
        return None
    if rewriter.single_use(rescale.output) and rewriter.single_use(arithmetic.output):
        return None
    return _emit_unary_steps([op], emit_copy(op.inputs[0], rewriter.build), rewriter.build)


def _match_chained_tables(op: Op, rewriter: Rewriter) -> list[Op] | None:
    """Arithmetic and a TABLE that Vela would chain with an earlier TABLE (``two_tables``: U85, 5.1 and 5.2).

    One of the TABLEs is int16. Vela copies both tables to the only slot before the chain starts: both TABLEs then use
    the table that is copied later.

    Returns:
        the operators from the arithmetic to ``op``, or None.
    """
    steps = _collect_steps(op, rewriter)
    table = next((step for step in steps if step.kind == "TABLE"), op)
    return steps if steps and _may_chain(steps[0], table, 0, 0, rewriter) else None


def _split_into_halves(op: Op, steps: list[Op], rewriter: Rewriter) -> Value:
    """Compute the steps in halves, each of which reads a SLICE: such operations are in no chain.

    By Vela's estimate the halves cost as many cycles as the whole.
    """
    table = next((step for step in steps if step.kind == "TABLE"), op)
    b, shape = rewriter.build, steps[0].output.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:  # one element cannot be halved: a CLAMP takes the TABLE's place in the chain
        clamped = b.reshape(b.clamp(table.inputs[0], *table.inputs[0].dtype.range), shape)
        return b.reshape(_emit_unary_steps(steps[steps.index(table) :], clamped, b), op.output.shape)
    middle, halves = shape[axis] // 2, []
    for bounds in ((0, middle), (middle, shape[axis])):
        inputs = [_narrow_operand(value, axis, bounds, rewriter) for value in steps[0].inputs]
        half_shape = (*shape[:axis], bounds[1] - bounds[0], *shape[axis + 1 :])
        first = b.emit(steps[0].kind, inputs, half_shape, steps[0].output.dtype, **steps[0].attrs)
        halves.append(_emit_unary_steps(steps[1:], first, b))
    return b.reshape(b.concat(halves, axis), op.output.shape)


def _collect_steps(op: Op, rewriter: Rewriter) -> list[Op]:
    """Arithmetic, RESCALEs, a TABLE and, for int16, the RESCALE of its result, if ``op`` is the last of them.

    Returns:
        the operators without RESHAPEs; empty if there is no such sequence.
    """
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
    is_arithmetic = steps[0].kind in ELEMENTWISE - {"CLAMP", "RESCALE", "TABLE"}
    return [step for step in steps if step.kind != "RESHAPE"] if is_arithmetic else []


def _may_chain(op: Op, table: Op, length: int, operands: int, rewriter: Rewriter) -> bool:
    """Whether a chain that ``op`` is part of may contain another TABLE before ``table``, with other values.

    Args:
        length: the operations that are in the chain already.
        operands: the external operands that are in the chain already.
    """
    if op.kind not in (*ELEMENTWISE, "RESHAPE") or length > _MAX_CHAIN_OPERATIONS or operands > _MAX_CHAIN_OPERANDS:
        return False
    if op.kind == "TABLE" and op is not table:
        is_int16 = DType.INT16 in (op.inputs[0].dtype, table.inputs[0].dtype)
        fits = length < _MAX_CHAIN_OPERATIONS and operands + _count_table_operands(op, rewriter) <= _MAX_CHAIN_OPERANDS
        if is_int16 and fits and not np.array_equal(op.attrs["table"], table.attrs["table"]):
            return True
    if op.kind not in ("CLAMP", "RESCALE", "RESHAPE", "TABLE"):  # these are fused, or are no operation
        length, operands = length + 1, operands + _count_operands(op) - 1
    producers = [value.producer for value in op.inputs if rewriter.single_use(value) and value.producer is not None]
    return any(_may_chain(op_before, table, length, operands, rewriter) for op_before in producers)


def _count_operands(op: Op) -> int:
    """The number of operands that are not single constants; at least 1."""
    return max(1, sum(value.data is None or value.size > 1 for value in op.inputs))


def _count_table_operands(op: Op, rewriter: Rewriter) -> int:
    """The number of operands of the arithmetic that a TABLE is certainly fused into; else 1, the TABLE's own."""
    value = op.inputs[0]
    rescale = producer(value, "RESCALE")
    if rescale is not None and rewriter.single_use(value) and not rescale.attrs["per_channel"]:
        value = rescale.inputs[0]
    before = value.producer
    is_fused = before is not None and before.kind in ("ADD", "SUB", "MUL") and rewriter.single_use(value)
    return _count_operands(before) if is_fused and before is not None else 1


def _emit_unary_steps(steps: list[Op], value: Value, b: Builder) -> Value:
    """Emit the unary operators ``steps`` again, from ``value`` on."""
    for step in steps:
        value = b.emit(step.kind, (value,), value.shape, step.output.dtype, **step.attrs)
    return value


def _narrow_operand(value: Value, axis: int, span: tuple[int, int], rewriter: Rewriter) -> Value:
    """The slice ``span`` of an operand along ``axis``; an operand that broadcasts along it stays whole.

    A widening RESCALE is emitted again on the slice, because the arithmetic fuses it.
    """
    b, (start, end), op = rewriter.build, span, producer(value, "RESCALE")
    if value.shape[axis] == 1:
        return value
    if op is not None and value.dtype is DType.INT32 and rewriter.single_use(value) and not op.attrs["per_channel"]:
        return _emit_unary_steps([op], _narrow_operand(op.inputs[0], axis, span, rewriter), b)
    if value.data is not None:
        return b.const(value.data.take(range(start, end), axis), value.dtype)
    return b.narrow(value, axis, start, end - start)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("two_tables", ("TABLE", "RESCALE"), _match_chained_tables, _split_into_halves),
)
