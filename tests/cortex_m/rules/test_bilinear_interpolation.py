"""Bilinear interpolation becomes depthwise convolutions or matrix products with exact weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tests.cortex_m.lowering import Case, Shape, check, check_refused

_DEPTHWISE, _MATMUL = "quantized_depthwise_conv2d_nhwc", "quantized_batch_matmul"


class _Bilinear(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, mode="bilinear", **self.options)


def _case(kernels: str, shape: Shape = (1, 3, 4, 5), isa: str = "mve", **options: Any) -> Case:
    name = f"{options} of {shape} on {isa}"
    return Case(name, _Bilinear(**options), [shape], kernels=kernels, isa=isa)


CASES = [
    _case(f"4 {_DEPTHWISE}", scale_factor=2),
    _case(f"4 {_DEPTHWISE}", scale_factor=2, isa="dsp"),
    _case(f"4 {_DEPTHWISE}", scale_factor=2, isa="scalar"),
    _case("4 quantized_conv2d_nhwc", (2, 3, 4, 5), scale_factor=2),
    _case(f"6 {_DEPTHWISE}", scale_factor=3),
    _case(f"8 {_DEPTHWISE}", scale_factor=4),
    _case(f"5 {_DEPTHWISE}", scale_factor=(2, 3)),
    _case(f"2 {_DEPTHWISE}, 1 {_MATMUL}", size=(3, 10)),
    _case(f"2 {_MATMUL}", scale_factor=2, align_corners=True),
    _case(f"2 {_MATMUL}", (2, 3, 3, 4), scale_factor=2, align_corners=True),
    _case(f"2 {_MATMUL}", size=(7, 9)),
    _case(f"2 {_MATMUL}", scale_factor=1.5),
    _case(f"2 {_MATMUL}", scale_factor=0.5),
    _case(f"2 {_MATMUL}", (1, 3, 1, 2), scale_factor=2),
    _case(f"1 {_MATMUL}", (1, 3, 4, 5), size=(4, 9), align_corners=True),
    _case("", (1, 3, 4, 5), size=(4, 5)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    lowered = check(case)
    for seed in range(1, 6):
        lowered.check(case.sample(seed), 1)
    lowered.check_executorch_run(case.sample(1))


def test_between_convolutions() -> None:
    """A decoder's block: the image stays in the order [N, H, W, C]."""
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), _Bilinear(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1))
    check(
        Case("decoder", model, [(1, 4, 6, 5)], kernels=f"4 {_DEPTHWISE}, 2 quantized_conv2d_nhwc, 2 transpose", steps=2)
    )


def test_weights_without_a_small_denominator_are_refused() -> None:
    case = _case("", (1, 2, 64, 3), size=(131, 3), align_corners=True)
    check_refused(case, "no common denominator of up to 127")
