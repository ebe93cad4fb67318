"""Unary functions: one registration with the floating-point formula for each ATen operator.

On quantized values, most of these functions need no rule. PyTorch evaluates the function, or a chain of functions, on
every value that the quantized operand can have. The results become a TABLE (``fusion.univariate.Univariate``).
Exceptions are signs and rounding functions: they have an integer rule for int16, which is exact at their jumps.
``hardshrink`` and ``threshold`` have jumps too, but no such rule: correction tables (``ops/lookup``) refine their int16
TABLE near the jumps, and only the few results nearest to a jump may be wrong. Formulas that are shared or longer than
a line are in ``ops/formulas``.

Source: Abramowitz & Stegun, Handbook of Mathematical Functions (A&S).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import formulas, intervals
from arm_backend_core.ops.fixed_point.rounding import FixedPointQuotient, divide_by_constant, rounding_rule
from arm_backend_core.ops.float_expression import FloatExpr
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, Record, register
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Formula = Callable[..., FloatExpr]


def register_unary(overload: OpOverload, formula: Formula | None, **attributes: Any) -> Record:
    """Register a unary function.

    Args:
        overload: the ATen overload.
        formula: function of the operator's arguments, with tensors as ``FloatExpr``, that returns the result. None for
            functions that are supported only on quantized values.
        attributes: other attributes of ``Record``.
    """

    def lower(cx: Context, *args: Any, **kwargs: Any) -> Value:
        if formula is None:
            raise Unsupported(f"TOSA has no floating-point formula for {overload}; quantize it, which makes it a TABLE")

        def evaluate(inner: Context, *args: Any, **kwargs: Any) -> Value:
            floats = [
                FloatExpr(cx.b, cx.to_value(x, inner.dtype), cx.dtype) if isinstance(x, Operand) else x for x in args
            ]
            return formula(*floats, **kwargs).value

        if cx.dtype in (DType.INT8, DType.INT16):
            return cast(Value, cx.compute_in_fp32_or_int32(evaluate, *args, **kwargs))
        first_op = len(cx.b.graph.ops)
        result = evaluate(cx, *args, **kwargs)
        # A single operator rounds only once. Several operators would round several times: emit them again in FP32.
        if len(cx.b.graph.ops) > first_op + 1:
            del cx.b.graph.ops[first_op:]
            result = cx.compute_in_fp32_or_int32(evaluate, *args, **kwargs)
        return result

    return register(Record((overload,), AnnotationKind.ELEMENTWISE, lower, is_univariate=True, **attributes))


def _clamp_bounds(x: Any, min: float | None = None, max: float | None = None) -> tuple[float, float]:
    return (-math.inf if min is None else min, math.inf if max is None else max)


# -- activations --------------------------------------------------------------------------------------------------

register_unary(aten.relu.default, lambda x: x.clamp(0.0, None), clamp_bounds=lambda x: (0.0, math.inf))
register_unary(aten.relu6.default, lambda x: x.clamp(0.0, 6.0), clamp_bounds=lambda x: (0.0, 6.0))
register_unary(
    aten.hardtanh.default,
    lambda x, min_val=-1.0, max_val=1.0: x.clamp(min_val, max_val),
    clamp_bounds=lambda x, min_val=-1.0, max_val=1.0: (min_val, max_val),
)
register_unary(
    aten.clamp.default,
    lambda x, min=None, max=None: x.clamp(min, max),
    clamp_bounds=_clamp_bounds,
    interval=intervals.elementwise(intervals.clamp),
)
register_unary(aten.clamp_min.default, lambda x, min: x.clamp(min, None), clamp_bounds=_clamp_bounds)
register_unary(aten.clamp_max.default, lambda x, max: x.clamp(None, max), clamp_bounds=lambda x, max: (-math.inf, max))
register_unary(aten.leaky_relu.default, lambda x, negative_slope=0.01: formulas.leaky_relu(x, negative_slope))
register_unary(aten.elu.default, formulas.elu)
register_unary(aten.selu.default, formulas.selu)
register_unary(aten.celu.default, formulas.celu)
register_unary(aten.gelu.default, formulas.gelu)
register_unary(aten.silu.default, lambda x: x * x.unary("SIGMOID"))
register_unary(aten.mish.default, formulas.mish)
register_unary(aten.sigmoid.default, lambda x: x.unary("SIGMOID"), is_recurrent_gate=True)
register_unary(aten.log_sigmoid.default, lambda x: x.minimum(0.0) - formulas.log1p(formulas.exp(-abs(x))))
register_unary(aten.hardsigmoid.default, lambda x: (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
register_unary(aten.hardswish.default, lambda x: x * (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
register_unary(aten.softplus.default, formulas.softplus)
register_unary(aten.hardshrink.default, lambda x, lambd=0.5: abs(x).less_equal(lambd).where(0.0, x))
register_unary(aten.softshrink.default, lambda x, lambd=0.5: x - x.clamp(-lambd, lambd))
register_unary(aten.threshold.default, lambda x, threshold, value: x.less_equal(threshold).where(value, x))

# -- exponentials, logarithms, powers -----------------------------------------------------------------------------

register_unary(aten.exp.default, formulas.exp)
register_unary(aten.exp2.default, lambda x: formulas.exp(x * math.log(2)))
register_unary(aten.expm1.default, formulas.expm1)
register_unary(aten.log.default, formulas.log)
register_unary(aten.log2.default, lambda x: formulas.log(x) / math.log(2))
register_unary(aten.log10.default, lambda x: formulas.log(x) / math.log(10))
register_unary(aten.log1p.default, formulas.log1p)
register_unary(aten.logit.default, formulas.logit)
register_unary(aten.sqrt.default, lambda x: x.sqrt())
register_unary(aten.rsqrt.default, lambda x: x.unary("RSQRT"))
register_unary(aten.reciprocal.default, lambda x: 1 / x)
register_unary(aten.square.default, lambda x: x * x)
register_unary(aten.pow.Tensor_Scalar, formulas.power)
register_unary(aten.pow.Scalar, lambda base, x: base**x)
register_unary(
    aten.special_entr.default, lambda x: x.equal(0.0).where(0.0, x.less(0.0).where(-math.inf, -x * formulas.log(x)))
)

# -- signs and rounding -------------------------------------------------------------------------------------------

register_unary(aten.abs.default, abs, interval=intervals.elementwise(lambda x: (0, max(abs(x[0]), abs(x[1])))))
register_unary(aten.neg.default, lambda x: -x, interval=intervals.elementwise(lambda x: (-x[1], -x[0])))
register_unary(aten.sign.default, formulas.sign, is_discontinuous=True).integer_rule(
    lambda cx, x: cx.to_fixed_point(x).sign().with_scale(1.0).requantize(cx.q)
)
register_unary(aten.sgn.default, formulas.sign, is_discontinuous=True).integer_rule(
    lambda cx, x: cx.to_fixed_point(x).sign().with_scale(1.0).requantize(cx.q)
)
register_unary(aten.floor.default, lambda x: x.unary("FLOOR"), is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.floor)
)
register_unary(aten.ceil.default, lambda x: x.unary("CEIL"), is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.ceil)
)
register_unary(aten.round.default, formulas.round_half_even, is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.round)
)
register_unary(aten.round.decimals, formulas.round_decimals, is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.round)
)
register_unary(aten.trunc.default, FloatExpr.trunc, is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.trunc)
)
register_unary(aten.frac.default, lambda x: x - x.trunc(), is_discontinuous=True).integer_rule(
    lambda cx, x: divide_by_constant(cx, x, 1.0, FixedPointQuotient.trunc, return_remainder=True)
)
register_unary(aten.nan_to_num.default, formulas.nan_to_num)

# -- orthogonal polynomials ---------------------------------------------------------------------------------------


_RecurrenceStep = Callable[[FloatExpr, int, FloatExpr, FloatExpr], FloatExpr]
_MAX_DEGREE = 64  #: Maximum degree of a polynomial: each degree takes a few operators.


def _orthogonal_polynomial(first: Callable[[FloatExpr], FloatExpr], step: _RecurrenceStep, *, shifted: bool) -> Formula:
    """Build the formula of the n-th orthogonal polynomial by its recurrence (A&S 22.7).

    The recurrence starts at p[0] = 1 and p[1] = ``first`` (A&S 22.4). ``step`` computes p[k + 1] from x, k, p[k] and
    p[k - 1].
    """

    def formula(x: FloatExpr, n: int) -> FloatExpr:
        if n > _MAX_DEGREE:
            raise Unsupported(
                f"a polynomial of degree {n} ({_MAX_DEGREE} at most, as each degree takes a few operators)"
            )
        if n <= 0:
            return formulas.power(x, 0) * (0.0 if n < 0 else 1.0)
        y = 2 * x - 1 if shifted else x
        previous, current = y.full_like(1.0), first(y)
        for k in range(1, n):
            previous, current = current, step(y, k, current, previous)
        return current

    return formula


def _chebyshev_recurrence(x: FloatExpr, k: int, p: FloatExpr, q: FloatExpr) -> FloatExpr:
    return 2 * x * p - q


_POLYNOMIALS: dict[str, tuple[Callable[[FloatExpr], FloatExpr], _RecurrenceStep]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev_recurrence),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev_recurrence),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev_recurrence),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev_recurrence),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda x, k, p, q: 2 * x * p - 2 * k * q),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, p, q: x * p - k * q),
    "laguerre_polynomial_l": (lambda x: 1 - x, lambda x, k, p, q: ((2 * k + 1 - x) * p - k * q) * (1 / (k + 1))),
    "legendre_polynomial_p": (lambda x: x, lambda x, k, p, q: ((2 * k + 1) * x * p - k * q) * (1 / (k + 1))),
}
for _name, _first_and_step in _POLYNOMIALS.items():
    for _shift in ("", "shifted_") if _name.startswith("chebyshev") else ("",):
        _overload = getattr(aten, f"special_{_shift}{_name}").n_scalar
        register_unary(_overload, _orthogonal_polynomial(*_first_and_step, shifted=bool(_shift)))

# -- trigonometric and hyperbolic ---------------------------------------------------------------------------------

register_unary(aten.sin.default, lambda x: x.unary("SIN"), is_sinusoid=True)
register_unary(aten.cos.default, lambda x: x.unary("COS"), is_sinusoid=True)
register_unary(aten.tan.default, lambda x: x.unary("SIN") / x.unary("COS"))
register_unary(aten.asin.default, formulas.asin)
register_unary(aten.acos.default, formulas.acos)
register_unary(aten.atan.default, formulas.atan)
register_unary(aten.sinh.default, formulas.sinh)
register_unary(aten.cosh.default, formulas.cosh)
register_unary(aten.tanh.default, formulas.tanh, is_recurrent_gate=True)
register_unary(aten.asinh.default, formulas.asinh)
register_unary(aten.acosh.default, formulas.acosh)
register_unary(aten.atanh.default, formulas.atanh)
register_unary(aten.sinc.default, formulas.sinc)
register_unary(
    aten.special_spherical_bessel_j0.default,
    lambda x: abs(x).equal(math.inf).where(0.0, formulas.sinc(x * (1 / math.pi))),
)
register_unary(aten.deg2rad.default, lambda x: x * (math.pi / 180), scale_factor=lambda x: math.pi / 180)
register_unary(aten.rad2deg.default, lambda x: x * (180 / math.pi), scale_factor=lambda x: 180 / math.pi)

# -- error function, gamma, Bessel --------------------------------------------------------------------------------

register_unary(aten.erf.default, lambda x: x.unary("ERF"))
register_unary(aten.erfc.default, formulas.erfc)
register_unary(aten.erfinv.default, formulas.erfinv)
register_unary(aten.special_erfcx.default, formulas.erfcx)
register_unary(aten.special_ndtri.default, formulas.ndtri)
register_unary(aten.special_log_ndtr.default, formulas.log_ndtr)
register_unary(aten.lgamma.default, None)
register_unary(aten.digamma.default, None)
register_unary(aten.polygamma.default, None)
register_unary(aten.special_zeta.other_scalar, None)
register_unary(aten.special_zeta.self_scalar, None)
register_unary(aten.igamma.default, None)
register_unary(aten.igammac.default, None)
register_unary(aten.i0.default, None)
register_unary(aten.special_i0e.default, None)
register_unary(aten.special_i1.default, None)
register_unary(aten.special_i1e.default, None)
for _bessel in ("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai"):
    register_unary(getattr(aten, f"special_{_bessel}").default, None)
for _modified in ("i0", "i1", "k0", "k1"):
    register_unary(getattr(aten, f"special_modified_bessel_{_modified}").default, None)
for _scaled in ("k0", "k1"):
    register_unary(getattr(aten, f"special_scaled_modified_bessel_{_scaled}").default, None)
