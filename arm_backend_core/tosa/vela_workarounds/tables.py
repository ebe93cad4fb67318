"""Vela workarounds for TABLEs, and duplication of cheap operators that a TABLE or MATMUL shares with other readers."""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer, skip_through
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: U85 chains elementwise operations, so that intermediate results are not written to memory. Limits of a chain: the
#: number of operations, and the number of external operands, which no operation in the chain computes.
_MAX_CHAIN_OPERATIONS, _MAX_CHAIN_OPERANDS = 4, 3


def duplicate_cheap_producers(graph: Graph, target: Target) -> None:
    """Duplicate an operand of a TABLE or MATMUL, so that no other operator reads it. This saves cycles.

    Vela fuses a TABLE into the preceding operator, and transposes a column for a MATMUL, only if there is no other
    reader. If there are others, this pass lets an int16 TABLE read a copy of its operand. For a MATMUL, it computes the
    column again for the other reader, a RESHAPE. By Vela's estimate for 100 elements on U55-128 and U85-256, a TABLE
    that is not fused takes 2,600 cycles. An addition or a copy takes 100.
    """
    if target.hardware.is_ethos_u:
        apply_once(graph, target, {"TABLE": [_copy_table_operand], "RESHAPE": [_duplicate_matmul_column]})


def _duplicate_matmul_column(op: Op, rewriter: Rewriter) -> Value | None:
    """If a RESHAPE and a MATMUL read a column of shape (1, n, 1), compute the column again for the RESHAPE.

    The MATMUL is then the only reader of the column. Vela transposes a column only if it has a single reader.
    """
    b, x = rewriter.builder, op.inputs[0]
    rescale = producer(x, "RESCALE")
    arithmetic = rescale and rescale.inputs[0].producer
    if rescale is None or arithmetic is None or arithmetic.kind not in ("ADD", "MUL", "SUB") or x.shape[::2] != (1, 1):
        return None
    if all(user.kind != "MATMUL" for user in rewriter.users(x) or []):
        return None
    duplicate = b.emit(arithmetic.kind, arithmetic.inputs, arithmetic.output.dtype, **arithmetic.attrs)
    return b.reshape(_emit_unary_sequence([rescale], duplicate, b), op.output.shape)


def _copy_table_operand(op: Op, rewriter: Rewriter) -> Value | None:
    """Copy the operand of an int16 TABLE that reads a RESCALE of arithmetic, if either result has other readers."""
    rescale = producer(op.inputs[0], "RESCALE")
    arithmetic = rescale and rescale.inputs[0].producer
    if (
        rescale is None
        or arithmetic is None
        or arithmetic.kind not in ("ADD", "MUL", "SUB")
        or op.output.dtype is DType.INT8
    ):
        return None
    if rewriter.has_one_use(rescale.output) and rewriter.has_one_use(arithmetic.output):
        return None
    return _emit_unary_sequence([op], emit_copy(op.inputs[0], rewriter.builder), rewriter.builder)


def _is_table_fused_into_transpose(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela fuses a TABLE or CLAMP into the preceding TRANSPOSE and miscompiles both.

    A copy between the TRANSPOSE and the TABLE or CLAMP prevents the fusion. The workaround ``unwritten_table_result``
    covers two bugs:

    - ``unwritten_table_result``: before a CONCAT or PAD, the fused operation loses its offset in the larger tensor.
    - ``table_overflow``: the internal memory of U55-32 and U55-64 has no room for the table.
    """
    readers = [reader.kind for reader in rewriter.users(op.output) or ()]
    is_lost = readers in (["CONCAT"], ["PAD"]) or (op.kind == "TABLE" and rewriter.builder.target.macs in (32, 64))
    return is_lost and producer(skip_through(value, "RESHAPE"), "TRANSPOSE") is not None


def _is_second_fused_table(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a TABLE or CLAMP follows a REVERSE or TRANSPOSE, which follows another TABLE or CLAMP.

    Bug ``transposed_table``: Vela fuses all three into one operation, which has a single table and a single range. One
    of the two tables or ranges is lost. A copy before the last TABLE or CLAMP prevents the fusion.
    """
    result = skip_through(value, "RESHAPE", "RESCALE")
    source = skip_through(result, "RESHAPE", "RESCALE", "REVERSE", "TRANSPOSE")
    return source is not result and source.producer is not None and source.producer.kind in ("TABLE", "CLAMP")


def _match_chained_tables(op: Op, rewriter: Rewriter) -> list[Op] | None:
    """Match arithmetic and a TABLE that Vela would chain with an earlier TABLE, if one of the TABLEs is int16.

    Bug ``two_tables``: a chain has a single table slot. Vela copies both tables to this slot before the chain starts,
    so that both TABLEs read the second table.

    Returns:
        the operators from the arithmetic to ``op``; None if there is no such chain.
    """
    steps = _collect_table_sequence(op, rewriter)
    table = next((step for step in steps if step.kind == "TABLE"), op)
    return steps if steps and _may_chain_tables(steps[0], table, 0, 0, rewriter) else None


def _split_into_halves(op: Op, steps: list[Op], rewriter: Rewriter) -> Value:
    """Compute the sequence ``steps`` on two halves of its operands, and concatenate the results.

    Each half reads a SLICE. Vela does not chain an operation that reads a SLICE with the producer of the sliced tensor.
    By Vela's estimate, the two halves together take as many cycles as the original sequence.
    """
    table = next((step for step in steps if step.kind == "TABLE"), op)
    b, shape = rewriter.builder, steps[0].output.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        # A single element cannot be split. Insert a CLAMP to the full range before the TABLE: Vela then fuses the CLAMP
        # into the arithmetic, and not the TABLE.
        clamped = b.reshape(b.clamp(table.inputs[0], *table.inputs[0].dtype.range), shape)
        return b.reshape(_emit_unary_sequence(steps[steps.index(table) :], clamped, b), op.output.shape)
    middle, halves = shape[axis] // 2, []
    for bounds in ((0, middle), (middle, shape[axis])):
        inputs = [_slice_operand(value, axis, bounds, rewriter) for value in steps[0].inputs]
        first = b.emit(steps[0].kind, inputs, steps[0].output.dtype, **steps[0].attrs)
        halves.append(_emit_unary_sequence(steps[1:], first, b))
    return b.reshape(b.concat(halves, axis), op.output.shape)


def _collect_table_sequence(op: Op, rewriter: Rewriter) -> list[Op]:
    """Collect the sequence that ends with ``op``: arithmetic, RESCALEs, a TABLE, and a RESCALE after an int16 TABLE.

    All operators of the sequence but the last have a single reader.

    Returns:
        the operators in order, without RESHAPEs; empty if ``op`` does not end such a sequence.
    """
    users = rewriter.users(op.output) or []
    if (op.kind == "TABLE" and len(users) == 1 and users[0].kind == "RESCALE") or (
        op.kind == "RESCALE" and producer(op.inputs[0], "TABLE") is None
    ):
        return []
    steps = [op]
    while steps[0].kind in ("TABLE", "RESCALE", "RESHAPE") and not steps[0].attrs.get("per_channel"):
        operand = steps[0].inputs[0]
        if operand.producer is None or not rewriter.has_one_use(operand):
            return []
        steps.insert(0, operand.producer)
    is_arithmetic = steps[0].kind in ELEMENTWISE - {"CLAMP", "RESCALE", "TABLE"}
    return [step for step in steps if step.kind != "RESHAPE"] if is_arithmetic else []


def _may_chain_tables(op: Op, table: Op, length: int, operands: int, rewriter: Rewriter) -> bool:
    """Whether Vela may chain ``op`` or its producers with ``table``, so that one chain has two different tables.

    Args:
        op: the operator from which to search backwards.
        table: the last TABLE of the chain.
        length: number of operations in the chain behind ``op``.
        operands: number of external operands of these operations. The result of ``op`` is not included.
        rewriter: the rewriter of the graph.
    """
    if op.kind not in (*ELEMENTWISE, "RESHAPE") or length > _MAX_CHAIN_OPERATIONS or operands > _MAX_CHAIN_OPERANDS:
        return False
    if op.kind == "TABLE" and op is not table:
        is_int16 = DType.INT16 in (op.inputs[0].dtype, table.inputs[0].dtype)
        fits = length < _MAX_CHAIN_OPERATIONS and operands + _count_table_operands(op, rewriter) <= _MAX_CHAIN_OPERANDS
        if is_int16 and fits and not np.array_equal(op.attrs["table"], table.attrs["table"]):
            return True
    if op.kind not in ("CLAMP", "RESCALE", "RESHAPE", "TABLE"):  # Vela fuses or removes these four kinds
        length, operands = length + 1, operands + _count_operands(op) - 1
    producers = [value.producer for value in op.inputs if rewriter.has_one_use(value) and value.producer is not None]
    return any(_may_chain_tables(parent, table, length, operands, rewriter) for parent in producers)


def _count_operands(op: Op) -> int:
    """Count the operands that are not scalar constants; at least 1."""
    return max(1, sum(value.data is None or value.size > 1 for value in op.inputs))


def _count_table_operands(op: Op, rewriter: Rewriter) -> int:
    """Count the operands of the NPU operation that computes a TABLE.

    If Vela fuses the TABLE into the preceding arithmetic, these are the operands of the arithmetic. Otherwise, the
    TABLE is a separate operation, which has 1 operand.
    """
    value = op.inputs[0]
    rescale = producer(value, "RESCALE")
    if rescale is not None and rewriter.has_one_use(value) and not rescale.attrs["per_channel"]:
        value = rescale.inputs[0]
    arithmetic = value.producer
    is_fused = arithmetic is not None and arithmetic.kind in ("ADD", "SUB", "MUL") and rewriter.has_one_use(value)
    return _count_operands(arithmetic) if is_fused and arithmetic is not None else 1


def _emit_unary_sequence(steps: list[Op], value: Value, b: Builder) -> Value:
    """Emit the unary operators ``steps`` again as a sequence. The first one reads ``value``."""
    for step in steps:
        value = b.emit(step.kind, (value,), step.output.dtype, **step.attrs)
    return value


def _slice_operand(value: Value, axis: int, span: tuple[int, int], rewriter: Rewriter) -> Value:
    """Slice an operand along ``axis`` from span[0] to span[1]. An operand of size 1 along ``axis`` is not sliced.

    If a RESCALE to int32 computes the operand, slice the RESCALE's input instead, because Vela fuses the RESCALE into
    the arithmetic.
    """
    b, (start, end), op = rewriter.builder, span, producer(value, "RESCALE")
    if value.shape[axis] == 1:
        return value
    if op is not None and value.dtype is DType.INT32 and rewriter.has_one_use(value) and not op.attrs["per_channel"]:
        return _emit_unary_sequence([op], _slice_operand(op.inputs[0], axis, span, rewriter), b)
    if value.data is not None:
        return b.const(value.data.take(range(start, end), axis), value.dtype)
    return b.narrow(value, axis, start, end - start)


FUSED_TABLE_WORKAROUNDS = (
    copy_operands_where("unwritten_table_result", ("TABLE", "CLAMP"), _is_table_fused_into_transpose),
    copy_operands_where("transposed_table", ("TABLE", "CLAMP"), _is_second_fused_table),
)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("two_tables", ("TABLE", "RESCALE"), _match_chained_tables, _split_into_halves),
)
