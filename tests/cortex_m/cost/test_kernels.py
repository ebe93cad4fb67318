"""Instructions of kernels: the formulas beside counts of executed instructions, and a formula for each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from arm_backend_core.cortex_m.catalog import KERNELS
from arm_backend_core.cortex_m.cost import instructions, kernels
from arm_backend_core.cortex_m.cost.kernels import kernel_work
from arm_backend_core.targets.cortex_m import Processor

#: Processors whose code was executed: Cortex-M4, M3, M0 and M55.
PROCESSORS = tuple(map(Processor.resolve, ("cortex-m4", "cortex-m3", "cortex-m0", "cortex-m55")))


class Case(NamedTuple):
    """A kernel call with the instructions that QEMU counted on each of ``PROCESSORS`` (CMSIS-NN 7, GCC 12.2)."""

    kernel: str
    arguments: Sequence[Any]
    counts: tuple[int, int, int, int]
    macs: int


def conv(size: int, inputs: int, outputs: int, window: int, stride: int, padding: int) -> list[Any]:
    """Arguments of a convolution of a square image."""
    weight = (outputs, window, window, inputs)
    return [(1, size, size, inputs), weight, (outputs,), (stride, stride), (padding, padding), (1, 1)]


def depthwise(size: int, channels: int, window: int, stride: int, padding: int, multiplier: int = 1) -> list[Any]:
    """Arguments of a depthwise convolution of a square image."""
    *first, dilation = conv(size, channels, 1, window, stride, padding)
    first[1] = (1, window, window, channels * multiplier)
    return [*first, dilation, multiplier]


CASES = {
    "1x1 convolution": Case(
        "quantized_conv2d_nhwc", conv(12, 64, 32, 1, 1, 0), (613400, 913400, 2226120, 116875), 144 * 32 * 64
    ),
    "1x1 convolution of few channels": Case(
        "quantized_conv2d_nhwc", conv(12, 16, 32, 1, 1, 0), (294320, 355720, 894840, 78844), 144 * 32 * 16
    ),
    "1x1 convolution of one pixel": Case(
        "quantized_conv2d_nhwc", conv(1, 128, 64, 1, 1, 0), (44280, 57400, 94280, 4406), 128 * 64
    ),
    "first convolution": Case(
        "quantized_conv2d_nhwc", conv(16, 3, 16, 3, 1, 1), (534080, 602960, 1294080, 149906), 256 * 16 * 27
    ),
    "3x3 convolution": Case(
        "quantized_conv2d_nhwc", conv(16, 32, 32, 3, 1, 1), (4542320, 6771400, 15817160, 596969), 256 * 32 * 288
    ),
    "3x3 convolution with stride": Case(
        "quantized_conv2d_nhwc", conv(17, 16, 32, 3, 2, 1), (803600, 1155000, 2694880, 123781), 81 * 32 * 144
    ),
    "5x5 convolution": Case(
        "quantized_conv2d_nhwc", conv(16, 8, 16, 5, 1, 2), (1942840, 2769720, 6272480, 341812), 256 * 16 * 200
    ),
    "3x3 depthwise": Case(
        "quantized_depthwise_conv2d_nhwc", depthwise(16, 64, 3, 1, 1), (1269280, 1432600, 5542240, 339219), 256 * 64 * 9
    ),
    "3x3 depthwise with stride": Case(
        "quantized_depthwise_conv2d_nhwc", depthwise(17, 32, 3, 2, 1), (200160, 222200, 840680, 63156), 81 * 32 * 9
    ),
    "5x5 depthwise": Case(
        "quantized_depthwise_conv2d_nhwc",
        depthwise(16, 32, 5, 1, 2),
        (2047960, 3647880, 7978920, 406312),
        256 * 32 * 25,
    ),
    "depthwise with multiplier 2": Case(
        "quantized_depthwise_conv2d_nhwc",
        depthwise(16, 8, 3, 1, 1, 2),
        (1041480, 1000520, 2107880, 997188),
        256 * 16 * 9,
    ),
    "linear": Case("quantized_linear", [(1, 640), (128, 640)], (160040, 281360, 506600, 40156), 640 * 128),
    "batch matmul": Case(
        "quantized_batch_matmul", [(1, 16, 64), 0, (1, 64, 64)], (182000, 326600, 844240, 56094), 16 * 64 * 64
    ),
    "transposed convolution": Case(
        "quantized_transpose_conv2d_nhwc",
        [(1, 8, 8, 8), (16, 3, 3, 8), None, (2, 2), (0, 0), (0, 0), (1, 1)],
        (504800, 606760, 1264160, 273844),
        64 * 72 * 16,
    ),
    "transposed convolution of many channels": Case(
        "quantized_transpose_conv2d_nhwc",
        [(1, 8, 8, 32), (16, 3, 3, 32), None, (2, 2), (0, 0), (0, 0), (1, 1)],
        (2716320, 4086600, 9336120, 365875),
        64 * 288 * 16,
    ),
    "add": Case("quantized_add", [(8000,), 0, 0, 0, (8000,)], (650040, 672080, 1890480, 110094), 0),
    "mul": Case("quantized_mul", [(8000,), 0, (8000,)], (288920, 240040, 715560, 54062), 0),
    "maximum": Case("maximum", [(8000,), (8000,)], (64040, 64040, 96240, 9062), 0),
    "quantize": Case("quantize_per_tensor", [(8000,)], (321360, 1133560, 2058320, 16031), 0),
    "dequantize": Case("dequantize_per_tensor", [(8000,)], (64000, 515240, 1377040, 12031), 0),
    "maximum of windows": Case(
        "quantized_max_pool2d_nhwc",
        [(1, 16, 16, 32), (3, 3), (2, 2), (0, 0), (1, 1), False],
        (124880, 124360, 576840, 24406),
        0,
    ),
    "average of windows": Case(
        "quantized_avg_pool2d_nhwc", [(1, 8, 8, 32), (8, 8), (8, 8), (0, 0), False], (13840, 24840, 43000, 2594), 0
    ),
    "transpose": Case("transpose", [(1, 16, 16, 16), (0, 2, 3, 1)], (22880, 22880, 31000, 19312), 0),
    "transpose of a matrix": Case("transpose", [(64, 64), (1, 0)], (20840, 20840, 25080, 7406), 0),
    "transpose of rows": Case("transpose", [(1, 16, 16, 16), (0, 2, 1, 3)], (10160, 10160, 16720, 9375), 0),
    "pad": Case("pad", [(1, 16, 16, 16), (0, 1, 1, 0), (0, 1, 1, 0)], (4520, 4640, 6560, 1469), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_estimated_instructions_are_near_the_counted_ones(name: str) -> None:
    case = CASES[name]
    for processor, counted in zip(PROCESSORS, case.counts, strict=True):
        work = kernel_work(case.kernel, processor, case.arguments)
        assert work.instructions - instructions.CALL == pytest.approx(counted, rel=0.15), processor.cpu
        assert work.macs == case.macs


def test_each_kernel_has_a_formula() -> None:
    assert {name.removesuffix("_nhwc") for name in KERNELS} == set(kernels._FUNCTIONS)


def test_cost_does_not_depend_on_the_layout() -> None:
    nhwc = conv(16, 8, 32, 3, 1, 1)
    nchw = [(1, 8, 16, 16), *nhwc[1:]]
    for processor in PROCESSORS:
        one, other = (kernel_work(f"quantized_conv2d{end}", processor, x) for end, x in (("_nhwc", nhwc), ("", nchw)))
        assert one == other
