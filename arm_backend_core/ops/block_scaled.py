"""Linear and convolution layers in block-scaled formats: OCP Microscaling (MX) 1.0, TOSA extension "mxfp".

Weight and input are quantized in blocks of 32 channels, to elements of 4 to 8 bits and a shared power-of-two scale. The
scale is rounded up so that the largest element fits (torchao's RCEIL, TOSA's CAST_TO_BLOCK_SCALED). Products are summed
in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.image_layout import to_nchw, to_nhwc_image
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value, prod
from arm_backend_core.tosa.operators.block_scaled import BLOCK_SIZE

#: {TOSA's name of an element type: torchao's name or dtype}.
TORCHAO_FORMATS: dict[str, torch.dtype | str] = {
    "fp8e4m3": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
    "fp6e2m3": "fp6_e2m3",
    "fp6e3m2": "fp6_e3m2",
    "fp4e2m1": torch.float4_e2m1fn_x2,
}
_LIBRARY = torch.library.Library("arm_backend_core", "FRAGMENT")
_LIBRARY.define("mx_linear(Tensor x, Tensor weight, Tensor? bias, str format) -> Tensor")
_LIBRARY.define(
    "mx_conv2d(Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int[2] dilation, str format)"
    " -> Tensor"
)
MX_LINEAR, MX_CONV2D = (getattr(torch.ops.arm_backend_core, name).default for name in ("mx_linear", "mx_conv2d"))


# -- in PyTorch ----------------------------------------------------------------------------------------------


def quantize_blocks(x: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [.., C] to elements [.., C] and scales [.., C / 32], both as float32.

    C is padded with zeros to a multiple of 32.
    """
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    padded = functional.pad(x.detach().float(), (0, -x.shape[-1] % BLOCK_SIZE)).contiguous()
    torchao_format = TORCHAO_FORMATS[format]
    scales, codes = mx_tensor.to_mx(padded, torchao_format, BLOCK_SIZE, ScaleCalculationMode.RCEIL)
    elements = mx_tensor.to_dtype(codes, torch.ones_like(scales), torchao_format, BLOCK_SIZE, torch.float32)
    return elements, scales.float()


def fake_quantize_blocks(x: torch.Tensor, format: str) -> torch.Tensor:
    """Quantize and dequantize x [.., C] in blocks along its last dimension; the result is float32."""
    elements, scales = quantize_blocks(x, format)
    return (elements * scales.repeat_interleave(BLOCK_SIZE, -1))[..., : x.shape[-1]]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str) -> torch.Tensor:
    return functional.linear(
        fake_quantize_blocks(x, format), fake_quantize_blocks(weight, format), _to_float32(bias)
    ).to(x.dtype)


def _conv2d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    *window, format = rest
    image, kernel = (fake_quantize_blocks(y.movedim(-3, -1), format).movedim(-1, -3) for y in (x, weight))
    return functional.conv2d(image, kernel, _to_float32(bias), *window).to(x.dtype)


def _to_float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _require_known_format(format: str) -> None:
    if format not in TORCHAO_FORMATS:
        raise ValueError(f"format={format!r} is not a block-scaled format. Allowed: {', '.join(TORCHAO_FORMATS)}")


def _infer_linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str) -> torch.Tensor:
    _require_known_format(format)
    return functional.linear(x, weight.to(x.dtype))


def _infer_conv2d_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    *window, format = rest
    _require_known_format(format)
    return functional.conv2d(x, weight.to(x.dtype), None, *window)


_LIBRARY.impl("mx_linear", _linear, "CPU")
_LIBRARY.impl("mx_linear", _infer_linear_shape, "Meta")
_LIBRARY.impl("mx_conv2d", _conv2d, "CPU")
_LIBRARY.impl("mx_conv2d", _infer_conv2d_shape, "Meta")


# -- in TOSA -------------------------------------------------------------------------------------------------


@op(MX_LINEAR, kind=AnnotationKind.PASSTHROUGH)
def mx_linear(cx: Context, x: Operand, weight: Operand, bias: Operand | None, format: str) -> Value:
    """Linear layer of x [.., IC] and weight [OC, IC], as a 1x1 convolution in which each row of x is a pixel."""
    image = cx.b.reshape(x.value, (1, 1, prod(x.shape[:-1]), x.shape[-1]))
    kernel = _require_constant(weight)[:, None, None, :]
    return cx.b.reshape(_mx_conv2d(cx, image, kernel, bias, format, (1, 1), (0, 0), (1, 1)), cx.shape)


@op(MX_CONV2D, kind=AnnotationKind.PASSTHROUGH)
def mx_conv2d(
    cx: Context,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    format: str,
) -> Value:
    """2D convolution of x [N, IC, H, W] and weight [OC, IC, KH, KW]."""
    kernel = _require_constant(weight).transpose(0, 2, 3, 1)
    result = _mx_conv2d(cx, to_nhwc_image(cx.b, x.value, 4), kernel, bias, format, stride, padding, dilation)
    return cx.b.reshape(to_nchw(cx.b, result), cx.shape)


def _mx_conv2d(
    cx: Context, image: Value, kernel: np.ndarray[Any, Any], bias: Operand | None, format: str, *window: Sequence[int]
) -> Value:
    """Emit the block-scaled convolution of image [N, H, W, IC] and kernel [OC, KH, KW, IC]."""
    if "mxfp" not in cx.target.extensions:
        raise Unsupported(f"{cx.target.name} has no block-scaled types")
    stride, padding, dilation = window
    elements, scales = (
        part.numpy() for part in quantize_blocks(torch.from_numpy(np.ascontiguousarray(kernel)), format)
    )
    if not np.isfinite(elements).all() or not np.isfinite(scales).all():
        raise Unsupported("its weight has infinite or NaN elements, which a block cannot represent")
    channel_padding = elements.shape[-1] - image.shape[-1]
    x = cx.b.pad(cx.b.cast(image, DType.FP32), [(0, 0), (0, 0), (0, 0), (0, channel_padding)], 0)
    sums = cx.b.mx_conv2d(
        x,
        cx.b.const(elements, DType(format)),
        cx.b.const(scales, DType.FP8UE8M0),
        cx.b.const(np.zeros(1) if bias is None else bias.float_values, DType.FP32),
        pad=[padding[0], padding[0], padding[1], padding[1]],
        stride=stride,
        dilation=dilation,
    )
    return cx.b.cast(sums, cx.dtype)


def _require_constant(weight: Operand) -> np.ndarray[Any, Any]:
    if weight.value.data is None:
        raise Unsupported("its weight is computed at run time; block-scaled weights are quantized at export")
    return weight.value.data.astype(np.float32)
