"""Operators that Vela takes apart, beside SLICE, CONCAT, PAD and RESHAPE: copies in the right places (``vela``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, producer

_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")


def filled(x: Value, number: int, dtype: DType, b: Builder) -> Value:
    """One number that broadcasts to ``x``."""
    return b.const(np.full((1,) * x.rank, number), dtype)


def copied(x: Value, b: Builder) -> Value:
    """``x`` as the result of an operation that reads slices and writes into parts of a tensor: x * 1, or x or x.

    Vela removes IDENTITY, and estimates 1.1 to 1.5 cycles an element for CLAMP against 0.25 (U85) to 1 (U55) here.
    """
    if x.dtype is DType.BOOL:
        return b.bitwise("LOGICAL_OR", x, x)
    product = b.mul(x, filled(x, 1, x.dtype, b))
    return product if x.dtype is DType.INT32 else b.rescale(product, x.dtype, 1.0)


def slice_whole(op: Op, rewriter: Rewriter) -> Value | None:
    """The SLICE that an operator reads is copied where Vela, which lets the operator read the part, forgets it."""
    axes = rewriter.build.target.hardware.forgotten(op)
    inputs = [_whole(value, axes, rewriter.build) or value for value in op.inputs] if axes else op.inputs
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _whole(value: Value, axes: Sequence[int], b: Builder) -> Value | None:
    op = value.producer
    if op is None:
        return None
    if op.kind == "SLICE":
        whole, part = op.inputs[0].shape, value.shape
        cut = any(-axis <= value.rank and whole[axis] != part[axis] for axis in axes)
        return copied(value, b) if cut else None
    if op.kind not in ("RESHAPE", "RESCALE"):  # what Vela looks or writes through
        return None
    inner = _whole(op.inputs[0], range(-6, 0) if op.kind == "RESHAPE" else axes, b)
    return None if inner is None else b.emit(op.kind, (inner,), value.shape, value.dtype, **op.attrs)


def copy_column(op: Op, rewriter: Rewriter) -> Value | None:
    """The reduction of rows that were columns, [.., n, 1], is of a copy.

    Vela reduces columns again and sees one layout all through, of 16 channels, but has allocated the rows.
    """
    value, column = op.inputs[0], producer(op.inputs[0], "RESHAPE")
    rows = op.attrs["axis"] == value.rank - 1 and value.shape[-1] > 1
    if not rows or column is None or column.inputs[0].shape[-1:] != (1,):
        return None
    inputs = [copied(value, rewriter.build)]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def join_whole(op: Op, rewriter: Rewriter) -> Value | None:
    """CONCAT and PAD copy a result that Vela would write in their place, and does at the wrong one."""
    inputs = [copied(value, rewriter.build) if _misplaced(value, rewriter) else value for value in op.inputs]
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _misplaced(value: Value, rewriter: Rewriter) -> bool:
    op, reshaped = value.producer, False
    while op is not None and op.kind in ("RESCALE", "RESHAPE"):
        reshaped = reshaped or op.kind == "RESHAPE"
        op = op.inputs[0].producer
    if op is None or not rewriter.single_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not reshaped
    forgotten = bool(rewriter.build.target.hardware.forgotten(op))
    # Of a MATMUL the results that Vela sees have four dimensions, the first of them 1.
    return forgotten and (reshaped if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not reshaped)


def pad_apart(op: Op, rewriter: Rewriter) -> Value | None:
    """PAD with 0 is copied before a convolution without padding, whose padding Vela would make it: with input_zp."""
    source = op.inputs[0].producer
    while source is not None and source.kind == "RESHAPE":
        source = source.inputs[0].producer
    if source is None or source.kind != "PAD" or any(op.attrs["pad"]) or not op.attrs["input_zp"]:
        return None
    if source.attrs["pad_const"] != 0:
        return None
    inputs = [copied(op.inputs[0], rewriter.build), *op.inputs[1:]]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def select_own(op: Op, rewriter: Rewriter) -> Value | None:
    """SELECT reads copies of what others read in another shape: Vela takes that shape for it, and broadcasts."""
    inputs = [copied(value, rewriter.build) if _read_reshaped(value, rewriter) else value for value in op.inputs]
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _read_reshaped(value: Value, rewriter: Rewriter) -> bool:
    """Whether another than the reader of ``value`` reads a RESHAPE of it; a result of the graph counts as that."""
    own = producer(value, "RESHAPE")
    readers = rewriter.users(own.inputs[0] if own else value)
    return readers is None or any(reader.kind == "RESHAPE" and reader is not own for reader in readers)


_WINDOWS = ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")
_APART = (*_WINDOWS, *_REDUCTIONS, "ARGMAX", "AVG_POOL2D", "MATMUL", "MAX_POOL2D", "REDUCE_SUM", "TRANSPOSE_CONV2D")
#: By the mistake's name: rules, and the operators that they are for.
RULES: dict[str, tuple[tuple[Rule, tuple[str, ...]], ...]] = {
    "sliced": ((slice_whole, _APART),),
    "column": ((copy_column, (*_REDUCTIONS, "ARGMAX")),),
    "joined": ((join_whole, ("CONCAT", "PAD")),),
    "padded_zero": ((pad_apart, _WINDOWS),),
    "reshaped_select": ((select_own, ("SELECT",)),),
}
