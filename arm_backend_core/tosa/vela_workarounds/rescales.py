"""RESCALEs of which Vela, most of them 5.2 alone, forgets what part they read or write, or what it clips (``vela``).

U55 and U65 compute a RESCALE to or from 32 bits as a MUL, behind a widening ADD where it reads int8 or int16, unless an
operator does it on its way. 5.2 moves SLICE, CONCAT, PAD and TILE into it before it writes these, which it gives the
whole tensor. On all NPUs it joins a CONCAT or TILE, a RESCALE and the CONCAT or PAD behind, and writes one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import power_of_two, rescale_factors
from arm_backend_core.tosa.passes.merge import alike
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through
from arm_backend_core.tosa.vela_workarounds.arithmetic import MOVEMENTS, copied, copy_result, copy_where, filled
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

_NARROW = (DType.INT8, DType.INT16)
#: Operators that do the RESCALE of their result, whatever its scales.
_SCALING = (*("AVG_POOL2D", "CONV2D", "CONV3D", "DEPTHWISE_CONV2D", "MATMUL", "REDUCE_SUM", "TRANSPOSE_CONV2D"),)
_ARITHMETIC = frozenset(ELEMENTWISE - UNARY)
#: Operators that write their operands as parts of a tensor.
_JOINS = ("CONCAT", "PAD", "TILE")
#: Those that become part of no RESCALE.
_MOVES = ("GATHER", "IDENTITY", "REVERSE", "SCATTER", "SLICE", "TRANSPOSE")
_ONE_OPERAND = ("ABS", "BITWISE_NOT", "CLZ", "LOGICAL_NOT", "NEGATE")
#: Operators that have no scale of their operands, also where Vela gives them one.
_UNSCALED = (*_ONE_OPERAND, "BITWISE_AND", "BITWISE_OR", "BITWISE_XOR")
#: Operators for each of which Vela repeats a RESCALE; it makes an ADD of a CAST first.
_REPEATED = frozenset({*_ARITHMETIC, *_ONE_OPERAND, "CAST"})
#: Operators of which Vela clips a RESCALE to the range of their own type.
_CLIPPED = (_ARITHMETIC - {"INTDIV"}) | {"BITWISE_NOT", "CAST", "MAX_POOL2D", "RESIZE", "SELECT"}


def _is_in_32_bits(op: Op) -> bool:
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _reads_part(op: Op, rewriter: Rewriter) -> bool:
    """Whether a RESCALE of its own reads a SLICE, past RESHAPEs that add or drop dimensions of size 1, or a join."""
    if not _is_in_32_bits(op):
        return False
    part = op.inputs[0]
    while (view := part.producer) is not None and (_is_same_shape(view) or _is_joined(view, op, rewriter)):
        part = view.inputs[0]
    if producer(part, "SLICE") is None and _join(op, rewriter) is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(_reads_without(reader, rewriter) for reader in readers)


def _is_same_shape(op: Op) -> bool:
    return op.kind == "RESHAPE" and alike(op.output.shape, op.inputs[0].shape)


def _is_joined(before: Op, op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela makes one RESCALE of two, of which one is by 1."""
    return before.kind == "RESCALE" and rewriter.single_use(before.output) and 0 in map(power_of_two, (before, op))


def _join(op: Op, rewriter: Rewriter) -> Op | None:
    """The CONCAT, PAD or TILE, or the pool that Vela takes apart, whose result a RESCALE alone reads.

    Past RESHAPEs and RESCALEs that become one with it.
    """
    value = op.inputs[0]
    while rewriter.single_use(value) and (view := value.producer) is not None:
        if view.kind != "RESHAPE" and not _is_joined(view, op, rewriter):
            break
        value = view.inputs[0]
    join = value.producer
    if join is None or not rewriter.single_use(value):
        return None
    apart = join.kind in ("AVG_POOL2D", "MAX_POOL2D") and max(join.attrs["stride"]) > 3
    return join if apart or join.kind in _JOINS else None


def _joins_again(op: Op, rewriter: Rewriter) -> bool:
    """Whether a RESCALE has a CONCAT, PAD or TILE before it and, as its only reader, PAD or a CONCAT that is not first.

    Or has a scale for each channel: those of the parts' channels are the first ones, whatever channels these become.
    """
    join, readers = _join(op, rewriter), rewriter.users(op.output)
    if join is not None and op.attrs["per_channel"]:
        return True
    if join is None or join.kind not in _JOINS or readers is None or len(readers) != 1:
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


def _is_repeated_for_parts(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela repeats a RESCALE of its own for several readers, of which one reads a SLICE of it."""
    readers = _repeated_for(op, rewriter)
    return any("SLICE" in passed for _, passed in readers) and _is_in_32_bits(op) and not _is_read_narrow(op, readers)


def _is_repeated_reshaped(op: Op, rewriter: Rewriter) -> bool:
    """Whether it repeats one for several readers, of which one reads a RESHAPE of it.

    Each repeated RESCALE takes the shape of its reader, and reads that of before; one that a reader does on its way
    reads the reader's, but the place of a SLICE is that in the shape before.
    """
    readers = _repeated_for(op, rewriter)
    if any({"SLICE", "RESHAPE"} <= passed for _, passed in readers):
        return True
    return any("RESHAPE" in passed for _, passed in readers) and not _is_read_narrow(op, readers)


def _repeated_for(op: Op, rewriter: Rewriter) -> list[tuple[Op, frozenset[str]]]:
    """The readers for each of which Vela repeats a RESCALE; none where the operator before does it."""
    if op.output.dtype in _NARROW and _is_given_scale(op, rewriter):
        return []
    readers = list(_last_readers(op.output, rewriter, frozenset()))
    repeated = all(reader.kind in _REPEATED or _is_left_to_readers(reader, rewriter) for reader, _ in readers)
    return readers if repeated and len(readers) > 1 else []


def _last_readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """``_readers``, and of a RESCALE that is left to several those in its place."""
    for reader, between in _readers(value, rewriter, passed):
        later = list(_last_readers(reader.output, rewriter, between)) if _is_left_to_readers(reader, rewriter) else []
        yield from later if len(later) > 1 else [(reader, between)]


def _is_read_narrow(op: Op, readers: Iterable[tuple[Op, frozenset[str]]]) -> bool:
    """Whether all do it on their way."""
    return op.output.dtype is DType.INT32 and all(reads_narrow(reader) for reader, _ in readers)


def _is_left_to_readers(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela may have the operators that read a RESCALE do it, which then read what it reads."""
    if op.kind != "RESCALE":
        return False
    readers = [reader for reader, _ in _readers(op.output, rewriter, frozenset())]
    return power_of_two(op) == 0 or (bool(readers) and all(reader.kind in _REPEATED for reader in readers))


def _readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """What reads the value past RESHAPE and SLICE, and which are between; on U85 not RESHAPEs of sizes of 1 alone."""
    for reader in rewriter.users(value) or ():
        if reader.kind in ("RESHAPE", "SLICE"):
            ones = reader.kind == "RESHAPE" and alike(reader.output.shape, value.shape)
            same = ones and rewriter.build.target.hardware.ignores_unit_axes
            yield from _readers(reader.output, rewriter, passed if same else passed | {reader.kind})
        else:
            yield reader, passed


def _is_clipped(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to more bits by more than 1 that the operator before does: it clips the result to the fewer bits.

    Or one by more than 1 behind one by 1 to more bits.
    """
    x = op.inputs[0]
    if op.attrs["input_zp"] or not _grows(op):
        return False
    while rewriter.single_use(x) and (before := _passed(x)) is not None:
        x = before.inputs[0]
    if x.producer is None or not rewriter.single_use(x) or op.output.dtype.bytes <= x.dtype.bytes:
        return False
    sources = x.producer.inputs if x.producer.kind == "CONCAT" else [x]
    lost = [source.producer for source in sources if _has_no_scale(source.producer)]
    return any(one is not None and (one.kind != "MAX_POOL2D" or _clips_maxima(rewriter)) for one in lost)


def _passed(value: Value) -> Op | None:
    """What moves elements alone, or RESCALE by 1 to more bits, which gives ``value``."""
    op = value.producer
    if op is None or (op.kind in MOVEMENTS and op.kind != "CONCAT"):
        return op
    widens = op.output.dtype.bytes > op.inputs[0].dtype.bytes
    return op if op.kind == "RESCALE" and power_of_two(op) == 0 and not op.attrs["input_zp"] and widens else None


def _is_left_unclipped(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE of int16 to int8, and one by 1 to more that arithmetic reads: Vela leaves both to that, unclipped."""
    if (op.inputs[0].dtype, op.output.dtype) != (DType.INT16, DType.INT8):
        return False
    wider = [reader for reader, _ in _readers(op.output, rewriter, frozenset()) if reader.kind == "RESCALE"]
    return any(
        power_of_two(one) == 0
        and one.output.dtype.bytes > one.inputs[0].dtype.bytes
        and _is_read_by((*_REPEATED,), one, rewriter)
        for one in wider
    )


def _has_no_scale(op: Op | None) -> bool:
    """Whether Vela gives the operator, or a RESCALE by 1 with what is before it, a scale that it has not."""
    return op is not None and (op.kind in _CLIPPED or (op.kind == "RESCALE" and power_of_two(op) == 0))


def _clips_maxima(rewriter: Rewriter) -> bool:
    """U55 and U65 scale no maximum."""
    return rewriter.build.target.hardware.scales_maxima


def _grows(op: Op) -> bool:
    return bool(rescale_factors(op).max() > 1)


def _is_of_no_scale(op: Op, rewriter: Rewriter, *, kinds: tuple[str, ...]) -> bool:
    """RESCALE of int8 or int16 that Vela leaves to ABS, BITWISE_AND or the like behind it, which have no scale."""
    joined = {op.inputs[0].dtype, skip_through(op.inputs[0], "RESCALE", "RESHAPE").dtype}
    return power_of_two(op) != 0 and not joined.isdisjoint(_NARROW) and _is_read_by(kinds, op, rewriter)


def _is_read_by(kinds: tuple[str, ...], op: Op, rewriter: Rewriter) -> bool:
    """Whether an operator of these kinds reads a RESCALE, also past those by 1, which become one with it."""
    readers = [reader for reader, _ in _readers(op.output, rewriter, frozenset())]
    joined = [reader for reader in readers if reader.kind == "RESCALE" and power_of_two(reader) == 0]
    return any(reader.kind in kinds for reader in readers) or any(_is_read_by(kinds, one, rewriter) for one in joined)


def _reads_without(op: Op, rewriter: Rewriter) -> bool:
    """Whether it does so here: of RESCALEs that others read too, Vela repeats those that arithmetic alone reads.

    But before it repeats one, it gives the others to the operators before them.
    """
    if _reads_scaled(op, rewriter) or _fuses_operands(op, rewriter):
        return True
    repeated = reads_narrow(op) and all(_is_repeated(value, rewriter) for value in op.inputs)
    return repeated and not any(_is_given_back(value, rewriter) for value in op.inputs)


def _reads_scaled(op: Op, rewriter: Rewriter) -> bool:
    """ADD or SUB on U55 and U65 that does the RESCALEs of both operands and, with them, the one of its result."""
    if op.kind not in ("ADD", "SUB") or not rewriter.build.target.hardware.sums_rescale_operands:
        return False
    match rewriter.users(op.output):
        case [Op(kind="RESCALE", attrs={"per_channel": False, "input_zp": 0}, output=result) as rescale]:
            narrow = result.dtype in _NARROW and not _merges_to_int32(rescale, rewriter)
            return narrow and _is_sole_reader(op, rewriter) and _can_scale([value.producer for value in op.inputs])
    return False


def _merges_to_int32(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges a RESCALE with the RESCALE by 1 to int32 that follows it, past RESHAPEs.

    It does not where an operator fuses the second one (``_fuses_operands``).
    """
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and _is_joined(op, reader, rewriter):
            consumer = rewriter.only_user(reader.output)
            fused = consumer is not None and _fuses_operands(consumer, rewriter)
            return reader.output.dtype is DType.INT32 and not fused
        if reader.kind != "RESHAPE":
            return False
        result = reader.output
    return False


def _fuses_operands(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs by 1 of all operands into the operator, as it is their only reader."""
    return reads_narrow(op) and _is_sole_reader(op, rewriter)


def _is_sole_reader(op: Op, rewriter: Rewriter) -> bool:
    """Whether no other operator reads any operand."""
    return all(rewriter.single_use(value) for value in op.inputs)


def _can_scale(terms: list[Op | None]) -> bool:
    """Whether an ADD scales the operands so: both by 16-bit numbers, or the larger by shifts and the other by any."""
    rescales = [term for term in terms if term is not None and term.kind == "RESCALE" and not term.attrs["per_channel"]]
    kinds = {rescale.inputs[0].dtype for rescale in rescales}
    if len(rescales) != 2 or len(kinds) != 1 or not kinds <= {*_NARROW}:
        return False
    scales = [float(rescale_factors(rescale)[0]) for rescale in rescales]
    shifted = 2.0**14 if DType.INT16 in kinds else 2.0**19
    small = all(scale.is_integer() and scale < 1 << 15 for scale in scales)
    return small or (max(scales) == shifted and scales[0] != scales[1])


def _is_given_back(value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse a RESCALE into the producers of its operand, of which it is the only reader."""
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
    return not _is_given_scale(scaled, rewriter)


def _is_given_scale(rescale: Op, rewriter: Rewriter) -> bool:
    """Whether the operator before does a RESCALE."""
    op = rescale.inputs[0].producer
    if op is None or rescale.attrs["input_zp"] or not rewriter.single_use(op.output):
        return False
    narrow = op.kind in _ARITHMETIC and all(value.dtype in _NARROW for value in op.inputs)
    if op.kind == "TABLE":
        return {op.inputs[0].dtype, rescale.output.dtype} == {DType.INT16}
    return op.kind in _SCALING or narrow or _reads_without(op, rewriter)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("rescaled_once", ("RESCALE",), partial(_is_of_no_scale, kinds=_UNSCALED), copy_result),
    # Of which it makes bitwise operators:
    Workaround(
        "rescaled_choice", ("RESCALE",), partial(_is_of_no_scale, kinds=("SELECT",)), copy_result, releases=((5, 2),)
    ),
    Workaround("unclipped_term", ("RESCALE",), _is_left_unclipped, copy_result, releases=((5, 2),)),
    Workaround("clipped_rescale", ("RESCALE",), _is_clipped, _copy_read, releases=((5, 2),)),
    Workaround("reshaped_parts", ("RESCALE",), _is_repeated_reshaped, copy_result, releases=((5, 2),)),
    Workaround("rescaled_parts", ("RESCALE",), _is_repeated_for_parts, copy_result, releases=((5, 2),)),
    Workaround("rescaled_part", ("RESCALE",), _reads_part, _copy_read, releases=((5, 2),)),
    Workaround("joined_again", ("RESCALE",), _joins_again, _copy_read, releases=((5, 2),)),
    copy_where("joined_rescale", ("CONCAT", "PAD"), _is_written_whole, releases=((5, 2),)),
)
