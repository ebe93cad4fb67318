"""Sizes of scratch memory that CMSIS-NN, compiled for each instruction set, asks for."""

from __future__ import annotations

import pytest

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.targets.cortex_m import Isa

_ONE = [1, 1]
#: Arguments after the bias of a convolution: stride, padding, dilation.
_PLAIN = (_ONE, [0, 0], _ONE)

ROWS = [
    ("quantized_conv2d_nhwc", ((1, 8, 8, 3), (4, 3, 3, 3), None, _ONE, _ONE, _ONE), [(112,), (112,), (128,)]),
    ("quantized_conv2d_nhwc", ((1, 8, 8, 3), (4, 1, 1, 3), None, *_PLAIN), [(0,), (0,), (0,)]),
    ("quantized_conv2d_nhwc", ((1, 8, 8, 3), (4, 1, 1, 3), None, _ONE, _ONE, _ONE), [(16,), (16,), (64,)]),
    ("quantized_conv2d_nhwc", ((1, 1, 9, 4), (4, 1, 3, 4), None, _ONE, [0, 1], _ONE), [(48,), (48,), (16,)]),
    ("quantized_conv2d_nhwc", ((1, 1, 2, 4), (4, 1, 3, 4), None, _ONE, [0, 2], _ONE), [(48,), (48,), (20,)]),
    ("quantized_conv2d_nhwc", ((1, 1, 1, 4), (4, 1, 3, 4), None, _ONE, [0, 1], _ONE), [(48,), (48,), (64,)]),
    ("quantized_depthwise_conv2d_nhwc", ((1, 8, 8, 6), (1, 3, 3, 6), None, *_PLAIN), [(0,), (0,), (4464,)]),
    ("quantized_depthwise_conv2d_nhwc", ((1, 8, 8, 6), (1, 3, 2, 6), None, *_PLAIN), [(0,), (72,), (2976,)]),
    ("quantized_depthwise_conv2d_nhwc", ((1, 8, 8, 6), (1, 3, 2, 12), None, *_PLAIN), [(0,), (0,), (0,)]),
    ("quantized_depthwise_conv2d_nhwc", ((1, 8, 8, 1), (1, 3, 2, 5), None, *_PLAIN), [(0,), (0,), (94,)]),
    (
        "quantized_transpose_conv2d_nhwc",
        ((1, 3, 1, 9), (5, 3, 3, 9), None, [2, 2], [0, 0], [0, 1]),
        [(180, 0), (180, 0), (180, 0)],
    ),
    (
        "quantized_transpose_conv2d_nhwc",
        ((1, 1, 6, 21), (1, 4, 2, 21), None, [2, 1], [1, 1], [0, 0]),
        [(672, 168), (672, 168), (704, 168)],
    ),
    ("quantized_batch_matmul", ((2, 3, 4), 0, (2, 5, 4), 0), [(0,), (0,), (20,)]),
]


@pytest.mark.parametrize(("name", "arguments", "sizes"), ROWS)
def test_scratch_sizes_by_instruction_set(
    name: str, arguments: tuple[object, ...], sizes: list[tuple[int, ...]]
) -> None:
    kernel = find_kernel(name)
    assert [kernel.scratch_bytes(isa, *arguments) for isa in (Isa.SCALAR, Isa.DSP, Isa.MVE)] == sizes


def test_scratch_sizes_do_not_depend_on_the_layout() -> None:
    rest = ((4, 3, 3, 3), None, _ONE, _ONE, _ONE)
    contiguous = find_kernel("quantized_conv2d_nhwc").scratch_bytes(Isa.MVE, (2, 8, 9, 3), *rest)
    assert find_kernel("quantized_conv2d").scratch_bytes(Isa.MVE, (2, 3, 8, 9), *rest) == contiguous
