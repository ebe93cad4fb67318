"""Quantization configurations: dtype, scheme and observer of activations and weights."""

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
    """Quantization specs that the annotator assigns.

    Attributes:
        activation: spec of inputs and results of operators.
        weight: spec of weights; None leaves operators with weights in floating point.
        inner: spec of results whose readers all keep int16/int32 intermediates (layer_norm, softmax, residual additions
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
    """Make a symmetric spec in [-largest, largest]; the annotator sets the output-channel axis for each operator."""
    if not is_per_channel:
        return QuantizationSpec(torch.int8, WeightObserver, -largest, largest, torch.per_tensor_symmetric)
    return QuantizationSpec(torch.int8, PerChannelWeightObserver, -largest, largest, torch.per_channel_symmetric, 0)


def get_symmetric_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = ActivationObserver
) -> QuantizationConfig:
    """Return int8 activations (affine) and int8 weights (symmetric), with int16 between operators that gain from it."""
    return QuantizationConfig(_int8(observer), _int8_weight(is_per_channel), _INT16)


def get_symmetric_a8w4_quantization_config(
    is_per_channel: bool = True, observer: type[RangeObserver] = ActivationObserver
) -> QuantizationConfig:
    """Return int8 activations and weights in [-7, 7], which take four bits where TOSA has the extension int4."""
    return QuantizationConfig(_int8(observer), _int8_weight(is_per_channel, 7), _INT16)


def get_symmetric_a16w8_quantization_config(is_per_channel: bool = True) -> QuantizationConfig:
    """Return int16 activations and int8 weights, both symmetric."""
    return QuantizationConfig(_INT16, _int8_weight(is_per_channel), _INT16)
