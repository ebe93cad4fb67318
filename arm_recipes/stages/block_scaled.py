"""Block-scaled layers (OCP MX): replace linear layers and 2D convolutions before the model is captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from executorch.export import AOQuantizationConfig, QuantizationRecipe
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from arm_backend_core.ops.block_scaled import MX_CONV2D, MX_LINEAR, TORCHAO_FORMATS


@dataclass
class MXConfig(AOBaseConfig):
    """Configuration for torchao's ``quantize_``: ``quantize_(model, MXConfig("fp4e2m1"), can_block_scale)``.

    A recipe with the option ``mx`` makes such a call. The call replaces layers by layers that round their weight and
    input to an MX format: ``format`` elements in blocks of 32 channels, with one power-of-two scale per block.

    Args:
        format: element type: "fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2" or "fp4e2m1".

    Raises:
        ValueError: there is no such format.
    """

    format: str = "fp8e4m3"

    def __post_init__(self) -> None:
        if self.format not in TORCHAO_FORMATS:
            raise ValueError(f"format={self.format!r}: there is no such format. Allowed: {', '.join(TORCHAO_FORMATS)}")


class MXLinear(nn.Linear):
    """A linear layer that rounds its weight and input to an MX format."""

    format: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., IC] to [.., OC], of the same dtype."""
        result: torch.Tensor = MX_LINEAR(x, self.weight, self.bias, self.format)
        return result


class MXConv2d(nn.Conv2d):
    """A convolution that rounds its weight and input to an MX format, in blocks along the channels of each pixel."""

    format: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [(N,) IC, H, W] to [(N,) OC, H, W], of the same dtype."""
        window = [list(values) for values in (self.stride, self.padding, self.dilation)]
        result: torch.Tensor = MX_CONV2D(x, self.weight, self.bias, *window, self.format)
        return result


_MX_LAYERS = (MXLinear, MXConv2d)


def can_block_scale(module: nn.Module, name: str = "") -> bool:
    """Whether a layer can be block-scaled: ``nn.Linear``, or ``nn.Conv2d`` without groups.

    The padding of the convolution must be zeros, and given as numbers ("same" and "valid" are refused). Subclasses of
    these classes, and layers that are block-scaled already, cannot be block-scaled.
    """
    return (
        isinstance(module, (nn.Linear, nn.Conv2d)) and not isinstance(module, _MX_LAYERS) and _refusal(module) is None
    )


def _refusal(module: nn.Module) -> str | None:
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"a {type(module).__name__}"
    if not isinstance(module, nn.Conv2d):
        return None
    if module.groups != 1:
        return f"groups={module.groups}"
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"padding={module.padding!r}, padding_mode={module.padding_mode!r}"
    return None


def describe_layers_without_block_scales(model: nn.Module, method: str) -> tuple[list[str], bool]:
    """Describe the layers of a transformed model that are not block-scaled.

    Returns:
        a sentence for each such layer, and whether no layer is block-scaled.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvTransposeNd))
    }
    notes = [
        f"'{name or type(layer).__name__}' of '{method}' is not block-scaled: {_refusal(layer)}"
        for name, layer in layers.items()
        if not isinstance(layer, _MX_LAYERS)
    ]
    return notes, len(notes) == len(layers)


@register_quantize_module_handler(MXConfig)
def _to_block_scaled(module: nn.Module, config: MXConfig) -> nn.Module:
    """Block-scale a layer, if ``can_block_scale``, by a change of its class in place.

    Because the object stays the same, its parameters keep their names, modules that share the layer still share it, and
    it may be the root module.
    """
    if can_block_scale(module):
        module.__class__ = MXLinear if isinstance(module, nn.Linear) else MXConv2d
        vars(module)["format"] = config.format
    return module


def make_mx_recipe(format: str) -> QuantizationRecipe:
    """The quantization part of a recipe with ``mx=format``."""
    return QuantizationRecipe(ao_quantization_configs=[AOQuantizationConfig(MXConfig(format), can_block_scale)])


def is_mx_recipe(recipe: QuantizationRecipe | None) -> bool:
    """Whether ``make_mx_recipe`` created the quantization part of a recipe."""
    configs = recipe.ao_quantization_configs if recipe is not None else None
    return any(isinstance(config.ao_base_config, MXConfig) for config in configs or ())
