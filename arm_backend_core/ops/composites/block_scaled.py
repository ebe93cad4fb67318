"""Decompositions of ExecuTorch's ``tosa_mxfp`` layers, which store weights in MX formats (codes and block scales).

ExecuTorch's operators accept only ``groups`` = 1 and ``block_size`` = 32. These decompositions ignore both arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arm_backend_core.ops.block_scaled import MX_CONV2D, MX_LINEAR
from arm_backend_core.ops.registry import decomposition_by_name
from arm_backend_core.tosa.operators.block_scaled import BLOCK_SIZE

#: {``weight_payload_dtype`` of ExecuTorch's operators: name of the MX format in TOSA}.
_FORMAT_OF_PAYLOAD = {
    "f8e4m3": "fp8e4m3",
    "f8e5m2": "fp8e5m2",
    "fp6e2m3": "fp6e2m3",
    "fp6e3m2": "fp6e3m2",
    "f4e2m1": "fp4e2m1",
}
#: {format: (exponent bits, fraction bits)}. A sign bit precedes them (OCP MX 1.0, section 5.3).
_EXPONENT_AND_FRACTION_BITS = {"fp6e2m3": (2, 3), "fp6e3m2": (3, 2), "fp4e2m1": (2, 1)}


@decomposition_by_name("tosa_mxfp::linear")
def linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    block_size: int = BLOCK_SIZE,
    weight_payload_dtype: str = "",
) -> Tensor:
    """MX linear layer: x [.., IC], codes [1, OC, IC], scales [1, OC, IC / 32]; computes in float32."""
    weight, format = _dequantize_weight(codes, scales, weight_payload_dtype)
    result: Tensor = MX_LINEAR(x.float(), weight[0], bias, format)
    return result


@decomposition_by_name("tosa_mxfp::conv2d")
def conv2d(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
    block_size: int = BLOCK_SIZE,
    weight_payload_dtype: str = "",
) -> Tensor:
    """MX convolution: x [N, IC, H, W], codes [OC, KH, KW, IC], scales [OC, KH, KW, IC / 32]; computes in float32."""
    weight, format = _dequantize_weight(codes, scales, weight_payload_dtype)
    result: Tensor = MX_CONV2D(x.float(), weight.permute(0, 3, 1, 2), bias, stride, padding, dilation, format)
    return result


def _dequantize_weight(codes: Tensor, scales: Tensor, payload_dtype: str) -> tuple[Tensor, str]:
    """Return the dequantized weight and its format. Quantizing the weight again gives the same codes and scales."""
    default_payloads = {torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.uint8: "f4e2m1"}
    format = _FORMAT_OF_PAYLOAD[payload_dtype or default_payloads[codes.dtype]]
    elements = _decode_elements(codes.int(), format) if format in _EXPONENT_AND_FRACTION_BITS else codes.float()
    return elements * scales.float().repeat_interleave(BLOCK_SIZE, -1), format


def _decode_elements(codes: Tensor, format: str) -> Tensor:
    """Convert codes of fewer than 8 bits to their real values."""
    if format == "fp4e2m1":  # two codes per byte, the first in the low bits
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return torch.tensor(_list_code_values(*_EXPONENT_AND_FRACTION_BITS[format]))[codes.long()]


def _list_code_values(exponent_bits: int, fraction_bits: int) -> list[float]:
    """List the value of each code, from its sign (the top bit), exponent e and fraction f.

    The value is 2**(e - bias) * 1.f, or 2**(1 - bias) * 0.f if e = 0 (subnormal).
    """
    bias, fractions = (1 << (exponent_bits - 1)) - 1, 1 << fraction_bits
    codes = [divmod(code, fractions) for code in range(fractions << exponent_bits)]
    positive = [((fractions if e else 0) + f) / fractions * 2.0 ** (max(e, 1) - bias) for e, f in codes]
    return [*positive, *(-value for value in positive)]
