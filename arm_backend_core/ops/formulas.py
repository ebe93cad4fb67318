"""Formulas of elementary and special functions in floating point. TOSA lacks most of them or computes them inexactly.

Most formulas keep the *relative* error small (1e-5 in float32), also near a zero of the function, where the textbook
form suffers from cancellation. Exceptions are ``gelu`` far below 0 (without ``approximate="tanh"``), ``logit`` near
1 / 2, ``sinc`` at its zeros, and large powers.

Sources: Abramowitz & Stegun, Handbook of Mathematical Functions (A&S); M. Giles, Approximating the erfinv function
(2010); Press et al., Numerical Recipes, 2nd edition.
"""

from __future__ import annotations

import math

from arm_backend_core.ops.float_expression import FloatExpr

_LARGE = 1e9  #: above this limit, x * x + 1 rounds to x * x; far above it, x * x overflows


def exp(x: FloatExpr) -> FloatExpr:
    """e**x."""
    return x.unary("EXP")


def log(x: FloatExpr) -> FloatExpr:
    """ln(x)."""
    return x.unary("LOG")


def _copysign(magnitude: FloatExpr, x: FloatExpr) -> FloatExpr:
    """Return ``magnitude`` with the sign of x; -0.0 is treated as positive.

    An odd function is computed at abs(x) and then gets the sign of x.
    """
    return x.less(0.0).where(-magnitude, magnitude)


def log1p(x: FloatExpr) -> FloatExpr:
    """ln(1 + x); for abs(x) < 1 / 4 by A&S 4.1.27: 2 * (s + s**3 / 3 + s**5 / 5 + ...), s = x / (2 + x).

    The relative error of the series is 2e-8.
    """
    s = x / (x + 2)
    series = 2 * s * (s * s).polynomial([1, 1 / 3, 1 / 5, 1 / 7])
    return abs(x).less(0.25).where(series, log(x + 1))


def expm1(x: FloatExpr) -> FloatExpr:
    """e**x - 1; for abs(x) < 1 / 2 the power series A&S 4.2.1, with a relative error of 4e-7."""
    series = x * x.polynomial([1 / math.factorial(n) for n in range(1, 8)])
    return abs(x).less(0.5).where(series, exp(x) - 1)


def sinh(x: FloatExpr) -> FloatExpr:
    """Hyperbolic sine: A&S 4.5.1, and 4.5.62 for abs(x) < 1.

    With r = exp(abs(x) / 2), 0.5 * r * r overflows only where the result does; exp(abs(x)) would overflow earlier.
    """
    series = x * (x * x).polynomial([1 / math.factorial(n) for n in (1, 3, 5, 7, 9)])
    root = exp(0.5 * abs(x))
    return abs(x).less(1.0).where(series, _copysign(0.5 * root * root - 0.5 / root / root, x))


def cosh(x: FloatExpr) -> FloatExpr:
    """Hyperbolic cosine: A&S 4.5.2.

    With r = exp(abs(x) / 2), 0.5 * r * r overflows only where the result does; exp(abs(x)) would overflow earlier.
    """
    root = exp(0.5 * abs(x))
    return 0.5 * root * root + 0.5 / root / root


def tanh(x: FloatExpr) -> FloatExpr:
    """Hyperbolic tangent; for abs(x) < 0.02 by A&S 4.5.64.

    TOSA bounds only the absolute error of TANH, which may be computed as a quotient of exponentials.
    """
    return abs(x).less(0.02).where(x - x * x * x * (1 / 3), x.unary("TANH"))


def _log_2x(x: FloatExpr) -> FloatExpr:
    """ln(2 * x). For x above ``_LARGE`` it equals asinh(x) and acosh(x) to 1e-16."""
    return log(x) + math.log(2)


def asinh(x: FloatExpr) -> FloatExpr:
    """Inverse hyperbolic sine: A&S 4.6.20 as log1p(a + (sqrt(a * a + 1) - 1)), a = abs(x).

    The bracket is computed as a * a / (sqrt(a * a + 1) + 1), without cancellation.
    """
    a = abs(x)
    square = a.minimum(_LARGE) * a.minimum(_LARGE)
    return _copysign(a.greater(_LARGE).where(_log_2x(a), log1p(a + square / ((square + 1).sqrt() + 1))), x)


def acosh(x: FloatExpr) -> FloatExpr:
    """Inverse hyperbolic cosine: A&S 4.6.21 as log1p(t + sqrt(t * (t + 2))), t = x - 1."""
    t = x.less(1.0).where(math.nan, x.minimum(_LARGE) - 1)
    return x.greater(_LARGE).where(_log_2x(x), log1p(t + (t * (t + 2)).sqrt()))


def atanh(x: FloatExpr) -> FloatExpr:
    """Inverse hyperbolic tangent: A&S 4.6.22 as log1p(2 * a / (1 - a)) / 2, a = abs(x)."""
    a = abs(x)
    return _copysign(0.5 * log1p(2 * a / (1 - a)), x)


def atan(x: FloatExpr) -> FloatExpr:
    """Inverse tangent: A&S 4.4.49 on [0, 1], with an error of 2e-8; above 1 it is pi / 2 minus the angle of 1 / x."""
    a = abs(x)
    is_above_1 = a.greater(1.0)
    z = is_above_1.where(1 / a, a)
    coefficients = [1, -0.3333314528, 0.1999355085, -0.1420889944, 0.1065626393]
    coefficients += [-0.0752896400, 0.0429096138, -0.0161657367, 0.0028662257]
    angle = z * (z * z).polynomial(coefficients)
    return _copysign(is_above_1.where(math.pi / 2 - angle, angle), x)


def asin(x: FloatExpr) -> FloatExpr:
    """Arcsine as atan(x / sqrt(1 - x * x))."""
    return atan(x * ((1 - x) * (1 + x)).unary("RSQRT"))


def acos(x: FloatExpr) -> FloatExpr:
    """Arccosine as 2 * atan(sqrt((1 - x) / (1 + x)))."""
    return 2 * atan(((1 - x) / (1 + x)).sqrt())


def _erfcx_positive(a: FloatExpr) -> FloatExpr:
    """exp(a * a) * erfc(a) for a >= 0; Numerical Recipes, section 6.2 (erfcc), relative error 1.2e-7."""
    t = 1 / (0.5 * a + 1)
    exponent = [-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806]
    exponent += [0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277]
    return t * exp(t.polynomial(exponent))


def erfc(x: FloatExpr) -> FloatExpr:
    """1 - erf(x), without cancellation for large x."""
    tail = _erfcx_positive(abs(x)) * exp(-(x * x))
    return x.less(0.0).where(2 - tail, tail)


def erfcx(x: FloatExpr) -> FloatExpr:
    """exp(x * x) * erfc(x)."""
    mirrored = _erfcx_positive(abs(x))
    return x.less(0.0).where(2 * exp(x * x) - mirrored, mirrored)


def log_ndtr(x: FloatExpr) -> FloatExpr:
    """ln of the standard normal CDF: ln(erfc(-y) / 2), y = x / sqrt(2), without underflow for x < 0."""
    y = x * math.sqrt(0.5)
    mirrored = _erfcx_positive(abs(y)) * 0.5
    return x.less(0.0).where(log(mirrored) - y * y, log1p(-(mirrored * exp(-(y * y)))))


def _erfinv_factor(w: FloatExpr) -> FloatExpr:
    """erfinv(x) / x from w = -ln(1 - x * x): Giles 2010, table 5 (single precision), for w < 16.

    For 16 <= w <= 104, the factor is a least-squares fit in sqrt(w) with a relative error of at most 3e-7. For float32,
    only ``ndtri`` has such large w.
    """
    central = [1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087]
    central += [-4.39150654e-06, -3.5233877e-06, 3.43273939e-07, 2.81022636e-08]
    tail = [2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773]
    tail += [-0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257]
    far_tail = [6.86901863, 1.00859711, -5.0935969e-4, 4.79447561e-06, 4.44235118e-06]
    far_tail += [-1.19376830e-06, 5.52779896e-07, -9.94565699e-08]
    root = w.sqrt()
    tail_factor = w.greater(16.0).where((root - 7).polynomial(far_tail), (root - 3).polynomial(tail))
    factor = w.less(5.0).where((w - 2.5).polynomial(central), tail_factor)
    return w.greater(1e30).where(math.inf, factor)  # w is infinite where erfinv is


def erfinv(x: FloatExpr) -> FloatExpr:
    """The inverse of erf."""
    return x * _erfinv_factor(-log((1 - x) * (1 + x)))


def ndtri(x: FloatExpr) -> FloatExpr:
    """Inverse of the standard normal CDF (quantile function): sqrt(2) * erfinv(y), y = 2 * x - 1.

    1 - y * y is computed as 4 * x * (1 - x), because y near -1 has lost the low bits of x.
    """
    return math.sqrt(2) * (2 * x - 1) * _erfinv_factor(-log(4 * x * (1 - x)))


def softplus(x: FloatExpr, beta: float = 1.0, threshold: float = 20.0) -> FloatExpr:
    """ln(1 + e**(beta * x)) / beta, or x itself where beta * x exceeds ``threshold``."""
    y = x * beta
    curve = (y.maximum(0.0) + log1p(exp(-abs(y)))) / beta
    return y.greater(threshold).where(x, curve)


def mish(x: FloatExpr) -> FloatExpr:
    """x * tanh(ln(1 + e**x)) = x * n / (n + 2), n = e**x * (e**x + 2); equals x from 20 on."""
    e = exp(x.minimum(20.0))
    n = e * (e + 2)
    return x * (n / (n + 2))


def elu(x: FloatExpr, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> FloatExpr:
    """scale * x where x is positive, else alpha * scale * (e**(input_scale * x) - 1)."""
    return x.greater(0.0).where(x * scale, expm1(x.minimum(0.0) * input_scale) * (alpha * scale))


def celu(x: FloatExpr, alpha: float = 1.0) -> FloatExpr:
    """max(0, x) + min(0, alpha * (e**(x / alpha) - 1))."""
    return elu(x, alpha, 1.0, 1 / alpha)


def selu(x: FloatExpr) -> FloatExpr:
    """SELU (Klambauer et al. 2017). With its constants, layers keep activations of mean 0 and variance 1."""
    return elu(x, 1.6732632423543772, 1.0507009873554805)


def gelu(x: FloatExpr, approximate: str = "none") -> FloatExpr:
    """x times the standard normal CDF, or its approximation by tanh."""
    if approximate == "tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 * y), without cancellation for y far below 0
        return x * (math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x)).unary("SIGMOID")
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).unary("ERF"))


def leaky_relu(x: FloatExpr, slope: float = 0.01) -> FloatExpr:
    """x where it is positive, else slope * x."""
    return x.maximum(x * slope) if 0 < slope <= 1 else x.greater(0.0).where(x, x * slope)


def round_half_even(x: FloatExpr) -> FloatExpr:
    """Round half to even: floor(x), plus 1 above the half, plus 1 at the half if floor(x) is odd."""
    floor = x.unary("FLOOR")
    fraction = x - floor
    is_odd = floor - 2 * (floor * 0.5).unary("FLOOR")
    return fraction.equal(0.5).where(floor + is_odd, fraction.greater(0.5).where(floor + 1, floor))


def round_decimals(x: FloatExpr, *, decimals: int) -> FloatExpr:
    """Round to a number of decimal places, half to even."""
    return round_half_even(x * 10.0**decimals) / 10.0**decimals


def sign(x: FloatExpr) -> FloatExpr:
    """Sign of x; 0 for NaN, as in PyTorch."""
    return x.greater(0.0).where(1.0, x.less(0.0).where(-1.0, x.full_like(0.0)))


def power(x: FloatExpr, exponent: float) -> FloatExpr:
    """x**exponent: integer exponents up to 64 in magnitude by repeated squaring, 0.5 and -0.5 by the square root.

    Other finite exponents that are no integers use exp(exponent * log(x)). Integers beyond 64 use
    exp(exponent * log(abs(x))); if they are odd, the result gets the sign of x. Infinite exponents use the formula of
    ``FloatExpr.__pow__``.
    """
    if exponent == 0:
        return x.equal(x).where(1.0, x.full_like(1.0))  # 1 in the shape of x, also for NaN
    if abs(exponent) == 0.5:
        return x.sqrt() if exponent > 0 else x.unary("RSQRT")
    if not math.isfinite(exponent):
        return x**exponent
    if exponent != int(exponent):  # as in pow, -inf gives the power of inf, and other negative bases NaN
        return exp(log(x.equal(-math.inf).where(math.inf, x)) * exponent)
    if abs(exponent) > 64:
        magnitude = exp(log(abs(x)) * exponent)
        return _copysign(magnitude, x) if exponent % 2 else magnitude
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


def logit(x: FloatExpr, eps: float | None = None) -> FloatExpr:
    """ln(x / (1 - x)) of x clamped to [eps, 1 - eps]."""
    p = x if eps is None else x.clamp(eps, 1 - eps)
    return log(p / (1 - p))


def nan_to_num(
    x: FloatExpr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> FloatExpr:
    """Replace NaN and infinities by numbers."""
    if not x.value.dtype.is_float:
        return x  # integers are always finite
    max_finite = x.max_finite
    without_nan = x.equal(x).where(x, 0.0 if nan is None else nan)
    bounded = without_nan.greater(max_finite).where(max_finite if posinf is None else posinf, without_nan)
    return bounded.less(-max_finite).where(-max_finite if neginf is None else neginf, bounded)


def sinc(x: FloatExpr) -> FloatExpr:
    """sin(y) / y with y = pi * x. For abs(y) < 1e-4, where 1 / y could overflow, it is 1, with an error of 2e-9."""
    y = x * math.pi
    return abs(y).less(1e-4).where(1.0, y.unary("SIN") / y)
