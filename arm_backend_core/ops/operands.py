"""Arguments of lowering rules: operands (``Operand``) and the ``Context`` (builder, node, result parameters)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.accumulator import Accumulator
from arm_backend_core.ops.fixed_point_value import FixedPoint
from arm_backend_core.qparams import QParams
from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

_DTYPES = {
    torch.bool: DType.BOOL,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT32,  # TOSA has no int64; aten/int64 and lowering/constants check that the values fit
    torch.float32: DType.FP32,
    torch.float16: DType.FP16,
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.FP8E4M3,
    torch.float8_e5m2: DType.FP8E5M2,
}


def has_tosa_dtype(dtype: torch.dtype) -> bool:
    """Whether ``to_tosa_dtype`` maps a PyTorch element type to a TOSA type. True for int64, which maps to INT32."""
    return dtype in _DTYPES


def to_tosa_dtype(dtype: torch.dtype) -> DType:
    """Convert a PyTorch element type to TOSA's; int64 becomes INT32.

    Raises:
        Unsupported: TOSA has no such element type (float64, uint8, complex).
        ModelError: the type belongs to no kind (``scalar_kind.kind_of``).
    """
    if kind_of(dtype) is ScalarKind.COMPLEX:
        raise Unsupported(
            f"TOSA has no complex numbers, and there is no rule for this operator on {dtype}: compute with the two "
            "parts of torch.view_as_real(z)"
        )
    if not has_tosa_dtype(dtype):
        raise Unsupported(f"TOSA has no element type for {dtype}; convert with .to(torch.float32) or .to(torch.int32)")
    return _DTYPES[dtype]


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of a lowering rule.

    Attributes:
        value: the TOSA value.
        q: quantization parameters if the integers represent real numbers, else None.
    """

    value: Value
    q: QParams | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, in PyTorch's order."""
        return self.value.shape

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.value.rank

    @property
    def is_constant(self) -> bool:
        """Whether the elements are known at compile time."""
        return self.value.data is not None

    @property
    def float_values(self) -> np.ndarray[Any, Any]:
        """Elements of a constant as real numbers, float64 (integers dequantized).

        Raises:
            Unsupported: not a constant.
        """
        if self.value.data is None:
            raise Unsupported(
                "an operand is computed at run time; it must be a constant (a parameter or buffer of the model)"
            )
        return self.value.data.astype(np.float64) if self.q is None else self.q.dequantize(self.value.data)


@dataclass(frozen=True)
class Context:
    """First argument of a lowering rule: the builder, the FX node, and the types of the result.

    Attributes:
        b: builder that appends TOSA operators to the graph.
        node: the FX node.
        result_q: quantization parameters of the result; None if the result is not quantized.
        compute_dtype: element type in which the rule computes; None for the element type of the result.
    """

    b: Builder
    node: torch.fx.Node
    result_q: QParams | None = None
    compute_dtype: DType | None = None

    @property
    def target(self) -> Target:
        """The compilation target."""
        return self.b.target

    @property
    def q(self) -> QParams:
        """Quantization parameters of the result; only for integer rules with a quantized result."""
        assert self.result_q is not None
        return self.result_q

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return tuple(int(size) for size in self._meta.shape)

    @property
    def dtype(self) -> DType:
        """Element type in which the rule must return the (first) result."""
        return self.compute_dtype or to_tosa_dtype(self._meta.dtype)

    @property
    def _meta(self) -> torch.Tensor:
        meta = self.node.meta["val"]
        first: torch.Tensor = meta[0] if isinstance(meta, (tuple, list)) else meta
        return first

    def to_value(self, x: Operand | float, dtype: DType | None = None) -> Value:
        """Return a tensor's value, cast to ``dtype`` if given, or a Python number as a rank-0 constant."""
        if isinstance(x, Operand):
            return x.value if dtype is None else self.b.cast(x.value, dtype)
        return self.b.const(np.full((), x), dtype or self.dtype)

    def compute_in_fp32_or_int32(self, rule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute ``rule`` in FP32 if the result is floating point, else in INT32, and cast the result once.

        PyTorch, too, computes FP16 and BF16 in FP32. In FP16, sums and formulas of several operators would overflow
        and lose bits. INT32 is the only type of TOSA's integer arithmetic. The CAST back to a narrower integer wraps,
        as in PyTorch. If the result is boolean or quantized, the rule runs on the unchanged operands.
        """
        wide_dtype, *narrow_dtypes = (
            (DType.FP32, DType.FP16, DType.BF16, DType.FP8E4M3, DType.FP8E5M2)
            if self.dtype.is_float
            else (DType.INT32, DType.INT8, DType.INT16)
        )

        def widen(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [widen(item) for item in x]
            if not isinstance(x, Operand) or x.value.dtype not in narrow_dtypes:
                return x
            data = x.value.data  # a constant is converted at compile time
            return Operand(self.b.cast(x.value, wide_dtype) if data is None else self.b.const(data, wide_dtype))

        def narrow(value: Value) -> Value:
            return self.b.cast(value, self.dtype) if value.dtype is wide_dtype else value

        if self.dtype is DType.BOOL or self.result_q is not None:
            return rule(self, *args, **kwargs)
        result = rule(replace(self, compute_dtype=wide_dtype), *widen(args), **{k: widen(x) for k, x in kwargs.items()})
        return [narrow(value) for value in result] if isinstance(result, list) else narrow(result)

    def to_fixed_point(self, x: Operand | float) -> FixedPoint:
        """Convert an operand to ``FixedPoint``.

        A Python number becomes the integer 1, 0 or -1, with its magnitude as the scale. Booleans and plain integers
        have scale 1.

        Raises:
            Unsupported: the operand is a floating-point tensor, a plain INT32 tensor that is computed at run time, or a
                tensor with per-channel scales; or the number is NaN.
        """
        if isinstance(x, Operand):
            if x.q is None and x.value.dtype is DType.INT32 and not x.is_constant:
                raise Unsupported("an int32 operand beside a quantized one; convert it with .to(torch.float32)")
            if x.q is None and not x.value.dtype.is_float:
                return self.integer_to_fixed_point(x)
            if x.q is None:
                raise Unsupported("one of its operands is quantized and the other is not; annotate both (set_global)")
            if np.ndim(x.q.scale):
                raise Unsupported(
                    "an operand has per-channel scales, which only weights can have; quantize it per tensor"
                )
            return FixedPoint.from_value(self.b, x.value, x.q)
        if math.isnan(x):
            raise Unsupported("one of its operands is NaN, which integers cannot represent")
        sign = (x > 0) - (x < 0)
        return FixedPoint.const(self.b, sign, DType.INT32, min(abs(float(x)), float(np.finfo(np.float32).max)))

    def integer_to_fixed_point(self, x: Operand) -> FixedPoint:
        """Convert a plain integer or boolean operand to ``FixedPoint`` with scale 1."""
        value = self.b.cast(x.value, DType.INT32) if x.value.dtype is DType.BOOL else x.value
        result = FixedPoint.from_value(self.b, value, QParams(1.0, 0, value.dtype, *value.dtype.range))
        return result.assume_range(0, 1) if x.value.dtype is DType.BOOL else result

    def requantize_sums(self, value: Value, layer: Accumulator) -> Value:
        """Convert the accumulator ``value``, which ``layer`` describes, to the result's quantization parameters.

        A floating-point accumulator is cast to the result's type: FP8 accumulates in FP16.
        """
        return self.b.cast(value, self.dtype) if layer.scales is None else layer.requantize(self.b, value, self.q)

    def requantize(self, x: Operand, q: QParams) -> Value:
        """Convert ``x`` to quantization parameters ``q``; constants are converted at compile time."""
        operand = self.to_fixed_point(x)
        if q.is_equivalent(x.q):
            return x.value
        return self.b.const(q.quantize(x.float_values), q.dtype) if x.is_constant else operand.requantize(q)
