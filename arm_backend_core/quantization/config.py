"""How wide and how finely tensors are quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from arm_backend_core.quantization.observer import (
    ActivationObserver,
    HeadroomObserver,
    PerChannelWeightObserver,
    RangeObserver,
    WeightObserver,
)


@dataclass(frozen=True)
class QuantizationConfig:
    """What the annotator puts on tensors.

    Attributes:
        activation: for inputs and results of operators.
        weight: for weights; None leaves operators with weights in floating point.
        inner: for results that only operators with precision inside read (layer_norm, softmax, residual additions
            before them); None uses ``activation`` there too.
    """

    activation: QuantizationSpec
    weight: QuantizationSpec | None
    inner: QuantizationSpec | None = None


#: Symmetric: TOSA has no zero points for int16.
_INT16 = QuantizationSpec(torch.int16, HeadroomObserver, -32768, 32767, torch.per_tensor_symmetric)


def _int8(observer: type[RangeObserver]) -> QuantizationSpec:
    return QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)


def _int8_weight(is_per_channel: bool, largest: int = 127) -> QuantizationSpec:
    """Symmetric in [-largest, largest]; the output-channel axis is set for each operator."""
    if not is_per_channel:
        return QuantizationSpec(torch.int8, WeightObserver, -largest, largest, torch.per_tensor_symmetric)
    return QuantizationSpec(torch.int8, PerChannelWeightObserver, -largest, largest, torch.per_channel_symmetric, 0)


def get_symmetric_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = ActivationObserver
) -> QuantizationConfig:
    """int8 activations (affine) and int8 weights (symmetric); int16 between operators that gain from it."""
    return QuantizationConfig(_int8(observer), _int8_weight(is_per_channel), _INT16)


def get_symmetric_a8w4_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = ActivationObserver
) -> QuantizationConfig:
    """The same with weights from -7 to 7, which take four bits where TOSA has the extension int4."""
    return QuantizationConfig(_int8(observer), _int8_weight(is_per_channel, 7), _INT16)


def get_symmetric_a16w8_quantization_config(is_per_channel: bool = True) -> QuantizationConfig:
    """int16 activations and int8 weights, both symmetric."""
    return QuantizationConfig(_INT16, _int8_weight(is_per_channel), _INT16)
