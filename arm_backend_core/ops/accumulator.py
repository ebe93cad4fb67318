"""Accumulators of convolutions and matrix products: their bounds, their bias and their requantization."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.fixed_point_value import Array, FixedPoint, requantize
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value


@dataclass(frozen=True)
class Accumulator:
    """A convolution or linear layer with constant weights: its weights and bias, and its accumulator's scale and bound.

    Attributes:
        weights: [out_channels, ...], integers or floats.
        quantized_bias: bias in integers at the accumulator's scale, or in floats, [out_channels].
        dtype: element type of the accumulator and the bias.
        scales: scale of the accumulator, [1] or [out_channels]; None for floats, which need no requantization.
        peaks: upper bound of the accumulator's magnitude, [out_channels].
        residual_bias: the real bias minus the bias that ``quantized_bias`` represents, [out_channels].
    """

    weights: Array
    quantized_bias: Array
    dtype: DType
    scales: Array | None = None
    peaks: Array | None = None
    residual_bias: Array | None = None

    @classmethod
    def from_weights(cls, x: FixedPoint, weights: Array, zero_point: int, scales: Array, bias: Array) -> Accumulator:
        """Describe the accumulator of sum(x * (weights - zero_point)) + bias.

        The bias is rounded to the accumulator's scale. If a sum with the bias could overflow the accumulator, all of
        ``quantized_bias`` is 0 and ``residual_bias`` is the whole bias.

        Args:
            x: the input.
            weights: [out_channels, ...].
            zero_point: zero point of the weights.
            scales: scale of the accumulator, [1] or [out_channels].
            bias: real numbers, [out_channels].

        Raises:
            Unsupported: a sum could exceed INT32 (int8 input) or INT48 (int16 input).
        """
        dtype = DType.INT48 if x.dtype is DType.INT16 else DType.INT32
        limit = dtype.range[1]
        flat = np.subtract(weights.reshape(len(weights), -1), zero_point, dtype=np.int32)
        sums = np.abs(flat, out=flat).sum(1, dtype=np.float64) * x.peak
        if np.any(sums > limit):
            raise Unsupported(f"a sum of {flat.shape[1]} products, which may exceed {dtype.value}; split the channels")
        if np.any(np.abs(bias) > (limit - sums) * scales):
            return cls(weights, np.zeros(len(weights)), dtype, scales, sums, bias)
        quantized_bias = np.rint(bias / scales)
        return cls(
            weights, quantized_bias, dtype, scales, sums + np.abs(quantized_bias), bias - quantized_bias * scales
        )

    def requantize(self, b: Builder, value: Value, out: QParams) -> Value:
        """Requantize the accumulator to ``out``. Add ``residual_bias`` if it exceeds a quarter of the result's scale.

        Raises:
            Unsupported: under the conditions of the function ``requantize``. Also if the residual bias must be added,
                and a sum or this bias exceeds 2**26 times the result's scale: both must fit 2**28 steps, and a step
                must not exceed a quarter of this scale.
        """
        assert self.scales is not None
        assert self.peaks is not None
        assert self.residual_bias is not None
        if float(np.abs(self.residual_bias).max()) <= float(out.scale) / 4:
            peaks = self.peaks if self.scales.size > 1 else float(self.peaks.max())
            return requantize(b, value, peaks, self.scales, out)
        max_abs = max(float((self.peaks * self.scales).max()), float(np.abs(self.residual_bias).max()))
        scale = max(float(out.scale) * 2.0**-12, max_abs * 2.0**-28)
        if scale > float(out.scale) / 4:
            raise Unsupported(
                f"its bias does not fit {self.dtype.value} sums at a scale of {self.scales.min():.2g}, and its result "
                f"has a scale of {float(out.scale):.2g}; calibrate with samples in which input and result vary"
            )
        sums = b.rescale(value, DType.INT32, np.where(self.peaks > 0, self.scales / scale, 0.0))
        bias = FixedPoint.const(b, np.rint(self.residual_bias / scale).astype(np.int64), DType.INT32, scale)
        return (FixedPoint(b, sums, -(1 << 28) - 1, (1 << 28) + 1, scale) + bias).requantize(out)
