"""Quantization configurations: dtype, scheme and observer of activations and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from arm_backend_core.quantization.observer import (
    HeadroomObserver,
    HistogramObserver,
    PerChannelWeightObserver,
    RangeObserver,
    WeightObserver,
)


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantization specs that the annotator assigns.

    Attributes:
        activation: spec of inputs and results of operators.
        weight: spec of weights; if None, operators with weights stay in floating point.
        int16_activation: int16 spec of mixed precision. It applies to the tensors for which ``FusionPlan`` chooses
            int16. Examples are the inputs of operators with more than 8 bits of internal precision (layer_norm,
            softmax), and the results of the residual additions before them. If None, these tensors use ``activation``.
    """

    activation: QuantizationSpec
    weight: QuantizationSpec | None
    int16_activation: QuantizationSpec | None = None


#: int16 activations. Symmetric, because TOSA has no zero point for int16.
_INT16 = QuantizationSpec(torch.int16, HeadroomObserver, -32768, 32767, torch.per_tensor_symmetric)


def _int8_activation(observer: type[RangeObserver]) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)


def _int8_weight(is_per_channel: bool, quant_max: int = 127) -> QuantizationSpec:
    """Make a symmetric spec in [-quant_max, quant_max]; the annotator sets each operator's output-channel axis."""
    if not is_per_channel:
        return QuantizationSpec(torch.int8, WeightObserver, -quant_max, quant_max, torch.per_tensor_symmetric)
    return QuantizationSpec(torch.int8, PerChannelWeightObserver, -quant_max, quant_max, torch.per_channel_symmetric, 0)


def get_symmetric_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = HistogramObserver
) -> QuantizationConfig:
    """Return int8 activations (affine) and int8 weights (symmetric); tensors that benefit from int16 become int16."""
    return QuantizationConfig(_int8_activation(observer), _int8_weight(is_per_channel), _INT16)


def get_symmetric_a8w4_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = HistogramObserver
) -> QuantizationConfig:
    """Return int8 activations, and int8 weights in [-7, 7], which take 4 bits with TOSA's extension int4."""
    return QuantizationConfig(_int8_activation(observer), _int8_weight(is_per_channel, 7), _INT16)


def get_symmetric_a16w8_quantization_config(is_per_channel: bool = True) -> QuantizationConfig:
    """Return int16 activations and int8 weights, both symmetric."""
    return QuantizationConfig(_INT16, _int8_weight(is_per_channel), _INT16)
