"""A row per operator, and per variant of an operator that takes another way through the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ops.runner import Case, Input

aten = torch.ops.aten


def unary(name: str, function: Callable[..., Any], low: float = -4.0, high: float = 4.0, **facts: Any) -> Case:
    """A function of one tensor with values between ``low`` and ``high``."""
    return Case(name, function, [Input((2, 5, 40), low, high)], tabulated=True, **facts)


def near_zero(name: str, function: Callable[..., Any], low: float = -1e-3, high: float = 1e-3) -> Case:
    """A function next to one of its zeros: the relative error of every element stays small."""
    return Case(name, function, [Input((2, 5, 40), low, high)], atol=0, profiles=("fp",))


_QUANTIZED_ONLY = {"refused": {"fp": "TOSA has no floating-point formula"}}

UNARY = [
    unary("relu", F.relu),
    unary("relu6", F.relu6, -4, 8),
    unary("hardtanh", lambda x: F.hardtanh(x, -1.5, 2)),
    unary("clamp", lambda x: torch.clamp(x, -1.5, 2)),
    unary("clamp_min_only", lambda x: torch.clamp(x, min=-1)),
    unary("clamp_min", lambda x: torch.clamp_min(x, 0.5)),
    unary("clamp_max", lambda x: torch.clamp_max(x, 0.5)),
    unary("leaky_relu", F.leaky_relu),
    unary("leaky_relu_steep", lambda x: F.leaky_relu(x, 1.5)),
    unary("elu", lambda x: F.elu(x, 1.3)),
    unary("selu", F.selu),
    unary("celu", lambda x: F.celu(x, 1.7)),
    unary("gelu", F.gelu),
    unary("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    unary("silu", F.silu),
    unary("mish", F.mish, -8, 30),
    unary("sigmoid", torch.sigmoid),
    unary("log_sigmoid", F.logsigmoid, -20, 20),
    unary("hardsigmoid", F.hardsigmoid),
    unary("hardswish", F.hardswish),
    unary("softplus", F.softplus, -15, 30),
    unary("softplus_beta", lambda x: F.softplus(x, 2.0, 3.0)),
    unary("hardshrink", lambda x: F.hardshrink(x, 0.7)),
    unary("softshrink", lambda x: F.softshrink(x, 0.7)),
    unary("tanhshrink", F.tanhshrink),
    unary("softsign", F.softsign),
    unary("threshold", lambda x: F.threshold(x, 0.3, -1.0)),
    unary("exp", torch.exp),
    unary("exp2", torch.exp2),
    unary("expm1", torch.expm1),
    near_zero("expm1_small", torch.expm1),
    unary("log", torch.log, 0.01, 10),
    unary("log2", torch.log2, 0.01, 10),
    unary("log10", torch.log10, 0.01, 10),
    unary("log1p", torch.log1p, -0.9, 10),
    near_zero("log1p_small", torch.log1p),
    unary("logit", torch.logit, 0.01, 0.99),
    unary("logit_eps", lambda x: torch.logit(x, 0.1), -0.5, 1.5),
    unary("sqrt", torch.sqrt, 0, 9),
    unary("rsqrt", torch.rsqrt, 0.1, 9),
    unary("reciprocal", torch.reciprocal, 0.1, 9),
    unary("square", torch.square),
    unary("pow2", lambda x: x**2),
    unary("pow3", lambda x: x**3),
    unary("pow_minus_2", lambda x: x**-2, 0.3, 4),
    unary("pow_half", lambda x: x**0.5, 0, 4),
    unary("pow_1_7", lambda x: x**1.7, 0, 4),
    unary("pow0", lambda x: x**0),
    unary("pow_of_number", lambda x: 1.7**x),
    unary("entr", torch.special.entr, 0, 2),
    unary("abs", torch.abs),
    unary("neg", torch.neg),
    unary("sign", torch.sign),
    unary("sgn", torch.sgn),
    unary("floor", torch.floor),
    unary("ceil", torch.ceil),
    unary("round", torch.round),
    unary("round_halves", lambda x: torch.round(torch.floor(x * 4) / 2)),
    unary("round_decimals", lambda x: torch.round(x, decimals=1)),
    unary("trunc", torch.trunc),
    unary("frac", torch.frac),
    unary("nan_to_num", torch.nan_to_num),
    unary("sin", torch.sin),
    unary("cos", torch.cos),
    unary("tan", torch.tan, -1.4, 1.4),
    unary("asin", torch.asin, -0.98, 0.98),
    near_zero("asin_small", torch.asin),
    unary("acos", torch.acos, -0.98, 0.98),
    near_zero("acos_near_1", torch.acos, 0.999, 1),
    unary("atan", torch.atan, -20, 20),
    near_zero("atan_small", torch.atan),
    unary("sinh", torch.sinh),
    near_zero("sinh_small", torch.sinh),
    unary("cosh", torch.cosh),
    unary("tanh", torch.tanh),
    unary("asinh", torch.asinh, -20, 20),
    near_zero("asinh_small", torch.asinh),
    unary("acosh", torch.acosh, 1, 20),
    near_zero("acosh_near_1", torch.acosh, 1, 1.001),
    unary("atanh", torch.atanh, -0.99, 0.99),
    near_zero("atanh_small", torch.atanh),
    unary("sinc", torch.sinc),
    unary("deg2rad", torch.deg2rad, -180, 180),
    unary("rad2deg", torch.rad2deg),
    unary("erf", torch.erf),
    unary("erfc", torch.erfc, -4, 6, atol=0),
    unary("erfcx", torch.special.erfcx, -2, 20),
    unary("erfinv", torch.erfinv, -0.9999, 0.9999),
    unary("ndtri", torch.special.ndtri, 0.001, 0.999),
    unary("log_ndtr", torch.special.log_ndtr, -20, 6, atol=0),
    unary("lgamma", torch.lgamma, 0.1, 5, **_QUANTIZED_ONLY),
    unary("digamma", torch.digamma, 0.3, 5, **_QUANTIZED_ONLY),
    unary("i0", torch.i0, **_QUANTIZED_ONLY),
    unary("i0e", torch.special.i0e, **_QUANTIZED_ONLY),
    unary("i1", torch.special.i1, **_QUANTIZED_ONLY),
    unary("i1e", torch.special.i1e, **_QUANTIZED_ONLY),
    unary("bessel_j0", torch.special.bessel_j0, **_QUANTIZED_ONLY),
    unary("bessel_j1", torch.special.bessel_j1, **_QUANTIZED_ONLY),
    unary("x_times_sigmoid", lambda x: x * torch.sigmoid(1.7 * x)),
    unary("relu_", lambda x: torch.relu_(x * 2)),
    unary("hardtanh_", lambda x: F.hardtanh_(x * 2, -1, 3)),
    unary("clamp_", lambda x: (x * 2).clamp_(-1, 3)),
]

CASES = UNARY
