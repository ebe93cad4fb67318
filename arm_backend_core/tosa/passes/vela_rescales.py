"""RESCALEs to or from 32 bits of which Vela 5.2 forgets what part of a tensor they read or write (U55, U65) (``vela``).

These NPUs compute such a RESCALE as a MUL, behind a widening ADD where it reads int8 or int16, unless an operator does
it on its way. 5.2 moves SLICE, CONCAT and PAD into it before it writes these, which it gives the whole tensor.
"""

from __future__ import annotations

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import power_of_two
from arm_backend_core.tosa.passes.merge import alike
from arm_backend_core.tosa.passes.mistakes import AnyMistake, Mistake
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer
from arm_backend_core.tosa.passes.vela_numbers import copied, copy_where, filled

_NARROW = (DType.INT8, DType.INT16)
#: Operators that do the RESCALE of their result, whatever its scales.
_SCALING = (
    *("AVG_POOL2D", "CONV2D", "CONV3D", "DEPTHWISE_CONV2D", "MATMUL", "REDUCE_SUM", "TABLE", "TRANSPOSE_CONV2D"),
)
_ARITHMETIC = frozenset(ELEMENTWISE - UNARY)


def _is_in_32_bits(op: Op) -> bool:
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _reads_part(op: Op, rewriter: Rewriter) -> bool:
    """Whether a RESCALE reads a SLICE, past RESHAPEs that add or drop dimensions of size 1, and is one of its own."""
    part = op.inputs[0]
    while (view := producer(part, "RESHAPE")) is not None and alike(part.shape, view.inputs[0].shape):
        part = view.inputs[0]
    if not _is_in_32_bits(op) or producer(part, "SLICE") is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(reads_narrow(reader) for reader in readers)


def reads_narrow(op: Op) -> bool:
    """Whether Vela has an operator read int8 or int16 in place of what RESCALEs by 1 have made of it."""
    terms = [producer(value, "RESCALE") for value in op.inputs]
    kinds = {term.inputs[0].dtype for term in terms if term is not None and power_of_two(term) == 0}
    binary = op.kind in _ARITHMETIC and len(terms) == 2
    plain = all(term is not None and power_of_two(term) == 0 for term in terms)
    return (op.kind == "REDUCE_SUM" or binary) and plain and len(kinds) == 1 and kinds <= {*_NARROW}


def _copy_read(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """The RESCALE of x * 1, which is int32 already: then all that is left where it is by 1."""
    b, part, attrs = rewriter.build, op.inputs[0], op.attrs
    if part.dtype not in _NARROW or attrs["input_zp"] != 0 or op.output.dtype is not DType.INT32:
        return b.emit("RESCALE", (copied(part, b),), op.output.shape, op.output.dtype, **attrs)
    wide = b.mul(part, filled(part, 1, part.dtype, b))
    if power_of_two(op) == 0 and attrs["output_zp"] == 0:
        return wide
    return b.emit("RESCALE", (wide,), op.output.shape, DType.INT32, **attrs)


def _is_written_whole(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a RESCALE of its own writes its part of a larger tensor, and not where that begins."""
    scaled = producer(value, "RESCALE")
    if scaled is None or not _is_in_32_bits(scaled) or not rewriter.single_use(value):
        return False
    if reader.kind == "CONCAT" and value is reader.inputs[0]:
        return False
    if reader.kind == "PAD" and not any(reader.attrs["padding"][::2]):
        return False
    return not _scales(scaled.inputs[0].producer, rewriter)


def _scales(op: Op | None, rewriter: Rewriter) -> bool:
    """Whether an operator does the RESCALE of its result."""
    if op is None or not rewriter.single_use(op.output):
        return False
    narrow = op.kind in _ARITHMETIC and all(value.dtype in _NARROW for value in op.inputs)
    return op.kind in _SCALING or narrow or reads_narrow(op)


MISTAKES: tuple[AnyMistake, ...] = (
    Mistake("rescaled_part", ("RESCALE",), _reads_part, _copy_read, releases=((5, 2),)),
    copy_where("joined_rescale", ("CONCAT", "PAD"), _is_written_whole, releases=((5, 2),)),
)
