"""RESCALEs of which Vela, most of them 5.2 alone, forgets what part they read or write, or what it clips (``vela``).

U55 and U65 compute a RESCALE to or from 32 bits as a MUL, behind a widening ADD where it reads int8 or int16, unless an
operator does it on its way. 5.2 moves SLICE, CONCAT, PAD and TILE into it before it writes these, which it gives the
whole tensor. On all NPUs it joins a CONCAT or TILE, a RESCALE and the CONCAT or PAD behind, and writes one part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

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
#: Operators that write their operands as parts of a tensor.
_JOINS = ("CONCAT", "PAD", "TILE")
#: Those that become part of no RESCALE.
_MOVES = (*_JOINS, "GATHER", "IDENTITY", "REVERSE", "SCATTER", "SLICE", "TRANSPOSE")
_ONE_OPERAND = ("ABS", "BITWISE_NOT", "CLZ", "LOGICAL_NOT", "NEGATE")
#: Operators for each of which Vela repeats a RESCALE.
_REPEATED = frozenset({*_ARITHMETIC, *_ONE_OPERAND} - {"SELECT"})
#: Operators of which Vela clips a RESCALE to the range of their own type.
_CLIPPED = (_ARITHMETIC - {"INTDIV"}) | {"BITWISE_NOT", "CAST", "MAX_POOL2D", "RESIZE", "SELECT"}


def _is_in_32_bits(op: Op) -> bool:
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _reads_part(op: Op, rewriter: Rewriter) -> bool:
    """Whether a RESCALE of its own reads a SLICE, past RESHAPEs that add or drop dimensions of size 1, or a join."""
    if not _is_in_32_bits(op):
        return False
    part = op.inputs[0]
    while (view := producer(part, "RESHAPE")) is not None and alike(part.shape, view.inputs[0].shape):
        part = view.inputs[0]
    if producer(part, "SLICE") is None and _join(op, rewriter) is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(_reads_without(reader, rewriter) for reader in readers)


def _join(op: Op, rewriter: Rewriter) -> Op | None:
    """The CONCAT, PAD or TILE, or the pool that Vela takes apart, whose result a RESCALE alone reads, past RESHAPEs."""
    value = op.inputs[0]
    while rewriter.single_use(value) and (view := producer(value, "RESHAPE")) is not None:
        value = view.inputs[0]
    join = value.producer
    if join is None or not rewriter.single_use(value):
        return None
    apart = join.kind in ("AVG_POOL2D", "MAX_POOL2D") and max(join.attrs["stride"]) > 3
    return join if apart or join.kind in _JOINS else None


def _joins_again(op: Op, rewriter: Rewriter) -> bool:
    """Whether a RESCALE has a CONCAT or TILE before it and, as its only reader, PAD or a CONCAT that is not first.

    Or has a scale for each channel: those of the parts' channels are the first ones, whatever channels these become.
    """
    join, readers = _join(op, rewriter), rewriter.users(op.output)
    if join is not None and op.attrs["per_channel"]:
        return True
    if join is None or join.kind not in ("CONCAT", "TILE") or readers is None or len(readers) != 1:
        return False
    reader = readers[0]
    return reader.kind == "PAD" or (reader.kind == "CONCAT" and op.output is not reader.inputs[0])


def reads_narrow(op: Op) -> bool:
    """Whether Vela has an operator read int8 or int16 in place of what RESCALEs by 1 have made of it."""
    terms = [producer(value, "RESCALE") for value in op.inputs]
    kinds = {term.inputs[0].dtype for term in terms if term is not None and power_of_two(term) == 0}
    binary = op.kind in _ARITHMETIC and len(terms) == 2
    plain = all(term is not None and power_of_two(term) == 0 for term in terms)
    return (op.kind == "REDUCE_SUM" or binary) and plain and len(kinds) == 1 and kinds <= {*_NARROW}


def _is_for_parts(op: Op, rewriter: Rewriter, *, reshaped: bool) -> bool:
    """Whether Vela repeats a RESCALE for several readers, of which one reads a SLICE of it.

    Unless the operator before does it.

    Args:
        reshaped: a SLICE of a RESHAPE, whose place each counts in the shape before; else any, by an operation that
            no reader does on its way.
    """
    readers = list(_readers(op.output, rewriter, frozenset()))
    parts = [passed for _, passed in readers if "SLICE" in passed]
    if len(readers) < 2 or not parts or (op.output.dtype in _NARROW and _scales(op.inputs[0].producer, rewriter)):
        return False
    if any(reader.kind not in _REPEATED and not _is_rescale_by_one(reader) for reader, _ in readers):
        return False
    if reshaped:
        return any("RESHAPE" in passed for passed in parts)
    widens = op.output.dtype is DType.INT32
    return _is_in_32_bits(op) and not (widens and all(reads_narrow(reader) for reader, _ in readers))


def _is_rescale_by_one(op: Op) -> bool:
    """Which Vela leaves to the operators that read it."""
    return op.kind == "RESCALE" and power_of_two(op) == 0


def _readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """What reads the value past RESHAPE and SLICE, and which of them are between."""
    for reader in rewriter.users(value) or ():
        if reader.kind in ("RESHAPE", "SLICE"):
            yield from _readers(reader.output, rewriter, passed | {reader.kind})
        else:
            yield reader, passed


def _is_clipped(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to more bits by more than 1 that the operator before does: it clips the result to the fewer bits."""
    x = op.inputs[0]
    if op.output.dtype.bytes <= x.dtype.bytes or op.attrs["input_zp"] or not _grows(op):
        return False
    while rewriter.single_use(x) and (before := producer(x, "RESHAPE")) is not None:
        x = before.inputs[0]
    if x.producer is None or not rewriter.single_use(x):
        return False
    sources = x.producer.inputs if x.producer.kind == "CONCAT" else [x]
    lost = [source.producer for source in sources if _has_no_scale(source.producer)]
    return any(one is not None and (one.kind != "MAX_POOL2D" or _clips_maxima(rewriter)) for one in lost)


def _has_no_scale(op: Op | None) -> bool:
    """Whether Vela gives the operator, or a RESCALE by 1 with what is before it, a scale that it has not."""
    return op is not None and (op.kind in _CLIPPED or (op.kind == "RESCALE" and power_of_two(op) == 0))


def _clips_maxima(rewriter: Rewriter) -> bool:
    """U55 and U65 scale no maximum."""
    return rewriter.build.target.family == "ethos-u85"


def _grows(op: Op) -> bool:
    scales = np.asarray(op.attrs["multiplier"]) / 2.0 ** np.asarray(op.attrs["shift"])
    return bool(scales.max() > 1)


def _is_of_one_operand(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE that Vela leaves to ABS, CLZ or the like behind it, which have no scale."""
    return power_of_two(op) != 0 and any(
        reader.kind in _ONE_OPERAND for reader, _ in _readers(op.output, rewriter, frozenset())
    )


def _copy_written(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """The result is copied."""
    b = rewriter.build
    return copied(b.emit("RESCALE", op.inputs, op.output.shape, op.output.dtype, **op.attrs), b)


def _reads_without(op: Op, rewriter: Rewriter) -> bool:
    """Whether it does so here: of RESCALEs that others read too, Vela repeats those that arithmetic alone reads.

    But before it repeats one, it gives the others to the operators before them.
    """
    if not reads_narrow(op) or not all(_is_repeated(value, rewriter) for value in op.inputs):
        return False
    alone = all(rewriter.single_use(value) for value in op.inputs)
    return alone or not any(_is_given_back(value, rewriter) for value in op.inputs)


def _is_given_back(value: Value, rewriter: Rewriter) -> bool:
    """Whether an operator that moves nothing gives what the RESCALE of ``value`` alone reads, past RESHAPEs."""
    x = value.producer.inputs[0] if value.producer is not None else value
    while rewriter.single_use(x) and (view := producer(x, "RESHAPE")) is not None:
        x = view.inputs[0]
    return rewriter.single_use(x) and x.producer is not None and x.producer.kind not in _MOVES


def _is_repeated(value: Value, rewriter: Rewriter) -> bool:
    readers = rewriter.users(value)
    return readers is not None and (len(readers) == 1 or all(reader.kind in _ARITHMETIC for reader in readers))


def _copy_read(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """The RESCALE of x * 1, which is int32 already: then all that is left where it is by 1 to int32."""
    b, part, attrs = rewriter.build, op.inputs[0], op.attrs
    if part.dtype not in _NARROW or attrs["input_zp"] != 0:
        return b.emit("RESCALE", (copied(part, b),), op.output.shape, op.output.dtype, **attrs)
    wide = b.mul(part, filled(part, 1, part.dtype, b))
    if power_of_two(op) == 0 and attrs["output_zp"] == 0 and op.output.dtype is DType.INT32:
        return wide
    return b.emit("RESCALE", (wide,), op.output.shape, op.output.dtype, **attrs)


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
    return op.kind in _SCALING or narrow or _reads_without(op, rewriter)


MISTAKES: tuple[AnyMistake, ...] = (
    Mistake("rescaled_once", ("RESCALE",), _is_of_one_operand, _copy_written),
    Mistake("clipped_rescale", ("RESCALE",), _is_clipped, _copy_read, releases=((5, 2),)),
    Mistake("reshaped_parts", ("RESCALE",), partial(_is_for_parts, reshaped=True), _copy_written, releases=((5, 2),)),
    Mistake("rescaled_parts", ("RESCALE",), partial(_is_for_parts, reshaped=False), _copy_written, releases=((5, 2),)),
    Mistake("rescaled_part", ("RESCALE",), _reads_part, _copy_read, releases=((5, 2),)),
    Mistake("joined_again", ("RESCALE",), _joins_again, _copy_read, releases=((5, 2),)),
    copy_where("joined_rescale", ("CONCAT", "PAD"), _is_written_whole, releases=((5, 2),)),
)
