"""Operator test rows: one per operator, and one per variant that the compiler handles differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ops.runner import Case, Input

aten = torch.ops.aten


def unary_case(name: str, function: Callable[..., Any], low: float = -4.0, high: float = 4.0, **facts: Any) -> Case:
    """A function of one tensor with values between ``low`` and ``high``."""
    return Case(name, function, [Input((2, 5, 40), low, high)], tabulated=True, **facts)


def near_zero_case(name: str, function: Callable[..., Any], low: float = -1e-3, high: float = 1e-3) -> Case:
    """A function near one of its zeros, where the relative error of every element must be small."""
    return Case(name, function, [Input((2, 5, 40), low, high)], atol=0, profiles=("fp",))


_GATHER = {"u55": "no GATHER"}
_TOO_MANY_ELEMENTS = dict.fromkeys(("fp", "int8", "a16w8", "u55", "u85"), "6 among 513 elements")
_TOO_MANY_CYCLES = {"u55": "about 9,686,000 cycles .at most 300,000.", "u85": "4,639,000 cycles"}
_NO_FORMULA = {"fp": "TOSA has no floating-point formula"}

UNARY = [
    unary_case("relu", F.relu),
    unary_case("relu6", F.relu6, -4, 8),
    unary_case("hardtanh", lambda x: F.hardtanh(x, -1.5, 2)),
    unary_case("clamp", lambda x: torch.clamp(x, -1.5, 2)),
    unary_case("clamp_min_only", lambda x: torch.clamp(x, min=-1)),
    unary_case("clamp_min", lambda x: torch.clamp_min(x, 0.5)),
    unary_case("clamp_max", lambda x: torch.clamp_max(x, 0.5)),
    unary_case("leaky_relu", F.leaky_relu),
    unary_case("leaky_relu_steep", lambda x: F.leaky_relu(x, 1.5)),
    unary_case("elu", lambda x: F.elu(x, 1.3)),
    unary_case("selu", F.selu),
    unary_case("celu", lambda x: F.celu(x, 1.7)),
    unary_case("gelu", F.gelu),
    unary_case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    unary_case("silu", F.silu),
    unary_case("mish", F.mish, -8, 30),
    unary_case("sigmoid", torch.sigmoid),
    unary_case("log_sigmoid", F.logsigmoid, -20, 20),
    unary_case("hardsigmoid", F.hardsigmoid),
    unary_case("hardswish", F.hardswish),
    unary_case("softplus", F.softplus, -15, 30),
    unary_case("softplus_beta", lambda x: F.softplus(x, 2.0, 3.0)),
    unary_case("hardshrink", lambda x: F.hardshrink(x, 0.7)),
    unary_case("softshrink", lambda x: F.softshrink(x, 0.7)),
    unary_case("tanhshrink", F.tanhshrink),
    unary_case("softsign", F.softsign),
    unary_case("threshold", lambda x: F.threshold(x, 0.3, -1.0)),
    unary_case("exp", torch.exp),
    unary_case("exp2", torch.exp2),
    unary_case("expm1", torch.expm1),
    near_zero_case("expm1_small", torch.expm1),
    unary_case("log", torch.log, 0.01, 10),
    unary_case("log_to_0", torch.log, 1e-4, 1),
    unary_case("log2", torch.log2, 0.01, 10),
    unary_case("log10", torch.log10, 0.01, 10),
    unary_case("log1p", torch.log1p, -0.9, 10),
    near_zero_case("log1p_small", torch.log1p),
    unary_case("logit", torch.logit, 0.01, 0.99),
    unary_case("logit_to_both_ends", torch.logit, 1e-3, 0.999),
    unary_case("logit_eps", lambda x: torch.logit(x, 0.1), -0.5, 1.5),
    unary_case("sqrt", torch.sqrt, 0, 9),
    unary_case("rsqrt", torch.rsqrt, 0.1, 9),
    unary_case("reciprocal", torch.reciprocal, 0.1, 9, int16_steps=2),
    unary_case("square", torch.square),
    unary_case("pow2", lambda x: x**2),
    unary_case("pow3", lambda x: x**3),
    unary_case("pow_minus_2", lambda x: x**-2, 0.3, 4),
    unary_case("pow_half", lambda x: x**0.5, 0, 4),
    unary_case("pow_1_7", lambda x: x**1.7, 0, 4),
    unary_case("pow0", lambda x: x**0),
    unary_case("pow_of_number", lambda x: 1.7**x),
    unary_case("entr", torch.special.entr, 0, 2, int16_steps=2),
    unary_case("abs", torch.abs),
    unary_case("neg", torch.neg),
    unary_case("sign", torch.sign),
    unary_case("sgn", torch.sgn),
    unary_case("floor", torch.floor),
    unary_case("ceil", torch.ceil),
    unary_case("round", torch.round),
    unary_case("round_halves", lambda x: torch.round(torch.floor(x * 4) / 2)),
    unary_case("round_decimals", lambda x: torch.round(x, decimals=1)),
    unary_case("trunc", torch.trunc),
    unary_case("frac", torch.frac),
    unary_case("nan_to_num", torch.nan_to_num),
    unary_case("sin", torch.sin),
    unary_case("cos", torch.cos),
    unary_case("tan", torch.tan, -1.4, 1.4, int16_steps=2),
    unary_case("asin", torch.asin, -0.98, 0.98),
    near_zero_case("asin_small", torch.asin),
    unary_case("acos", torch.acos, -0.98, 0.98),
    near_zero_case("acos_near_1", torch.acos, 0.999, 1),
    unary_case("atan", torch.atan, -20, 20),
    near_zero_case("atan_small", torch.atan),
    unary_case("sinh", torch.sinh),
    near_zero_case("sinh_small", torch.sinh),
    unary_case("cosh", torch.cosh),
    unary_case("tanh", torch.tanh),
    near_zero_case("tanh_small", torch.tanh),
    unary_case("asinh", torch.asinh, -20, 20),
    near_zero_case("asinh_small", torch.asinh),
    unary_case("acosh", torch.acosh, 1.2, 20),
    near_zero_case("acosh_near_1", torch.acosh, 1, 1.001),
    unary_case("atanh", torch.atanh, -0.99, 0.99),
    near_zero_case("atanh_small", torch.atanh),
    unary_case("sinc", torch.sinc),
    unary_case("spherical_bessel_j0", torch.special.spherical_bessel_j0),
    unary_case("deg2rad", torch.deg2rad, -180, 180),
    unary_case("rad2deg", torch.rad2deg),
    unary_case("erf", torch.erf),
    unary_case("erfc", torch.erfc, -4, 6, atol=0),
    unary_case("erfcx", torch.special.erfcx, -2, 20),
    unary_case("erfinv", torch.erfinv, -0.97, 0.97),
    unary_case("ndtri", torch.special.ndtri, 0.001, 0.999),
    unary_case("log_ndtr", torch.special.log_ndtr, -20, 6, atol=0),
    unary_case("lgamma", torch.lgamma, 0.1, 5, refused=_NO_FORMULA),
    # The input range is symmetric, so that it contains the pole of digamma at 0. The entries of an int16 TABLE are
    # halved if neighbours are more than 32767 apart; the error is then two steps.
    unary_case("digamma", torch.digamma, 0.3, 5, refused=_NO_FORMULA, int16_steps=2),
    unary_case("polygamma", lambda x: torch.special.polygamma(2, x), 0.5, 4, refused=_NO_FORMULA, int16_steps=2),
    unary_case("zeta", lambda x: torch.special.zeta(x, 0.5), 1.5, 6, refused=_NO_FORMULA, int16_steps=2),
    unary_case("zeta_of_number", lambda x: torch.special.zeta(2.5, x), 0.5, 6, refused=_NO_FORMULA, int16_steps=2),
    unary_case("gammainc", lambda x: torch.special.gammainc(torch.tensor(1.5), x), 0, 6, refused=_NO_FORMULA),
    unary_case("gammaincc", lambda x: torch.special.gammaincc(torch.tensor([1.5]), x), 0, 6, refused=_NO_FORMULA),
    unary_case("i0", torch.i0, refused=_NO_FORMULA),
    unary_case("i0e", torch.special.i0e, refused=_NO_FORMULA),
    unary_case("i1", torch.special.i1, refused=_NO_FORMULA),
    unary_case("i1e", torch.special.i1e, refused=_NO_FORMULA),
    unary_case("bessel_j0", torch.special.bessel_j0, refused=_NO_FORMULA),
    unary_case("bessel_j1", torch.special.bessel_j1, refused=_NO_FORMULA),
    unary_case("bessel_y0", torch.special.bessel_y0, 0.2, 6, refused=_NO_FORMULA),
    unary_case("bessel_y1", torch.special.bessel_y1, 0.5, 6, refused=_NO_FORMULA),
    unary_case("airy_ai", torch.special.airy_ai, -4, 4, refused=_NO_FORMULA),
    unary_case("modified_bessel_i0", torch.special.modified_bessel_i0, -4, 4, refused=_NO_FORMULA),
    unary_case("modified_bessel_i1", torch.special.modified_bessel_i1, -4, 4, refused=_NO_FORMULA),
    unary_case("modified_bessel_k0", torch.special.modified_bessel_k0, 0.2, 4, refused=_NO_FORMULA),
    unary_case("modified_bessel_k1", torch.special.modified_bessel_k1, 0.4, 4, refused=_NO_FORMULA),
    unary_case("scaled_modified_bessel_k0", torch.special.scaled_modified_bessel_k0, 0.2, 4, refused=_NO_FORMULA),
    unary_case("scaled_modified_bessel_k1", torch.special.scaled_modified_bessel_k1, 0.4, 4, refused=_NO_FORMULA),
    *(
        unary_case(f"{polynomial.__name__}_{degree}", lambda x, f=polynomial, n=degree: f(x, n), low, high)
        for degree in (0, 5)
        for polynomial, low, high in (
            (torch.special.chebyshev_polynomial_t, -1.2, 1.2),
            (torch.special.chebyshev_polynomial_u, -1.2, 1.2),
            (torch.special.chebyshev_polynomial_v, -1.2, 1.2),
            (torch.special.chebyshev_polynomial_w, -1.2, 1.2),
            (torch.special.shifted_chebyshev_polynomial_t, -0.1, 1.1),
            (torch.special.shifted_chebyshev_polynomial_u, -0.1, 1.1),
            (torch.special.shifted_chebyshev_polynomial_v, -0.1, 1.1),
            (torch.special.shifted_chebyshev_polynomial_w, -0.1, 1.1),
            (torch.special.hermite_polynomial_h, -2, 2),
            (torch.special.hermite_polynomial_he, -2, 2),
            (torch.special.laguerre_polynomial_l, -1, 4),
            (torch.special.legendre_polynomial_p, -1.2, 1.2),
        )
    ),
    unary_case("x_times_sigmoid", lambda x: x * torch.sigmoid(1.7 * x)),
    unary_case("relu_", lambda x: torch.relu_(x * 2)),
    unary_case("hardtanh_", lambda x: F.hardtanh_(x * 2, -1, 3)),
    unary_case("clamp_", lambda x: (x * 2).clamp_(-1, 3)),
]


def image(channels: int = 4, height: int = 9, width: int = 10, batch: int = 1) -> list[Input]:
    """One input [batch, channels, height, width]."""
    return [Input((batch, channels, height, width))]


def one(*shape: int, low: float = -2.0, high: float = 2.0) -> list[Input]:
    """One input."""
    return [Input(shape, low, high)]


def two(first: tuple[int, ...], second: tuple[int, ...], low: float = -2.0, high: float = 2.0) -> list[Input]:
    """Two inputs."""
    return [Input(first, low, high), Input(second, -1.0, 3.0)]


class Constant(nn.Module):
    """Calls ``function`` with the inputs and a constant buffer."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("constant", torch.linspace(-1.5, 2, max(1, torch.Size(shape).numel())).reshape(shape))

    def forward(self, *x: Tensor) -> Any:
        return self.function(*x, self.constant)


class Recurrent(nn.Module):
    """Returns the output sequence of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


class Unrolled(nn.Module):
    """Calls a recurrent cell for each step, without an initial state, and returns its states."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x:
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


def _with_batch_norm_parameters(module: nn.Module) -> nn.Module:
    """Set different statistics and parameters for each channel of batch norms; the first gain is negative."""
    for part in module.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d)):
            size = part.num_features
            part.running_mean = torch.linspace(-0.5, 0.5, size)
            part.running_var = torch.linspace(0.5, 2, size)
            part.weight = nn.Parameter(torch.linspace(-0.5, 1.5, size))
            part.bias = nn.Parameter(torch.linspace(-1, 1, size))
    return module


def _with_affine_parameters(module: nn.Module) -> nn.Module:
    """Set different gains and biases for each channel of a norm; the first are negative."""
    for parameter in module.parameters():
        parameter.data = torch.linspace(-0.5, 1.5, parameter.numel()).reshape(parameter.shape)
    return module


CONVOLUTION = [
    Case("conv2d", nn.Conv2d(4, 8, 3, padding=1), image()),
    Case("conv2d_no_bias", nn.Conv2d(4, 8, 3, bias=False), image()),
    Case("conv2d_stride", nn.Conv2d(4, 8, 3, stride=2), image()),
    Case("conv2d_stride_padding", nn.Conv2d(4, 8, (3, 5), stride=(2, 3), padding=(1, 2)), image(4, 10, 11)),
    Case("conv2d_long_stride_padding", nn.Conv2d(3, 8, 7, stride=4, padding=2), image(3, 14, 13)),
    Case("conv2d_dilation", nn.Conv2d(4, 8, 3, dilation=2, padding=2), image()),
    Case("conv2d_groups", nn.Conv2d(4, 6, 3, groups=2), image()),
    Case("conv2d_depthwise", nn.Conv2d(4, 4, 3, groups=4, padding=1), image()),
    Case("conv2d_depthwise_multiplier", nn.Conv2d(4, 8, 3, groups=4, stride=2, padding=1), image()),
    Case("conv2d_depthwise_dilation", nn.Conv2d(4, 4, 3, groups=4, dilation=2), image()),
    Case("conv2d_depthwise_stride_4", nn.Conv2d(4, 4, 5, groups=4, stride=4, padding=2), one(1, 4, 17, 17)),
    Case("conv2d_depthwise_stride_5", nn.Conv2d(3, 6, 3, groups=3, stride=(5, 4)), one(1, 3, 16, 18)),
    Case("conv2d_one_channel", nn.Conv2d(1, 8, 3, padding=1), image(1)),
    Case("conv2d_pointwise", nn.Conv2d(4, 8, 1), image()),
    Case("conv2d_same", nn.Conv2d(4, 8, 4, padding="same"), image()),
    Case("conv2d_valid", nn.Conv2d(4, 8, 4, padding="valid"), image()),
    Case("conv2d_unbatched", nn.Conv2d(4, 8, 3), one(4, 9, 10)),
    Case("conv2d_batch", nn.Conv2d(4, 8, 3), image(batch=3)),
    Case("conv2d_relu", nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()), image()),
    Case("conv2d_relu6", nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU6(inplace=True)), image()),
    Case(
        "conv2d_batch_norm", _with_batch_norm_parameters(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8))), image()
    ),
    Case("conv2d_hardswish", nn.Sequential(nn.Conv2d(4, 8, 3), nn.Hardswish()), image(), int16_steps=2),
    Case("conv2d_conv2d", nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)), image(), steps=2),
    Case("conv1d", nn.Conv1d(4, 8, 3, padding=1), one(2, 4, 12)),
    Case("conv1d_stride_dilation", nn.Conv1d(4, 8, 3, stride=2, dilation=2), one(1, 4, 13)),
    Case("conv1d_depthwise", nn.Conv1d(4, 4, 5, groups=4, padding=2), one(1, 4, 12)),
    Case("conv3d", nn.Conv3d(3, 8, (2, 3, 3), padding=(0, 1, 1)), one(1, 3, 4, 6, 7)),
    Case("conv3d_stride_padding", nn.Conv3d(3, 8, 3, stride=2, padding=1), one(2, 3, 5, 6, 7)),
    Case("conv3d_dilation", nn.Conv3d(3, 4, (2, 2, 1), stride=(3, 1, 1), dilation=(2, 1, 1)), one(1, 3, 9, 4, 4)),
    Case("conv3d_groups", nn.Conv3d(4, 6, 2, groups=2), one(1, 4, 3, 5, 5)),
    Case("conv3d_depthwise", nn.Conv3d(4, 4, (3, 2, 2), groups=4, padding=1), one(1, 4, 3, 5, 5)),
    Case("conv3d_depthwise_stride", nn.Conv3d(4, 8, 3, stride=(1, 2, 4), groups=4, padding=1), one(1, 4, 4, 21, 13)),
    Case("conv3d_depthwise_dilation", nn.Conv3d(3, 3, 2, dilation=(1, 2, 1), groups=3), one(1, 3, 3, 5, 5)),
    Case("conv3d_unbatched", nn.Conv3d(3, 4, 2), one(3, 3, 5, 5)),
    Case("conv1d_same", nn.Conv1d(4, 8, 4, padding="same"), one(1, 4, 12)),
    Case("conv2d_depthwise_wide", nn.Conv2d(96, 192, (3, 1), groups=96), [Input((1, 96, 3, 200))]),
    Case("conv_transpose2d", nn.ConvTranspose2d(4, 6, 3), image(4, 5, 6)),
    Case("conv_transpose2d_stride", nn.ConvTranspose2d(4, 6, 2, stride=2), image(4, 5, 6)),
    Case(
        "conv_transpose2d_output_padding",
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        image(4, 5, 6),
    ),
    Case("conv_transpose2d_groups", nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), image(4, 5, 6)),
    Case(
        "conv_transpose2d_phases",
        nn.ConvTranspose2d(4, 6, (5, 3), stride=(3, 4), padding=(1, 0), output_padding=(2, 3), groups=2),
        image(4, 5, 6),
    ),
    Case("conv_transpose1d_phases", nn.ConvTranspose1d(4, 1, 16, stride=8, bias=False), one(2, 4, 9)),
    Case("conv_transpose2d_no_bias", nn.ConvTranspose2d(4, 6, 3, bias=False), image(4, 5, 6)),
]

LINEAR = [
    Case("linear", nn.Linear(12, 7), one(3, 12)),
    Case("linear_no_bias", nn.Linear(12, 7, bias=False), one(3, 12)),
    Case("linear_1d", nn.Linear(12, 7), one(12)),
    Case("linear_3d", nn.Linear(12, 7), one(2, 3, 12)),
    Case("linear_4d", nn.Linear(12, 7), one(2, 3, 2, 12)),
    Case(
        "linear_dynamic_weight",
        lambda x, w, b: F.linear(x, w, b),
        [*two((2, 3, 4), (5, 4)), Input((5,))],
        steps=2,
        int16_steps=2,
    ),
    Case("linear_relu", nn.Sequential(nn.Linear(12, 7), nn.ReLU()), one(3, 12)),
    Case("addmm", Constant(lambda x, w: torch.addmm(w[0], x, w), 12, 12), one(3, 12)),
    Case(
        "addmm_alpha_beta",
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        [*one(3, 4), *two((3, 12), (12, 4))],
    ),
    Case("mm", torch.mm, two((3, 12), (12, 5))),
    Case("mm_constant", Constant(torch.mm, 12, 5), one(3, 12)),
    Case("bmm", torch.bmm, two((2, 3, 12), (2, 12, 5))),
    Case("matmul", torch.matmul, two((3, 12), (12, 5))),
    Case("matmul_broadcast", torch.matmul, two((2, 3, 4, 12), (3, 12, 5))),
    Case("matmul_broadcast_ones", torch.matmul, two((2, 1, 4, 12), (1, 3, 12, 5))),
    Case("matmul_vector", torch.matmul, two((3, 12), (12,))),
    Case("matmul_vectors", torch.matmul, two((12,), (12,))),
    Case("matmul_constant", Constant(torch.matmul, 12, 5), one(2, 3, 12)),
    Case("baddbmm", torch.baddbmm, [*one(2, 3, 5), *two((2, 3, 12), (2, 12, 5))]),
    Case("sdpa", F.scaled_dot_product_attention, [Input((1, 2, 6, 8))] * 3, steps=3, int16_steps=4),
    Case(
        "sdpa_scale",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.2),
        [Input((1, 2, 6, 8))] * 3,
        steps=3,
        int16_steps=4,
    ),
    Case(
        "sdpa_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [Input((1, 2, 6, 8))] * 3,
        steps=3,
        int16_steps=4,
    ),
    Case("lstm", Recurrent(nn.LSTM(5, 6, batch_first=True)), one(1, 4, 5), steps=3, int16_steps=16),
    Case("lstm_bidirectional", Recurrent(nn.LSTM(5, 6, 2, bidirectional=True)), one(3, 1, 5), steps=4, int16_steps=32),
    Case("lstm_large", Recurrent(nn.LSTM(5, 72, proj_size=70)), one(3, 1, 5), steps=3, int16_steps=16),
    Case("lstm_single", Recurrent(nn.LSTM(3, 1)), one(3, 1, 3), steps=3, int16_steps=16),
    Case("lstm_cell", Unrolled(nn.LSTMCell(5, 6)), one(3, 2, 5), steps=3, int16_steps=16),
    Case("gru", Recurrent(nn.GRU(5, 6, batch_first=True)), one(1, 4, 5), steps=3, int16_steps=16),
    Case("gru_large", Recurrent(nn.GRU(5, 80, bidirectional=True)), one(3, 1, 5), steps=3, int16_steps=16),
    Case("gru_cell", Unrolled(nn.GRUCell(5, 6)), one(3, 2, 5), steps=3, int16_steps=16),
    Case("rnn", Recurrent(nn.RNN(5, 6, 2)), one(4, 2, 5), steps=3, int16_steps=16),
    Case("rnn_cell", Unrolled(nn.RNNCell(5, 6, nonlinearity="relu")), one(3, 2, 5), steps=3, int16_steps=16),
    Case(
        "sdpa_mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        [*[Input((1, 2, 6, 8))] * 3, Input((6, 6), -3, 0)],
        steps=3,
        int16_steps=4,
    ),
    Case(
        "sdpa_mask_of_padding",
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(1, 6).masked_fill(m, -torch.inf)),
        [Input((6,), dtype=torch.bool), *[Input((1, 2, 6, 8))] * 3],
        steps=3,
        int16_steps=24,
    ),
    Case("dot_product_einsum", lambda x, y: torch.einsum("bij,bkj->bik", x, y), two((2, 3, 8), (2, 5, 8))),
]

ARITHMETIC = [
    Case("add", torch.add, two((2, 3, 8), (2, 3, 8))),
    Case("add_broadcast", torch.add, two((2, 3, 8), (3, 1))),
    Case("add_broadcast_both", torch.add, two((2, 1, 8), (3, 1))),
    Case("add_scalar", lambda x: x + 1.5, one(2, 3, 8)),
    Case("add_scalar_to_scalar", lambda x: x + 1.5, one()),
    Case("add_alpha", lambda x, y: torch.add(x, y, alpha=2.5), two((2, 8), (2, 8))),
    Case("add_constant", Constant(torch.add, 8), one(2, 3, 8)),
    Case("add_self", lambda x: x + x, one(2, 8)),
    Case("add_relu", lambda x, y: F.relu(x + y), two((2, 8), (2, 8))),
    Case("add_", lambda x, y: (x * y).add_(y), two((2, 8), (2, 8)), steps=2),
    Case("sub", torch.sub, two((2, 3, 8), (2, 3, 8))),
    Case("sub_alpha", lambda x, y: torch.sub(x, y, alpha=0.5), two((2, 8), (2, 8))),
    Case("sub_scalar", lambda x: x - 1.5, one(2, 8)),
    Case("rsub", lambda x: 1.5 - x, one(2, 8)),
    Case("rsub_tensor", torch.rsub, two((2, 8), (2, 8))),
    Case("mul", torch.mul, two((2, 3, 8), (2, 3, 8))),
    Case("mul_broadcast", torch.mul, two((2, 3, 8), (3, 1))),
    Case("mul_scalar", lambda x: x * 1.5, one(2, 8)),
    Case("mul_negative_scalar", lambda x: x * -1.5, one(2, 8)),
    Case("mul_constant", Constant(torch.mul, 3, 1), one(2, 3, 8)),
    Case("mul_", lambda x, y: (x + y).mul_(y), two((2, 8), (2, 8)), steps=3),
    Case("square_by_mul", lambda x: x * x, one(2, 8)),
    Case("div", torch.div, [Input((2, 8)), Input((2, 8), 0.5, 4)]),
    Case("div_by_zero", lambda x, y: x / torch.clamp(y, min=0), [Input((2, 8), 0.5, 1), Input((2, 8), 0.001, 4)]),
    Case("div_broadcast", torch.div, [Input((2, 3, 8)), Input((3, 1), 0.5, 4)]),
    Case("div_floor", torch.floor_divide, [Input((2, 64)), Input((2, 64), 0.3, 1)], refused={"u55": "INTDIV"}),
    Case(
        "div_floor_broadcast",
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        [Input((2, 3, 64)), Input((3, 1), -4, -0.5)],
        refused={"u55": "INTDIV"},
    ),
    Case(
        "div_trunc",
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        [Input((2, 64)), Input((2, 64), 0.3, 1)],
        refused={"u55": "INTDIV"},
    ),
    Case("div_scalar", lambda x: x / 3, one(2, 8)),
    Case("div_scalar_by_tensor", lambda x: 3 / x, one(2, 8, low=0.5), tabulated=True),
    Case("div_constant", Constant(lambda x, c: x / (c + 3), 8), one(2, 8)),
    Case("maximum", torch.maximum, two((2, 3, 8), (2, 3, 8))),
    Case("maximum_broadcast", torch.maximum, two((2, 3, 8), (3, 1))),
    Case("maximum_constant", Constant(torch.maximum, 8), one(2, 8)),
    Case("minimum", torch.minimum, two((2, 3, 8), (2, 3, 8))),
    Case("minimum_broadcast", torch.minimum, two((2, 1, 8), (3, 1))),
    Case("clamp_tensor", Constant(lambda x, c: torch.clamp(x, min=c - 1, max=c), 8), one(2, 8)),
    Case("pow", torch.pow, [Input((2, 8), 0.5, 2), Input((8,))], int16_steps=2),
    Case("pow_of_zero", torch.pow, [Input((2, 64), 0, 3), Input((64,), 0.5, 4)], int16_steps=2),
    Case("remainder", torch.remainder, [Input((2, 64)), Input((64,), 0.3, 2)], refused={"u55": "no INTDIV"}),
    Case("remainder_negative", torch.remainder, [Input((2, 8)), Input((8,), -2, -0.3)], refused={"u55": "no INTDIV"}),
    Case("fmod", torch.fmod, [Input((2, 64)), Input((2, 64), 0.3, 2)], refused={"u55": "no INTDIV"}),
    Case("prod", torch.prod, one(2, 5), int16_steps=2),
    Case("prod_dim", lambda x: torch.prod(x, 1, keepdim=True), one(3, 7, 2, low=-1.5, high=1.5), int16_steps=2),
    Case("prod_with_zero", lambda x: torch.prod(F.relu(x), 0), one(2, 24), int16_steps=2),
    Case("pow_self", lambda x: x**x, one(2, 8, low=0.5), tabulated=True),
    Case("prelu", nn.PReLU(), one(2, 4, 8), tabulated=True),
    Case("prelu_per_channel", Constant(F.prelu, 4), one(2, 4, 8)),
    Case("lerp_formula", lambda x, y: x + 0.3 * (y - x), two((2, 8), (2, 8)), steps=2),
]

NORMALIZATION = [
    Case("batch_norm2d", _with_batch_norm_parameters(nn.BatchNorm2d(4)), image()),
    Case("batch_norm1d", _with_batch_norm_parameters(nn.BatchNorm1d(4)), one(3, 4)),
    Case("batch_norm1d_sequence", _with_batch_norm_parameters(nn.BatchNorm1d(4)), one(3, 4, 6)),
    Case("batch_norm_relu", _with_batch_norm_parameters(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())), image()),
    Case("batch_norm_no_affine", nn.BatchNorm2d(4, affine=False), image()),
    Case("batch_norm_batch_statistics", nn.BatchNorm2d(4, track_running_stats=False), image()),
    Case("batch_norm_batch_statistics_no_affine", lambda x: F.batch_norm(x, None, None, training=True), one(6, 4)),
    Case("batch_norm3d", _with_batch_norm_parameters(nn.BatchNorm3d(4)), one(1, 4, 2, 3, 5)),
    Case("layer_norm", nn.LayerNorm(16), one(2, 3, 16), steps=2),
    Case("layer_norm_two_dimensions", nn.LayerNorm((3, 16)), one(2, 3, 16), steps=2),
    Case("layer_norm_no_affine", nn.LayerNorm(16, elementwise_affine=False), one(2, 3, 16), steps=2),
    Case("group_norm", _with_affine_parameters(nn.GroupNorm(2, 6)), image(6, 5, 4, batch=2)),
    Case("group_norm_no_affine", nn.GroupNorm(3, 6, affine=False), one(3, 6)),
    Case("instance_norm1d", nn.InstanceNorm1d(4), one(2, 4, 12)),
    Case("instance_norm2d", _with_affine_parameters(nn.InstanceNorm2d(4, affine=True)), image(batch=2)),
    Case("instance_norm3d", nn.InstanceNorm3d(2), one(1, 2, 3, 4, 5)),
    Case(
        "instance_norm_of_many", nn.InstanceNorm2d(1), one(1, 1, 384, 256)
    ),  # 98304 elements: the reduction is split into two parts
    Case("rms_norm_of_many", _with_affine_parameters(nn.RMSNorm([384, 256])), one(384, 256)),
    Case(
        "instance_norm_running",
        _with_batch_norm_parameters(nn.InstanceNorm2d(4, True, track_running_stats=True)),
        image(),
    ),
    Case("rms_norm", _with_affine_parameters(nn.RMSNorm(16)), one(2, 3, 16)),
    Case("rms_norm_two_dimensions", nn.RMSNorm((3, 16), eps=0.1), one(2, 3, 16)),
    Case("normalize", lambda x: F.normalize(x, dim=-1), one(2, 3, 16)),
    Case("normalize_channels", F.normalize, image()),
    Case(
        "normalize_rows_of_different_magnitude",
        lambda x, y: F.normalize(torch.cat([x, y])),
        [Input((3, 8), -50, 50), Input((3, 8))],
    ),
    Case("softmax", lambda x: F.softmax(x, -1), one(2, 3, 16), steps=2),
    Case("softmax_middle", lambda x: F.softmax(x, 1), one(2, 5, 6), steps=2),
    Case("softmax_large", lambda x: F.softmax(x, -1), one(2, 64, low=-100, high=100), steps=2, int16_steps=2),
    Case("softmax_scalar", lambda x: F.softmax(x, 0), one()),
    Case("log_softmax_scalar", lambda x: F.log_softmax(x + x, -1), one(), profiles=("fp", "int8")),
    Case("log_softmax", lambda x: F.log_softmax(x, -1), one(2, 3, 16), steps=2),
    Case("log_softmax_first", lambda x: F.log_softmax(x, 0), one(5, 6), steps=2),
]

POOLING = [
    Case("max_pool2d", nn.MaxPool2d(2), image()),
    Case("max_pool2d_stride_padding", nn.MaxPool2d(3, stride=2, padding=1), image()),
    Case("max_pool2d_stride_4", nn.MaxPool2d(5, stride=4, padding=2), image()),
    Case("max_pool2d_ceil", nn.MaxPool2d(3, stride=2, ceil_mode=True), image(4, 10, 12)),
    Case("max_pool2d_rectangle", nn.MaxPool2d((2, 3), stride=(2, 1), padding=(0, 1)), image()),
    Case("max_pool2d_unbatched", nn.MaxPool2d(2), one(4, 8, 8)),
    Case("max_pool2d_relu", nn.Sequential(nn.MaxPool2d(2), nn.ReLU()), image()),
    Case("max_pool1d", nn.MaxPool1d(3, stride=2), one(2, 4, 12)),
    Case("avg_pool2d", nn.AvgPool2d(2), image()),
    Case("avg_pool2d_padding", nn.AvgPool2d(3, stride=2, padding=1), image()),
    Case("avg_pool2d_padding_uncounted", nn.AvgPool2d(3, 2, 1, count_include_pad=False), image()),
    Case("avg_pool2d_ceil", nn.AvgPool2d(3, stride=2, ceil_mode=True), image(4, 10, 12)),
    Case("avg_pool2d_ceil_padding", nn.AvgPool2d(3, 2, 1, ceil_mode=True), image(4, 10, 12)),
    Case("avg_pool2d_divisor", nn.AvgPool2d(3, 2, 1, divisor_override=2), image()),
    Case("avg_pool2d_large_divisor", nn.AvgPool2d(3, 1, 0, True, divisor_override=20), image()),
    Case("avg_pool1d", nn.AvgPool1d(3, stride=2), one(2, 4, 12)),
    Case("adaptive_avg_pool2d_1", nn.AdaptiveAvgPool2d(1), image(), int16_steps=2),
    Case("adaptive_avg_pool2d_3", nn.AdaptiveAvgPool2d(3), image(4, 9, 12)),
    Case("adaptive_avg_pool2d_uneven", nn.AdaptiveAvgPool2d((4, 3)), image(4, 9, 10)),
    Case(
        "adaptive_avg_pool2d_padded",
        lambda x: F.adaptive_avg_pool2d(F.pad(x, (3, 3, 3, 3)), (6, 5)),
        one(2, 5, 7, 1, low=0),
    ),
    Case("adaptive_avg_pool2d_rows", nn.AdaptiveAvgPool2d((None, 1)), image()),
    Case("adaptive_avg_pool2d_identity", nn.AdaptiveAvgPool2d((9, 10)), image()),
    Case("adaptive_avg_pool1d", nn.AdaptiveAvgPool1d(1), one(2, 4, 12)),
    Case("adaptive_avg_pool1d_uneven", nn.AdaptiveAvgPool1d(5), one(2, 4, 12)),
]

REDUCTION = [
    Case("mean", lambda x: x.mean(-1), one(2, 3, 16)),
    Case("mean_keepdim", lambda x: x.mean((1, 2), keepdim=True), one(2, 3, 16)),
    Case("mean_all", lambda x: x.mean(), one(2, 3, 16)),
    Case("mean_matrix", lambda x: x.mean(), one(3, 16)),
    Case("mean_vector", lambda x: x.mean(), one(16)),
    Case("mean_scalar", lambda x: x.mean(), one()),
    Case("mean_image", lambda x: x.mean((2, 3)), image(), int16_steps=2),
    Case("sum", lambda x: x.sum(-1), one(2, 3, 16)),
    Case("sum_keepdim", lambda x: x.sum((0, 2), keepdim=True), one(2, 3, 16)),
    Case("sum_all", lambda x: x.sum(), one(2, 3, 16)),
    Case("sum_two", lambda x: x.sum(1), one(1, 2, 65540)),  # exceeds Ethos-U55's limit of a dimension
    Case("sum_scalar", lambda x: x.sum(), one()),
    Case("sum_scalar_dim", lambda x: x.sum(0), one()),
    Case("amax_scalar_dim", lambda x: x.amax(0), one()),
    Case("argmax_scalar_dim", lambda x: x.argmax(-1), one()),
    Case("var", lambda x: x.var(-1), one(2, 3, 16)),
    Case("var_all_biased", lambda x: torch.var(x, False), one(2, 3, 16)),
    Case("var_correction", lambda x: x.var((0, 2), correction=3, keepdim=True), one(2, 3, 16)),
    Case("std", lambda x: x.std(-1), one(2, 3, 16)),
    Case("std_of_many", lambda x: x.std((1, 2)), one(2, 384, 256)),
    Case("var_of_many", lambda x: x.var((1, 2)), one(2, 384, 256)),
    Case("sum_of_many", lambda x: x.sum(1), one(2, 98304, 1)),
    Case("std_biased", lambda x: x.std((1, 2), unbiased=False, keepdim=True), one(2, 3, 16)),
    Case("amax", lambda x: x.amax(-1), one(2, 3, 16)),
    Case("amax_keepdim", lambda x: x.amax((1, 2), keepdim=True), one(2, 3, 16)),
    Case("amin", lambda x: x.amin(1), one(2, 3, 16)),
    Case("argmax", lambda x: x.argmax(-1), one(2, 3, 16)),
    Case("argmax_keepdim", lambda x: x.argmax(1, keepdim=True), one(2, 6, 4)),
    Case("argmax_of_many", lambda x: x.argmax(-1), one(2, 3, 200)),
    Case("argmax_of_ints", lambda x: x.argmax(1), [Input((3, 9, 2), -(2**31), 2**31 - 1, torch.int32)]),
    Case("argmax_all", lambda x: x.argmax(), one(2, 16)),
    Case("amin_keepdim", lambda x: x.amin(-1, keepdim=True), one(2, 3, 16)),
    Case("topk", lambda x: torch.topk(x, 3), one(2, 3, 16)),
    Case("topk_of_many", lambda x: torch.topk(x, 3), one(2, 65)),
    Case(
        "topk_smallest_dim",
        lambda x: torch.topk(x, 5, -2, largest=False).values,
        one(2, 65, 3),
    ),
    Case("topk_all_dim", lambda x: torch.topk(x, 12, 1, largest=False).values, one(2, 12, 3)),
    Case("topk_indices", lambda x: torch.topk(x, 6).indices + 7, one(2, 12)),
    Case("topk_of_many_rows", lambda x: torch.topk(x, 8)[0], one(2100, 12), refused=_TOO_MANY_CYCLES),
    Case("topk_9_of_300", lambda x: torch.topk(x, 9)[0], one(1, 300)),
    Case("topk_too_many", lambda x: torch.topk(x, 6), one(1, 513), refused=_TOO_MANY_ELEMENTS),
    Case("topk_scalar", lambda x: torch.topk(x, 1, -1), one()),
]

MOVEMENT = [
    Case("view", lambda x: x.view(3, 16), one(2, 3, 8)),
    Case(
        "windows_of_video",
        lambda x: x.view(1, 1, 2, 2, 3, 2, 2, 4).permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(4, 12, 4),
        one(1, 2, 6, 4, 4),
    ),
    Case(
        "windows_of_videos",
        lambda x: x.view(2, 2, 2, 2, 3, 2, 2, 4).permute(0, 1, 3, 5, 2, 4, 6, -1).contiguous().view(16, 12, 4) + 1,
        one(2, 4, 6, 4, 4),
    ),
    Case(
        "permute_images_of_video",
        lambda x: x.view(1, 4, 8, 14, 14, 96).permute(2, 0, 1, 3, 4, 5) * 2,
        one(1, 32, 14, 14, 96),
    ),
    Case("permute_heads", lambda x: x.permute(2, 0, 3, 1, 4), one(1, 1024, 1, 2, 66)),
    Case("permute_every_dimension", lambda x: x.view([2] * 8).permute(3, 0, 5, 2, 7, 4, 1, 6).flatten(), one(16, 16)),
    Case(
        "convex_upsampling",  # of RAFT
        lambda x, y: (
            (x.view(1, 1, 9, 2, 2, 3, 4).softmax(2) * y.view(1, 2, 9, 1, 1, 3, 4)).sum(2).permute(0, 1, 4, 2, 5, 3)
        ),
        two((1, 36, 3, 4), (1, 18, 12)),
        int16_steps=4,  # a sum of nine products with independent errors
    ),
    Case(
        "position_grid_of_video",
        lambda x, y: (
            x.reshape(1, 2, 2, 3, 1, 2, 1, 1) + y.reshape(1, 2, 1, 3, 1, 1, 2, 1) * x.reshape(1, 2, 2, 3, 1, 1, 1, 2)
        ).reshape(2, 6, 8),
        [Input((2, 6, 2)), Input((2, 3, 2))],
    ),
    Case("reshape_after_transpose", lambda x: x.transpose(1, 2).reshape(2, 24), one(2, 3, 8)),
    Case("flatten", lambda x: torch.flatten(x, 1), one(2, 3, 8)),
    Case("unflatten", lambda x: x.unflatten(1, (2, 3)), one(2, 6, 8)),
    Case("squeeze", lambda x: x.squeeze(), one(1, 3, 1, 8)),
    Case("squeeze_dim", lambda x: x.squeeze(2), one(1, 3, 1, 8)),
    Case("squeeze_dims", lambda x: x.squeeze((0, 2)), one(1, 3, 1, 8)),
    Case("unsqueeze", lambda x: x.unsqueeze(1), one(2, 3, 8)),
    Case("permute", lambda x: x.permute(2, 0, 1), one(2, 3, 8)),
    Case("transpose", lambda x: x.transpose(-1, 0), one(2, 3, 8)),
    Case("t", lambda x: x.t(), one(3, 8)),
    Case("movedim", lambda x: x.movedim(0, 2), one(2, 3, 8)),
    Case("expand", lambda x: x.expand(2, 3, -1), one(3, 8)),
    Case("expand_as", lambda x, y: x.expand_as(y) + y, two((3, 1), (3, 8))),
    Case("roll", lambda x: torch.roll(x, (1, -2), (1, 2)), one(2, 3, 5)),
    Case("roll_whole_turns", lambda x: torch.roll(x, (0, 1, -10), (0, 1, 2)), one(2, 3, 5)),
    Case("roll_flat", lambda x: torch.roll(x, 4), one(2, 3, 5)),
    Case("repeat", lambda x: x.repeat(2, 1, 3), one(3, 4)),
    Case("clone", lambda x: x.clone(), one(2, 3)),
    Case("contiguous", lambda x: x.permute(1, 0).contiguous(), one(2, 3)),
    Case("detach", lambda x: x.detach() * 2, one(2, 3)),
    Case("dropout_eval", nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), one(2, 4)),
    Case("cat", lambda x, y: torch.cat([x, y], 1), two((2, 3, 4), (2, 5, 4))),
    Case("cat_last", lambda x, y: torch.cat([x, y], -1), two((2, 3), (2, 5))),
    Case("cat_constant", Constant(lambda x, c: torch.cat([x, c]), 2, 4), one(3, 4)),
    Case("stack", lambda x, y: torch.stack([x, y], 1), two((2, 3), (2, 3))),
    Case("slice", lambda x: x[:, 1:3], one(2, 5, 4)),
    Case("slice_negative", lambda x: x[:, -3:-1], one(2, 5, 4)),
    Case("slice_step", lambda x: x[:, 1::2], one(2, 6, 4)),
    Case("slice_step_cut", lambda x: x[:, ::3], one(2, 7, 4)),
    Case("index", lambda x: x[:, [3, -5, 1]], one(2, 5, 4)),
    Case("index_many", lambda x: x[:, [7 * i % 40 for i in range(40)]], one(2, 40, 3)),
    Case("flip", lambda x: torch.flip(x, (1,)), one(2, 5, 4)),
    Case("flip_ends", lambda x: torch.flip(x, (0, -1)), one(2, 5, 4)),
    Case("select", lambda x: x[:, 1], one(2, 5, 4)),
    Case("select_negative", lambda x: x.select(-1, -2), one(2, 5, 4)),
    Case("split", lambda x: torch.split(x, 2, 1), one(2, 5, 4)),
    Case("split_sizes", lambda x: torch.split(x, [1, 4], 1), one(2, 5, 4)),
    Case("chunk", lambda x: torch.chunk(x, 2, -1), one(2, 5, 4)),
    Case("unbind", lambda x: torch.unbind(x, 1), one(2, 3, 4)),
    Case("pad", lambda x: F.pad(x, (1, 2)), one(2, 3, 4)),
    Case("pad_value", lambda x: F.pad(x, (1, 2, 0, 1), value=1.5), one(2, 3, 4)),
    Case("pad_reflect", lambda x: F.pad(x, (1, 2, 2, 1), "reflect"), image()),
    Case("pad_replicate", lambda x: F.pad(x, (1, 2), "replicate"), one(2, 3, 4)),
    Case("pad_circular", lambda x: F.pad(x, (1, 2), "circular"), one(2, 3, 4)),
    Case("pad_crop", lambda x: F.pad(x, (-1, 2)), one(2, 3, 4)),
    Case("pixel_shuffle", nn.PixelShuffle(2), image(8, 3, 4)),
    Case("embedding", nn.Embedding(10, 6), [Input((2, 5), 0, 10, torch.int64)]),
    Case("embedding_int32", nn.Embedding(10, 6), [Input((5,), 0, 10, torch.int32)]),
    Case(
        "embedding_of_many_indices",
        nn.Embedding(3, 2),
        [Input((1 << 16,), 0, 3, torch.int64)],
        refused={"u85": "65536 indices .65535 at most."},
    ),
    Case("embedding_large", nn.Embedding(3000, 6), [Input((5,), 0, 3000, torch.int64)], refused=_GATHER),
    Case("upsample_nearest", nn.Upsample(scale_factor=2), image()),
    Case("upsample_nearest_3", nn.Upsample(scale_factor=3), image()),
    Case("upsample_nearest_uneven", nn.Upsample(size=(13, 15)), image()),
    Case("upsample_nearest_down", nn.Upsample(size=(3, 5)), image()),
    Case("upsample_nearest_ties", nn.Upsample(size=(82, 41)), image(4, 2, 3)),
    Case("upsample_nearest_exact", nn.Upsample(size=(13, 4), mode="nearest-exact"), image()),
    Case("upsample_bilinear", nn.Upsample(scale_factor=2, mode="bilinear"), image()),
    Case("upsample_bilinear_corners", nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), image()),
    Case("upsample_bilinear_uneven", nn.Upsample(size=(13, 15), mode="bilinear"), image()),
    Case("upsample_bilinear_same", lambda x: F.interpolate(x, size=x.shape[2:], mode="bilinear").flatten(2), image()),
    Case("upsample_nearest_same", lambda x: F.interpolate(x, size=x.shape[2:]).flatten(2), image()),
    Case(
        "upsample_bilinear_many_parts", nn.Upsample(size=(259, 13), mode="bilinear", align_corners=True), image(130, 7)
    ),
    Case("upsample_bilinear_down", nn.Upsample(size=(4, 5), mode="bilinear"), image()),
    Case("upsample_bilinear_factor", nn.Upsample(scale_factor=1.6, mode="bilinear"), image()),
]


_I64 = torch.int64


def _relative_positions(x: torch.Tensor) -> torch.Tensor:
    """Index of the relative position (query - key + 4) of 4 queries and 5 keys, as in relative attention."""
    return (torch.arange(4)[:, None] - torch.arange(5) + 4).clamp(0, 6).expand(*x.shape[:-2], 4, 5)


LOGICAL = [
    Case(
        "where",
        lambda c, x, y: torch.where(c, x, y),
        [Input((2, 8), dtype=torch.bool), *two((2, 8), (2, 8))],
    ),
    Case(
        "where_scalar",
        lambda c, x: torch.where(c, x, 0.5),
        [Input((2, 8), dtype=torch.bool), *one(2, 8)],
    ),
    Case(
        "where_numbers",
        lambda c: torch.where(c, 0.0, -1.5),
        [Input((2, 8), dtype=torch.bool)],
    ),
    Case(
        "masked_fill",
        lambda c, x: x.masked_fill(c, -1.0),
        [Input((8,), dtype=torch.bool), *one(2, 8)],
    ),
    *(
        Case(f"{name}", lambda x, y, f=function: f(x, y), two((2, 8), (2, 8)))
        for name, function in {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}.items()
    ),
    Case("eq", lambda x: torch.eq(x, 0), one(2, 8)),
    Case("ne", lambda x: torch.ne(x, 0), one(2, 8)),
    Case("gt_scalar", lambda x: x > 0.5, one(2, 8)),
    Case("where_gt", lambda x, y: torch.where(x > y, x, y), two((2, 8), (2, 8))),
    *(
        Case(name, function, [Input((2, 8), dtype=torch.bool)] * 2)
        for name, function in {
            "logical_and": torch.logical_and,
            "logical_or": torch.logical_or,
            "logical_xor": torch.logical_xor,
            "bitwise_and": torch.bitwise_and,
            "bitwise_or": lambda x, y: x | y,
            "bitwise_xor": lambda x, y: x ^ y,
        }.items()
    ),
    *(
        Case(name, function, [Input((2, 8), -99, 99, torch.int32), Input((8,), 0, 40, torch.int32)], refused=refused)
        for name, function, refused in (
            ("left_shift", torch.bitwise_left_shift, {}),
            ("left_shift_number", lambda x, y: (x << 3) + (1 << y % 31), {}),
            ("right_shift", torch.bitwise_right_shift, {"u55": "a shift that does not round"}),
            ("right_shift_number", lambda x, y: (x >> 2) + (y >> 40), {}),
            (
                "last_bits",
                lambda x, y: (x & torch.tensor([-1, 0, 1, 3, 7, 15, 63, 127], dtype=torch.int32)) + (y & 3),
                {},
            ),
            (
                "bits",
                lambda x, y: aten.__and__(x, 12) | aten.__xor__(y, 3),
                {"fp": "needs TOSA INT", "u55": "in hardware"},
            ),
            ("bits_of_number", lambda x, y: torch.bitwise_or(8, x) + y, {"fp": "needs TOSA INT", "u55": "in hardware"}),
        )
    ),
    Case("logical_and_real", lambda x, y: torch.logical_and(x > 0, F.relu(y)), two((2, 8), (2, 8))),
    Case("logical_not_real", lambda x: torch.logical_not(F.relu(x)), one(2, 8)),
    Case("all_real", lambda x: torch.all(F.relu(x), 1), one(2, 3)),
    Case("any_real", lambda x: torch.any(F.relu(x)), one(2, 3)),
    Case("logical_not", torch.logical_not, [Input((2, 8), dtype=torch.bool)]),
    Case("bitwise_not", lambda x: ~x, [Input((2, 8), dtype=torch.bool)]),
    *(
        Case(
            f"{name}_at_ends_of_range",
            lambda x, f=function: (f(x, 1.0), f(x, 0.3), f(x, -1.0)),
            one(2, 8, low=-1, high=1),
        )
        for name, function in {"eq": torch.eq, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}.items()
    ),
    Case(
        "right_shift_of_all",
        lambda x, y: x >> y,
        [Input((2, 64), -(2**31), 2**31 - 1, torch.int32), Input((64,), 0, 32, torch.int32)],
        refused={"u55": "a shift that does not round"},
    ),
    Case(
        "right_shift_of_all_by_numbers",
        lambda x: x >> torch.arange(32, dtype=torch.int32),
        [Input((64, 32), -(2**31), 2**31 - 1, torch.int32)],
    ),
    *(
        Case(
            f"{name}_by_any_{str(dtype).removeprefix('torch.')}",
            function,
            [Input((2, 64), -100, 100, dtype), Input((64,), -40, 70, dtype)],
            refused={"u55": "a shift that does not round"} if name == "right_shift" else {},
        )
        for name, function in {"left_shift": torch.bitwise_left_shift, "right_shift": torch.bitwise_right_shift}.items()
        for dtype in (torch.int8, torch.int16, torch.int32)
    ),
    *(
        Case(
            f"{name}_by_negative_numbers",
            lambda x, f=function: (f(x, -1), f(x, torch.arange(-16, 16, dtype=torch.int32) * 3)),
            [Input((2, 32), -100, 100, torch.int32)],
        )
        for name, function in {"left_shift": torch.bitwise_left_shift, "right_shift": torch.bitwise_right_shift}.items()
    ),
    Case("last_bits_of_all", lambda x: x & 1023, [Input((64, 32), -(2**31), 2**31 - 1, torch.int32)]),
    *(
        Case(f"{name}_of_ints", function, [Input((4, 7), -(2**31) + 1, 2**31 - 1, torch.int32)] * 2)
        for name, function in {
            "maximum": torch.maximum,
            "minimum": torch.minimum,
            "abs": lambda x, y: x.abs(),
            "clamp": lambda x, y: x.clamp(-5, 1 << 30),
            "neg": lambda x, y: -x,
            "amax": lambda x, y: x.amax(1),
            "amin": lambda x, y: y.amin(0),
            "where": lambda x, y: torch.where(x > y, x, 7),
        }.items()
    ),
    *(
        Case(f"{name}_of_ints_by_number", function, [Input((8, 99), -(1 << 30), 1 << 30, torch.int32)])
        for name, function in {
            "floor_divide": lambda x: x // 48,
            "floor_divide_negative": lambda x: x // -7,
            "remainder": lambda x: x % 10 + x % 2,
            "fmod": lambda x: torch.fmod(x, 3),
            "div_trunc": lambda x: torch.div(x, 1000003, rounding_mode="trunc"),
        }.items()
    ),
    Case("eq_int", lambda x: x == 3, [Input((2, 8), 0, 6, torch.int32)]),
    Case("lt_int", torch.lt, [Input((2, 8), -6, 6, torch.int32)] * 2),
    Case("lt_large_int", torch.lt, [Input((2, 64), -(2**31), 2**31 - 1, torch.int32)] * 2),
    Case("ge_close_ints", torch.ge, [Input((2, 64), 2**30, 2**30 + 5, torch.int32)] * 2),
    *(
        Case(f"{name}_{kind}", function, [Input((2, 8)), Input((2, 8), -20, 20, dtype)])
        for kind, dtype in (("int8", torch.int8), ("int16", torch.int16), ("bool", torch.bool))
        for name, function in (
            ("add_real_to", lambda x, y: x + y),
            ("mul_real_by", lambda x, y: x * y),
            ("cast_and_add", lambda x, y: y.to(torch.float32) * 0.5 + x),
            ("cat_real_with", lambda x, y: torch.cat([x, y.to(torch.float32)], 1)),
        )
    ),
    Case("cast_int32", lambda x, y: y.to(torch.float32) + x, [Input((2, 8)), Input((2, 8), -2000, 2000, torch.int32)]),
    Case("add_known_integers", lambda x: x + torch.arange(6).reshape(2, 3), one(3)),
    Case("cat_known_integers", lambda x: torch.cat([x, torch.eye(3, dtype=torch.int32)]), one(2, 3)),
    Case("mul_by_known_booleans", lambda x: x * (torch.arange(6) > 2).reshape(2, 3), one(3)),
    Case("cast_real_to_int32", lambda x: F.relu6(x).to(torch.int32) * 3, one(4, 16, low=-1, high=7)),
    Case("cast_negative_to_int32", lambda x: (x - 1).to(torch.int32), one(4, 16, low=-40, high=40)),
    Case("where_known", Constant(lambda x, c: torch.where(c > 0, x, -1.5), 8), one(2, 8)),
    Case("where_known_not", Constant(lambda x, c: torch.where(c > 0, c, x), 8), one(2, 3, 8)),
    Case("gather_known_rows", lambda x: x.gather(-1, _relative_positions(x)), one(2, 3, 4, 9)),
    Case(
        "gather_of_equals", lambda x, i: x + torch.ones(2, 9).gather(1, i), [Input((2, 4)), Input((2, 4), 0, 9, _I64)]
    ),
    Case("isnan", torch.isnan, one(2, 8)),
    Case("isinf", torch.isinf, one(2, 8)),
]

#: Functions of unquantized integers, by number of operands. int8 and int16 wrap around.
_INTEGER_FUNCTIONS: dict[int, dict[str, Callable[..., Any]]] = {
    1: {
        "relu": F.relu,
        "clamp": lambda x: x.clamp(-3, 50),
        "abs": torch.abs,
        "neg": torch.neg,
        "square": torch.square,
        "rsub": lambda x: 3 - x,
    },
    2: {
        "mul": torch.mul,
        "add": torch.add,
        "sub": lambda x, y: torch.sub(x, y, alpha=3),
        "maximum": torch.maximum,
    },
}

CASTING = [
    Case("to_int", lambda x: (x * 3).to(torch.int32), one(2, 8), profiles=("fp",)),
    Case("to_bool", lambda x: F.relu(x).bool(), one(2, 8), profiles=("fp",)),
    Case("to_half", lambda x: x.half() * 2, one(2, 8), rtol=2e-3, profiles=("fp",)),
    Case("int_to_float", lambda x: x.float() * 2, [Input((2, 8), -50, 50, torch.int32)], profiles=("fp",)),
    Case("bool_to_float", lambda x: x.float() * 2, [Input((2, 8), dtype=torch.bool)], profiles=("fp",)),
    Case("to_same", lambda x: x.to(torch.float32) * 2, one(2, 8)),
    Case("type_as", lambda x, y: x.type_as(y) + y, two((2, 8), (2, 8))),
    *(
        Case(f"{name}_{str(dtype)[6:]}", function, [Input((2, 8), -100, 100, dtype)] * count, profiles=("int8",))
        for dtype in (torch.int8, torch.int16, torch.int32)
        for count, functions in _INTEGER_FUNCTIONS.items()
        for name, function in functions.items()
    ),
    Case(
        "mm_int8",
        torch.mm,
        [Input((2, 8), -100, 100, torch.int8), Input((8, 3), -100, 100, torch.int8)],
        profiles=("int8",),
    ),
    Case("int32_to_int8", lambda x: (x + 1).to(torch.int8), [Input((2, 8), -50, 50, torch.int32)], profiles=("int8",)),
]

CASES = [
    *UNARY,
    *CONVOLUTION,
    *LINEAR,
    *ARITHMETIC,
    *NORMALIZATION,
    *POOLING,
    *REDUCTION,
    *MOVEMENT,
    *LOGICAL,
    *CASTING,
]
