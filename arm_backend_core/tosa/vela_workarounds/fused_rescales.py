"""Vela workarounds for RESCALEs whose scale or clipping is lost in the operation that Vela makes of them."""

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
from arm_backend_core.tosa.passes.fuse import is_identity_rescale, is_rescale_by_one, power_of_two, rescale_factors
from arm_backend_core.tosa.passes.layout_modes import is_free_permutation
from arm_backend_core.tosa.passes.merge import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant, copy_result, emit_copy
from arm_backend_core.tosa.vela_workarounds.narrowing import DATA_MOVEMENT
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

NARROW = (DType.INT8, DType.INT16)
ARITHMETIC = frozenset(ELEMENTWISE - UNARY)
_UNARY_INTEGER = ("ABS", "BITWISE_NOT", "CLZ", "LOGICAL_NOT", "NEGATE")
#: Operators that the NPU does not scale, although Vela fuses RESCALEs of their operands into them.
_HAS_NO_SCALE = (*_UNARY_INTEGER, "BITWISE_AND", "BITWISE_OR", "BITWISE_XOR")
#: Readers for each of which Vela duplicates a RESCALE; it lowers CAST to ADD before that.
DUPLICATES_RESCALE = frozenset({*ARITHMETIC, *_UNARY_INTEGER, "CAST"})
#: Operators into which Vela fuses the RESCALE of their result but clips it to the range of their own type.
_CLIPS_TO_OWN_TYPE = (ARITHMETIC - {"INTDIV"}) | {"BITWISE_NOT", "CAST", "MAX_POOL2D", "RESIZE", "SELECT"}


def _is_scaled_maximum(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to the same type of MAX_POOL2D or REDUCE_MAX, its only reader (``scaled_maximum``: U55, U65, 5.1).

    Also past IDENTITY, RESHAPE and RESCALEs by 1. Vela makes one MAX pool with ``OFM_SCALE``. These NPUs do not scale a
    maximum: the RESCALE is lost.
    """
    if op.attrs["input_zp"] or op.attrs["output_unsigned"] or power_of_two(op) == 0:
        return False

    def is_passed(before: Op) -> bool:
        keeps_values = before.kind in ("IDENTITY", "RESHAPE") or is_identity_rescale(before)
        return keeps_values and rewriter.has_one_use(before.output)

    maximum, _ = trace_back(op.inputs[0], is_passed)
    is_maximum = maximum.producer is not None and maximum.producer.kind in ("MAX_POOL2D", "REDUCE_MAX")
    return is_maximum and rewriter.has_one_use(maximum) and maximum.dtype is op.output.dtype


def _has_channel_scales(op: Op, rewriter: Rewriter) -> bool:
    """Per-channel RESCALE between int8 and int16 (``channel_scales``: U55, U65, 5.1 and 5.2).

    Vela makes it a pool, and pools read no per-channel scales: the RESCALE is lost. The operand is no accumulator.
    """
    narrow = {op.inputs[0].dtype, op.output.dtype} <= {DType.INT8, DType.INT16}
    return narrow and bool(op.attrs["per_channel"])


def _rescale_product(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """RESCALE of x * 1: the hardware scales products, so that both become one scaled MUL."""
    b, x, zero_point = rewriter.build, op.inputs[0], op.attrs["input_zp"]
    x = b.rescale(x, DType.INT32, 1.0, zero_point) if zero_point else x
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    return b.emit("RESCALE", (product,), op.output.dtype, **op.attrs | {"input_zp": 0})


@dataclass(frozen=True)
class _ScaledSum:
    """ADD or SUB of two RESCALEs by integers.

    Attributes:
        total: the ADD or SUB.
        terms: the RESCALEs of its operands.
        factors: their integer scales.
        doublings: the power of two by which the larger scale is multiplied to become 2**14 (int16) or 2**19 (int8).
    """

    total: Op
    terms: Sequence[Op]
    factors: Sequence[int]
    doublings: int


def _match_unequal_scales(op: Op, rewriter: Rewriter) -> _ScaledSum | None:
    """RESCALE(RESCALE(x) +- RESCALE(y)) by different integers below 2**15 (``unequal_scales``: U55, U65, 5.1 and 5.2).

    Vela fuses all three RESCALEs into the ADD or SUB. Where the scales differ, the NPU multiplies one operand by its
    scale and shifts the other left by 14 (int16) or 19 (int8) bits, whatever that scale is. This is correct only if the
    larger scale is 2**14 or 2**19. RESHAPE and TRANSPOSE after the sum are skipped, since Vela may remove them.
    """
    x, _ = trace_back(
        op.inputs[0], lambda move: move.kind in ("RESHAPE", "TRANSPOSE") and rewriter.has_one_use(move.output)
    )
    total = x.producer
    if total is None or total.kind not in ("ADD", "SUB") or not rewriter.has_one_use(x):
        return None
    if op.attrs["per_channel"] or op.output.dtype not in (DType.INT8, DType.INT16):
        return None
    for merged in (False, True):
        scales = _integer_scales(total, rewriter, merged=merged)
        if scales is not None and len({*scales[1]}) > 1:
            shift = 14 if scales[0][0].inputs[0].dtype is DType.INT16 else 19
            if max(scales[1]) != 1 << shift:
                return _ScaledSum(total, *scales, shift + 1 - max(scales[1]).bit_length())
    return None


def _enlarge_scales(op: Op, match: _ScaledSum, rewriter: Rewriter) -> Value:
    """Multiply all three scales by the power of two that makes the larger one 2**14 or 2**19; the sum stays within 31
    bits.

    If the larger scale is no power of two, multiply one operand by a MUL, which Vela does not fuse. If data movement
    follows the sum, copy its result, so that Vela does not fuse the last RESCALE.
    """
    total, terms, factors, doublings = match.total, match.terms, match.factors, match.doublings
    b, attrs, large = rewriter.build, dict(op.attrs), max(factors)
    if op.inputs[0] is not total.output:
        return b.emit("RESCALE", (emit_copy(op.inputs[0], b),), op.output.dtype, **attrs)
    shift = np.asarray(attrs["shift"]) + doublings
    if large & (large - 1) == 0 and shift[0] <= 62 and attrs["rounding_mode"] == "SINGLE_ROUND":
        attrs["shift"] = shift.astype(np.int8)
        operands = [_rescale_operand(term, factor << doublings, b) for term, factor in zip(terms, factors, strict=True)]
    else:
        widened = _rescale_operand(terms[1], 1, b)
        operands = [total.inputs[0], b.mul(widened, broadcast_constant(widened, factors[1], DType.INT32, b))]
    result = b.emit(total.kind, operands, DType.INT32)
    return b.emit("RESCALE", (result,), op.output.dtype, **attrs)


def _integer_scales(total: Op, rewriter: Rewriter, *, merged: bool) -> tuple[list[Op], list[int]] | None:
    """The RESCALEs of the operands of an ADD or SUB and their integer scales, if U55 and U65 can fuse them.

    Vela 5.1 fuses a RESCALE with its only reader. 5.2 also duplicates a RESCALE for each of its readers, and merges two
    consecutive RESCALEs into one.

    Args:
        merged: where consecutive RESCALEs merge, take the first of them.

    Returns:
        (RESCALEs, integer scales), or None.
    """
    terms, factors, only_single_use = [], [], rewriter.build.target.vela == (5, 1)
    for value in total.inputs:
        term = producer(value, "RESCALE")
        if term is not None and merged and not only_single_use:
            term = _first_of_merged_rescales(term, rewriter)
        if term is None or term.attrs["per_channel"] or (only_single_use and not rewriter.has_one_use(value)):
            return None
        multiplier, shift = int(term.attrs["multiplier"][0]), int(term.attrs["shift"][0])
        if multiplier % (1 << shift) or multiplier >> shift >= 1 << 15:
            return None
        terms.append(term)
        factors.append(multiplier >> shift)
    dtypes = {term.inputs[0].dtype for term in terms}
    fused = len(dtypes) == 1 and dtypes <= {DType.INT8, DType.INT16}
    return (terms, factors) if fused else None


def _first_of_merged_rescales(term: Op, rewriter: Rewriter) -> Op:
    """The first of consecutive RESCALEs that Vela merges: all behind it are by 1."""
    while is_identity_rescale(term) and rewriter.has_one_use(term.inputs[0]):
        before = producer(term.inputs[0], "RESCALE")
        if before is None:
            break
        term = before
    return term


def _rescale_operand(term: Op, factor: int, b: Builder) -> Value:
    return b.rescale(term.inputs[0], DType.INT32, factor, term.attrs["input_zp"])


def _is_fused_into_unscaled(op: Op, rewriter: Rewriter, *, kinds: tuple[str, ...]) -> bool:
    """RESCALE of int8 or int16 with a scale other than 1, fused into a reader that has no scale (U85).

    ``rescaled_once`` (5.1 and 5.2): ABS, CLZ, another unary operator, or BITWISE_AND, OR, XOR. ``rescaled_choice``
    (5.2): SELECT, which Vela lowers to bitwise operators. The scale is lost.
    """
    dtypes = {op.inputs[0].dtype, skip_through(op.inputs[0], "RESCALE", "RESHAPE").dtype}
    return power_of_two(op) != 0 and not dtypes.isdisjoint(NARROW) and _is_read_by(kinds, op, rewriter)


def _is_read_by(kinds: tuple[str, ...], op: Op, rewriter: Rewriter) -> bool:
    """Whether an operator of these kinds reads the RESCALE ``op``, also past RESCALEs by 1, which merge with it."""
    readers = [reader for reader, _ in readers_past_views(op.output, rewriter, frozenset())]
    merged = [reader for reader in readers if is_rescale_by_one(reader)]
    return any(reader.kind in kinds for reader in readers) or any(_is_read_by(kinds, one, rewriter) for one in merged)


def readers_past_views(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """The readers of ``value`` past RESHAPE and SLICE, each with the kinds of the operators between.

    A TRANSPOSE that moves only dimensions of size 1 counts as RESHAPE. On U85, RESHAPEs that change only dimensions of
    size 1 do not count as between.
    """
    for reader in rewriter.users(value) or ():
        if is_view(reader):
            is_size_one = equal_without_ones(reader.output.shape, value.shape)
            is_transparent = is_size_one and rewriter.build.target.hardware.ignores_unit_axes
            yield from readers_past_views(reader.output, rewriter, passed if is_transparent else passed | {"RESHAPE"})
        elif reader.kind == "SLICE":
            yield from readers_past_views(reader.output, rewriter, passed | {"SLICE"})
        else:
            yield reader, passed


def is_view(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE, or a TRANSPOSE that moves only dimensions of size 1."""
    if op.kind != "TRANSPOSE":
        return op.kind == "RESHAPE"
    x = op.inputs[0]
    return is_free_permutation(x.shape, identity(x.rank), tuple(op.attrs["perms"]))


def rescale_copy(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """RESCALE of a copy, x * 1, in place of the partial tensor.

    The product of int8 or int16 is int32 already: it replaces a RESCALE by 1 to int32.
    """
    b, x, attrs = rewriter.build, op.inputs[0], op.attrs
    if x.dtype not in NARROW or attrs["input_zp"] != 0:
        return b.emit("RESCALE", (emit_copy(x, b),), op.output.dtype, **attrs)
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    if power_of_two(op) == 0 and attrs["output_zp"] == 0 and op.output.dtype is DType.INT32:
        return product
    return b.emit("RESCALE", (product,), op.output.dtype, **attrs)


def _is_clipped_by_producer(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to more bits by more than 1 that is fused into its producer (``clipped_rescale``: all NPUs, 5.2).

    The producer has no scale. The fused operation clips the result to the producer's narrower type. Also past RESHAPE,
    CONCAT and a RESCALE by 1 to more bits.
    """
    if op.attrs["input_zp"] or rescale_factors(op).max() <= 1:
        return False
    x, _ = trace_back(op.inputs[0], lambda before: rewriter.has_one_use(before.output) and _is_skippable(before))
    if x.producer is None or not rewriter.has_one_use(x) or op.output.dtype.bytes <= x.dtype.bytes:
        return False
    sources = x.producer.inputs if x.producer.kind == "CONCAT" else [x]
    clipping = [source.producer for source in sources if _cannot_scale(source.producer)]
    scales_maxima = rewriter.build.target.hardware.scales_maxima  # U85: U55 and U65 do not scale a maximum
    return any(one is not None and (one.kind != "MAX_POOL2D" or scales_maxima) for one in clipping)


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
    rescales = [
        reader for reader, _ in readers_past_views(op.output, rewriter, frozenset()) if reader.kind == "RESCALE"
    ]
    return any(
        power_of_two(one) == 0
        and one.output.dtype.bytes > one.inputs[0].dtype.bytes
        and _is_read_by((*DUPLICATES_RESCALE,), one, rewriter)
        for one in rescales
    )


def _cannot_scale(op: Op | None) -> bool:
    """Whether Vela fuses a scale into ``op`` that ``op`` does not apply; a RESCALE by 1 stands for its producer."""
    return op is not None and (op.kind in _CLIPS_TO_OWN_TYPE or is_rescale_by_one(op))


SCALED_MAXIMUM = Workaround("scaled_maximum", ("RESCALE",), _is_scaled_maximum, _rescale_product, releases=((5, 1),))
#: By priority: where two workarounds match one operator, the first is applied first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    SCALED_MAXIMUM,
    Workaround("channel_scales", ("RESCALE",), _has_channel_scales, _rescale_product),
    Workaround("unequal_scales", ("RESCALE",), _match_unequal_scales, _enlarge_scales),
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
    Workaround("clipped_rescale", ("RESCALE",), _is_clipped_by_producer, rescale_copy, releases=((5, 2),)),
)
