"""Unary functions: one row with the floating-point formula for each ATen operator.

On quantized values they need no rule of their own. PyTorch evaluates the function (or a chain of them) on every value
that the quantized operand can have, and the result becomes a TABLE (``arm_backend_core.fusion.Univariate``). Functions
with jumps have an integer rule for int16.

Where TOSA has no operator, the formulas keep the *relative* error small (1e-5 in float32), also near a zero of the
function, where the textbook form suffers from cancellation.

Sources: Abramowitz & Stegun, Handbook of Mathematical Functions (A&S); M. Giles, Approximating the erfinv function
(2010); Press et al., Numerical Recipes, 2nd edition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops import intervals
from arm_backend_core.ops.expression import FloatExpr
from arm_backend_core.ops.fixed_point.rounding import FixedPointQuotient, divide_by_constant, rounding_rule
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, Record, register
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
_LARGE = 1e9  #: above it x * x + 1 rounds to x * x, and x * x may overflow
Formula = Callable[..., FloatExpr]


def unary(overload: OpOverload, formula: Formula | None, **facts: Any) -> Record:
    """Register a unary function.

    Args:
        overload: the ATen overload.
        formula: maps the operator's arguments, with tensors as ``FloatExpr``, to the result; None for functions that
            run only on quantized values.
        facts: attributes of ``Record``.
    """

    def lower(cx: Context, *args: Any, **kwargs: Any) -> Value:
        if formula is None:
            raise Unsupported(f"TOSA has no floating-point formula for {overload}; quantize it, which makes it a TABLE")

        def evaluate(inner: Context, *args: Any, **kwargs: Any) -> Value:
            floats = [
                FloatExpr(cx.b, cx.operand(x, inner.dtype), cx.dtype) if isinstance(x, Tensor) else x for x in args
            ]
            return formula(*floats, **kwargs).value

        if cx.dtype in (DType.INT8, DType.INT16):
            return cast(Value, cx.compute_wide(evaluate, *args, **kwargs))
        first_op = len(cx.b.graph.ops)
        result = evaluate(cx, *args, **kwargs)
        if len(cx.b.graph.ops) > first_op + 1:  # a single operator rounds only once in any type
            del cx.b.graph.ops[first_op:]
            result = cx.compute_wide(evaluate, *args, **kwargs)
        return result

    return register(Record((overload,), Kind.ELEMENTWISE, lower, univariate=True, **facts))


# -- formulas that are shared or longer than a line -------------------------------------------------------------


def _exp(x: FloatExpr) -> FloatExpr:
    return x.unary("EXP")


def _log(x: FloatExpr) -> FloatExpr:
    return x.unary("LOG")


def _odd(x: FloatExpr, magnitude: FloatExpr) -> FloatExpr:
    """An odd function of x from its value at abs(x)."""
    return x.less(0.0).where(-magnitude, magnitude)


def _log1p(x: FloatExpr) -> FloatExpr:
    """A&S 4.1.27: 2 * (s + s**3 / 3 + s**5 / 5 + ...), s = x / (2 + x); relative error 2e-8 for abs(x) < 1 / 4."""
    s = x / (x + 2)
    series = 2 * s * (s * s).polynomial([1, 1 / 3, 1 / 5, 1 / 7])
    return abs(x).less(0.25).where(series, _log(x + 1))


def _expm1(x: FloatExpr) -> FloatExpr:
    """A&S 4.2.1 near 0: the power series, relative error 4e-7 for abs(x) < 1 / 2."""
    series = x * x.polynomial([1 / math.factorial(n) for n in range(1, 8)])
    return abs(x).less(0.5).where(series, _exp(x) - 1)


def _sinh(x: FloatExpr) -> FloatExpr:
    """A&S 4.5.1, and 4.5.62 for abs(x) < 1. exp(abs(x) / 2)**2 overflows only where the result does."""
    series = x * (x * x).polynomial([1 / math.factorial(n) for n in (1, 3, 5, 7, 9)])
    root = _exp(0.5 * abs(x))
    return abs(x).less(1.0).where(series, _odd(x, 0.5 * root * root - 0.5 / root / root))


def _cosh(x: FloatExpr) -> FloatExpr:
    root = _exp(0.5 * abs(x))
    return 0.5 * root * root + 0.5 / root / root


def _tanh(x: FloatExpr) -> FloatExpr:
    """A&S 4.5.64 for small x, as TOSA bounds only the absolute error of TANH (it may be a quotient of exponentials)."""
    return abs(x).less(0.02).where(x - x * x * x * (1 / 3), x.unary("TANH"))


def _log_double(x: FloatExpr) -> FloatExpr:
    """ln(2 * x), which equals asinh and acosh to 1e-16 above ``_LARGE``."""
    return _log(x) + math.log(2)


def _asinh(x: FloatExpr) -> FloatExpr:
    """A&S 4.6.20 as log1p(a + (sqrt(a * a + 1) - 1)), with the bracket computed without cancellation."""
    a = abs(x)
    square = a.minimum(_LARGE) * a.minimum(_LARGE)
    return _odd(x, a.greater(_LARGE).where(_log_double(a), _log1p(a + square / ((square + 1).sqrt() + 1))))


def _acosh(x: FloatExpr) -> FloatExpr:
    """A&S 4.6.21 as log1p(t + sqrt(t * (t + 2))), t = x - 1."""
    t = x.less(1.0).where(math.nan, x.minimum(_LARGE) - 1)
    return x.greater(_LARGE).where(_log_double(x), _log1p(t + (t * (t + 2)).sqrt()))


def _atanh(x: FloatExpr) -> FloatExpr:
    """A&S 4.6.22 as log1p(2 * a / (1 - a)) / 2."""
    a = abs(x)
    return _odd(x, 0.5 * _log1p(2 * a / (1 - a)))


def _atan(x: FloatExpr) -> FloatExpr:
    """A&S 4.4.49 (error 2e-8 on [0, 1]); pi / 2 - atan(1 / x) above 1."""
    a = abs(x)
    beyond = a.greater(1.0)
    z = beyond.where(1 / a, a)
    coefficients = [1, -0.3333314528, 0.1999355085, -0.1420889944, 0.1065626393]
    coefficients += [-0.0752896400, 0.0429096138, -0.0161657367, 0.0028662257]
    angle = z * (z * z).polynomial(coefficients)
    return _odd(x, beyond.where(math.pi / 2 - angle, angle))


def _asin(x: FloatExpr) -> FloatExpr:
    return _atan(x * ((1 - x) * (1 + x)).unary("RSQRT"))


def _acos(x: FloatExpr) -> FloatExpr:
    return 2 * _atan(((1 - x) / (1 + x)).sqrt())


def _erfcx_positive(a: FloatExpr) -> FloatExpr:
    """exp(a * a) * erfc(a) for a >= 0; Numerical Recipes, section 6.2 (erfcc), relative error 1.2e-7."""
    t = 1 / (0.5 * a + 1)
    exponent = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806]
    exponent += [0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277]
    return t * _exp(t.polynomial(exponent))


def _erfc(x: FloatExpr) -> FloatExpr:
    tail = _erfcx_positive(abs(x)) * _exp(-(x * x))
    return x.less(0.0).where(2 - tail, tail)


def _erfcx(x: FloatExpr) -> FloatExpr:
    mirrored = _erfcx_positive(abs(x))
    return x.less(0.0).where(2 * _exp(x * x) - mirrored, mirrored)


def _log_ndtr(x: FloatExpr) -> FloatExpr:
    """ln of the normal distribution function: ln(erfc(-y) / 2), y = x / sqrt(2), without underflow for x < 0."""
    y = x * math.sqrt(0.5)
    mirrored = _erfcx_positive(abs(y)) * 0.5
    return x.less(0.0).where(_log(mirrored) - y * y, _log1p(-(mirrored * _exp(-(y * y)))))


def _erfinv_factor(w: FloatExpr) -> FloatExpr:
    """erfinv(x) / x from w = -ln(1 - x * x): Giles 2010, table 5 (single precision), for w < 16.

    From w = 16 up to w = 104, which only ``ndtri`` reaches with float32 arguments, a least-squares fit in sqrt(w) has a
    relative error of at most 3e-7.
    """
    central = [1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087]
    central += [-4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08]
    tail = [2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773]
    tail += [-0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257]
    far = [6.86901863, 1.00859711, -5.0935969e-4, 4.79447561e-06, 4.44235118e-06]
    far += [-1.19376830e-06, 5.52779896e-07, -9.94565699e-08]
    root = w.sqrt()
    beyond = w.greater(16.0).where((root - 7).polynomial(far), (root - 3).polynomial(tail))
    factor = w.less(5.0).where((w - 2.5).polynomial(central), beyond)
    return w.greater(1e30).where(math.inf, factor)  # w is infinite where erfinv is


def _erfinv(x: FloatExpr) -> FloatExpr:
    return x * _erfinv_factor(-_log((1 - x) * (1 + x)))


def _ndtri(x: FloatExpr) -> FloatExpr:
    """sqrt(2) * erfinv(y), y = 2 * x - 1, with 1 - y * y as 4 * x * (1 - x), as y near -1 has lost the bits of x."""
    return math.sqrt(2) * (2 * x - 1) * _erfinv_factor(-_log(4 * x * (1 - x)))


def _softplus(x: FloatExpr, beta: float = 1.0, threshold: float = 20.0) -> FloatExpr:
    y = x * beta
    curve = (y.maximum(0.0) + _log1p(_exp(-abs(y)))) / beta
    return y.greater(threshold).where(x, curve)


def _mish(x: FloatExpr) -> FloatExpr:
    """x * tanh(ln(1 + e**x)) = x * n / (n + 2), n = e**x * (e**x + 2); equals x from 20 on."""
    e = _exp(x.minimum(20.0))
    n = e * (e + 2)
    return x * (n / (n + 2))


def _elu(x: FloatExpr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> FloatExpr:
    return x.greater(0.0).where(x * scale, _expm1(x.minimum(0.0) * input_scale) * (alpha * scale))


def _celu(x: FloatExpr, alpha: float = 1.0) -> FloatExpr:
    return _elu(x, alpha, 1.0, 1 / alpha)


def _selu(x: FloatExpr) -> FloatExpr:
    """Klambauer et al. (2017): constants with a fixed point at mean 0 and variance 1."""
    return _elu(x, 1.6732632423543772, 1.0507009873554805)


def _gelu(x: FloatExpr, approximate: str = "none") -> FloatExpr:
    if approximate == "tanh":  # sigmoid(2 * y) is (1 + tanh(y)) / 2, and exact where that is near 0
        return x * (math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)).unary("SIGMOID")
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).unary("ERF"))


def _leaky_relu(x: FloatExpr, slope: float = 0.01) -> FloatExpr:
    return x.maximum(x * slope) if 0 < slope <= 1 else x.greater(0.0).where(x, x * slope)


def _round(x: FloatExpr) -> FloatExpr:
    """Half to even: floor(x), plus 1 above the half, plus 1 at the half if floor(x) is odd."""
    down = x.unary("FLOOR")
    rest = x - down
    odd = down - 2 * (down * 0.5).unary("FLOOR")
    return rest.equal(0.5).where(down + odd, rest.greater(0.5).where(down + 1, down))


def _round_decimals(x: FloatExpr, *, decimals: int) -> FloatExpr:
    return _round(x * 10.0**decimals) / 10.0**decimals


def _sign(x: FloatExpr) -> FloatExpr:
    """Sign of x; 0 for NaN, as in PyTorch."""
    return x.greater(0.0).where(1.0, x.less(0.0).where(-1.0, x.full_like(0.0)))


def _power(x: FloatExpr, exponent: float) -> FloatExpr:
    """Integer exponents by repeated squaring, which is correct for negative x too; other exponents by logarithm."""
    if exponent == 0:
        return x.equal(x).where(1.0, x.full_like(1.0))
    if abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else x.unary("RSQRT")
    if not math.isfinite(exponent):
        return x**exponent
    if exponent != int(exponent):  # minus infinity counts as infinity; other negative numbers give NaN
        return _exp(_log(x.equal(-math.inf).where(math.inf, x)) * exponent)
    if abs(exponent) > 64:
        magnitude = _exp(_log(abs(x)) * exponent)
        return _odd(x, magnitude) if exponent % 2 else magnitude
    result: FloatExpr | None = None
    square, count = x, abs(int(exponent))
    while True:
        if count % 2:
            result = square if result is None else result * square
        count //= 2
        if not count:
            break
        square = square * square
    assert result is not None
    return result if exponent > 0 else 1 / result


def _logit(x: FloatExpr, eps: float | None = None) -> FloatExpr:
    p = x if eps is None else x.clamp(eps, 1 - eps)
    return _log(p / (1 - p))


def _nan_to_num(
    x: FloatExpr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> FloatExpr:
    if not x.value.dtype.is_float:
        return x  # integers are always finite
    max_finite = x.max_finite
    without_nan = x.equal(x).where(x, 0.0 if nan is None else nan)
    bounded = without_nan.greater(max_finite).where(max_finite if posinf is None else posinf, without_nan)
    return bounded.less(-max_finite).where(-max_finite if neginf is None else neginf, bounded)


def _sinc(x: FloatExpr) -> FloatExpr:
    """sin(pi * x) / (pi * x); near 0, where 1 / y could overflow, it is 1 to within 2e-9."""
    y = x * math.pi
    return abs(y).less(1e-4).where(1.0, y.unary("SIN") / y)


_Step = Callable[[FloatExpr, int, FloatExpr, FloatExpr], FloatExpr]
_MAX_DEGREE = 64  #: each degree is a few operators


def _polynomial(first: Callable[[FloatExpr], FloatExpr], step: _Step, *, shifted: bool) -> Formula:
    """The n-th orthogonal polynomial from p[0] = 1 and p[1] (A&S 22.4) by its recurrence (A&S 22.7)."""

    def formula(x: FloatExpr, n: int) -> FloatExpr:
        if n > _MAX_DEGREE:
            raise Unsupported(
                f"a polynomial of degree {n} ({_MAX_DEGREE} at most, as each degree takes a few operators)"
            )
        if n <= 0:
            return _power(x, 0) * (0.0 if n < 0 else 1.0)
        y = 2 * x - 1 if shifted else x
        before, now = y.full_like(1.0), first(y)
        for k in range(1, n):
            before, now = now, step(y, k, now, before)
        return now

    return formula


def _clamp_bounds(x: Any, min: float | None = None, max: float | None = None) -> tuple[float, float]:
    return (-math.inf if min is None else min, math.inf if max is None else max)


# -- activations --------------------------------------------------------------------------------------------------

unary(aten.relu.default, lambda x: x.clamp(0.0, None), clamp=lambda x: (0.0, math.inf))
unary(aten.relu6.default, lambda x: x.clamp(0.0, 6.0), clamp=lambda x: (0.0, 6.0))
unary(
    aten.hardtanh.default,
    lambda x, min_val=-1.0, max_val=1.0: x.clamp(min_val, max_val),
    clamp=lambda x, min_val=-1.0, max_val=1.0: (min_val, max_val),
)
unary(
    aten.clamp.default,
    lambda x, min=None, max=None: x.clamp(min, max),
    clamp=_clamp_bounds,
    interval=intervals.elementwise(intervals.clamp),
)
unary(aten.clamp_min.default, lambda x, min: x.clamp(min, None), clamp=_clamp_bounds)
unary(aten.clamp_max.default, lambda x, max: x.clamp(None, max), clamp=lambda x, max: (-math.inf, max))
unary(aten.leaky_relu.default, lambda x, negative_slope=0.01: _leaky_relu(x, negative_slope))
unary(aten.elu.default, _elu)
unary(aten.selu.default, _selu)
unary(aten.celu.default, _celu)
unary(aten.gelu.default, _gelu)
unary(aten.silu.default, lambda x: x * x.unary("SIGMOID"))
unary(aten.mish.default, _mish)
unary(aten.sigmoid.default, lambda x: x.unary("SIGMOID"), is_gate=True)
unary(aten.log_sigmoid.default, lambda x: x.minimum(0.0) - _log1p(_exp(-abs(x))))
unary(aten.hardsigmoid.default, lambda x: (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
unary(aten.hardswish.default, lambda x: x * (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
unary(aten.softplus.default, _softplus)
unary(aten.hardshrink.default, lambda x, lambd=0.5: abs(x).less_equal(lambd).where(0.0, x))
unary(aten.softshrink.default, lambda x, lambd=0.5: x - x.clamp(-lambd, lambd))
unary(aten.threshold.default, lambda x, threshold, value: x.less_equal(threshold).where(value, x))

# -- exponentials, logarithms, powers -----------------------------------------------------------------------------

unary(aten.exp.default, _exp)
unary(aten.exp2.default, lambda x: _exp(x * math.log(2)))
unary(aten.expm1.default, _expm1)
unary(aten.log.default, _log)
unary(aten.log2.default, lambda x: _log(x) / math.log(2))
unary(aten.log10.default, lambda x: _log(x) / math.log(10))
unary(aten.log1p.default, _log1p)
unary(aten.logit.default, _logit)
unary(aten.sqrt.default, lambda x: x.sqrt())
unary(aten.rsqrt.default, lambda x: x.unary("RSQRT"))
unary(aten.reciprocal.default, lambda x: 1 / x)
unary(aten.square.default, lambda x: x * x)
unary(aten.pow.Tensor_Scalar, _power)
unary(aten.pow.Scalar, lambda base, x: base**x)
unary(aten.special_entr.default, lambda x: x.equal(0.0).where(0.0, x.less(0.0).where(-math.inf, -x * _log(x))))

# -- signs and rounding -------------------------------------------------------------------------------------------

unary(aten.abs.default, abs, interval=intervals.elementwise(lambda x: (0, max(abs(x[0]), abs(x[1])))))
unary(aten.neg.default, lambda x: -x, interval=intervals.elementwise(lambda x: (-x[1], -x[0])))
unary(aten.sign.default, _sign, is_discontinuous=True).integer_rule(
    lambda cx, x: cx.to_fixed_point(x).sign().with_scale(1.0).requantize(cx.q)
)
unary(aten.sgn.default, _sign, is_discontinuous=True).integer_rule(
    lambda cx, x: cx.to_fixed_point(x).sign().with_scale(1.0).requantize(cx.q)
)
unary(aten.floor.default, lambda x: x.unary("FLOOR"), is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.floor)
)
unary(aten.ceil.default, lambda x: x.unary("CEIL"), is_discontinuous=True).integer_rule(
    rounding_rule(FixedPointQuotient.ceil)
)
unary(aten.round.default, _round, is_discontinuous=True).integer_rule(rounding_rule(FixedPointQuotient.round))
unary(aten.round.decimals, _round_decimals, is_discontinuous=True).integer_rule(rounding_rule(FixedPointQuotient.round))
unary(aten.trunc.default, FloatExpr.trunc, is_discontinuous=True).integer_rule(rounding_rule(FixedPointQuotient.trunc))
unary(aten.frac.default, lambda x: x - x.trunc(), is_discontinuous=True).integer_rule(
    lambda cx, x: divide_by_constant(cx, x, 1.0, FixedPointQuotient.trunc, rest=True)
)
unary(aten.nan_to_num.default, _nan_to_num)

# -- orthogonal polynomials ---------------------------------------------------------------------------------------


def _chebyshev(x: FloatExpr, k: int, p: FloatExpr, q: FloatExpr) -> FloatExpr:
    return 2 * x * p - q


_POLYNOMIALS: dict[str, tuple[Callable[[FloatExpr], FloatExpr], _Step]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda x, k, p, q: 2 * x * p - 2 * k * q),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, p, q: x * p - k * q),
    "laguerre_polynomial_l": (lambda x: 1 - x, lambda x, k, p, q: ((2 * k + 1 - x) * p - k * q) * (1 / (k + 1))),
    "legendre_polynomial_p": (lambda x: x, lambda x, k, p, q: ((2 * k + 1) * x * p - k * q) * (1 / (k + 1))),
}
for _name, _parts in _POLYNOMIALS.items():
    for _shift in ("", "shifted_") if _name.startswith("chebyshev") else ("",):
        _overload = getattr(aten, f"special_{_shift}{_name}").n_scalar
        unary(_overload, _polynomial(*_parts, shifted=bool(_shift)))

# -- trigonometric and hyperbolic ---------------------------------------------------------------------------------

unary(aten.sin.default, lambda x: x.unary("SIN"), is_sinusoid=True)
unary(aten.cos.default, lambda x: x.unary("COS"), is_sinusoid=True)
unary(aten.tan.default, lambda x: x.unary("SIN") / x.unary("COS"))
unary(aten.asin.default, _asin)
unary(aten.acos.default, _acos)
unary(aten.atan.default, _atan)
unary(aten.sinh.default, _sinh)
unary(aten.cosh.default, _cosh)
unary(aten.tanh.default, _tanh, is_gate=True)
unary(aten.asinh.default, _asinh)
unary(aten.acosh.default, _acosh)
unary(aten.atanh.default, _atanh)
unary(aten.sinc.default, _sinc)
unary(aten.special_spherical_bessel_j0.default, lambda x: abs(x).equal(math.inf).where(0.0, _sinc(x * (1 / math.pi))))
unary(aten.deg2rad.default, lambda x: x * (math.pi / 180), factor=lambda x: math.pi / 180)
unary(aten.rad2deg.default, lambda x: x * (180 / math.pi), factor=lambda x: 180 / math.pi)

# -- error function, gamma, Bessel --------------------------------------------------------------------------------

unary(aten.erf.default, lambda x: x.unary("ERF"))
unary(aten.erfc.default, _erfc)
unary(aten.erfinv.default, _erfinv)
unary(aten.special_erfcx.default, _erfcx)
unary(aten.special_ndtri.default, _ndtri)
unary(aten.special_log_ndtr.default, _log_ndtr)
unary(aten.lgamma.default, None)
unary(aten.digamma.default, None)
unary(aten.polygamma.default, None)
unary(aten.special_zeta.other_scalar, None)
unary(aten.special_zeta.self_scalar, None)
unary(aten.igamma.default, None)
unary(aten.igammac.default, None)
unary(aten.i0.default, None)
unary(aten.special_i0e.default, None)
unary(aten.special_i1.default, None)
unary(aten.special_i1e.default, None)
for _bessel in ("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "airy_ai"):
    unary(getattr(aten, f"special_{_bessel}").default, None)
for _modified in ("i0", "i1", "k0", "k1"):
    unary(getattr(aten, f"special_modified_bessel_{_modified}").default, None)
for _scaled in ("k0", "k1"):
    unary(getattr(aten, f"special_scaled_modified_bessel_{_scaled}").default, None)
