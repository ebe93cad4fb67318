"""Work of the ``cortex_m`` kernels: the instructions of a call as a function of its shapes.

The decorator ``_register_work`` registers a function that computes the work of a kernel from a ``Call``. In a ``Call``,
shapes of images are [N, H, W, C], also for kernels of (N, C, H, W) in channels_last memory format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arm_backend_core.cortex_m.catalog import KERNELS, find_kernel
from arm_backend_core.cortex_m.cost import instructions as per
from arm_backend_core.cortex_m.cost.processors import CodeVariant, PerCodeVariant, code_variant_of, has_fpu
from arm_backend_core.cortex_m.cost.work import Work
from arm_backend_core.cortex_m.kernels.registry import Shape
from arm_backend_core.targets.cortex_m import Processor


@dataclass(frozen=True)
class Call:
    """A call of a kernel, with the shapes of its tensors.

    Attributes:
        code: code variant of the kernel.
        has_fpu: True if the processor has a floating-point unit.
        result: shape of the result.
        arguments: arguments of the kernel, with the shapes of the tensors instead of the tensors.
    """

    code: CodeVariant
    has_fpu: bool
    result: Shape
    arguments: Sequence[Any]

    @property
    def elements(self) -> int:
        """Number of elements of the result."""
        return math.prod(self.result)

    def select(self, numbers: PerCodeVariant) -> float:
        """The number for the code variant of this call."""
        return numbers.of(self.code)


_Function = Callable[[Call], Work]
_FUNCTIONS: dict[str, _Function] = {}
_TO_NHWC = (0, 2, 3, 1)


def _register_work(*names: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def kernel_work(name: str, processor: Processor, arguments: Sequence[Any]) -> Work:
    """The work of a kernel call.

    Args:
        name: name of the kernel, without its namespace.
        processor: the processor.
        arguments: arguments of ``Kernel.compute``, with the shapes of the tensors instead of the tensors. The scratch
            arguments may be absent.

    Raises:
        KeyError: there is no such kernel.
    """
    base = name.removesuffix("_nhwc")
    function = _FUNCTIONS[base]
    result = find_kernel(name).result_shape(*arguments)
    nhwc_arguments = list(arguments)
    if f"{base}_nhwc" in KERNELS and not name.endswith("_nhwc"):
        result, nhwc_arguments[0] = ([shape[axis] for axis in _TO_NHWC] for shape in (result, arguments[0]))
    work = function(Call(code_variant_of(processor), has_fpu(processor), result, nhwc_arguments))
    return Work(work.macs, work.instructions + per.CALL)


def _inner_product_steps(code: CodeVariant, depth: int) -> int:
    """Number of steps of an inner product of length ``depth``: one per product, with MVE one per vector of products."""
    return -(-depth // per.MVE_LANES) if code is CodeVariant.MVE else depth


def _matrix_product(call: Call, pixels: int, depth: int, channels: int, product: PerCodeVariant) -> float:
    """Instructions of a requantized matrix product of [pixels, depth] and the transpose of [channels, depth]."""
    together = int(call.select(per.PIXELS_TOGETHER))
    single = pixels % together
    products = (pixels - single) * call.select(product) + single * call.select(per.SINGLE_PIXEL_PRODUCT)
    results = pixels * channels * call.select(per.CONVOLUTION_RESULT)
    return results + products * channels * _inner_product_steps(call.code, depth)


def _convolution(call: Call, pixels: int, taps: int, inputs: int, channels: int) -> float:
    """Instructions of a convolution that copies the inputs of each pixel (im2col)."""
    copies = pixels * taps * (call.select(per.IM2COL_TAP) + inputs * call.select(per.IM2COL_INPUT))
    return copies + _matrix_product(call, pixels, taps * inputs, channels, per.CONVOLUTION_PRODUCT)


@_register_work("quantized_conv2d")
def _conv2d(call: Call) -> Work:
    image, weight, _, _, padding, dilation = call.arguments[:6]
    *pixel_shape, channels = call.result
    pixels, taps, inputs = math.prod(pixel_shape), math.prod(weight[1:3]), weight[3]
    groups = image[3] // inputs
    macs = call.elements * taps * inputs
    if groups == 1 and taps == 1 and set(dilation) == {1} and not any(padding):
        return Work(macs, _matrix_product(call, pixels, inputs, channels, per.POINTWISE_PRODUCT))
    return Work(macs, groups * _convolution(call, pixels, taps, inputs, channels // groups))


@_register_work("quantized_depthwise_conv2d")
def _depthwise(call: Call) -> Work:
    image, weight, _, _, padding, dilation, multiplier = call.arguments[:7]
    batch, *size, channels = call.result
    taps, pixels, results = math.prod(weight[1:3]), batch * math.prod(size), call.elements
    macs = results * taps
    if call.code is CodeVariant.MVE and image[3] == 1 and channels > 1:
        return Work(macs, _convolution(call, pixels, taps, 1, channels))
    if multiplier != 1 or image[3] != channels or batch != 1 or set(dilation) != {1}:
        is_by_four = multiplier % 4 == 0
        product = per.GENERIC_DEPTHWISE_PRODUCT_BY_FOUR if is_by_four else per.GENERIC_DEPTHWISE_PRODUCT
        return Work(macs, results * call.select(per.GENERIC_DEPTHWISE_RESULT) + macs * call.select(product))
    if call.code is not CodeVariant.MVE and tuple(weight[1:3]) == (3, 3) and max(padding) <= 1:
        unrolled = results * call.select(per.DEPTHWISE_3X3_RESULT) + pixels * call.select(per.DEPTHWISE_3X3_PIXEL)
        return Work(macs, unrolled)
    of_result = call.select(per.DEPTHWISE_RESULT) + taps * call.select(per.DEPTHWISE_PRODUCT)
    of_pixel = call.select(per.DEPTHWISE_PIXEL) + taps * call.select(per.DEPTHWISE_TAP)
    return Work(macs, results * of_result + pixels * of_pixel)


@_register_work("quantized_transpose_conv2d")
def _transposed(call: Call) -> Work:
    image, weight, _, stride = call.arguments[:4]
    channels, inputs, taps = weight[0], weight[3], math.prod(weight[1:3])
    input_pixels, pixels = math.prod(image[:3]), math.prod(call.result[:3])
    macs = input_pixels * taps * inputs * channels
    if max(stride) <= 2 and inputs > 16:  # a convolution of the upsampled input (kernels/conv_scratch.py)
        return Work(macs, _convolution(call, pixels, taps, inputs, channels))
    adds = input_pixels * taps * channels * _adds_per_tap(call.code, inputs)
    of_results = call.elements * call.select(per.TRANSPOSE_CONV_RESULT)
    return Work(
        macs, macs * call.select(per.TRANSPOSE_CONV_PRODUCT) + adds * call.select(per.TRANSPOSE_CONV_TAP) + of_results
    )


def _adds_per_tap(code: CodeVariant, depth: int) -> int:
    """Additions to an accumulator per input pixel, tap and output channel: one; with MVE, one per vector of inputs."""
    return _inner_product_steps(code, depth) if code is CodeVariant.MVE else 1


@_register_work("quantized_linear")
def _linear(call: Call) -> Work:
    return _rows_by_columns(call, call.arguments[1][1], per.LINEAR_RESULT, per.LINEAR_PRODUCT)


@_register_work("quantized_batch_matmul")
def _matmul(call: Call) -> Work:
    return _rows_by_columns(call, call.arguments[0][2], per.MATMUL_RESULT, per.MATMUL_PRODUCT)


def _rows_by_columns(call: Call, depth: int, result: PerCodeVariant, product: PerCodeVariant) -> Work:
    steps = call.select(result) + _inner_product_steps(call.code, depth) * call.select(product)
    return Work(call.elements * depth, call.elements * steps)


def _elementwise(name: str, counts: PerCodeVariant) -> None:
    _FUNCTIONS[name] = lambda call: Work(0, call.elements * call.select(counts))


for _name, _counts in (
    ("quantized_add", per.ADD),
    ("quantized_mul", per.MUL),
    ("minimum", per.MINIMUM),
    ("maximum", per.MINIMUM),
    ("quantized_activation", per.TABLE),
    ("softmax", per.SOFTMAX),
):
    _elementwise(_name, _counts)


@_register_work("quantized_div")
def _div(call: Call) -> Work:
    return Work(0, call.elements * (per.DIV_WITH_FPU if call.has_fpu else call.select(per.DIV_WITHOUT_FPU)))


@_register_work("quantize_per_tensor")
def _quantize(call: Call) -> Work:
    counts = per.QUANTIZE_WITH_FPU if call.has_fpu else per.QUANTIZE_WITHOUT_FPU
    return Work(0, call.elements * call.select(counts))


@_register_work("dequantize_per_tensor")
def _dequantize(call: Call) -> Work:
    counts = per.DEQUANTIZE_WITH_FPU if call.has_fpu else per.DEQUANTIZE_WITHOUT_FPU
    return Work(0, call.elements * call.select(counts))


def _pool(name: str, counts: tuple[PerCodeVariant, PerCodeVariant, PerCodeVariant, PerCodeVariant]) -> None:
    of_result, of_tap, of_pixel, of_pixel_tap = counts

    def work(call: Call) -> Work:
        taps, pixels = math.prod(call.arguments[1]), math.prod(call.result[:3])
        of_results = call.elements * (call.select(of_result) + taps * call.select(of_tap))
        return Work(0, of_results + pixels * (call.select(of_pixel) + taps * call.select(of_pixel_tap)))

    _FUNCTIONS[name] = work


_pool("quantized_max_pool2d", per.MAXIMUM_POOL)
_pool("quantized_avg_pool2d", per.AVERAGE_POOL)


@_register_work("transpose")
def _transpose(call: Call) -> Work:
    shape, order = call.arguments[:2]
    run = shape[-1] if order[-1] == len(shape) - 1 else 1
    if run > 1:
        of_runs = call.elements // run * call.select(per.COPY_RUN)
        return Work(0, of_runs + call.elements * call.select(per.COPY))
    counts = per.TRANSPOSE_MATRIX if len(shape) == 2 else per.TRANSPOSE
    return Work(0, call.elements * call.select(counts))


@_register_work("pad")
def _pad(call: Call) -> Work:
    rows = call.elements // max(math.prod(call.result[-2:]), 1)
    return Work(0, rows * call.select(per.PAD_ROW) + call.elements * call.select(per.COPY))
