"""How wide and how finely tensors are quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from arm_backend_core.quantizer.observer import (
    ActivationObserver,
    HeadroomObserver,
    PerChannelWeightObserver,
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


def _int8_activation() -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=ActivationObserver,
    )


def _int16_activation() -> QuantizationSpec:
    """Symmetric: TOSA has no zero points for int16."""
    return QuantizationSpec(
        dtype=torch.int16,
        quant_min=-32768,
        quant_max=32767,
        qscheme=torch.per_tensor_symmetric,
        observer_or_fake_quant_ctr=HeadroomObserver,
    )


def _int8_weight(is_per_channel: bool) -> QuantizationSpec:
    """Symmetric in [-127, 127]; the output-channel axis is set for each operator."""
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric if is_per_channel else torch.per_tensor_symmetric,
        ch_axis=0 if is_per_channel else None,
        observer_or_fake_quant_ctr=PerChannelWeightObserver if is_per_channel else WeightObserver,
    )


def get_symmetric_quantization_config(is_per_channel: bool = True) -> QuantizationConfig:
    """int8 activations (affine) and int8 weights (symmetric); int16 between operators that gain from it."""
    return QuantizationConfig(_int8_activation(), _int8_weight(is_per_channel), _int16_activation())


def get_symmetric_a16w8_quantization_config(is_per_channel: bool = True) -> QuantizationConfig:
    """int16 activations and int8 weights, both symmetric."""
    return QuantizationConfig(_int16_activation(), _int8_weight(is_per_channel))


def along(spec: QuantizationSpec, axis: int) -> QuantizationSpec:
    """A weight's spec with its channels on ``axis``."""
    return spec if spec.ch_axis is None else replace(spec, ch_axis=axis)
