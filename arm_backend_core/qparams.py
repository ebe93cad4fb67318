"""Quantization parameters of one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported


@dataclass(frozen=True, eq=False)
class QParams:
    """Quantization parameters: real = (integer - zero_point) * scale.

    Attributes:
        scale: one number, or one per channel (1-D array) along ``axis``.
        zero_point: the integer that represents 0. It is 0 for per-channel parameters, and TOSA requires 0 for int16.
        dtype: INT8, INT16 or INT32.
        qmin: smallest integer that quantization produces; for weights often -127, not -128.
        qmax: largest integer that quantization produces.
        axis: dimension that ``scale`` runs along, None for per-tensor parameters.
    """

    scale: float | np.ndarray[Any, Any]
    zero_point: int
    dtype: DType
    qmin: int
    qmax: int
    axis: int | None = None

    @property
    def max_abs(self) -> float:
        """The largest magnitude that the integers can represent; for per-tensor scales only."""
        return max(self.qmax - self.zero_point, self.zero_point - self.qmin) * float(self.scale)

    @property
    def real_range(self) -> tuple[float, float]:
        """The smallest and the largest real value that the integers represent; for per-tensor scales only."""
        scale = float(self.scale)
        return scale * (self.qmin - self.zero_point), scale * (self.qmax - self.zero_point)

    def is_equivalent(self, other: QParams | None) -> bool:
        """Whether both have the same meaning, up to float32 precision of the scale (relative 1e-6)."""
        return (
            other is not None
            and self.dtype is other.dtype
            and self.zero_point == other.zero_point
            and (self.qmin, self.qmax, self.axis) == (other.qmin, other.qmax, other.axis)
            and np.shape(self.scale) == np.shape(other.scale)
            and bool(np.allclose(self.scale, other.scale, rtol=1e-6, atol=0.0))
        )

    def quantize(self, real: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Nearest integers, ties to even, saturated to [qmin, qmax]; int64.

        Raises:
            Unsupported: an element is NaN.
        """
        if np.isnan(real).any():
            raise Unsupported("a constant operand is not a number (nan), which integers cannot hold")
        return np.clip(np.rint(real / self._broadcast_scale(real.ndim)) + self.zero_point, self.qmin, self.qmax).astype(
            np.int64
        )

    def dequantize(self, integers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Real values, float64."""
        return (integers.astype(np.float64) - self.zero_point) * self._broadcast_scale(integers.ndim)

    def _broadcast_scale(self, rank: int) -> np.ndarray[Any, Any]:
        scale = np.asarray(self.scale, dtype=np.float64)
        if self.axis is None:
            return scale
        return scale.reshape([-1 if i == self.axis % rank else 1 for i in range(rank)])
