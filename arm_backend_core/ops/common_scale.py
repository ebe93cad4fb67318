"""Conversion of two operands to one scale and rank, for additions and comparisons."""

from __future__ import annotations

import math

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point_value import RESCALE_SAFE_LIMIT, FixedPoint
from arm_backend_core.qparams import QParams


def to_common_scale(x: FixedPoint, y: FixedPoint, out: QParams | None = None) -> tuple[FixedPoint, FixedPoint]:
    """Convert the operands of an addition or a comparison to INT32 at one scale that is fine enough for the result.

    If each operand is shifted left by g guard bits, the sum stays within 2**30. g is 19 for int8 and 14 for int16.
    This shift refines the operand's scale to scale * 2**-g. The common scale is the coarser of the two refined scales.
    The operand whose refined scale is the common scale is shifted by g bits. The other operand is multiplied by a
    factor below 2**g. The rounding error is at most one step of the common scale. If both operands are int8 or both
    int16, a constant gets no more guard bits than the other operand: on U55, Vela fuses the two RESCALEs with the sum
    only if the operand with the larger scale is the one that is shifted.

    Two numbers compare as equal if they differ by less than the rounding error. For example, one step of x equals one
    step of y if the scales of two int8 tensors differ by a factor of 1 + 2**-20. Dequantized numbers in float32 have
    rounding errors of this size.

    Args:
        x: the first operand.
        y: the second operand.
        out: the result's parameters, None for a comparison.

    Raises:
        Unsupported: the conversion is not exact, and the result's scale is smaller than the common scale.
    """
    x, y = _saturate_negligible(*to_common_rank(x, y), out)
    guard_bits = [_guard_bits(z) for z in (x, y)]
    if x.dtype is y.dtype is not DType.INT32:
        guard_bits = [min(guard_bits)] * 2
    scale = max(z.scale * 2.0**-bits for z, bits in zip((x, y), guard_bits, strict=True))
    exact = all(math.isclose(round(z.scale / scale), z.scale / scale, rel_tol=1e-9) for z in (x, y))
    if out is not None and not exact and scale > float(out.scale):
        raise Unsupported(
            f"its operands have scales of {x.scale:.2g} and {y.scale:.2g}, its result has a scale of "
            f"{float(out.scale):.2g}, too small for 32 bits; calibrate with samples in which the result is not constant"
        )
    for narrow, other in ((x, y), (y, x)):
        computed = narrow.value.data is other.value.data is None
        if computed and (narrow.dtype, other.dtype) == (DType.INT16, DType.INT32) and narrow.scale >= scale:
            factor = int(narrow.scale / scale)  # on Ethos-U, MUL takes far fewer cycles than RESCALE
            pair = narrow.refine_scale(factor), other.to_int32_at(narrow.scale / factor)
            return pair if narrow is x else pair[::-1]
    return x.to_int32_at(scale), y.to_int32_at(scale)


def to_common_int16(x: FixedPoint, y: FixedPoint, out: QParams) -> tuple[FixedPoint, FixedPoint] | None:
    """Convert the operands of an addition, at least one of them int8, to int16 at one scale.

    An NPU adds and rescales int16 in one operation. The common scale is the scale of the computed int16 operand, if it
    does not exceed the result's scale. If no computed operand is int16, the common scale is the result's scale. The
    error is at most one step of the result. Compared with INT32, each operand saves two operations of the NPU: adding
    an int8 and an int16 element takes 2.6 instead of 8.0 cycles on U55-128, 0.8 instead of 2.6 on U85-256.

    Returns:
        The operands as INT32 at one scale. They are RESCALEs of int16 values, which Vela fuses into the addition. None
        if the target has no NPU, a constant is int8 or broadcast, int16 cannot hold an operand at the common scale, or
        the common scale exceeds the result's scale. Also None if operands and result are not a mix of int8 and int16,
        or if no operand is int8: the addition of two int16 operands is one operation without a conversion.
    """
    pair, dtypes = to_common_rank(x, y), [x.dtype, y.dtype, out.dtype]
    computed_scales = (z.scale for z in pair if z.dtype is DType.INT16 and z.value.data is None)
    scale = max(computed_scales, default=float(out.scale))
    is_mixed = set(dtypes) == {DType.INT8, DType.INT16} and DType.INT8 in dtypes[:2]
    # Two cases stay in INT32. The RESCALEs of two int8 operands are fused if one of them is constant. A broadcast
    # constant becomes INT32: a single element costs nothing, and several elements are copied to SRAM only once.
    has_other_form = any(
        z.value.data is not None and (z.dtype is DType.INT8 or z.value.size < other.value.size)
        for z, other in (pair, pair[::-1])
    )
    fits = not has_other_form and all(z.max_abs <= 2.0**15 * scale for z in pair)
    if not (x.b.target.hardware.is_ethos_u and is_mixed and fits and scale <= float(out.scale)):
        return None
    left, right = (z.to_int16_at(scale).rescale(DType.INT32, 1.0).with_scale(scale) for z in pair)
    return left, right


def to_common_rank(x: FixedPoint, y: FixedPoint) -> tuple[FixedPoint, FixedPoint]:
    """Prepend dimensions to a constant operand up to the other's rank, so that they broadcast."""
    rank = max(x.value.rank, y.value.rank)
    left, right = (z if z.value.data is None else z.reshape((1,) * (rank - z.value.rank) + z.shape) for z in (x, y))
    return left, right


def _saturate_negligible(x: FixedPoint, y: FixedPoint, out: QParams | None) -> tuple[FixedPoint, FixedPoint]:
    """Reduce an extreme ratio of the operands' scales if the result stays the same.

    If one step of an operand exceeds the ranges of the other operand and of ``out`` together, only the sign of this
    operand matters. The operand is then replaced by its sign, at a smaller scale.
    """
    if x.scale > y.scale:
        return _saturate_negligible(y, x, out)[::-1]
    if y.scale <= 2 * x.max_abs or x.low == x.high == 0:
        return x, y
    result_peak = 0.0 if out is None else out.max_abs
    if 0 < 2 * result_peak < x.scale:
        x = x.sign().with_scale(2 * result_peak)
    limit = 2 * (x.max_abs + result_peak)
    return x, y.sign().with_scale(limit) if y.scale > limit else y


def _guard_bits(x: FixedPoint) -> int:
    """Number of guard bits by which an operand is shifted left.

    RESCALE multiplies int16 by at most 2**14. A constant is stored at the common scale without a RESCALE, so only the
    headroom in INT32 limits its bits.
    """
    headroom = RESCALE_SAFE_LIMIT.bit_length() - 1 - max(x.high, -x.low - 1, 0).bit_length()
    return headroom if x.value.data is not None else min(14 if x.dtype is DType.INT16 else 19, headroom)
