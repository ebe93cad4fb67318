"""Regression programs: reduced random graphs that failed once. Every test run checks each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ops.runner import Case, Input

aten = torch.ops.aten
_EVERY = ("TOSA_FP", "TOSA_INT8", "TOSA_A16W8")
_FP = ("TOSA_FP",)
_INT = ("TOSA_INT8", "TOSA_A16W8")


@dataclass(frozen=True)
class Regression:
    """A program that failed once.

    Attributes:
        name: the test's name.
        model: a module or a function of the inputs.
        inputs: the inputs of a call.
        targets: targets that are checked.
    """

    name: str
    model: Callable[..., Any]
    inputs: tuple[Input, ...]
    targets: tuple[str, ...] = _EVERY

    def module(self) -> nn.Module:
        """The model in evaluation mode."""
        return Case(self.name, self.model, self.inputs).module()

    def samples(self) -> list[tuple[torch.Tensor, ...]]:
        """Three samples for calibration; the first one is executed."""
        return [Case(self.name, self.model, self.inputs).sample(seed) for seed in range(3)]


def _x(*shape: int, low: float = -2, high: float = 2, dtype: torch.dtype = torch.float32) -> Input:
    return Input(shape, low, high, dtype)


def _low_frequencies(x: torch.Tensor) -> torch.Tensor:
    """A layer of a Fourier neural operator."""
    written = torch.zeros(2, 3, 9, dtype=torch.cfloat)
    weight = torch.view_as_complex(torch.linspace(-1, 1, 96).reshape(4, 3, 4, 2))
    written[:, :, :4] = torch.einsum("bix,iox->box", torch.fft.rfft(x)[:, :, :4], weight)
    return torch.fft.irfft(written, n=16)


def _almost_equal_scales(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two quantized tensors whose scales differ by 5e-7."""
    y = x * 1.0000005
    return x == y, x != y, x < y, x >= y


def _discontinuous_functions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Functions with more discontinuities than an int16 table represents, alone and inside other functions."""
    alone = (x.floor(), x.ceil(), x.round(), (2 * x).round(decimals=1), x.trunc(), x.frac(), x.sign())
    divided = (x // 0.3, x // -0.3, x % 0.7, x % -0.7, torch.fmod(x, -0.7), torch.div(x, 0.3, rounding_mode="trunc"))
    return (*alone, *divided, torch.sigmoid(x) - torch.floor(torch.tanh(x) * 5) / 5)


def _indices(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    i = torch.sort(x, 2)[1]
    return F.one_hot(i.abs() % 4, 4), i


def _in_place_writes_to_a_tensor_and_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first result is written in place, and then through a view of the tensor that dropout returned unchanged."""
    y = x * 2
    return F.dropout(y, 0.5, False).add_(0.5), y[0].zero_()


class _Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 4, proj_size=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.lstm(x)[1][0]
        return hidden


class _Difference(nn.Module):
    """Large values that cancel, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.linear.weight.data, self.linear.bias.data = torch.tensor([[1.0, -1.0]]), torch.tensor([0.3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        difference: torch.Tensor = self.linear(torch.cat([x, x], -1))
        return difference


class _OfBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.linear = nn.Buffer(torch.ones(3, 4)), nn.Linear(4, 2)

    def forward(self) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.x)
        return y


class _WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bound = nn.Buffer(torch.ones(5, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp_min(x, self.bound)


class _Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6, 3, 2) - 0.5), nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(aten.convolution(x, self.weight, self.bias, [3], [1], [1], True, [1], 1))
        return y


class _ComputedGru(nn.Module):
    """A GRU of two layers whose weights are inputs: some operators stay on the CPU, and both layers slice the state."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.linspace(-1e4, 1e4, 24).reshape(2, 2, 6))
        self.u, self.c = nn.Buffer(torch.linspace(-1, 1, 108).reshape(18, 6)), nn.Buffer(torch.linspace(-1, 1, 18))

    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = [w, self.u, b, b, self.u, v, self.c, self.c]
        y: torch.Tensor = aten.gru.input(x, self.state, weights, True, 2, 0.0, False, False, True)[0]
        return y


class _LayerOfConstants(nn.Module):
    """A transformer layer of constants: PyTorch's fused kernel returns other strides than its graph says."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Buffer(torch.linspace(-1, 1, 324).reshape(12, 9, 3))
        self.layer = nn.TransformerEncoderLayer(3, 1, 8, batch_first=True)

    def forward(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y.select(2, 0).zero_(), self.layer(self.x) + y[0, 0, 0]


def _cat_of_cat(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.cat([x, x, x], -1)
    z = x.flatten(1)
    return torch.cat([y, x], -1), y + 3.0, torch.cat([z, x.flatten(1), z], 1), torch.cat([x[:, :1], x[:, 1:], x], 1)


class _OfConstants(nn.Module):
    """Constant outputs: ExecuTorch lacks a kernel for one of their operators, and its decomposition loses constants."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.row = nn.Buffer(torch.tensor(0.7)), nn.Buffer(torch.rand(1, 1, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = torch.ones(6, 1, 5, 7)[:, ::2]  # step 2 on a dimension of one element
        return torch.logsumexp(self.scalar, 0), F.interpolate(self.row, scale_factor=2.0, mode="linear"), x + 1, part


class _NormBesideWrite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(7)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).transpose(0, -1).mul_(0.1), self.norm(y)


REGRESSIONS = [
    Regression("softmax_rank_0", lambda x: torch.softmax(x, -1), (_x(),)),
    Regression("logsumexp_rank_0", lambda x: torch.logsumexp(x, -1), (_x(),)),
    Regression("prelu_kernel_weight_like_input", lambda x: aten._prelu_kernel(x, x), (_x(2, 2),)),
    Regression(
        "prelu_kernel_broadcasts",
        lambda x, w: F.adaptive_avg_pool2d(aten._prelu_kernel(x, w), (6, 6)),
        (_x(), _x(7, 7, 1, 6)),
    ),
    Regression("pow_of_negative", lambda x: torch.pow(x, torch.zeros(1, 1)), (_x(3, 4),)),
    Regression(
        "bilinear_1_to_2",
        lambda x: F.interpolate(x, size=(2, 2), mode="bilinear", align_corners=True),
        (_x(1, 1, 2, 1),),
    ),
    Regression(
        "conv_transpose_padding_beyond_kernel", nn.ConvTranspose2d(6, 3, 3, stride=4, padding=4), (_x(1, 6, 3, 4),)
    ),
    Regression("conv_transpose_1x1_padding", nn.ConvTranspose2d(6, 1, 1, stride=3, padding=2), (_x(5, 6, 3, 8),)),
    Regression(
        "tanh_tiny",
        torch.tanh,
        (_x(12, low=1e-6, high=2e-6),),
        _FP,
    ),
    Regression("max_pool2d_indices", lambda x: F.max_pool2d(x, 2, 1, return_indices=True), (_x(8, 1, 2, 6),)),
    Regression("max_pool2d_indices_alone", lambda x: F.max_pool2d(x, 2, 1, return_indices=True)[1], (_x(8, 1, 2, 6),)),
    Regression("empty_to_other_dtype", lambda x, y: x.type_as(y), (_x(8, 7, 5, 0), _x(4, dtype=torch.float16)), _FP),
    Regression("empty_slice_returned_twice", lambda x: (x[:, :, 1:].split(1, 2)[0], x[:, :, 1:]), (_x(1, 1, 1),)),
    Regression("dropout_then_write", lambda x: F.dropout(x * 2, 0.5, False).add_(1.5), (_x(4),)),
    Regression("in_place_writes_to_a_tensor_and_a_view", _in_place_writes_to_a_tensor_and_a_view, (_x(2, 3),)),
    Regression("batch_norm_3d", nn.BatchNorm3d(4), (_x(2, 4, 3, 3, 3),)),
    Regression("lstm_projection", _Projected(), (_x(1, 1, 7),)),
    Regression(
        "addmm_computed_bias",
        lambda x: torch.addmm(x[0], x, x.t()),
        (_x(14, 14),),
    ),
    Regression("int8_product", lambda x: x * x, (_x(9, 15, low=-100, high=100, dtype=torch.int8),)),
    Regression("one_hot_of_indices", _indices, (_x(6, 4, 4, 4),)),
    Regression("normalize_tiny", lambda x: F.normalize(x, dim=-2), (_x(10, 9, low=1e-6, high=2e-6),), _INT),
    Regression(
        "adaptive_pool_of_padded",
        lambda x: F.adaptive_avg_pool2d(F.pad(x, (3, 3, 3, 3)), (6, 5)),
        (_x(2, 5, 7, 1, low=0, high=1),),
        _INT,
    ),
    Regression("asin_to_the_end_of_its_domain", torch.asin, (_x(12, 1, 3, 1, low=0, high=1),), _INT),
    Regression(
        "masked_fill_rank_0",
        lambda x: torch.masked_fill(x, x < 0, 1),
        (_x(),),
    ),
    Regression("batch_norm_beside_a_write", _NormBesideWrite(), (_x(6, 12), _x(5, 7, 1, 2))),
    Regression(
        "batch_norm_statistics",
        lambda x, m, v: aten._native_batch_norm_legit_no_training(x, m, m, m, v, 0.1, 1e-5)[1],
        (_x(1, 4, 10), _x(4), _x(4, low=0.5)),
        _FP,
    ),
    Regression(
        "ndtri_tiny",
        lambda x, y: (torch.special.ndtri(x), torch.special.ndtri(y)),
        (_x(6, 7, low=1e-6, high=2e-6), _x(16, low=1e-38, high=1e-36)),
        _FP,
    ),
    Regression(
        "batch_norm_of_computed_statistics",
        lambda x, m, v: F.batch_norm(x, m, v, m),
        (_x(1, 5, 1, 6), _x(5), _x(5, low=0.5)),
    ),
    Regression("sort_rank_0", lambda x: torch.sort(x, -1)[0], (_x(),)),
    Regression("empty_adaptive_pool", lambda x: aten.adaptive_avg_pool3d(x * 2, [1, 0, 3]), (_x(1, 3, 8, 1),)),
    Regression(
        "views_that_no_schema_declares",
        lambda x, y: (torch.meshgrid(x, indexing="ij")[0], y.type_as(x), x.transpose(0, -1).mul_(0.5), y[1:].add_(1)),
        (_x(7), _x(3, 4)),
        _FP,
    ),
    Regression("copysign_of_integers", torch.copysign, (_x(15, low=-100, high=100, dtype=torch.int32), _x(1))),
    Regression("cumulative_rank_0", lambda x: (torch.cumsum(x, 0), torch.cumprod(x, -1)), (_x(),)),
    Regression(
        "sums_of_int64_with_a_factor",
        lambda x: (aten.sub.Scalar(x % 9, 2, 2), torch.add(x % 9, x % 7, alpha=3), torch.rsub(x % 9, 4, alpha=-2)),
        (_x(5, low=0, high=100, dtype=torch.int64),),
    ),
    Regression("median_rank_0", lambda x: (torch.median(x, 0, True)[0], torch.kthvalue(x, 1, -1)[0]), (_x(),)),
    Regression("rrelu_beside_a_write", lambda x, y: (F.rrelu(x, training=False), y[1:].add_(1)), (_x(7), _x(4))),
    Regression("linear_vector_weight", lambda x: F.linear(x, torch.arange(4.0)), (_x(3, 4),)),
    Regression("linear_two_vectors", lambda x: F.linear(x, torch.arange(4.0), torch.tensor(2.0)), (_x(4),)),
    Regression("bfloat16_passes_through", lambda x: x.squeeze(0), (_x(25, dtype=torch.bfloat16),), _FP),
    Regression(
        "seven_dimensions_pass_through", lambda x: torch.repeat_interleave(x, 2, 0), (_x(2, 2, 3, 1, 1, 2),), _FP
    ),
    Regression("transpose_rank_0", lambda x: (x * 2).transpose(-1, 0), (_x(),)),
    Regression(
        "to_other_of_its_source",
        lambda x: (aten.to.other(y := torch.diagonal(x), x, False, True).chunk(4)[0], y.roll(-4, -1)),
        (_x(7, 6),),
        _INT,
    ),
    Regression(
        "upsample_nearest_of_a_batch",
        lambda x: F.interpolate(x, scale_factor=4),
        (_x(4, 4, 1, 8),),
        ("ETHOSU_U55_INT8",),
    ),
    Regression(
        "conv_transpose_of_less_than_its_stride",
        nn.ConvTranspose2d(2, 4, (1, 3), stride=(1, 3), padding=(0, 2)),
        (_x(1, 2, 1, 2),),
        ("ETHOSU_U85_INT8",),
    ),
    Regression("maximum_with_empty", lambda x: torch.maximum(torch.empty(0).transpose(-1, 0), x), (_x(1),)),
    Regression(
        "group_norm_of_single_values",
        lambda x, w: aten.native_group_norm(x, w, w, 1, 9, 1, 9, 1e-5)[0],
        (_x(1, 9, 1), _x(9)),
    ),
    Regression(
        "trunc_division_just_below_an_integer",
        lambda x: torch.div(x, 0.001, rounding_mode="trunc"),
        (_x(4, 9, dtype=torch.int32),),
        _FP,
    ),
    Regression(
        "bias_finer_than_its_accumulator",
        _Difference(),
        (_x(8, 1, low=-500, high=500),),
        ("TOSA_A16W8",),
    ),
    Regression(
        "atan2_of_minus_zero", lambda x, y: (torch.atan2(x * 0, y), torch.copysign(y, x * 0)), (_x(12), _x(12)), _INT
    ),
    Regression("conv_transpose1d", nn.ConvTranspose1d(4, 3, 4, stride=2), (_x(1, 4, 7),)),
    Regression(
        "conv_transpose2d_groups_computed_weight",
        lambda x, w, b: F.conv_transpose2d(x, w, b, (2, 2), (2, 1), (1, 0), 2, (2, 1)),
        (_x(1, 2, 10, 6), _x(2, 2, 3, 1), _x(4)),
    ),
    Regression(
        "batch_norm_of_several_results",
        lambda x, m, v: aten._native_batch_norm_legit_no_training(x, m, m, m, v, 0.1, 1e-3)[0],
        (_x(9, 8), _x(8), _x(8, low=0.5)),
        _INT,
    ),
    Regression("softmax_in_16_bits", lambda x: F.scaled_dot_product_attention(x, x, x), (_x(8, 2, 2, 8),), _INT),
    Regression("mean_in_16_bits", nn.AdaptiveAvgPool3d(1), (_x(1, 1, 2, 3, 3),), _INT),
    Regression(
        "instance_norm_of_equal_values",
        lambda x: F.instance_norm(torch.softmax(x, 2)),
        (_x(8, 2, 1, 2),),
        _INT,
    ),
    Regression("amin_rank_5", lambda x: x.amin(2), (_x(2, 4, 3, 3, 4),), ("ETHOSU_U55_INT8",)),
    Regression("empty_constant", _WithEmpty(), (_x(5, 1, 0),), _INT),
    Regression("median_of_integers", lambda x: x.median(), (_x(7, 5, low=-100, high=100, dtype=torch.int8),)),
    Regression(
        "sums_of_int64_with_a_factor",
        lambda x: (aten.sub.Scalar(x % 9, 2, 2), torch.add(x % 9, x % 7, alpha=3), torch.rsub(x % 9, 4, alpha=-2)),
        (_x(5, low=0, high=100, dtype=torch.int64),),
    ),
    Regression(
        "argmin_of_the_smallest_integer",
        lambda x, y: (torch.where(y > -200, -(2**31), x).argmin(0), torch.maximum(x, y).min(0)[1]),
        (_x(7, 5, low=-9, high=9, dtype=torch.int32), _x(7, 5, low=-300, high=9, dtype=torch.int32)),
    ),
    Regression(
        "transposed_core_convolution",
        _Convolution(),
        (_x(2, 6, 8),),
    ),
    Regression(
        "max_and_min_of_booleans",
        lambda x: (*(x > 0).max(0), *(x > 0).min(0)),
        (_x(3, 4),),
    ),
    Regression(
        "constant_that_two_delegates_read",
        _ComputedGru(),
        (_x(2, 2, 5), _x(18, 5, low=-1, high=1), _x(18, low=-1, high=1), _x(18, 6, low=-1, high=1)),
        _INT,
    ),
    Regression(
        "where_of_a_constant_beyond_int32",
        lambda x: x * torch.where(torch.tensor([2**40, 2, 3]) > 4, 2.5, 1.0),
        (_x(3),),
    ),
    Regression(
        "padded_int64",
        lambda x: F.pad(x % 9, (1, 2), value=300) + 1,
        (_x(5, low=0, high=100, dtype=torch.int64),),
    ),
    Regression("no_inputs", _OfBuffers(), (), _INT),
    Regression("adaptive_max_pool", lambda x: F.adaptive_max_pool2d(x, 1), (_x(3, 6, 8, 6),)),
    Regression(
        "remainder_of_tiny",
        lambda x, y: (x % 3, torch.remainder(-1, y)),
        (_x(2, 9, low=-1e-35, high=1e-35), _x(2, 9, low=-1e9, high=1e9)),
        _FP,
    ),
    Regression(
        "std_whose_variance_exceeds_float32",
        lambda x, y: (x.std(), *torch.std_mean(y, 1)),
        (_x(3, 4, low=-1e24, high=1e24), _x(3, 4, low=-1e-35, high=1e-35)),
        _FP,
    ),
    Regression(
        "infinity_added_to_one_row",
        lambda x, y: x.index_add(1, torch.tensor([0, 2, 0]), y, alpha=2),
        (_x(2, 4, 5), Input((2, 3, 5), special=(math.inf, -math.inf))),
        _FP,
    ),
    Regression(
        "nan_to_num_of_integers",
        lambda x: torch.nan_to_num(x, None, 0.001, 1.5),
        (_x(5, 8, low=-100, high=100, dtype=torch.int32),),
    ),
    Regression(
        "atan2_of_integers",
        lambda x, y: (torch.atan2(x, x), torch.atan2(x, y)),
        (_x(9, low=-96, high=85, dtype=torch.int32), _x(9, low=-96, high=85, dtype=torch.int8)),
    ),
    Regression(
        "as_strided_of_overlapping_views",
        lambda x: tuple(x.flatten()[i : i + 8].as_strided((2,), (1,), 4) + 1 for i in (1, 2)),
        (_x(3, 4),),
        _INT,
    ),
    Regression(
        "index_fill_of_integers_with_float",
        lambda x: (x.index_fill(1, torch.tensor([0, 2]), 3.0), x.scatter(0, torch.tensor([[1]]), 3.0)),
        (_x(3, 4, low=-100, high=100, dtype=torch.int16),),
        _FP,
    ),
    Regression(
        "flash_attention_logsumexp",
        lambda x, y: (
            *aten._scaled_dot_product_flash_attention_for_cpu(x, x, x),
            *aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, attn_mask=torch.where(y > 0, -math.inf, 0.0)),
        ),
        (_x(1, 3, 2, 6), _x(2, 1)),
        _FP,
    ),
    Regression("layer_of_constants", _LayerOfConstants(), (_x(4, 11, 7),), _FP),
    Regression(
        "circular_pad_with_crop",
        lambda x: (F.pad(x, (1, -1, 3, 3), "circular"), F.pad(x, (-2, 2, -1, 0), "circular")),
        (_x(1, 2, 5, 4),),
    ),
    Regression(
        "cumprod_of_zero_and_overflow",
        lambda x: torch.cumprod(x * torch.tensor([0.0, 1e20, 1e20, 1e20, 1.0]), 1),
        (_x(3, 5, low=1, high=2),),
        _FP,
    ),
    Regression("acosh_far_below_its_domain", torch.acosh, (_x(9, 7, low=-10000, high=9),), _FP),
    Regression(
        "sign_of_a_remainder_of_zero",
        lambda x: torch.copysign(x, (x / x.abs() * 4) % 2),
        (_x(9, 7, low=-9, high=9),),
        _FP,
    ),
    Regression(
        "in_place_write_to_lift",
        lambda x: (aten.lift(x).view(-1)[:3].add_(1.5), torch.tanh(x)),
        (_x(10, 1),),
        _FP,
    ),
    Regression(
        "fold_of_infinities",
        lambda x: F.fold(x, (5, 6), (2, 3), (2, 1), (1, 2), (1, 2)),
        (Input((2, 12, 20), special=(math.inf, -math.inf)),),
        _FP,
    ),
    Regression(
        "floor_of_an_in_place_constant",
        lambda x: (x.select(-1, 0).zero_() + 0.3).floor(),
        (_x(1, 2, 2, 3, 3, 4),),
        _INT,
    ),
    Regression("returned_constants", _OfConstants(), (_x(3),), _FP),
    Regression(
        "in_place_write_to_fill",
        lambda x, y, z: (x.clamp_(-0.5, 0.5), aten.fill(y, z)[..., :2].mul_(0.5).sum()),
        (_x(10, 6), _x(2), _x()),
    ),
    Regression("cat_of_cat", _cat_of_cat, (_x(4, 3, 2),)),
    Regression(
        "slice_scatter_of_the_whole_tensor",
        lambda x, y: (torch.slice_scatter(x > 0, y), torch.slice_scatter(x > 0, y, 0, None, 1, 2)),
        (_x(1, 9), _x(1, 9)),
    ),
    Regression(
        "grid_sample_beyond_the_image",
        lambda x, y: F.grid_sample(x, y, padding_mode="zeros", align_corners=False),
        (_x(2, 3, 8, 4, 9, low=1e-6, high=2e-6), _x(2, 2, 2, 2, 3, low=-1.2, high=1.2)),
    ),
    Regression("batch_norm_empty", nn.BatchNorm1d(3).eval(), (_x(1, 3, 0),)),
    Regression("normalize_empty", lambda x, y: (F.normalize(x, dim=-1), y * 2), (_x(0), _x(3)), _INT),
    Regression("comparison_of_almost_equal_scales", _almost_equal_scales, (_x(900),), ("TOSA_INT8",)),
    Regression("gelu_far_below_zero", lambda x: F.gelu(x, approximate="tanh"), (_x(2000, low=-7, high=-4),), _FP),
    Regression("view_of_a_composite", lambda x: torch.diagonal_copy(x).view(-1) * 2, (_x(5, 6, 3),)),
    Regression(
        "clamp_of_integers_by_float",
        lambda x: (aten.pow.Scalar(0.001, torch.clamp_min(x, 0.5)), torch.clamp(x, -1.5, 2.25) * x),
        (_x(1, 11, 3, low=-100, high=100, dtype=torch.int8),),
        ("TOSA_INT8", "ETHOSU_U55_INT8"),
    ),
    Regression(
        "conv_transpose_groups_behind_slices",
        nn.ConvTranspose1d(3, 3, 1, stride=2, output_padding=1, groups=3),
        (_x(2, 3, 8),),
        ("ETHOSU_U55_INT8",),
    ),
    Regression(
        "input_detached_in_place",
        lambda x, y: (x.detach_().to(torch.int32), (y.detach_().add_(1) * 3).to(torch.int32)),
        (_x(7, low=-40, high=40), _x(7, low=-40, high=40)),
    ),
    Regression("pow_with_exponent_zero", torch.pow, (_x(2, 7, low=-0.3, high=0.6), _x(1, low=0, high=0)), _INT),
    Regression(
        "batch_norm_of_one_value",
        lambda x, y: aten._native_batch_norm_legit.no_stats(x, y, y, True, 0.1, 1e-3)[0],
        (_x(1, 5, 1), _x(5)),
    ),
    Regression(
        "fold_and_upsample_bicubic",
        lambda x: aten.upsample_bicubic2d.vec(F.fold(x, 2, 1), [5, 7], True, None),
        (_x(3, 2, 4),),
        ("ETHOSU_U85_INT8",),
    ),
    Regression("prelu_with_its_input_as_slope", lambda x: F.prelu(x, x), (_x(1),), _INT),
    Regression(
        "triangular_solve_of_batches",
        lambda b, c, a, d: (*aten.triangular_solve(b, a), *aten.triangular_solve(c, d, False, False, True)),
        (_x(3, 1, 2, 2), _x(2, 2), _x(2, 2, low=1), _x(3, 2, 2, low=1)),
        _FP,
    ),
    Regression(
        "triangular_solve_of_one_element", lambda b, a: aten.triangular_solve(b, a), (_x(4, 1, 1, 1), _x(1, 1, low=1))
    ),
    Regression(
        "unsafe_masked_index_negative",
        lambda x, mask, i: aten._unsafe_masked_index(x, mask, [i], 0.5),
        (_x(5), _x(9, dtype=torch.bool), _x(9, low=-9, high=9, dtype=torch.int64)),
    ),
    Regression(
        "unsafe_masked_index_empty",
        lambda x, mask, i: aten._unsafe_masked_index(x, mask, [i], 0.5),
        (_x(0), _x(4, dtype=torch.bool), _x(4, low=-9, high=9, dtype=torch.int64)),
    ),
    Regression(
        "histogram_weights_outside_of_the_bins",
        lambda x, y: (
            torch.histogram(x, torch.tensor([-2.0, 2.0]), weight=x)[0],
            torch.histogram(y, torch.tensor([-1.0, 0.5]), weight=torch.exp(y), density=True)[0],
        ),
        (Input((9, 7), -10000, 10000, special=(-math.inf, math.nan)), _x(144, low=-30, high=30)),
        _FP,
    ),
    Regression(
        "add_relu_of_integers_with_float_alpha",
        lambda x: (aten._add_relu(x, x, alpha=1.5), aten._add_relu(x, 3, -0.5), aten._add_relu(x, 2.5, 0.5)),
        (_x(5, 5, low=-50, high=50, dtype=torch.int8),),
    ),
    Regression(
        "scalars_beside_bfloat16",
        lambda x: (aten.xlogy(3.0, x), aten.xlogy(x[None], 2.5), torch.copysign(x, -2.5)),
        (_x(low=1, high=5, dtype=torch.bfloat16),),
        _FP,
    ),
    Regression(
        "order_of_equal_elements",
        lambda x, y: (x.relu().sort(-1)[1], x.relu().kthvalue(30, 1)[1], y.median(-1)[1], x.relu().topk(20, 0)[1]),
        (_x(70, 40), _x(9, 41, low=-3, high=3, dtype=torch.int32)),
        _FP,
    ),
    Regression(
        "rms_norm_of_half_precision",
        lambda x: F.rms_norm(x, (3,)),
        (_x(5, 6, 3, low=-0.05, high=0.05, dtype=torch.float16),),
        _FP,
    ),
    Regression(
        "cummax_indices",
        lambda x: torch.cummax(x, 0)[1],
        (_x(3, 1, 5),),
        ("ETHOSU_U85_INT8",),
    ),
    Regression(
        "softmax_of_col2im",
        lambda x: torch.softmax(aten.col2im(x, [5, 5], [1, 2], [2, 1], [0, 0], [2, 1]), 3),
        (_x(2, 8, 12, low=1, high=5),),
        ("ETHOSU_U85_INT8",),
    ),
    Regression("histc", lambda x: torch.histc(x, 5, -1, 2), (_x(30),), ("ETHOSU_U85_INT8",)),
    Regression("histogram_empty", lambda x: torch.histogram(x, 4), (_x(2, 0),), _FP),
    Regression(
        "product_beside_in_place_zero", lambda x, y: (x * y, y[0].zero_()), (_x(3, 4), _x(3, 1)), ("ETHOSU_U85_INT8",)
    ),
    Regression(
        "nll_loss_of_one_target_with_weights",
        lambda x, i: aten.nll_loss_forward(x, i, x, 0, -100)[0],
        (_x(2, low=0.5, high=2), Input((), 0, 2, torch.int64)),
        ("TOSA_FP", "TOSA_INT8"),
    ),
    Regression(
        "boolean_constants",
        lambda x: (aten.any(x[:1].fill_(1.5)), x[:, 0].zero_() > 0.1),
        (_x(5, 3),),
        ("ETHOSU_U55_INT8", "ETHOSU_U85_INT8"),
    ),
    Regression("remainder_far_below_its_divisor", lambda x: x % 3, (_x(40, low=1e-6, high=2e-6),), _INT),
    Regression(
        "einsum_of_views_of_an_input",
        lambda x: torch.einsum("bij,bkj->bik", x, x),
        (_x(9, 3, 2),),
        ("ETHOSU_U85_INT8",),
    ),
    Regression(
        "flash_attention_with_scale",
        lambda x: aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, False, scale=0.3),
        (_x(1, 5, 4, 12, low=-2, high=2),),
        ("ETHOSU_U55_INT8",),
    ),
    Regression(
        "masked_scatter",
        torch.masked_scatter,
        (_x(9, 10, 2), _x(9, 10, 2, dtype=torch.bool), _x(9, 10, 2)),
        ("ETHOSU_U65_INT8",),
    ),
    Regression(
        "softmax_and_prod_of_one_element",
        lambda x: (torch.softmax(x, 1), torch.prod(x, 1)),
        (_x(4, 1, 3),),
        ("TOSA_A16W8",),
    ),
    Regression(
        "remainder_of_large_quotients",
        torch.remainder,
        (_x(80, low=-1e4, high=1e4), _x(80, low=0.5, high=4)),
        ("TOSA_A16W8",),
    ),
    Regression("discontinuous_functions", _discontinuous_functions, (_x(300, low=-3.9, high=3.9),), _EVERY),
    Regression("hypot_of_booleans", torch.hypot, (_x(6, dtype=torch.bool), _x(6))),
    Regression(
        "remainders_of_small_numbers", torch.fmod, (_x(34, 34, low=-1, high=1), _x(34, 1, low=1e-4, high=2e-4)), _INT
    ),
    Regression(
        "product_of_a_slice_and_one_element",
        lambda x, y, z: (y * x[:1, :1, :2, :, 1:], x[:1, :1, 2:, :, 1:] - z),
        (_x(2, 1, 3, 1, 2, 1), _x(1, 1, 1, 1, 1, 1), _x(3, 1, 3, 1, 2, 1)),
        ("ETHOSU_U55_INT8",),
    ),
    Regression(
        "multilabel_margin_loss_beside_a_write",
        lambda x, i, y: (aten.multilabel_margin_loss_forward(x, torch.where(i > 2, -1, i), 2)[0], y[:1].fill_(3.0)),
        (_x(6, low=0.1, high=3), Input((6,), 0, 6, torch.int64), _x(2, 3)),
        _FP,
    ),
    Regression(
        "signbit_of_floor_division", lambda x: torch.signbit(x // -0.25), (Input((8,), 0, 3, special=(0.0,)),), _FP
    ),
    Regression(
        "gather_on_npus_without_gather",
        lambda x, i: (torch.gather(x, 1, i), x[:, i[0]], torch.gather(i * 70000, 1, i % 3), x[i[1] - 9]),
        (_x(9, 9), Input((2, 3), 0, 9, torch.int64)),
        (*_INT, "ETHOSU_U55_INT8", "ETHOSU_U65_INT8"),
    ),
    Regression(
        "conv_tbc_bias_of_another_dtype", aten.conv_tbc, (_x(5, 2, 4), _x(1, 4, 3), _x(3, dtype=torch.bfloat16)), _FP
    ),
    Regression(
        "fmod_of_an_rnn_cell",
        lambda x, h, w: torch.fmod(aten.rnn_tanh_cell(x, h, w, w[:, :4], None, None), -0.25),
        (_x(30, 6, low=-1, high=1), _x(30, 4, low=-1, high=1), _x(4, 6, low=-0.5, high=0.5)),
        ("TOSA_INT8", "ETHOSU_U85_INT8"),
    ),
    Regression("low_frequencies", _low_frequencies, (_x(2, 4, 16),)),
    Regression(
        "quantiles",
        lambda x: [
            torch.quantile(x, 0.3, 1, interpolation=way) for way in ("linear", "lower", "higher", "nearest", "midpoint")
        ],
        (_x(3, 8),),
    ),
    Regression("quantile_of_a_scalar", lambda x: torch.quantile(x, 0.3, 0, keepdim=True), (_x(),)),
    Regression(
        "einsum_of_einsum",
        lambda x: (lambda y: torch.einsum("bij,bkj->bik", y, y))(torch.einsum("bij,bkj->bik", x, x)),
        (_x(1, 7, 1),),
        ("ETHOSU_U55_INT8",),
    ),
    Regression(
        "quotient_of_where_of_scalars",
        lambda m, x: aten.where.Scalar(m, 0.001, 0) / (x.abs() + 0.5),
        (_x(1, dtype=torch.bool), _x(10, 5, 4)),
        ("ETHOSU_U55_INT8", "ETHOSU_U85_INT8"),
    ),
    Regression(
        "quantile_of_all", lambda x: (torch.quantile(x, 0.5), torch.quantile(x, 1.0, keepdim=True)), (_x(3, 4),)
    ),
    Regression(
        "nll_loss2d_of_ignored_infinities",
        lambda x, i: aten.nll_loss2d_forward(torch.where(x > 1, -math.inf, x), torch.where(i > 1, i, 0), None, 2, 0)[0],
        (_x(2, 6, 4, 3, low=-2, high=1.5), Input((2, 4, 3), 0, 3, torch.int64)),
        _FP,
    ),
    Regression("sort_of_booleans", lambda x: (x.sort()[0], x.sort(stable=True)), (_x(8, dtype=torch.bool),)),
    Regression(
        "multilabel_margin_loss_of_one_sample",
        lambda x, i: aten.multilabel_margin_loss_forward(x, i, 0)[1],
        (_x(13, low=0.1, high=3), Input((13,), -1, 13, torch.int64)),
        _FP,
    ),
    Regression("median_empty", aten.median.default, (_x(0, dtype=torch.int64),), ("TOSA_INT8",)),
    Regression("nanmedian_empty", aten.nanmedian.default, (_x(0, dtype=torch.int64),), ("TOSA_INT8",)),
    Regression(
        "divided_by_a_scalar",
        lambda x, y: x / (y.abs() + 0.5),
        (_x(1, 8, 7), _x()),
        ("ETHOSU_U55_A16W8", "ETHOSU_U85_A16W8"),
    ),
    Regression(
        "avg_pool_divisor_override",
        lambda x: aten.avg_pool2d(x, [4, 4], [3, 1], [1, 1], False, True, 3),
        (_x(1, 4, 4, low=-5000, high=5000),),
        ("TOSA_INT8", "ETHOSU_U55_INT8"),
    ),
    Regression("fitted_int16_table", lambda x: 37 / (x.abs() + 0.1), (_x(4096, low=-99, high=99),), ("TOSA_A16W8",)),
    Regression(
        "conv2d_of_padding_alone",
        lambda x, y: (aten.conv2d(x, torch.ones(3, 3, 1, 1), torch.ones(3), [3, 1], [2, 1], [1, 2], 1), y.exp()),
        (_x(3, 3, 1, 8), _x(4)),
        ("ETHOSU_U85_INT8", "ETHOSU_U85_A16W8"),
    ),
    Regression(
        "qr_of_one_row_with_infinity",
        lambda x: torch.linalg.qr(torch.cat([torch.where(x > 0, math.inf, x[:1]), x], -1))[1],
        (_x(3, 1, 1),),
        _FP,
    ),
    Regression("geqrf_of_one_row", aten.geqrf.default, (_x(2, 1, 3),)),
    Regression(
        "multi_margin_loss_of_one_sample",
        lambda x, i: aten.multi_margin_loss(x, i, 2, 0.5, x, 0),
        (_x(13), Input((1,), 0, 13, torch.int64)),
        _FP,
    ),
    # The CPU computes a product of atan2's decomposition. A division after it reads an int8 tensor of the delegate
    # before it.
    Regression(
        "atan2_in_two_delegates",
        lambda x: torch.atan2(torch.zeros(1, 1, 2), x),
        (_x(low=1e-6, high=2e-6),),
        ("TOSA_INT8", "ETHOSU_U55_INT8"),
    ),
    Regression(
        "conv_transpose1d_of_padding_beyond_the_kernel",
        lambda x: aten.conv_transpose1d(x, torch.ones(3, 1, 1), None, [1], [2], [0], 3, [2]),
        (_x(2, 3, 12),),
        ("TOSA_INT8", "CORTEX_M_INT8"),
    ),
    Regression(
        "avg_pool_of_windows_beyond_the_image",
        lambda x: aten.avg_pool2d(x, [4, 3], [], [0, 1], True, False),
        (_x(1, 1, 2),),
        ("TOSA_INT8", "CORTEX_M_INT8"),
    ),
    Regression(
        "max_pool_of_windows_beyond_the_image",
        lambda x: F.max_pool2d(x, [4, 3], padding=[0, 1], ceil_mode=True),
        (_x(1, 3, 2),),
        ("TOSA_INT8", "CORTEX_M_INT8"),
    ),
    Regression(
        "fmod_of_a_much_smaller_dividend",
        lambda x, y: (torch.fmod(x, y), torch.fmod(x.abs(), y), torch.remainder(x.abs(), y), torch.remainder(x, y)),
        (_x(1, 5, low=-2e-6, high=2e-6), _x(29, 1, low=99, high=101)),
        ("TOSA_INT8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8"),
    ),
    Regression(
        "sum_of_a_slice_that_broadcasts_both",
        lambda x, y: aten.add(y, x[4:5].permute(3, 2, 1, 0).unsqueeze(3).permute(4, 3, 2, 1, 0), alpha=2).relu().relu(),
        (_x(5, 2, 4, 3), _x(5, 2, 1, 4, 1, high=1.9947237968444824)),
        ("ETHOSU_U55_INT8", "ETHOSU_U65_INT8"),
    ),
]
