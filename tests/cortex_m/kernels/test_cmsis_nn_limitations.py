"""Arguments that CMSIS-NN does not compute correctly."""

from __future__ import annotations

from typing import Any

import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.targets.cortex_m import Isa

_ONE, _ZERO = [1, 1], [0, 0]


def _limitation(name: str, isa: Isa, *arguments: Any) -> str | None:
    return find_kernel(f"{name}_nhwc").find_limitation(isa, *arguments)


def test_grouped_convolutions_need_a_bias() -> None:
    for isa in Isa:
        shapes = (1, 8, 8, 6), (4, 3, 3, 3)
        assert "needs a bias" in (_limitation("quantized_conv2d", isa, *shapes, None, _ONE, _ZERO, _ONE) or "")
        assert _limitation("quantized_conv2d", isa, *shapes, (4,), _ONE, _ZERO, _ONE) is None


def test_convolution_of_too_many_products_per_result() -> None:
    arguments = (1, 2, 2, 20_000), (2, 2, 2, 20_000), None, _ONE, _ZERO, _ONE
    assert _limitation("quantized_conv2d", Isa.MVE, *arguments) is None
    assert _limitation("quantized_conv2d", Isa.DSP, *arguments) == "80000 products per result exceed 65535"


@pytest.mark.parametrize(
    ("width", "kernel", "stride", "padding", "is_correct"),
    [
        (9, 3, 1, [0, 1], True),
        (9, 3, 2, [0, 1], True),
        (8, 3, 2, [0, 1], False),  # the last window ends before the padding
        (8, 3, 2, [0, 0], False),
        (9, 3, 1, [1, 1], False),
        (9, 3, 1, [0, 2], True),
        (5, 3, 3, [0, 2], False),  # reads behind the row
        (9, 3, 2, [0, 3], True),
        (1, 3, 1, [1, 1], True),  # too narrow for the code of one row
    ],
)
def test_convolutions_of_one_row(width: int, kernel: int, stride: int, padding: list[int], is_correct: bool) -> None:
    arguments = (1, 1, width, 4), (5, 1, kernel, 4), (5,), [1, stride], padding, _ONE
    assert (_limitation("quantized_conv2d", Isa.MVE, *arguments) is None) == is_correct
    assert _limitation("quantized_conv2d", Isa.DSP, *arguments) is None


def test_depthwise_convolutions() -> None:
    rest = _ONE, _ZERO, _ONE, 1
    name = "quantized_depthwise_conv2d"
    assert _limitation(name, Isa.MVE, (1, 8, 8, 124), (1, 3, 3, 124), None, *rest) is None
    assert "needs a bias" in (_limitation(name, Isa.MVE, (1, 8, 8, 125), (1, 3, 3, 125), None, *rest) or "")
    assert _limitation(name, Isa.MVE, (1, 8, 8, 125), (1, 3, 3, 125), (125,), *rest) is None
    assert _limitation(name, Isa.DSP, (1, 8, 8, 125), (1, 3, 3, 125), None, *rest) is None
    # Large padding overflows a buffer, which only the code for the DSP extension has.
    for isa in Isa:
        padded = (1, 5, 5, 9), (1, 2, 3, 9), (9,), _ONE, [3, 0], _ONE, 1
        assert (_limitation(name, isa, *padded) is None) == (isa is not Isa.DSP)
        assert _limitation(name, isa, *padded[:4], [2, 5], _ONE, 1) is None
    # CMSIS-NN computes it as a convolution of one row.
    row = (1, 1, 8, 1), (1, 1, 3, 8), (8,), [1, 4], [0, 0], _ONE, 8
    assert "one row" in (_limitation(name, Isa.MVE, *row) or "")


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride", "padding", "output_padding", "is_correct"),
    [
        ((4, 4), 8, [3, 3], [2, 2], [1, 1], [1, 1], True),
        ((4, 4), 8, [3, 3], [2, 2], [1, 1], [0, 0], True),
        ((4, 4), 8, [2, 2], [2, 2], [0, 0], [0, 0], True),
        ((4, 4), 8, [3, 3], [2, 2], [0, 0], [1, 1], False),
        ((4, 4), 32, [3, 3], [2, 2], [0, 0], [1, 1], True),
        ((4, 4), 8, [1, 1], [2, 2], [0, 0], [0, 0], False),
        ((4, 4), 8, [3, 3], [2, 2], [2, 0], [0, 0], False),
        ((4, 4), 8, [3, 3], [2, 2], [0, 2], [0, 0], True),
        ((1, 4), 8, [5, 5], [1, 1], [2, 2], [0, 0], False),
        ((4, 4), 32, [2, 2], [1, 1], [2, 0], [0, 0], False),
    ],
)
def test_transposed_convolutions(
    size: tuple[int, int],
    channels: int,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    is_correct: bool,
) -> None:
    arguments = (1, *size, channels), (3, *kernel, channels), None, stride, padding, output_padding, _ONE
    assert (_limitation("quantized_transpose_conv2d", Isa.MVE, *arguments) is None) == is_correct
