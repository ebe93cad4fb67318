"""3D convolutions become 2D convolutions whose channels include the depth of the kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipe, export
from tests.cortex_m.lowering import Case, check, check_refused
from tests.sqnr import sqnr

_CONV, _DEPTHWISE = "1 quantized_conv2d_nhwc", "1 quantized_depthwise_conv2d_nhwc"


def _conv(
    name: str, shape: tuple[int, ...], *args: Any, kernels: str = _CONV, isa: str = "mve", **options: Any
) -> Case:
    return Case(f"{name} on {isa}", nn.Conv3d(*args, **options), [shape], kernels=kernels, isa=isa)


def _core(name: str, *shapes: tuple[int, ...], transposed: bool = False) -> Case:
    """The core ATen operator, with a constant weight of ones in steps."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shapes[1])).reshape(shapes[1]))

        def forward(self, x: Tensor) -> Tensor:
            ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)
            return torch.ops.aten.convolution(x, self.weight, None, ones, ones, ones, transposed, zeros, 1)

    return Case(f"core {name}", Convolution(), shapes[:1])


CASES = [
    *(_conv("cube", (1, 3, 5, 6, 7), 3, 5, 3, isa=isa) for isa in ("mve", "dsp", "scalar")),
    _conv("batch of 2", (2, 3, 5, 6, 7), 3, 5, 3, stride=2, padding=1),
    _conv("sizes differ", (2, 3, 6, 9, 8), 3, 4, (2, 3, 4), stride=(2, 3, 1), padding=(1, 0, 2)),
    _conv("unbatched", (3, 4, 5, 6), 3, 4, 2),
    _conv("one channel", (1, 1, 4, 5, 6), 1, 3, 3, padding=1, bias=False),
    _conv("one result", (1, 3, 3, 3, 3), 3, 4, 3),
    _conv("dilation", (1, 3, 7, 5, 6), 3, 4, (2, 3, 2), dilation=(3, 1, 2)),
    _conv("dilation and stride", (1, 3, 9, 5, 6), 3, 4, (3, 2, 2), dilation=(2, 1, 1), stride=(2, 1, 1), padding=1),
    _conv("same", (1, 3, 7, 5, 6), 3, 4, (2, 3, 4), padding="same"),
    _conv("valid", (1, 3, 7, 5, 6), 3, 4, (2, 3, 4), padding="valid"),
    _conv("groups", (1, 6, 4, 5, 6), 6, 9, (2, 3, 2), groups=3, padding=(1, 0, 1)),
    _conv("groups without bias, batch of 2", (2, 6, 4, 5, 6), 6, 4, 3, groups=2, padding=1, bias=False),
    _conv("depthwise", (1, 6, 4, 5, 6), 6, 6, 3, groups=6, padding=1, isa="dsp"),
    _conv("depthwise with multiplier", (1, 3, 4, 5, 6), 3, 6, 3, groups=3, stride=2),
    _conv("plane", (1, 3, 5, 6, 7), 3, 5, (1, 3, 3), padding=(0, 1, 1)),
    _conv("plane, stride", (1, 3, 5, 6, 7), 3, 5, (1, 3, 3), padding=1, stride=2),
    _conv("depth", (1, 3, 5, 6, 7), 3, 5, (3, 1, 1), padding=(1, 0, 0)),
    _conv("depth, stride and dilation", (2, 3, 9, 4, 3), 3, 5, (3, 1, 1), stride=(2, 1, 1), dilation=(2, 1, 1)),
    _conv("depth, depthwise", (1, 6, 7, 5, 6), 6, 6, (3, 1, 1), groups=6, kernels=_DEPTHWISE),
    _conv("depth with strides of planes", (1, 3, 5, 6, 7), 3, 5, (3, 1, 1), stride=2),
    _conv("point", (1, 3, 5, 6, 7), 3, 5, 1),
    _conv("point, stride", (1, 3, 5, 6, 7), 3, 5, 1, stride=2),
    _conv("images of one row", (1, 4, 4, 1, 8), 4, 4, (2, 1, 3), padding=(0, 0, 1)),
    Case("per tensor", nn.Conv3d(3, 4, 2), [(1, 3, 4, 5, 6)], kernels=_CONV, per_channel=False),
    Case("relu", nn.Sequential(nn.Conv3d(3, 4, 2), nn.ReLU()), [(1, 3, 4, 5, 6)], kernels=_CONV),
    Case("transposed", nn.ConvTranspose3d(3, 4, 3, stride=2, padding=1, output_padding=1), [(1, 3, 3, 4, 4)]),
    Case("transposed, groups", nn.ConvTranspose3d(4, 6, 2, stride=2, groups=2), [(1, 4, 3, 4, 4)]),
    _core("1d", (1, 3, 8), (4, 3, 3)),
    _core("2d", (1, 3, 8, 5), (4, 3, 3, 2)),
    _core("3d", (1, 3, 4, 4, 5), (4, 3, 2, 3, 2)),
    _core("2d transposed", (1, 3, 8, 5), (3, 4, 3, 2), transposed=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    lowered = check(case)
    lowered.check(case.sample(1), 1)


@pytest.mark.parametrize("name", ["sizes differ", "groups", "depth, stride and dilation", "plane, stride"])
def test_runtime(name: str) -> None:
    """ExecuTorch's runtime computes the same bits."""
    case = next(case for case in CASES if case.name == f"{name} on mve")
    check(case).check_executorch_run(case.sample())


def test_layout_between_convolutions() -> None:
    """Volumes stay in the order [N, D, H, W, C]: only the input and the result are transposed."""
    layers = nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 8, 2), nn.ReLU(), nn.Conv3d(8, 4, 1)
    check(Case("chain", nn.Sequential(*layers), [(1, 3, 4, 6, 5)], steps=2, kernels="2 transpose"))


class _VideoNetwork(nn.Sequential):
    """A small C3D: 3D convolutions with batch norms, 3D max pools, two linear layers."""

    def __init__(self) -> None:
        super().__init__(
            *_block(3, 4),
            nn.MaxPool3d((1, 2, 2)),
            *_block(4, 8),
            nn.MaxPool3d(2),
            *_block(8, 8),
            nn.MaxPool3d(2, ceil_mode=True),
            nn.Flatten(),
            nn.Linear(8 * 2 * 2 * 2, 16),
            nn.ReLU(),
            nn.Linear(16, 5),
        )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU()]


def test_network() -> None:
    """A whole network has no operator in floating point; the report has the products of its convolutions."""
    model, samples = _VideoNetwork().eval(), [(torch.randn(1, 3, 8, 16, 16),) for _ in range(8)]
    result = export(model, ArmRecipe.cortex_m(cpu="cortex-m55", require_full_delegation=True), samples)
    text = str(result.report)
    assert "5 x quantized_conv2d_nhwc" in text
    assert "5 x quantized_max_pool2d_nhwc" in text
    assert "2 x transpose" in text  # of the input, and before the linear layers
    macs = {layer.module: layer.macs for layer in result.report.layers}
    assert [macs[name] for name in "048"] == [663_552, 442_368, 110_592]  # results * inputs * 27
    with torch.no_grad():
        assert sqnr([model(*samples[0])], [result.run(*samples[0])]) > 25


def test_refusal() -> None:
    """CMSIS-NN counts the products of a result in 16 bits; the reason names their number, with the kernel's depth."""
    case = Case("", nn.Conv3d(8193, 1, 2), [(1, 8193, 2, 2, 2)], isa="scalar")
    check_refused(case, "65544 products per result exceed 65535")
