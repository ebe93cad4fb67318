"""Convolutions, transposed convolutions, linear layers and matrix products become kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cortex_m.lowering import Case, check, check_refused

_F = nn.functional
_CONV, _DEPTHWISE = "quantized_conv2d_nhwc", "quantized_depthwise_conv2d_nhwc"


def _conv1d(name: str, shape: tuple[int, ...], *args: Any, isa: str = "mve", kernels: str = "", **options: Any) -> Case:
    return Case(f"conv1d {name}", nn.Conv1d(*args, **options), [shape], isa=isa, kernels=kernels)


def _conv2d(name: str, shape: tuple[int, ...], *args: Any, isa: str = "mve", kernels: str = "", **options: Any) -> Case:
    return Case(f"conv2d {name}", nn.Conv2d(*args, **options), [shape], isa=isa, kernels=kernels)


def _transposed(name: str, shape: tuple[int, ...], *args: Any, **options: Any) -> Case:
    layer: Any = nn.ConvTranspose1d if name.startswith("1d") else nn.ConvTranspose2d
    return Case(f"transposed {name}", layer(*args, **options), [shape], kernels="quantized_transpose_conv2d_nhwc")


def _upsampled(name: str, *arguments: Any, **options: Any) -> Case:
    """A transposed convolution that its kernel cannot compute."""
    return replace(_transposed(name, *arguments, **options), kernels="0 quantized_transpose_conv2d_nhwc, pad")


CONVOLUTIONS = [
    _conv2d("square", (1, 3, 7, 6), 3, 5, 3, kernels=f"1 {_CONV}"),
    _conv2d("batch of 2", (2, 3, 7, 6), 3, 5, 3, stride=2, padding=1, kernels=f"1 {_CONV}"),
    _conv2d("one pixel", (1, 4, 1, 1), 4, 3, 1),
    _conv2d("one channel", (1, 1, 5, 4), 1, 1, 3, padding=1),
    _conv2d("one channel to many", (1, 1, 5, 4), 1, 6, (3, 2), padding=1),
    _conv2d("without bias", (1, 3, 6, 6), 3, 4, 3, bias=False),
    _conv2d("rows", (1, 3, 1, 9), 3, 4, (1, 3), padding=(0, 1)),
    _conv2d("rows with stride", (1, 3, 1, 8), 3, 4, (1, 3), stride=2, padding=(0, 1)),
    _conv2d("columns", (1, 3, 9, 1), 3, 4, (3, 1), stride=2, padding=(1, 0)),
    _conv2d("dilation", (1, 3, 11, 9), 3, 4, 3, dilation=(2, 3), padding=2),
    _conv2d("groups", (1, 6, 7, 6), 6, 9, 3, groups=3, padding=1, kernels=f"1 {_CONV}"),
    _conv2d("groups without bias", (1, 6, 7, 6), 6, 9, 3, groups=3, bias=False),
    _conv2d("groups, batch of 2", (2, 6, 5, 6), 6, 4, 3, groups=2),
    _conv2d("depthwise", (1, 6, 7, 6), 6, 6, 3, groups=6, padding=1, kernels=f"1 {_DEPTHWISE}"),
    _conv2d("depthwise, multiplier", (1, 3, 7, 6), 3, 6, 3, groups=3, stride=2, kernels=f"1 {_DEPTHWISE}"),
    _conv2d("depthwise, batch of 2", (2, 3, 7, 6), 3, 6, 3, groups=3, kernels=f"1 {_CONV}"),
    _conv2d("depthwise, dilation", (1, 4, 9, 8), 4, 4, 3, groups=4, dilation=2),
    _conv2d("same", (1, 3, 6, 7), 3, 4, (2, 4), padding="same", kernels=f"1 pad, 1 {_CONV}"),
    _conv2d("same, odd", (1, 3, 6, 7), 3, 4, (3, 5), padding="same", kernels=f"0 pad, 1 {_CONV}"),
    _conv2d("same, dilation", (1, 3, 9, 7), 3, 4, (2, 3), dilation=(3, 2), padding="same"),
    _conv2d("valid", (1, 3, 6, 7), 3, 4, (2, 4), padding="valid"),
    _conv2d("pixels with stride", (1, 5, 7, 6), 5, 4, 1, stride=2),
    _conv2d("padding exceeds kernel", (1, 2, 4, 4), 2, 3, 2, padding=3),
    *(_conv2d(f"on {isa}", (1, 3, 7, 6), 3, 5, 3, padding=1, isa=isa) for isa in ("dsp", "scalar")),
    *(_conv2d(f"depthwise on {isa}", (1, 5, 7, 6), 5, 5, 3, groups=5, padding=1, isa=isa) for isa in ("dsp", "scalar")),
    _conv2d("depthwise, much padding", (1, 2, 4, 4), 2, 2, 2, groups=2, padding=3, isa="dsp", kernels="1 pad"),
    _conv2d("unbatched", (3, 6, 5), 3, 4, 3),
    _conv1d("unbatched", (4, 9), 4, 6, 3, stride=2),
    _conv1d("k3", (1, 4, 9), 4, 6, 3, padding=1),
    _conv1d("k1", (1, 4, 9), 4, 6, 1),
    _conv1d("length 1", (1, 4, 1), 4, 6, 1),
    _conv1d("length 1, k3", (1, 4, 1), 4, 6, 3, padding=1),
    *(
        _conv1d(f"k{k} s{s} p{p} l{length} on {isa}", (1, 4, length), 4, 6, k, stride=s, padding=p, isa=isa)
        for k, s, p, length, isa in [
            (3, 2, 1, 12, "mve"),
            (3, 2, 1, 11, "mve"),
            (5, 3, 2, 17, "mve"),
            (3, 2, 1, 12, "dsp"),
            (4, 2, 3, 16, "mve"),
            (8, 2, 2, 41, "mve"),
            (3, 3, 1, 10, "scalar"),
            (7, 1, 3, 30, "mve"),
        ]
    ),
    _conv1d("batch of 2", (2, 4, 9), 4, 6, 3, stride=2, padding=1),
    _conv1d("dilation", (1, 4, 16), 4, 6, 3, dilation=4, padding=4),
    _conv1d("same, even", (1, 4, 9), 4, 6, 4, padding="same"),
    _conv1d("same, dilation", (1, 4, 9), 4, 6, 3, padding="same", dilation=2),
    _conv1d("groups", (1, 4, 12), 4, 6, 3, groups=2, stride=2, padding=1),
    _conv1d("depthwise", (1, 4, 12), 4, 4, 3, groups=4, padding=1),
    _conv1d("depthwise, stride", (1, 4, 12), 4, 8, 5, groups=4, padding=2, stride=2),
]

TRANSPOSED = [
    _transposed("k2 s2", (1, 4, 3, 5), 4, 3, 2, stride=2),
    _transposed("k3 s2 p1 o1", (1, 4, 3, 5), 4, 3, 3, stride=2, padding=1, output_padding=1),
    _transposed("k3 s2 p1", (1, 4, 4, 5), 4, 3, 3, stride=2, padding=1),
    _transposed("k4 s2 p1", (2, 3, 4, 4), 3, 5, 4, stride=2, padding=1),
    _transposed("k3 s1 p1", (1, 4, 5, 4), 4, 3, 3, padding=1),
    _transposed("k3 s1 p2", (1, 4, 5, 4), 4, 3, 3, padding=2),
    _transposed("k2x3 s1x2", (1, 2, 4, 3), 2, 3, (2, 3), stride=(1, 2), padding=(0, 1), output_padding=(0, 1)),
    _upsampled("k1 s2", (1, 2, 3, 3), 2, 3, 1, stride=2),
    _transposed("k1 s3 o2", (1, 2, 3, 3), 2, 3, 1, stride=3, output_padding=2),
    _transposed("k5 s3 p2", (1, 2, 4, 3), 2, 3, 5, stride=3, padding=2),
    _upsampled("k5 s3 p3", (1, 2, 4, 3), 2, 3, 5, stride=3, padding=3),
    _transposed("k5 s3 p4 o2", (1, 2, 4, 3), 2, 3, 5, stride=3, padding=4, output_padding=2),
    _upsampled("k4 s4 p3 without bias", (1, 2, 4, 3), 2, 3, 4, stride=4, padding=3, bias=False),
    _transposed("20 channels", (1, 20, 3, 4), 20, 3, 3, stride=2, padding=1),
    _transposed("unbatched", (4, 3, 4), 4, 3, 3, stride=2, padding=1),
    _transposed("one pixel", (1, 4, 1, 1), 4, 3, 4),
    _transposed("1d k4 s2 p1", (1, 4, 7), 4, 3, 4, stride=2, padding=1),
    _transposed("1d k3 s2 p1 o1", (2, 4, 5), 4, 3, 3, stride=2, padding=1, output_padding=1),
    _transposed("1d k16 s8 p4", (1, 4, 5), 4, 3, 16, stride=8, padding=4),
    _transposed("1d s1", (1, 4, 5), 4, 3, 3),
    _upsampled("groups", (1, 4, 3, 5), 4, 6, 3, stride=2, groups=2),
    _upsampled("depthwise", (1, 4, 3, 5), 4, 4, 3, stride=2, groups=4),
    _upsampled("dilation", (1, 4, 3, 5), 4, 6, 3, stride=2, dilation=2),
]


def _linear(
    name: str, shape: tuple[int, ...], *sizes: int, isa: str = "mve", per_channel: bool = True, bias: bool = True
) -> Case:
    kernels = "1 quantized_conv2d_nhwc" if per_channel else "1 quantized_linear"
    return Case(
        f"linear {name}",
        nn.Linear(sizes[0], sizes[1], bias),
        [shape],
        isa=isa,
        per_channel=per_channel,
        kernels=kernels,
    )


LINEAR = [
    _linear("rank 1", (5,), 5, 4),
    _linear("rank 2", (1, 5), 5, 4),
    _linear("batch of 3", (3, 5), 5, 4),
    _linear("rank 3", (2, 3, 5), 5, 4),
    _linear("rank 4", (2, 3, 2, 5), 5, 4),
    _linear("rank 5", (2, 3, 2, 2, 5), 5, 4),
    Case("linear one feature", nn.Linear(1, 1), [(4, 1)], kernels="1 quantized_linear"),
    _linear("without bias", (3, 5), 5, 4, bias=False),
    *(_linear(f"per tensor on {isa}", (3, 5), 5, 4, isa=isa, per_channel=False) for isa in ("mve", "dsp", "scalar")),
    *(
        _linear(f"per tensor without bias on {isa}", (2, 3, 5), 5, 4, isa=isa, per_channel=False, bias=False)
        for isa in ("mve", "dsp")
    ),
    _linear("per tensor, rank 1", (5,), 5, 4, per_channel=False),
    Case("linear after transpose", nn.Sequential(nn.Conv1d(4, 6, 3), nn.Flatten(1), nn.Linear(30, 3)), [(1, 4, 7)]),
    Case("conv, per tensor", nn.Conv2d(3, 4, 3), [(1, 3, 5, 5)], per_channel=False),
]


def _product(name: str, *shapes: tuple[int, ...], function: Any = torch.matmul) -> Case:
    return Case(f"matmul {name}", function, list(shapes), kernels="1 quantized_batch_matmul")


PRODUCTS = [
    _product("rank 2", (3, 5), (5, 4)),
    _product("rank 3", (2, 3, 5), (2, 5, 4)),
    _product("rank 4", (2, 3, 4, 5), (2, 3, 5, 1)),
    _product("rank 5", (1, 2, 3, 4, 5), (1, 2, 3, 5, 2)),
    _product("broadcast batch", (2, 3, 4, 5), (5, 2)),
    _product("broadcast both", (2, 1, 4, 5), (3, 5, 2)),
    _product("depth 1", (3, 1), (1, 4)),
    _product("bmm", (2, 3, 5), (2, 5, 4), function=torch.bmm),
    _product("mm", (3, 5), (5, 4), function=torch.mm),
    _product("second transposed", (2, 3, 5), (2, 4, 5), function=lambda x, y: x @ y.mT),
    _product("with itself", (3, 3), function=lambda x: x @ x),
    _product("relu", (3, 5), (5, 4), function=lambda x, y: torch.relu(x @ y)),
    _product("vector", (3, 5), (5,)),
    _product("dot", (5,), (5,)),
    _product("row", (5,), (5, 3)),
    _product("addmm", (3, 4), (3, 5), (5, 4), function=torch.addmm),
    _product("einsum", (2, 3, 5), (2, 4, 5), function=lambda x, y: torch.einsum("bik,bjk->bij", x, y)),
]


class _Fused(nn.Module):
    """A convolution with functions behind it that its kernel computes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


_FUSED = {
    "relu": torch.relu,
    "relu6": _F.relu6,
    "hardtanh": lambda x: _F.hardtanh(x, -0.3, 0.4),
    "clamp above": lambda x: x.clamp(max=0.25),
    "clamp twice": lambda x: x.clamp(min=-0.5).clamp(max=0.25),
    "times a number": lambda x: x * 3.5,
    "times a negative number": lambda x: x * -2.0,
    "divided": lambda x: x / 4,
    "relu, scaled": lambda x: torch.relu(x) * 0.5,
    "scaled, relu": lambda x: torch.relu(x * 0.5),
    "negative, relu": lambda x: torch.relu(x * -0.5),
    "relu, negative": lambda x: torch.relu(x) * -0.5,
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "gelu": _F.gelu,
    "hardswish": _F.hardswish,
    "leaky": lambda x: _F.leaky_relu(x, 0.1),
    "two readers": lambda x: (torch.relu(x), x * 2, x),
    "times zero": lambda x: x * 0.0,
}
#: The quantized graph rounds the product, with steps twice as large as those of the result. The kernel does not.
_TWO_STEPS = ("scaled, relu", "negative, relu")
FUSED = [
    Case(f"conv {name}", _Fused(function), [(1, 3, 4, 5)], steps=1 + (name in _TWO_STEPS))
    for name, function in _FUSED.items()
]


@pytest.mark.parametrize("case", [*CONVOLUTIONS, *TRANSPOSED, *LINEAR, *PRODUCTS, *FUSED], ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    check(case)


REFUSALS = {
    "a convolution of 65,536 products without MVE": (
        Case("", nn.Conv2d(16385, 1, 2), [(1, 16385, 2, 2)], isa="scalar"),
        "65540 products per result exceed 65535",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check_refused(*REFUSALS[name])
