"""Vela workarounds for RESCALEs that lose the offset of a partial tensor, or their clipping, when Vela fuses them.

Most of these bugs are in Vela 5.2 only. On U55 and U65, a RESCALE to or from int32 that no operator fuses is executed
as a MUL, after a widening ADD if it reads int8 or int16. Vela 5.2 moves SLICE, CONCAT, PAD and TILE into the RESCALE
before it emits these two operations, and gives them the whole tensor. On all NPUs it merges CONCAT or TILE, a RESCALE
and a following CONCAT or PAD, and writes only one part. "Fuses" below always means that Vela does so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import is_rescale_by_one, power_of_two, rescale_factors
from arm_backend_core.tosa.passes.merge import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.arithmetic import (
    DATA_MOVEMENT,
    broadcast_constant,
    copy_operands_where,
    copy_result,
    emit_copy,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

_NARROW = (DType.INT8, DType.INT16)
#: Operators that Vela fuses the RESCALE of their result into, whatever its scales.
_SCALES_RESULT = (*("AVG_POOL2D", "CONV2D", "CONV3D", "DEPTHWISE_CONV2D", "MATMUL", "REDUCE_SUM", "TRANSPOSE_CONV2D"),)
_ARITHMETIC = frozenset(ELEMENTWISE - UNARY)
#: Operators that Vela implements by writing each operand to its place in the result.
_JOINS = ("CONCAT", "PAD", "TILE")
#: Operators that Vela never fuses a RESCALE into.
_NEVER_RESCALES = ("GATHER", "IDENTITY", "REVERSE", "SCATTER", "SLICE", "TRANSPOSE")
_UNARY_INTEGER = ("ABS", "BITWISE_NOT", "CLZ", "LOGICAL_NOT", "NEGATE")
#: Operators that the NPU does not scale, although Vela fuses RESCALEs of their operands into them.
_HAS_NO_SCALE = (*_UNARY_INTEGER, "BITWISE_AND", "BITWISE_OR", "BITWISE_XOR")
#: Readers for each of which Vela duplicates a RESCALE; it lowers CAST to ADD before that.
_DUPLICATES_RESCALE = frozenset({*_ARITHMETIC, *_UNARY_INTEGER, "CAST"})
#: Operators into which Vela fuses the RESCALE of their result but clips it to the range of their own type.
_CLIPS_TO_OWN_TYPE = (_ARITHMETIC - {"INTDIV"}) | {"BITWISE_NOT", "CAST", "MAX_POOL2D", "RESIZE", "SELECT"}


def _has_int32(op: Op) -> bool:
    """Whether a RESCALE is to or from int32."""
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _reads_part(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 of a partial tensor that no reader fuses (``rescaled_part``: U55, U65, 5.2).

    The operand is a SLICE, also past RESHAPEs that add or remove dimensions of size 1, or
    ``_find_partitioned_producer``'s. Vela emits a MUL that reads from the start of the whole tensor, or writes only one
    part.
    """
    if not _has_int32(op):
        return False
    part, _ = trace_back(op.inputs[0], lambda view: _is_size_one_reshape(view) or _merges_with(view, op, rewriter))
    if producer(part, "SLICE") is None and _find_partitioned_producer(op, rewriter) is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(_fuses_own_rescales(reader, rewriter) for reader in readers)


def _is_size_one_reshape(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE that adds or removes only dimensions of size 1."""
    return op.kind == "RESHAPE" and equal_without_ones(op.output.shape, op.inputs[0].shape)


def _merges_with(before: Op, op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges the RESCALE ``before`` and ``op``, its only reader: one of them is by 1."""
    return before.kind == "RESCALE" and rewriter.single_use(before.output) and 0 in map(power_of_two, (before, op))


def _find_partitioned_producer(op: Op, rewriter: Rewriter) -> Op | None:
    """The CONCAT, PAD, TILE or split pool (stride over 3) before a RESCALE, its only reader.

    Also past RESHAPEs and RESCALEs that merge with this one.
    """

    def is_passed(view: Op) -> bool:
        return rewriter.single_use(view.output) and (view.kind == "RESHAPE" or _merges_with(view, op, rewriter))

    value, _ = trace_back(op.inputs[0], is_passed)
    join = value.producer
    if join is None or not rewriter.single_use(value):
        return None
    is_split_pool = join.kind in ("AVG_POOL2D", "MAX_POOL2D") and max(join.attrs["stride"]) > 3
    return join if is_split_pool or join.kind in _JOINS else None


def _is_between_joins(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE between a CONCAT, PAD or TILE and another CONCAT or PAD (``joined_again``: all NPUs, 5.2).

    It is the only reader of the first, and the second is its only reader: a PAD, or a CONCAT in which it is not first.
    Vela merges all three and writes one part only. Also a per-channel RESCALE after the first alone: Vela gives each
    part a RESCALE with the scales of the first channels, wherever the part's channels are.
    """
    join, readers = _find_partitioned_producer(op, rewriter), rewriter.users(op.output)
    if join is not None and op.attrs["per_channel"]:
        return True
    if join is None or join.kind not in _JOINS or readers is None or len(readers) != 1:
        return False
    reader = readers[0]
    return reader.kind == "PAD" or (reader.kind == "CONCAT" and op.output is not reader.inputs[0])


def absorbs_widening(op: Op) -> bool:
    """Whether Vela lets ``op`` read int8 or int16 directly in place of the results of RESCALEs by 1."""
    terms = [producer(value, "RESCALE") for value in op.inputs]
    dtypes = {term.inputs[0].dtype for term in terms if term is not None and power_of_two(term) == 0}
    is_binary = op.kind in _ARITHMETIC and len(terms) == 2
    are_identity = all(term is not None and power_of_two(term) == 0 for term in terms)
    return (op.kind == "REDUCE_SUM" or is_binary) and are_identity and len(dtypes) == 1 and dtypes <= {*_NARROW}


def _is_duplicated_for_slice(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 that Vela duplicates for several readers (``rescaled_parts``: U55, U65, 5.2).

    One of them reads a SLICE of it, and not all fuse it: the duplicate then has the bug ``rescaled_part``.
    """
    readers = _duplicating_readers(op, rewriter)
    return any("SLICE" in passed for _, passed in readers) and _has_int32(op) and not _all_absorb_widening(op, readers)


def _is_duplicated_for_reshape(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE that Vela duplicates for several readers, one of which reads a RESHAPE of it (``reshaped_parts``: all,
    5.2).

    Each duplicate writes the shape of its reader but reads the shape before the RESHAPE. Where the reader fuses its
    duplicate, both shapes are the reader's, but the offset of a SLICE is still counted in the shape before.
    """
    readers = _duplicating_readers(op, rewriter)
    if any({"SLICE", "RESHAPE"} <= passed for _, passed in readers):
        return True
    return any("RESHAPE" in passed for _, passed in readers) and not _all_absorb_widening(op, readers)


def _duplicating_readers(op: Op, rewriter: Rewriter) -> list[tuple[Op, frozenset[str]]]:
    """The readers for each of which Vela duplicates a RESCALE, and the operators between.

    Empty if it is not duplicated, or if the operator before fuses it.
    """
    if op.output.dtype in _NARROW and _fuses_into_producer(op, rewriter):
        return []
    readers = list(_final_readers(op.output, rewriter, frozenset()))
    is_duplicated = all(
        reader.kind in _DUPLICATES_RESCALE or _may_fuse_into_readers(reader, rewriter) for reader, _ in readers
    )
    return readers if is_duplicated and len(readers) > 1 else []


def _final_readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """The readers of ``value``; a RESCALE that Vela fuses into several readers is replaced by these readers.

    Yields: (reader, kinds of the operators between).
    """
    for reader, between in _readers(value, rewriter, passed):
        duplicating = (
            list(_final_readers(reader.output, rewriter, between)) if _may_fuse_into_readers(reader, rewriter) else []
        )
        yield from duplicating if len(duplicating) > 1 else [(reader, between)]


def _all_absorb_widening(op: Op, readers: Iterable[tuple[Op, frozenset[str]]]) -> bool:
    """Whether all readers fuse the widening RESCALE ``op``."""
    return op.output.dtype is DType.INT32 and all(absorbs_widening(reader) for reader, _ in readers)


def _may_fuse_into_readers(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse the RESCALE ``op`` into its readers, which then read the operand of ``op``."""
    if op.kind != "RESCALE":
        return False
    readers = [reader for reader, _ in _readers(op.output, rewriter, frozenset())]
    return power_of_two(op) == 0 or (bool(readers) and all(reader.kind in _DUPLICATES_RESCALE for reader in readers))


def _readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """The readers of ``value`` past RESHAPE and SLICE, each with the kinds of the operators between.

    On U85, RESHAPEs that change only dimensions of size 1 do not count as between.
    """
    for reader in rewriter.users(value) or ():
        if reader.kind in ("RESHAPE", "SLICE"):
            is_size_one = reader.kind == "RESHAPE" and equal_without_ones(reader.output.shape, value.shape)
            is_transparent = is_size_one and rewriter.build.target.hardware.ignores_unit_axes
            yield from _readers(reader.output, rewriter, passed if is_transparent else passed | {reader.kind})
        else:
            yield reader, passed


def _is_clipped_by_producer(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to more bits by more than 1 that is fused into its producer (``clipped_rescale``: all NPUs, 5.2).

    The producer has no scale. The fused operation clips the result to the producer's narrower type. Also past RESHAPE,
    CONCAT and a RESCALE by 1 to more bits.
    """
    if op.attrs["input_zp"] or not _scale_exceeds_one(op):
        return False
    x, _ = trace_back(op.inputs[0], lambda before: rewriter.single_use(before.output) and _is_skippable(before))
    if x.producer is None or not rewriter.single_use(x) or op.output.dtype.bytes <= x.dtype.bytes:
        return False
    sources = x.producer.inputs if x.producer.kind == "CONCAT" else [x]
    clipping = [source.producer for source in sources if _cannot_scale(source.producer)]
    return any(one is not None and (one.kind != "MAX_POOL2D" or _fuses_into_maximum(rewriter)) for one in clipping)


def _is_skippable(op: Op) -> bool:
    """Whether ``op`` moves elements or is a RESCALE by 1 to more bits."""
    if op.kind != "RESCALE":
        return op.kind in DATA_MOVEMENT and op.kind != "CONCAT"
    return power_of_two(op) == 0 and not op.attrs["input_zp"] and op.output.dtype.bytes > op.inputs[0].dtype.bytes


def _fuses_unclipped(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE from int16 to int8, then a RESCALE by 1 to more bits and arithmetic (``unclipped_term``: U85, 5.2).

    Vela fuses both RESCALEs into the arithmetic, which does not clip to int8.
    """
    if (op.inputs[0].dtype, op.output.dtype) != (DType.INT16, DType.INT8):
        return False
    rescales = [reader for reader, _ in _readers(op.output, rewriter, frozenset()) if reader.kind == "RESCALE"]
    return any(
        power_of_two(one) == 0
        and one.output.dtype.bytes > one.inputs[0].dtype.bytes
        and _is_read_by((*_DUPLICATES_RESCALE,), one, rewriter)
        for one in rescales
    )


def _cannot_scale(op: Op | None) -> bool:
    """Whether Vela fuses a scale into ``op`` that ``op`` does not apply; a RESCALE by 1 stands for its producer."""
    return op is not None and (op.kind in _CLIPS_TO_OWN_TYPE or is_rescale_by_one(op))


def _fuses_into_maximum(rewriter: Rewriter) -> bool:
    """Whether Vela fuses a RESCALE into MAX_POOL2D: on U85 only, as U55 and U65 do not scale a maximum."""
    return rewriter.build.target.hardware.scales_maxima


def _scale_exceeds_one(op: Op) -> bool:
    """Whether the largest scale of a RESCALE is above 1."""
    return bool(rescale_factors(op).max() > 1)


def _is_fused_into_unscaled(op: Op, rewriter: Rewriter, *, kinds: tuple[str, ...]) -> bool:
    """RESCALE of int8 or int16 by another number than 1 that a reader without a scale fuses (U85).

    ``rescaled_once`` (5.1 and 5.2): ABS, CLZ, another unary operator, or BITWISE_AND, OR, XOR. ``rescaled_choice``
    (5.2): SELECT, which Vela lowers to bitwise operators. The scale is lost.
    """
    dtypes = {op.inputs[0].dtype, skip_through(op.inputs[0], "RESCALE", "RESHAPE").dtype}
    return power_of_two(op) != 0 and not dtypes.isdisjoint(_NARROW) and _is_read_by(kinds, op, rewriter)


def _is_read_by(kinds: tuple[str, ...], op: Op, rewriter: Rewriter) -> bool:
    """Whether an operator of these kinds reads the RESCALE ``op``, also past RESCALEs by 1, which merge with it."""
    readers = [reader for reader, _ in _readers(op.output, rewriter, frozenset())]
    merged = [reader for reader in readers if is_rescale_by_one(reader)]
    return any(reader.kind in kinds for reader in readers) or any(_is_read_by(kinds, one, rewriter) for one in merged)


def _fuses_own_rescales(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs of all operands into ``op``, so that none of them is executed.

    Vela duplicates a RESCALE with several readers if all are arithmetic, and then fuses the duplicates. But before it
    does so, it fuses RESCALEs into their producers where it can.
    """
    if _is_scaled_sum(op, rewriter) or _fuses_operands(op, rewriter):
        return True
    are_duplicated = absorbs_widening(op) and all(_is_duplicated(value, rewriter) for value in op.inputs)
    return are_duplicated and not any(_may_fuse_into_producer(value, rewriter) for value in op.inputs)


def _is_scaled_sum(op: Op, rewriter: Rewriter) -> bool:
    """ADD or SUB on U55 and U65 that fuses the RESCALEs of both operands and the RESCALE of its result."""
    if op.kind not in ("ADD", "SUB") or not rewriter.build.target.hardware.sums_rescale_operands:
        return False
    match rewriter.users(op.output):
        case [Op(kind="RESCALE", attrs={"per_channel": False, "input_zp": 0}, output=result) as rescale]:
            is_narrow = result.dtype in _NARROW and not _merges_to_int32(rescale, rewriter)
            return (
                is_narrow
                and _is_sole_reader(op, rewriter)
                and _has_fusible_scales([value.producer for value in op.inputs])
            )
    return False


def _merges_to_int32(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges a RESCALE with the RESCALE by 1 to int32 that follows it, past RESHAPEs.

    It does not where an operator fuses the second one (``_fuses_operands``).
    """
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and _merges_with(op, reader, rewriter):
            consumer = rewriter.only_user(reader.output)
            is_fused = consumer is not None and _fuses_operands(consumer, rewriter)
            return reader.output.dtype is DType.INT32 and not is_fused
        if reader.kind != "RESHAPE":
            return False
        result = reader.output
    return False


def _fuses_operands(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs by 1 of all operands into the operator, as it is their only reader."""
    return absorbs_widening(op) and _is_sole_reader(op, rewriter)


def _is_sole_reader(op: Op, rewriter: Rewriter) -> bool:
    """Whether no other operator reads any operand."""
    return all(rewriter.single_use(value) for value in op.inputs)


def _has_fusible_scales(terms: list[Op | None]) -> bool:
    """Whether ADD or SUB can apply the scales of its operands.

    Either both are integers of 16 bits, or the larger is 2**14 (int16) or 2**19 (int8) and the other any other number.
    """
    rescales = [term for term in terms if term is not None and term.kind == "RESCALE" and not term.attrs["per_channel"]]
    dtypes = {rescale.inputs[0].dtype for rescale in rescales}
    if len(rescales) != 2 or len(dtypes) != 1 or not dtypes <= {*_NARROW}:
        return False
    scales = [float(rescale_factors(rescale)[0]) for rescale in rescales]
    shift_scale = 2.0**14 if DType.INT16 in dtypes else 2.0**19
    fit_16_bits = all(scale.is_integer() and scale < 1 << 15 for scale in scales)
    return fit_16_bits or (max(scales) == shift_scale and scales[0] != scales[1])


def _may_fuse_into_producer(value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse a RESCALE into the producer of its operand, whose only reader it is."""
    x = value.producer.inputs[0] if value.producer is not None else value
    x, _ = trace_back(x, lambda view: view.kind == "RESHAPE" and rewriter.single_use(view.output))
    return rewriter.single_use(x) and x.producer is not None and x.producer.kind not in _NEVER_RESCALES


def _is_duplicated(value: Value, rewriter: Rewriter) -> bool:
    """Whether each reader of ``value`` gets a RESCALE of its own: there is one reader, or all are arithmetic."""
    readers = rewriter.users(value)
    return readers is not None and (len(readers) == 1 or all(reader.kind in _ARITHMETIC for reader in readers))


def _copy_operand(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """RESCALE of a copy, x * 1, in place of the partial tensor.

    The product of int8 or int16 is int32 already: it replaces a RESCALE by 1 to int32.
    """
    b, x, attrs = rewriter.build, op.inputs[0], op.attrs
    if x.dtype not in _NARROW or attrs["input_zp"] != 0:
        return b.emit("RESCALE", (emit_copy(x, b),), op.output.dtype, **attrs)
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    if power_of_two(op) == 0 and attrs["output_zp"] == 0 and op.output.dtype is DType.INT32:
        return product
    return b.emit("RESCALE", (product,), op.output.dtype, **attrs)


def _loses_own_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 whose only reader is CONCAT or PAD (``joined_rescale``: U55, U65, 5.2).

    It is not first there, and its producer does not fuse it. Vela writes it to the start of the larger tensor.
    """
    rescale = producer(value, "RESCALE")
    if rescale is None or not _has_int32(rescale) or not rewriter.single_use(value):
        return False
    if reader.kind == "CONCAT" and value is reader.inputs[0]:
        return False
    if reader.kind == "PAD" and not any(reader.attrs["padding"][::2]):
        return False
    return not _fuses_into_producer(rescale, rewriter)


def _fuses_into_producer(rescale: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALE into its producer."""
    op = rescale.inputs[0].producer
    if op is None or rescale.attrs["input_zp"] or not rewriter.single_use(op.output):
        return False
    is_narrow = op.kind in _ARITHMETIC and all(value.dtype in _NARROW for value in op.inputs)
    if op.kind == "TABLE":
        return {op.inputs[0].dtype, rescale.output.dtype} == {DType.INT16}
    return op.kind in _SCALES_RESULT or is_narrow or _fuses_own_rescales(op, rewriter)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("rescaled_once", ("RESCALE",), partial(_is_fused_into_unscaled, kinds=_HAS_NO_SCALE), copy_result),
    # Vela lowers SELECT to bitwise operators:
    Workaround(
        "rescaled_choice",
        ("RESCALE",),
        partial(_is_fused_into_unscaled, kinds=("SELECT",)),
        copy_result,
        releases=((5, 2),),
    ),
    Workaround("unclipped_term", ("RESCALE",), _fuses_unclipped, copy_result, releases=((5, 2),)),
    Workaround("clipped_rescale", ("RESCALE",), _is_clipped_by_producer, _copy_operand, releases=((5, 2),)),
    Workaround("reshaped_parts", ("RESCALE",), _is_duplicated_for_reshape, copy_result, releases=((5, 2),)),
    Workaround("rescaled_parts", ("RESCALE",), _is_duplicated_for_slice, copy_result, releases=((5, 2),)),
    Workaround("rescaled_part", ("RESCALE",), _reads_part, _copy_operand, releases=((5, 2),)),
    Workaround("joined_again", ("RESCALE",), _is_between_joins, _copy_operand, releases=((5, 2),)),
    copy_operands_where("joined_rescale", ("CONCAT", "PAD"), _loses_own_offset, releases=((5, 2),)),
)
