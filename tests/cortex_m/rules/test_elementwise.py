"""Arithmetic of two tensors becomes kernels: broadcasting, shared operands, constants and fused activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cortex_m.lowering import Case, Shape, check, check_refused

_F = nn.functional

_SHAPES: dict[str, tuple[Shape, Shape]] = {
    "equal": ((2, 3, 4), (2, 3, 4)),
    "rank 0": ((), ()),
    "rank 1": ((5,), (5,)),
    "one element": ((2, 3, 4), (1,)),
    "one element first": ((1, 1), (2, 3, 4)),
    "rank 0 and 3": ((), (2, 3, 4)),
    "channel": ((1, 3, 4, 5), (3, 1, 1)),
    "channel, batch": ((2, 3, 4, 5), (1, 3, 1, 1)),
    "trailing": ((2, 3, 4), (4,)),
    "trailing first": ((4,), (2, 3, 4)),
    "two trailing": ((2, 3, 4), (3, 4)),
    "leading": ((2, 3, 4), (2, 1, 1)),
    "middle": ((2, 3, 4), (2, 1, 4)),
    "both": ((3, 1), (1, 4)),
    "both, rank 4": ((1, 3, 1, 5), (2, 1, 4, 1)),
    "rows": ((1, 3, 4, 5), (1, 3, 1, 5)),
    "batch": ((2, 3, 4, 5), (1, 3, 4, 5)),
    "rank 5": ((1, 2, 3, 4, 2), (2, 1, 4, 2)),
    "rank 5, trailing": ((2, 2, 3, 4, 2), (2,)),
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 0.5),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}
BROADCAST = [
    Case(f"{operator} {name}", function, shapes, steps=2 if operator == "div" else 1)
    for operator, function in _OPERATORS.items()
    for name, shapes in _SHAPES.items()
]


class _WithConstant(nn.Module):
    """A function of the input and a constant tensor."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("constant", torch.linspace(0.2, 1.7, torch.Size(shape).numel()).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.constant)


CONSTANTS = [
    Case(f"{operator} constant {shape}", _WithConstant(function, *shape), [(2, 3, 4)])
    for operator, function in {
        **_OPERATORS,
        "div": torch.div,
        "rsub": lambda x, c: c - x,
        "rdiv": lambda x, c: c / (x.abs() + 1),
    }.items()
    for shape in ((), (4,), (3, 1), (2, 3, 4))
]

OTHERS = [
    Case("sub with alpha", lambda x, y: torch.sub(x, y, alpha=2.5), [(2, 3), (2, 3)]),
    Case("add with negative alpha", lambda x, y: torch.add(x, y, alpha=-0.5), [(2, 3), (2, 3)]),
    Case("add with alpha 0", lambda x, y: torch.add(x, y, alpha=0), [(2, 3), (2, 3)]),
    Case("add alpha 1000", lambda x, y: torch.add(x, y, alpha=1000), [(2, 3), (2, 3)]),
    Case("add alpha 1e-6", lambda x, y: torch.add(x, y, alpha=1e-6), [(2, 3), (2, 3)]),
    Case("rsub", lambda x: torch.rsub(x, 1.5), [(2, 3)], kernels="1 quantized_activation"),
    Case("with itself", lambda x: x + x, [(2, 3)]),
    Case("product with itself", lambda x: x * x, [(2, 3)], kernels="1 quantized_activation"),
    Case("minimum with itself", lambda x: torch.minimum(x, x), [(2, 3)]),
    Case("with its function", lambda x: x * torch.sigmoid(x), [(2, 3)], kernels="1 quantized_activation"),
    Case("with its mirror", lambda x: x + x.flip(0), [(2, 3)], kernels="1 quantized_add"),
    Case("with its transpose", lambda x: x + x.T, [(3, 3)], kernels="1 quantized_add"),
    Case("channels last", torch.add, [(2, 3, 4, 5), (2, 3, 4, 5)], channels_last=True),
    Case("scaled channels", lambda x, y: _F.conv2d(x, torch.ones(4, 3, 1, 1)) * y, [(1, 3, 4, 5), (1, 4, 1, 1)]),
    Case("gate", lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), [(2, 3, 4, 5)]),
    Case("relu", lambda x, y: torch.relu(x + y), [(2, 3), (2, 3)], kernels="1 quantized_add, 0 quantized_activation"),
    Case("relu6 of product", lambda x, y: _F.relu6(x * y), [(2, 3), (2, 3)], kernels="1 quantized_mul"),
    Case("hardtanh of quotient", lambda x, y: _F.hardtanh(x / (y.abs() + 1), -0.2, 0.3), [(2, 3), (2, 3)], steps=2),
    Case("relu of maximum", lambda x, y: torch.relu(torch.maximum(x, y)), [(2, 3), (2, 3)]),
    Case("sum times a number", lambda x, y: (x + y) * 0.25, [(2, 3), (2, 3)], kernels="1 quantized_add"),
    Case("mean of two", lambda x, y: torch.clamp((x + y) / 2, -0.5, 0.5), [(2, 3), (2, 3)], kernels="1 quantized_add"),
    Case("sub, negated", lambda x, y: -(x - y), [(2, 3), (2, 3)]),
    Case("three readers", lambda x, y: ((x + y).relu(), (x + y) * 3, torch.tanh(x + y)), [(2, 3), (2, 3)]),
    Case("one sum, three readers", lambda x, y: (lambda z: (z.relu(), z * 3, torch.tanh(z)))(x + y), [(2, 3), (2, 3)]),
    Case("returned twice", lambda x, y: (lambda z: (z, z, z.T))(x * y), [(2, 3), (2, 3)]),
    Case("distance", lambda x, y: ((x - y) ** 2), [(2, 3), (2, 3)], kernels="1 quantized_add, 1 quantized_activation"),
    Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), [(2, 3), (2, 3), (2, 3)]),
    Case("hypot", lambda x, y: torch.sqrt(x * x + y * y), [(2, 3), (2, 3)]),
    Case("amax", lambda x: x.amax(1), [(2, 3)]),
    Case("large quotient", torch.div, [(2, 3), (2, 3)], low=0.001, steps=2),
    Case("negative factor", lambda x, y: (x + y) * -1.5, [(2, 3), (2, 3)]),
    *(Case(f"{name} on {isa}", function, [(2, 3), (3,)], isa=isa, steps=2 if name == "div" else 1)
      for name, function in _OPERATORS.items() for isa in ("dsp", "scalar")),
]  # fmt: skip


def _prelu(*slopes: float) -> nn.PReLU:
    layer = nn.PReLU(len(slopes))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(slopes))
    return layer


_TWO_PRODUCTS = "2 quantized_activation, 1 quantized_mul, 1 quantized_add"
PRELU = [
    Case("one slope", _prelu(0.3), [(1, 5, 3, 4)], kernels="1 quantized_activation"),
    Case("slopes up to 1", _prelu(0.1, 0.3, 0.5, 1.0, 0.0), [(1, 5, 3, 4)], kernels="1 quantized_mul, 1 maximum"),
    Case("other slopes", _prelu(0.1, 0.3, -0.5, 1.5, 0.0), [(1, 5, 3, 4)], kernels=_TWO_PRODUCTS),
    Case("other slopes, dsp", _prelu(0.1, 0.3, -0.5, 1.5, 0.0), [(2, 5, 3, 4)], kernels=_TWO_PRODUCTS, isa="dsp"),
    Case("slopes of a matrix", _prelu(0.1, 0.3, -0.5, 1.5, 0.0), [(3, 5)], kernels=_TWO_PRODUCTS),
    Case("slopes of rows", _prelu(0.1, 0.3, 0.25), [(2, 3, 5)], kernels="1 quantized_mul, 1 maximum"),
    Case("negative numbers only", _prelu(0.1, 0.9), [(1, 2, 3, 4)], low=-3.0, high=-1.0),
    Case("between convolutions", nn.Sequential(nn.Conv2d(3, 5, 1), _prelu(0.1, 0.3, 0.2, 0.7, 0.0), nn.Conv2d(5, 2, 1)),
         [(1, 3, 4, 5)], steps=2, kernels="2 quantized_conv2d_nhwc, 2 transpose"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*BROADCAST, *CONSTANTS, *OTHERS, *PRELU], ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    check(case)


REFUSALS = {
    "a power of two tensors": (
        Case("", lambda x, y: torch.pow(x.abs() + 1, y), [(2, 3), (2, 3)]),
        "pow.Tensor_Tensor combines 2 tensors, for which there is no kernel",
    ),
    "a rounded quotient": (
        Case("", lambda x, y: torch.div(x, y.abs() + 1, rounding_mode="floor"), [(2, 3), (2, 3)]),
        "div.Tensor_mode combines 2 tensors",
    ),
    "a cast of a comparison": (
        Case("", lambda x, y: (x > y).float() * x, [(2, 3), (2, 3)]),
        "there is no int8 kernel for aten.to.dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    check_refused(*REFUSALS[name])
