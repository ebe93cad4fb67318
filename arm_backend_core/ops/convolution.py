"""Convolutions by TOSA 1.0 CONV2D, DEPTHWISE_CONV2D and TRANSPOSE_CONV2D. 3D convolutions are computed as 2D ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.accumulator import Accumulator
from arm_backend_core.ops.image_layout import is_stored_as_nhwc, to_height_width, to_nchw, to_nhwc, to_nhwc_image
from arm_backend_core.ops.indexing import gather_constant_indices
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
_CONV: dict[str, Any] = {"kind": AnnotationKind.CONV, "activation_operands": (0,), "absorbs_activation": True}

#: Maximum number of bands of rows in ``_convolve_sub_bands``, which emits one convolution for each band.
_MAX_BANDS = 16


@dataclass(frozen=True)
class _ConvParameters:
    """Parameters of a 2D convolution. stride and dilation: (height, width); pad: (top, bottom, left, right)."""

    stride: tuple[int, int]
    pad: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int


@op(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, **_CONV)
def conv(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Value:
    """1D, 2D or 3D convolution of x [N, C, (D,) (H,) W] and weight [OC, C / groups, (KD,) (KH,) KW]."""
    spatial = weight.rank - 2
    if spatial == 3:
        return _convolve_3d(cx, x, weight, bias, stride, padding, dilation, groups=groups)
    top, left = to_height_width(padding, spatial, 0)
    parameters = _ConvParameters(
        to_height_width(stride, spatial, 1), (top, top, left, left), to_height_width(dilation, spatial, 1), groups
    )
    return _convolve(cx, x, weight, bias, parameters)


@op(aten.conv1d.padding, aten.conv2d.padding, **_CONV)
def conv_with_padding_mode(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sequence[int] = (1,),
    padding: str = "valid",
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Value:
    """Convolution with padding="valid" or "same". An odd padding has one more element at the end."""
    spatial = weight.rank - 2
    dilations = to_height_width(dilation, spatial, 1)
    kernel = to_height_width(weight.shape[2:], spatial, 1)
    total = [
        axis_dilation * (size - 1) if padding == "same" else 0
        for axis_dilation, size in zip(dilations, kernel, strict=True)
    ]
    pad = (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
    return _convolve(cx, x, weight, bias, _ConvParameters(to_height_width(stride, spatial, 1), pad, dilations, groups))


def _convolve_3d(
    cx: Context, x: Operand, weight: Operand, bias: Operand | None, *window: Sequence[int], groups: int
) -> Value:
    """3D convolution of x [(N,) C, D, H, W] and weight [OC, C / groups, KD, KH, KW] as a 2D convolution.

    The planes of x under the kernel are concatenated along the channels of an image. In a depthwise convolution whose
    dilation along H is 1, the rows of these planes are interleaved instead. This is exact and runs on every target.
    CONV3D does not: Ethos-U55 and U65 support no CONV3D with a kernel depth above 1.
    """
    strides, pads, dilations = (list(values) * (3 if len(values) == 1 else 1) for values in window)
    kernel = _require_constant(weight)
    slices = _depth_slices(cx, x, weight, strides[0], pads[0], [k * dilations[0] for k in range(kernel.shape[2])])
    n, h, w, c = slices[0].shape
    out, per_group, kernel_depth, kernel_height, kernel_width = kernel.shape
    if groups > 1 and per_group == 1 and dilations[1] == 1:  # depthwise: interleave the rows of the slices
        image = cx.b.reshape(
            cx.b.concat([cx.b.reshape(part, (n, h, w * c)) for part in slices], 2), (n, h * kernel_depth, w, c)
        )
        kernel = kernel.swapaxes(2, 3).reshape(out, 1, kernel_height * kernel_depth, kernel_width)
        strides[1], pads[1] = strides[1] * kernel_depth, pads[1] * kernel_depth
    elif groups > 1:  # each group needs its channels of all slices next to each other
        depth_last = cx.b.transpose(cx.b.reshape(cx.b.concat(slices, 3), (n * h * w, kernel_depth, c)), (0, 2, 1))
        image = cx.b.reshape(depth_last, (n, h, w, kernel_depth * c))
        kernel = kernel.reshape(out, -1, kernel_height, kernel_width)
    else:
        image, kernel = cx.b.concat(slices, 3), kernel.swapaxes(1, 2).reshape(out, -1, kernel_height, kernel_width)
    pad = (pads[1], pads[1], pads[2], pads[2])
    parameters = _ConvParameters((strides[1], strides[2]), pad, (dilations[1], dilations[2]), groups)
    result = _convolve_groups(cx, x, weight, bias, image, kernel, parameters)
    (depth, height, width), channels = cx.shape[-3:], result.shape[3]
    rows = cx.b.reshape(result, (result.size // (depth * height * width * channels), depth * height, width, channels))
    return cx.b.reshape(to_nchw(cx.b, rows), cx.shape)


def _depth_slices(
    cx: Context, x: Operand, weight: Operand, stride: int, pad: int, kernel_offsets: Sequence[int]
) -> list[Value]:
    """For each plane of the kernel, gather the planes of x that this kernel plane multiplies.

    Returns:
        One tensor [N * OD, H, W, C] for each plane of the kernel. It holds, for each of the OD output planes, the plane
        of x that this kernel plane multiplies.

    Args:
        kernel_offsets: for each plane of the kernel, its distance from the first one in planes of x.
    """
    b, depth = cx.b, cx.shape[-3]
    c, d, h, w = x.shape[-4:]
    n, image = x.value.size // (c * d * h * w), h * w * c
    # Only D and H are merged: an axis of D * H * W elements may exceed the hardware's limit of 65,536 elements.
    value = to_nhwc(b, b.reshape(x.value, (n, c, d * h, w)))
    pad_end = max(kernel_offsets[-1] + depth * stride - d - pad, 0)  # so that the last stride is complete
    value = b.pad(b.reshape(value, (n, d, image)), [(0, 0), (pad, pad_end), (0, 0)], zero_points(x, weight)[0])
    slices = []
    for start in kernel_offsets:
        span = b.reshape(b.narrow(value, 1, start, depth * stride), (n * depth, stride, image))
        slices.append(b.reshape(b.narrow(span, 1, 0, 1), (n * depth, h, w, c)))
    return slices


@op(aten.convolution.default, **_CONV | {"weight_axis": lambda node: int(node.args[6])})  # transposed
def convolution(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    """``aten.convolution``: a convolution, or a transposed convolution if ``transposed``."""
    if transposed:
        return conv_transpose.lower(cx, x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv.lower(cx, x, weight, bias, stride, padding, dilation, groups)


@op(aten.conv_transpose2d.input, aten.conv_transpose1d.default, **_CONV | {"weight_axis": lambda node: 1})
def conv_transpose(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Value:
    """Transposed convolution of x [N, IC, (H,) W] and weight [IC, OC / groups, (KH,) KW].

    A negative out_pad of TOSA crops the result, as PyTorch's padding does. If the hardware does not support the
    strides, ``_transpose_conv_by_phases`` computes the output pixels between two input pixels as channels of a
    convolution.
    """
    spatial = weight.rank - 2
    if spatial not in (1, 2):
        raise Unsupported(f"transposed convolution in {spatial} dimensions (1 or 2 are supported)")
    if weight.q is not None and weight.q.axis not in (None, 1):
        raise Unsupported("transposed convolution whose weight is not quantized along its output channels (axis 1)")
    kernels = _require_constant(weight)
    kernels = _dilate_kernel(
        kernels.reshape(*kernels.shape[:2], -1, kernels.shape[-1]), to_height_width(dilation, spatial, 1), weight
    )
    crop, extra = to_height_width(padding, spatial, 0), to_height_width(output_padding, spatial, 0)
    out_pad = (-crop[0], extra[0] - crop[0], -crop[1], extra[1] - crop[1])
    image = to_nhwc_image(cx.b, x.value, weight.rank)
    in_channels, out_channels = weight.shape[0] // groups, weight.shape[1]
    results = []
    for group in range(groups):
        group_image = cx.b.narrow(image, -1, group * in_channels, in_channels)
        group_kernels = kernels[group * in_channels : (group + 1) * in_channels]
        channels = slice(group * out_channels, (group + 1) * out_channels)
        layer = build_accumulator(cx, x, weight, bias, group_kernels.transpose(1, 2, 3, 0), channels)
        strides, zps = to_height_width(stride, spatial, 1), zero_points(x, weight)
        try:
            constants = cx.b.const(layer.weights, weight.value.dtype), cx.b.const(layer.quantized_bias, layer.dtype)
            value = cx.b.transpose_conv2d(group_image, *constants, out_pad=out_pad, stride=strides, zps=zps)
            results.append(cx.requantize_sums(value, layer))
        except Unsupported:
            uncropped = _transpose_conv_by_phases(
                cx, group_image, layer, strides, [max(end, 0) for end in out_pad[1::2]], zps, weight.value.dtype
            )
            size = (image.shape[0], *(1, *cx.shape[-spatial:])[-2:], out_channels)
            results.append(cx.b.slice(uncropped, (0, crop[0], crop[1], 0), size))
    return cx.b.reshape(to_nchw(cx.b, cx.b.concat(results, 3)), cx.shape)


def _transpose_conv_by_phases(
    cx: Context,
    image: Value,
    layer: Accumulator,
    strides: tuple[int, int],
    extra: Sequence[int],
    zps: tuple[int, int],
    dtype: DType,
) -> Value:
    """Uncropped transposed convolution by phases (sub-pixel convolution), with ``extra`` rows and columns at the end.

    With stride s, output row q * s + p is the sum of kernel rows p, p + s, ... times image rows q, q - 1, ... The rows
    of phase p are computed as output channels of one convolution, and depth-to-space interleaves the phases. Returns
    [N, rows, columns, OC].
    """
    b, (oc, kh, kw, ic), (sy, sx) = cx.b, layer.weights.shape, strides
    ty, tx = -(-(kh + extra[0]) // sy), -(-(kw + extra[1]) // sx)
    kernel = np.full((oc, ty * sy, tx * sx, ic), zps[1], layer.weights.dtype)
    kernel[:, :kh, :kw] = layer.weights
    kernel = kernel.reshape(oc, ty, sy, tx, sx, ic)[:, ::-1, :, ::-1].transpose(2, 4, 0, 1, 3, 5)
    vectors = (layer.scales, layer.peaks, layer.residual_bias)
    tiled_vectors = (x if x is None or x.size == 1 < oc else np.tile(x, sy * sx) for x in vectors)
    all_phases = Accumulator(
        kernel.reshape(-1, ty, tx, ic), np.tile(layer.quantized_bias, sy * sx), layer.dtype, *tiled_vectors
    )
    constants = b.const(all_phases.weights, dtype), b.const(all_phases.quantized_bias, all_phases.dtype)
    value = cx.requantize_sums(b.conv2d(image, *constants, pad=(ty - 1, ty - 1, tx - 1, tx - 1), zps=zps), all_phases)
    n, h, w, _ = value.shape
    rows = b.transpose(b.reshape(value, (n * h, w, sy, sx * oc)), (0, 2, 1, 3))
    return b.reshape(rows, (n, h * sy, w * sx, oc))


def _dilate_kernel(kernels: np.ndarray[Any, Any], dilations: tuple[int, int], weight: Operand) -> np.ndarray[Any, Any]:
    """Insert zeros between the elements of kernels [..., KH, KW]: TRANSPOSE_CONV2D has no dilation."""
    sizes = [step * (size - 1) + 1 for step, size in zip(dilations, kernels.shape[-2:], strict=True)]
    dilated = np.full((*kernels.shape[:-2], *sizes), weight.q.zero_point if weight.q else 0, kernels.dtype)
    dilated[..., :: dilations[0], :: dilations[1]] = kernels
    return dilated


for _record in (conv, conv_with_padding_mode, convolution, conv_transpose):
    _record.integer_rule(_record.lower)  # the same rule lowers floating-point and quantized operands


def _convolve(cx: Context, x: Operand, weight: Operand, bias: Operand | None, parameters: _ConvParameters) -> Value:
    if weight.q is None and x.q is not None:
        raise Unsupported("its input is quantized but its weight is not")
    if (banded_image := _find_sub_band_image(cx, x.value, weight, parameters)) is not None:
        return _convolve_sub_bands(cx, x, weight, bias, banded_image)
    image = to_nhwc_image(cx.b, x.value, weight.rank)
    kernel = _require_constant(weight)
    kernel = kernel.reshape(*kernel.shape[:2], -1, kernel.shape[-1])
    result = _convolve_groups(cx, x, weight, bias, image, kernel, parameters)
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _find_sub_band_image(cx: Context, x: Value, weight: Operand, parameters: _ConvParameters) -> Value | None:
    """Find the image [N, C, H, W] that a 1x1 depthwise convolution reads as a view [N, C * bands, H / bands, W].

    Sub-spectral norm (BC-ResNet) is a batch norm on such a view, and becomes such a convolution. None if there is no
    such image in [N, H, W, C] with at most ``_MAX_BANDS`` bands, or it is too wide for the hardware's depthwise limit.
    """
    reshape = x.producer
    if reshape is None or reshape.kind != "RESHAPE" or weight.shape != (x.shape[1], 1, 1, 1) or x.rank != 4:
        return None
    image, default = reshape.inputs[0], _ConvParameters((1, 1), (0, 0, 0, 0), (1, 1), x.shape[1])
    if image.rank != 4 or parameters != default or not is_stored_as_nhwc(image):
        return None
    n, channels, height, width = image.shape
    bands = x.shape[1] // channels
    is_split = 1 < bands <= _MAX_BANDS and x.shape == (n, channels * bands, height // bands, width)
    max_size = cx.target.hardware.max_depthwise_size or x.size
    return image if is_split and channels * width <= max_size else None


def _convolve_sub_bands(cx: Context, x: Operand, weight: Operand, bias: Operand | None, image: Value) -> Value:
    """Split an image into bands of rows, and apply a separate depthwise 1x1 convolution to each band.

    Channel c * bands + i of ``x`` has the rows of band i of channel c. Rows are contiguous in [N, H, W, C], so slicing
    and concatenating them costs nothing, while the view would need a TRANSPOSE before and after it. Together with
    ``spatial_mean``, which also keeps the layout, this reduces BC-ResNet-1 from 1,598,484 to 895,316 cycles on U55-128,
    and from 944,027 to 307,035 on U85-256 (Vela 5.2).
    """
    kernel, rows = _require_constant(weight), x.shape[2]
    bands, channels = image.shape[2] // rows, image.shape[1]
    image, results = to_nhwc(cx.b, image), list[Value]()
    for band in range(bands):
        channels_of_band = slice(band, None, bands)
        layer = build_accumulator(cx, x, weight, bias, kernel[channels_of_band], channels_of_band)
        filters = layer.weights.reshape(1, 1, channels, 1)
        constants = cx.b.const(filters, weight.value.dtype), cx.b.const(layer.quantized_bias, layer.dtype)
        part = cx.b.narrow(image, 1, band * rows, rows)
        value = cx.b.depthwise_conv2d(part, *constants, pad=(0, 0, 0, 0), zps=zero_points(x, weight))
        results.append(cx.requantize_sums(value, layer))
    return cx.b.reshape(to_nchw(cx.b, cx.b.concat(results, 1)), cx.shape)


def _convolve_groups(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    image: Value,
    kernel: np.ndarray[Any, Any],
    parameters: _ConvParameters,
) -> Value:
    """Convolve image [N, H, W, C] and kernel [OC, C / groups, KH, KW], depthwise or by one CONV2D per group."""
    out_channels, per_group = kernel.shape[:2]
    attrs: dict[str, Any] = {**vars(parameters), "zps": zero_points(x, weight)}
    groups = attrs.pop("groups")
    size, results = out_channels // groups, list[Value]()
    if groups > 1 and per_group == 1:
        step = groups if size == 1 else max((cx.target.hardware.max_depthwise_size or image.size) // image.shape[2], 1)
        for start in range(0, groups, step):
            # In PyTorch and in TOSA, output channel c * M + m is result m of the M results of input channel c.
            count = min(step, groups - start)
            channels = slice(start * size, (start + count) * size)
            layer = build_accumulator(cx, x, weight, bias, kernel[channels], channels)
            filters = layer.weights.reshape(count, size, *kernel.shape[2:]).transpose(2, 3, 0, 1)
            constants = cx.b.const(filters, weight.value.dtype), cx.b.const(layer.quantized_bias, layer.dtype)
            results.append(_depthwise_conv(cx, layer, (cx.b.narrow(image, -1, start, count), *constants), **attrs))
        return cx.b.concat(results, 3)
    for group in range(groups):
        channels = slice(group * size, (group + 1) * size)
        part = cx.b.narrow(image, -1, group * per_group, per_group)
        layer = build_accumulator(cx, x, weight, bias, kernel[channels].transpose(0, 2, 3, 1), channels)
        constants = cx.b.const(layer.weights, weight.value.dtype), cx.b.const(layer.quantized_bias, layer.dtype)
        # Each group is requantized before groups are concatenated: CONCAT does not accept INT48.
        results.append(cx.requantize_sums(cx.b.conv2d(part, *constants, **attrs), layer))
    return cx.b.concat(results, 3)


def _depthwise_conv(
    cx: Context, layer: Accumulator, operands: tuple[Value, Value, Value], *, stride: tuple[int, int], **attrs: Any
) -> Value:
    """Depthwise convolution.

    An unsupported stride is replaced by its largest divisor that is supported, and the result is subsampled. On U85,
    Vela splits a convolution with an unsupported stride, which is slow: a kernel of 7x7 on an image of 56x56x96 takes
    1,434,111 cycles with stride 4, and 136,242 with stride 2.
    """
    hardware = cx.target.hardware
    largest_stride = hardware.max_stride if hardware.is_ethos_u else max(stride)
    supported_stride = tuple(max(step for step in range(1, largest_stride + 1) if full % step == 0) for full in stride)
    value = cx.requantize_sums(cx.b.depthwise_conv2d(*operands, stride=supported_stride, **attrs), layer)
    for axis, (full, step) in enumerate(zip(stride, supported_stride, strict=True), 1):
        value = gather_constant_indices(cx.b, value, axis, range(0, value.shape[axis], full // step))
    return value


def build_accumulator(
    cx: Context, x: Operand, weight: Operand, bias: Operand | None, filters: np.ndarray[Any, Any], channels: slice
) -> Accumulator:
    """Build the accumulator of some output channels of a convolution or linear layer: quantized bias and scales.

    In an unquantized layer, the bias stays in floating point.

    Args:
        cx: the context.
        x: the input.
        weight: the whole weight.
        bias: the whole bias.
        filters: the weights of the described output channels, [channels, ...].
        channels: slice of the output channels to describe. It selects their bias and their scales.

    Raises:
        Unsupported: a sum could exceed the accumulator (``Accumulator.from_weights``), or the bias is not constant.
    """
    float_bias = np.zeros(len(filters)) if bias is None else bias.float_values[channels]
    if x.q is None or weight.q is None:
        return Accumulator(filters, float_bias, DType.FP16 if x.value.dtype.is_fp8 else x.value.dtype)
    scales = np.atleast_1d(weight.q.scale)
    if scales.size > len(filters):  # if transposed, all groups share the scales, and nothing is selected
        scales = scales[channels]
    return Accumulator.from_weights(
        cx.to_fixed_point(x), filters, weight.q.zero_point, float(x.q.scale) * scales, float_bias
    )


def _require_constant(weight: Operand) -> np.ndarray[Any, Any]:
    if weight.value.data is None:
        raise Unsupported("its weight is computed at run time; TOSA targets need a constant")
    return weight.value.data


def zero_points(x: Operand, weight: Operand) -> tuple[int, int]:
    """Zero points of input and weight; 0 for each that is not quantized."""
    return (x.q.zero_point if x.q else 0, weight.q.zero_point if weight.q else 0)
