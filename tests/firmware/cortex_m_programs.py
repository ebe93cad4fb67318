"""Programs of CORTEX_M_INT8 for the tests of firmware folders; each is exported once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models.zoo import DsCnn, initialize_batch_norm


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]


class Small(nn.Module):
    """Convolutions, a pooling, elementwise operators, a matrix product and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.linear = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return class probabilities, an image, and products of its channels."""
        y = torch.relu(self.stem(x))
        y = y + self.depthwise(y)
        up = self.up(nn.functional.max_pool2d(y, 2))
        gated = up * torch.sigmoid(y)
        features = torch.cat((gated, torch.maximum(up, y)), 1).mean((2, 3))
        products = torch.matmul(gated.flatten(2), up.flatten(2).transpose(1, 2))
        return torch.softmax(self.linear(features), -1), gated, products


class ResNet8(nn.Module):
    """MLPerf Tiny's image classifier."""

    class Block(nn.Module):
        """Two convolutions and a shortcut."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            stride = 1 if inputs == outputs else 2
            self.layers = nn.Sequential(
                *_convolution(inputs, outputs, 3, stride), *_convolution(outputs, outputs, 3)[:2]
            )
            self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

        def forward(self, x: Tensor) -> Tensor:
            """Return the activations of the sum."""
            return torch.relu(self.layers(x) + self.shortcut(x))

    def __init__(self) -> None:
        super().__init__()
        blocks = [self.Block(16, 16), self.Block(16, 32), self.Block(32, 64)]
        self.layers = nn.Sequential(*_convolution(3, 16, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, 32, 32) to (N, 10)."""
        y: Tensor = self.classifier(self.layers(x))
        return y


def _mobilenet_v1_025() -> nn.Module:
    """Build MLPerf Tiny's person detector."""
    strides = {16: [1], 32: [2, 1], 64: [2, 1], 128: [2, 1, 1, 1, 1, 1], 256: [2, 1]}
    layers, inputs = _convolution(3, 8, 3, 2), 8
    for outputs, steps in strides.items():
        for stride in steps:
            layers += [*_convolution(inputs, inputs, 3, stride, inputs), *_convolution(inputs, outputs, 1)]
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 2))


class Spotter(nn.Module):
    """A keyword spotter with a GRU, whose steps are unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(10, 16, batch_first=True)
        self.classifier = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, steps, 10) to (N, 12)."""
        y: Tensor = self.classifier(self.layer(x)[0][:, -1])
        return y


class UNet(nn.Module):
    """Two levels of a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*_convolution(3, 8, 3))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *_convolution(8, 16, 3), nn.ConvTranspose2d(16, 8, 2, 2))
        self.head = nn.Sequential(*_convolution(16, 8, 3), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 2, H, W)."""
        y = self.down(x)
        result: Tensor = self.head(torch.cat((self.bottom(y), y), 1))
        return result


_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small": (Small, (1, 3, 12, 12)),
    "ds_cnn": (DsCnn, (1, 1, 49, 10)),
    "resnet8": (ResNet8, (1, 3, 32, 32)),
    "mobilenet_v1_025": (_mobilenet_v1_025, (1, 3, 96, 96)),
    "spotter": (Spotter, (1, 8, 10)),
    "unet": (UNet, (1, 3, 32, 32)),
}


def samples(name: str, count: int = 2) -> list[tuple[Tensor, ...]]:
    """Random samples for a model."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(_MODELS[name][1], generator=generator),) for _ in range(count)]


@cache
def program(name: str, cpu: str = "cortex-m55") -> ExportResult:
    """Export one of the models for a processor."""
    build, shape = _MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().eval()
        initialize_batch_norm(model, lambda: (torch.randn(shape),))
    return export(model, ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, cpu=cpu), samples(name, 4))
