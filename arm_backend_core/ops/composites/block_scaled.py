"""Decompositions of ExecuTorch's ``tosa_mxfp`` layers, whose weights are block-scaled codes and scales already."""

from __future__ import annotations

import torch
from torch import Tensor

from arm_backend_core.ops.block_scaled import MX_CONV2D, MX_LINEAR
from arm_backend_core.ops.registry import foreign_decomposition
from arm_backend_core.tosa.operators.block_scaled import BLOCK

_NAMES = {"f8e4m3": "fp8e4m3", "f8e5m2": "fp8e5m2", "fp6e2m3": "fp6e2m3", "fp6e3m2": "fp6e3m2", "f4e2m1": "fp4e2m1"}
#: Bits of exponent and fraction; one sign bit comes before them (OCP MX 1.0, section 5.3).
_BITS = {"fp6e2m3": (2, 3), "fp6e3m2": (3, 2), "fp4e2m1": (2, 1)}


@foreign_decomposition("tosa_mxfp::linear")
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    block_size: int = BLOCK,
    weight_payload_dtype: str = "",
) -> Tensor:
    """x [.., IC], codes [1, OC, IC], scales [1, OC, IC / 32]; float32."""
    weight, format = _dequantize_weight(codes, scales, weight_payload_dtype)
    result: Tensor = MX_LINEAR(x.float(), weight[0], bias, format)
    return result


@foreign_decomposition("tosa_mxfp::conv2d")
def conv2d(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
    block_size: int = BLOCK,
    weight_payload_dtype: str = "",
) -> Tensor:
    """x [N, IC, H, W], codes [OC, KH, KW, IC], scales [OC, KH, KW, IC / 32]; float32."""
    weight, format = _dequantize_weight(codes, scales, weight_payload_dtype)
    result: Tensor = MX_CONV2D(x.float(), weight.permute(0, 3, 1, 2), bias, stride, padding, dilation, format)
    return result


def _dequantize_weight(codes: Tensor, scales: Tensor, name: str) -> tuple[Tensor, str]:
    """The weight of codes and scales. Quantizing it again gives the same codes and scales."""
    plain = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.uint8: "f4e2m1"}
    format = _NAMES[name or plain[codes.dtype]]
    numbers = _decode(codes.int(), format) if format in _BITS else codes.float()
    return numbers * scales.float().repeat_interleave(BLOCK, -1), format


def _decode(codes: Tensor, format: str) -> Tensor:
    if format == "fp4e2m1":  # two codes in a byte, the first in the low bits
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return torch.tensor(_code_values(*_BITS[format]))[codes.long()]


def _code_values(exponent: int, fraction: int) -> list[float]:
    """The value of each code: 2**(e - bias) * 1.f, and 2**(1 - bias) * 0.f for e = 0 (subnormal)."""
    bias, steps = (1 << (exponent - 1)) - 1, 1 << fraction
    codes = [divmod(code, steps) for code in range(steps << exponent)]
    positive = [((steps if e else 0) + f) / steps * 2.0 ** (max(e, 1) - bias) for e, f in codes]
    return [*positive, *(-number for number in positive)]
