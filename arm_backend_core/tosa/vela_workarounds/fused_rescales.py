"""Vela workarounds for RESCALEs whose scale or clipping is lost when Vela fuses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.permutation import identity
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.layout_modes import is_free_permutation
from arm_backend_core.tosa.passes.peephole_fusion import (
    has_unit_scale,
    has_unit_scale_and_no_zero_points,
    log2_scale,
    rescale_factors,
)
from arm_backend_core.tosa.passes.peephole_movement import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant, copy_result, emit_copy
from arm_backend_core.tosa.vela_workarounds.narrowing import DATA_MOVEMENT, may_clip
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

NARROW_TYPES = (DType.INT8, DType.INT16)
#: Elementwise operators with two or three operands. The docstrings of the workarounds call them arithmetic.
NONUNARY = frozenset(ELEMENTWISE - UNARY)
_UNARY_INTEGER = ("ABS", "BITWISE_NOT", "CLZ", "LOGICAL_NOT", "NEGATE")
#: Operators whose operands the NPU cannot scale, although Vela fuses the RESCALEs of these operands into them.
_UNSCALED_KINDS = (*_UNARY_INTEGER, "BITWISE_AND", "BITWISE_OR", "BITWISE_XOR")
#: If only operators of these kinds read a RESCALE, Vela duplicates the RESCALE for each of them. CAST is one of these
#: kinds, because Vela first lowers CAST to ADD.
RESCALE_DUPLICATING_KINDS = frozenset({*NONUNARY, *_UNARY_INTEGER, "CAST"})
#: Name for a RESHAPE across which Vela fuses operations (``Hardware.ignores_unit_axes``).
UNIT_RESHAPE = "RESHAPE of unit axes"
#: Operators that clip to their own result type, although Vela fuses a RESCALE to a wider type into them.
_OWN_TYPE_CLIPPING_KINDS = (NONUNARY - {"INTDIV"}) | {"BITWISE_NOT", "CAST", "MAX_POOL2D", "RESIZE", "SELECT"}


def _is_scaled_maximum(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE (scale not 1) that keeps the type and is the only reader of a MAX_POOL2D or REDUCE_MAX.

    Bug ``lost_maximum_scale``: Vela fuses both operators into a max pooling with ``OFM_SCALE``. U55 and U65 do not
    scale a maximum, so that the RESCALE is lost. IDENTITYs, RESHAPEs and RESCALEs with scale 1 may be between the two.
    """
    if op.attrs["input_zp"] or op.attrs["output_unsigned"] or log2_scale(op) == 0:
        return False

    def can_skip(before: Op) -> bool:
        keeps_values = before.kind in ("IDENTITY", "RESHAPE") or has_unit_scale_and_no_zero_points(before)
        return keeps_values and rewriter.has_one_use(before.output)

    maximum, _ = trace_back(op.inputs[0], can_skip)
    is_maximum = maximum.producer is not None and maximum.producer.kind in ("MAX_POOL2D", "REDUCE_MAX")
    return is_maximum and rewriter.has_one_use(maximum) and maximum.dtype is op.output.dtype


def _has_channel_scales(op: Op, rewriter: Rewriter) -> bool:
    """Match a per-channel RESCALE whose operand and result are int8 or int16.

    Bug ``lost_channel_scales``: Vela lowers the RESCALE to a pooling, which has no per-channel scales. The RESCALE is
    therefore lost. RESCALEs of accumulators are not affected.
    """
    is_narrow = {op.inputs[0].dtype, op.output.dtype} <= {DType.INT8, DType.INT16}
    return is_narrow and bool(op.attrs["per_channel"])


def _rescale_product(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the RESCALE of x * 1. The hardware scales products, so that MUL and RESCALE become one operation."""
    b, x, zero_point = rewriter.builder, op.inputs[0], op.attrs["input_zp"]
    if op.attrs["input_unsigned"]:  # TOSA has no RESCALE of uint8 to int32, and int16 holds the difference
        x = b.rescale(x, DType.INT16, 1.0, zero_point, input_unsigned=True)
    elif zero_point:
        x = b.rescale(x, DType.INT32, 1.0, zero_point)
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    return b.emit("RESCALE", (product,), op.output.dtype, **op.attrs | {"input_zp": 0, "input_unsigned": False})


@dataclass(frozen=True)
class _ScaledSum:
    """An ADD or SUB of two RESCALEs with integer scales.

    Attributes:
        addition: the ADD or SUB.
        rescales: the RESCALEs of its operands.
        factors: their integer scales.
        exponent: e, so that the larger scale times 2**e is in [2**14, 2**15) for int16 operands, or in [2**19, 2**20)
            for int8 operands.
    """

    addition: Op
    rescales: Sequence[Op]
    factors: Sequence[int]
    exponent: int


def _match_unequal_scales(op: Op, rewriter: Rewriter) -> _ScaledSum | None:
    """Match RESCALE(RESCALE(x) +- RESCALE(y)) whose inner scales are different integers below 2**15.

    Bug ``unequal_scales``: Vela fuses all three RESCALEs into the ADD or SUB. The NPU multiplies the operand that
    has the smaller scale by this scale, and shifts the other operand left by 14 (int16) or 19 (int8) bits. The shift is
    correct only if the larger scale is 2**14 or 2**19. RESHAPEs and TRANSPOSEs may follow the sum: Vela may remove
    them.
    """
    x, _ = trace_back(
        op.inputs[0], lambda move: move.kind in ("RESHAPE", "TRANSPOSE") and rewriter.has_one_use(move.output)
    )
    addition = x.producer
    if addition is None or addition.kind not in ("ADD", "SUB") or not rewriter.has_one_use(x):
        return None
    if op.attrs["per_channel"] or op.output.dtype not in (DType.INT8, DType.INT16):
        return None
    for use_merged in (False, True):
        scaled_terms = _find_integer_scales(addition, rewriter, use_merged=use_merged)
        if scaled_terms is not None and len({*scaled_terms[1]}) > 1:
            rescales, factors = scaled_terms
            shift = 14 if rescales[0].inputs[0].dtype is DType.INT16 else 19
            if max(factors) != 1 << shift:
                return _ScaledSum(addition, rescales, factors, shift + 1 - max(factors).bit_length())
    return None


def _enlarge_scales(op: Op, match: _ScaledSum, rewriter: Rewriter) -> Value:
    """Multiply the operand scales by 2**e, so that the larger one is 2**14 or 2**19; divide the last scale by 2**e.

    The sum stays within 31 bits. Scaling is impossible in three cases: the larger scale is not a power of two, the last
    RESCALE has double rounding, or its shift would exceed 62. In these cases, a MUL scales one operand instead, because
    Vela does not fuse a MUL. If data movement follows the sum, a copy prevents Vela from fusing the last RESCALE.
    """
    addition, rescales, factors, exponent = match.addition, match.rescales, match.factors, match.exponent
    b, attrs, large = rewriter.builder, dict(op.attrs), max(factors)
    if op.inputs[0] is not addition.output:
        return b.emit("RESCALE", (emit_copy(op.inputs[0], b),), op.output.dtype, **attrs)
    shift = np.asarray(attrs["shift"]) + exponent
    if large & (large - 1) == 0 and shift[0] <= 62 and attrs["rounding_mode"] == "SINGLE_ROUND":
        attrs["shift"] = shift.astype(np.int8)
        scaled_rescales = zip(rescales, factors, strict=True)
        operands = [_rescale_operand(rescale, factor << exponent, b) for rescale, factor in scaled_rescales]
    else:
        widened = _rescale_operand(rescales[1], 1, b)
        operands = [addition.inputs[0], b.mul(widened, broadcast_constant(widened, factors[1], DType.INT32, b))]
    result = b.emit(addition.kind, operands, DType.INT32)
    return b.emit("RESCALE", (result,), op.output.dtype, **attrs)


def _find_integer_scales(addition: Op, rewriter: Rewriter, *, use_merged: bool) -> tuple[list[Op], list[int]] | None:
    """The RESCALEs of the operands of an ADD or SUB and their integer scales, if U55 and U65 can fuse them.

    Vela 5.1 fuses a RESCALE that has only one reader into this reader. Vela 5.2 also duplicates a RESCALE for each of
    its readers, and merges two consecutive RESCALEs.

    Args:
        use_merged: if True, return the first of the consecutive RESCALEs that Vela merges; if False, the last.

    Returns:
        ([RESCALE of the first operand, of the second], [their scales]). None if a scale is not an integer below 2**15,
        or if Vela does not fuse the RESCALEs.
    """
    rescales, factors, only_single_use = [], [], rewriter.builder.target.vela_release == (5, 1)
    for value in addition.inputs:
        rescale = producer(value, "RESCALE")
        if rescale is not None and use_merged and not only_single_use:
            rescale = _first_of_merged_rescales(rescale, rewriter)
        if rescale is None or rescale.attrs["per_channel"] or (only_single_use and not rewriter.has_one_use(value)):
            return None
        multiplier, shift = int(rescale.attrs["multiplier"][0]), int(rescale.attrs["shift"][0])
        if multiplier % (1 << shift) or multiplier >> shift >= 1 << 15:
            return None
        rescales.append(rescale)
        factors.append(multiplier >> shift)
    dtypes = {rescale.inputs[0].dtype for rescale in rescales}
    are_fused = len(dtypes) == 1 and dtypes <= {DType.INT8, DType.INT16}
    return (rescales, factors) if are_fused else None


def _first_of_merged_rescales(rescale: Op, rewriter: Rewriter) -> Op:
    """The first of the consecutive RESCALEs that Vela merges into ``rescale``. All but the first have scale 1."""
    while has_unit_scale_and_no_zero_points(rescale) and rewriter.has_one_use(rescale.inputs[0]):
        before = producer(rescale.inputs[0], "RESCALE")
        if before is None or before.attrs["input_unsigned"]:  # Vela reads uint8 in a separate operation
            break
        rescale = before
    return rescale


def _rescale_operand(rescale: Op, factor: int, b: Builder) -> Value:
    return b.rescale(rescale.inputs[0], DType.INT32, factor, rescale.attrs["input_zp"])


def _loses_scale_in_reader(op: Op, rewriter: Rewriter, *, kinds: tuple[str, ...]) -> bool:
    """Match a RESCALE of int8 or int16 with a scale other than 1 that Vela fuses into a reader that cannot scale.

    The scale is lost.

    - Bug ``lost_operand_scale``: the reader is one of ``_UNSCALED_KINDS``.
    - Bug ``lost_select_scale``: the reader is SELECT, which Vela lowers to bitwise operators.

    Args:
        op: the RESCALE.
        rewriter: the rewriter of the graph.
        kinds: the operator kinds that cannot scale.
    """
    dtypes = {op.inputs[0].dtype, skip_through(op.inputs[0], "RESCALE", "RESHAPE").dtype}
    return log2_scale(op) != 0 and not dtypes.isdisjoint(NARROW_TYPES) and _is_read_by(kinds, op, rewriter)


def _is_read_by(kinds: tuple[str, ...], op: Op, rewriter: Rewriter) -> bool:
    """Whether an operator of these kinds reads the RESCALE ``op``.

    RESHAPEs, SLICEs and RESCALEs with scale 1 may be between the two.
    """
    readers = [reader for reader, _ in readers_past_views(op.output, rewriter, frozenset())]
    merged = [reader for reader in readers if has_unit_scale(reader)]
    return any(reader.kind in kinds for reader in readers) or any(
        _is_read_by(kinds, rescale, rewriter) for rescale in merged
    )


def readers_past_views(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """The operators other than RESHAPE and SLICE that read ``value``, directly or through RESHAPEs and SLICEs.

    A TRANSPOSE that moves only dimensions of size 1 is treated as a RESHAPE.

    Args:
        value: the tensor to search from.
        rewriter: the rewriter of the graph.
        passed: the operator kinds that the search has already passed. An empty set starts a search.

    Yields:
        (reader, passed kinds). Example: (ADD, {"RESHAPE", "SLICE"}) if the ADD reads a SLICE of a RESHAPE. For U85, a
        RESHAPE that adds or removes only dimensions of size 1 is ``UNIT_RESHAPE`` instead.
    """
    for reader in rewriter.users(value) or ():
        if is_pure_reshape(reader):
            is_size_one = equal_without_ones(reader.output.shape, value.shape)
            is_transparent = is_size_one and rewriter.builder.target.hardware.ignores_unit_axes
            kind = UNIT_RESHAPE if is_transparent else "RESHAPE"
            yield from readers_past_views(reader.output, rewriter, passed | {kind})
        elif reader.kind == "SLICE":
            yield from readers_past_views(reader.output, rewriter, passed | {"SLICE"})
        else:
            yield reader, passed


def is_pure_reshape(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE, or a TRANSPOSE that moves only dimensions of size 1."""
    if op.kind != "TRANSPOSE":
        return op.kind == "RESHAPE"
    x = op.inputs[0]
    return is_free_permutation(x.shape, identity(x.rank), tuple(op.attrs["perms"]))


def absorbs_widening(op: Op) -> bool:
    """Whether Vela can fuse RESCALEs with scale 1 from int8 or int16 into ``op``, their reader.

    ``op`` must be a REDUCE_SUM, or an elementwise operator with two operands. All operands must be results of such
    RESCALEs, which read one type.
    """
    terms = [producer(value, "RESCALE") for value in op.inputs]
    dtypes = {term.inputs[0].dtype for term in terms if term is not None and log2_scale(term) == 0}
    is_binary = op.kind in NONUNARY and len(terms) == 2
    are_identity = all(term is not None and log2_scale(term) == 0 for term in terms)
    return (op.kind == "REDUCE_SUM" or is_binary) and are_identity and len(dtypes) == 1 and dtypes <= {*NARROW_TYPES}


def fuses_unit_rescales_of_operands(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs with scale 1 of all operands into ``op``, which is their only reader."""
    return absorbs_widening(op) and is_sole_reader(op, rewriter)


def is_sole_reader(op: Op, rewriter: Rewriter) -> bool:
    """Whether ``op`` is the only reader of each of its operands."""
    return all(rewriter.has_one_use(value) for value in op.inputs)


def rescale_copy(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the RESCALE of a copy x * 1 of its operand.

    The product of int8 or int16 values is int32. It alone replaces a RESCALE to int32 with scale 1 and no zero points.
    """
    b, x, attrs = rewriter.builder, op.inputs[0], op.attrs
    if x.dtype not in NARROW_TYPES or attrs["input_zp"] != 0:
        return b.emit("RESCALE", (emit_copy(x, b),), op.output.dtype, **attrs)
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    if log2_scale(op) == 0 and attrs["output_zp"] == 0 and op.output.dtype is DType.INT32:
        return product
    return b.emit("RESCALE", (product,), op.output.dtype, **attrs)


def _is_clipped_by_producer(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE with a scale above 1 to a wider type, after an operator that clips to its own result type.

    Bug ``clipped_rescale``: Vela fuses the RESCALE into this operator, which then clips the scaled result to its
    narrower type. Data movement and RESCALEs with scale 1 to a wider type may be between the two.
    """
    if op.attrs["input_zp"] or rescale_factors(op).max() <= 1:
        return False
    x, _ = trace_back(op.inputs[0], lambda before: rewriter.has_one_use(before.output) and _is_skippable(before))
    if x.producer is None or not rewriter.has_one_use(x) or op.output.dtype.bytes <= x.dtype.bytes:
        return False
    sources = x.producer.inputs if x.producer.kind == "CONCAT" else [x]
    clipping_producers = [source.producer for source in sources if _clips_to_own_type(source.producer)]
    scales_max_pools = rewriter.builder.target.hardware.scales_max_pools
    return any(x is not None and (x.kind != "MAX_POOL2D" or scales_max_pools) for x in clipping_producers)


def _is_skippable(op: Op) -> bool:
    """Whether ``op`` only moves elements of one operand, or is a RESCALE with scale 1 to a wider type."""
    if op.kind != "RESCALE":
        return op.kind in DATA_MOVEMENT and op.kind != "CONCAT"
    return log2_scale(op) == 0 and not op.attrs["input_zp"] and op.output.dtype.bytes > op.inputs[0].dtype.bytes


def _loses_clipping_in_reader(op: Op, rewriter: Rewriter) -> bool:
    """Match a clipping RESCALE, a widening RESCALE of its result, and an elementwise op or CAST of the wide value.

    The first RESCALE is from int8 or int16 to int8 or int16, and may clip. The second one has scale 1.

    Bug ``unclipped_operand``: Vela fuses both RESCALEs into the last operator, which does not clip its operand. If
    ``fuses_unit_rescales_of_operands`` is true of this operator, Vela does so only if the first RESCALE is from int16
    to int8.
    """
    if not {op.inputs[0].dtype, op.output.dtype} <= {*NARROW_TYPES} or not may_clip(op):
        return False
    narrows = op.output.dtype.bytes < op.inputs[0].dtype.bytes

    def is_fused(rescale: Op) -> bool:
        reader = rewriter.only_user(rescale.output)
        is_separate = not narrows and reader is not None and fuses_unit_rescales_of_operands(reader, rewriter)
        return not is_separate and _is_read_by((*RESCALE_DUPLICATING_KINDS,), rescale, rewriter)

    readers = (reader for reader, _ in readers_past_views(op.output, rewriter, frozenset()))
    return any(
        reader.kind == "RESCALE"
        and log2_scale(reader) == 0
        and reader.output.dtype.bytes > reader.inputs[0].dtype.bytes
        and is_fused(reader)
        for reader in readers
    )


def _clips_to_own_type(op: Op | None) -> bool:
    """Whether ``op``, such as a RESCALE with scale 1, clips to its result type after Vela fuses a RESCALE into it."""
    return op is not None and (op.kind in _OWN_TYPE_CLIPPING_KINDS or has_unit_scale(op))


LOST_MAXIMUM_SCALE_WORKAROUND = Workaround(
    "lost_maximum_scale", ("RESCALE",), _is_scaled_maximum, _rescale_product, releases=((5, 1),)
)
#: In order of priority: if two workarounds match one operator, the first one is applied.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    LOST_MAXIMUM_SCALE_WORKAROUND,
    Workaround("lost_channel_scales", ("RESCALE",), _has_channel_scales, _rescale_product),
    Workaround("unequal_scales", ("RESCALE",), _match_unequal_scales, _enlarge_scales),
    Workaround("lost_operand_scale", ("RESCALE",), partial(_loses_scale_in_reader, kinds=_UNSCALED_KINDS), copy_result),
    Workaround(
        "lost_select_scale",
        ("RESCALE",),
        partial(_loses_scale_in_reader, kinds=("SELECT",)),
        copy_result,
        releases=((5, 2),),
    ),
    Workaround("unclipped_operand", ("RESCALE",), _loses_clipping_in_reader, copy_result, releases=((5, 2),)),
    Workaround("clipped_rescale", ("RESCALE",), _is_clipped_by_producer, rescale_copy, releases=((5, 2),)),
)
