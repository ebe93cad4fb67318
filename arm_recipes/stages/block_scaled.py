"""Linear layers and convolutions in block-scaled formats (OCP MX), before the model is captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from executorch.export import AOQuantizationConfig, QuantizationRecipe
from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from arm_backend_core.ops.block_scaled import FORMATS, MX_CONV2D, MX_LINEAR


@dataclass
class MXConfig(AOBaseConfig):
    """For torchao's ``quantize_(model, MXConfig("fp4e2m1"), is_mx_layer)``, which recipes do with ``mx="fp4e2m1"``.

    Weight and input of a layer are rounded to blocks of 32 channels that share a power of two.

    Args:
        format: of the elements: "fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2" or "fp4e2m1".

    Raises:
        ValueError: there is no such format.
    """

    format: str = "fp8e4m3"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r}: there is no such format. Allowed: {', '.join(FORMATS)}")


class MXLinear(nn.Linear):
    """A linear layer that rounds its weight and input."""

    format: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., IC] to [.., OC], of the same type."""
        result: torch.Tensor = MX_LINEAR(x, self.weight, self.bias, self.format)
        return result


class MXConv2d(nn.Conv2d):
    """A convolution that rounds its weight and input, each pixel's channels apart."""

    format: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [(N,) IC, H, W] to [(N,) OC, H, W], of the same type."""
        window = [list(values) for values in (self.stride, self.padding, self.dilation)]
        result: torch.Tensor = MX_CONV2D(x, self.weight, self.bias, *window, self.format)
        return result


_MX = (MXLinear, MXConv2d)


def is_mx_layer(module: nn.Module, name: str = "") -> bool:
    """Whether a layer has such a form: no groups, and padding with a number of zeros."""
    return isinstance(module, (nn.Linear, nn.Conv2d)) and not isinstance(module, _MX) and _obstacle(module) is None


def _obstacle(module: nn.Module) -> str | None:
    if type(module) not in (nn.Linear, nn.Conv2d):
        return f"a {type(module).__name__}"
    if not isinstance(module, nn.Conv2d):
        return None
    if module.groups != 1:
        return f"groups={module.groups}"
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"padding={module.padding!r}, padding_mode={module.padding_mode!r}"
    return None


def describe_float_layers(model: nn.Module, method: str) -> tuple[list[str], bool]:
    """Sentences on the layers of a transformed ``model`` that are not block-scaled, and whether none is."""
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvTransposeNd))
    }
    told = [
        f"'{name or type(layer).__name__}' of '{method}' is not block-scaled: {_obstacle(layer)}"
        for name, layer in layers.items()
        if not isinstance(layer, _MX)
    ]
    return told, len(told) == len(layers)


@register_quantize_module_handler(MXConfig)
def _to_block_scaled(module: nn.Module, config: MXConfig) -> nn.Module:
    """The same object with the same weights, so that names and sharing stay, also where it is the whole model."""
    if is_mx_layer(module):
        module.__class__ = MXLinear if isinstance(module, nn.Linear) else MXConv2d
        vars(module)["format"] = config.format
    return module


def mx_recipe(format: str) -> QuantizationRecipe:
    """What a recipe does for ``mx=format``."""
    return QuantizationRecipe(ao_quantization_configs=[AOQuantizationConfig(MXConfig(format), is_mx_layer)])


def is_mx_recipe(recipe: QuantizationRecipe | None) -> bool:
    """Whether it is such a recipe."""
    configs = recipe.ao_quantization_configs if recipe is not None else None
    return any(isinstance(config.ao_base_config, MXConfig) for config in configs or ())
