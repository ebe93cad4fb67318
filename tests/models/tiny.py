"""Models for microcontrollers, beside those of the zoo, with seeded random weights.

The two image classifiers of MLPerf Tiny (Banbury et al. 2021) that the zoo lacks, a U-Net (Ronneberger et al. 2015) and
a GRU keyword spotter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.models.zoo import CONVOLUTION, Entry, build_entry

RECURRENT = "recurrent"
"""A network with a recurrent layer inside."""


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution with "same" padding and batch normalization."""
    padding = (kernel - 1) // 2
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution if the block changes the shape."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet8(nn.Module):
    """MLPerf Tiny's image classifier: images of 32x32 in, 10 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(3, 16, 3)
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.pool = nn.AvgPool2d(8)
        self.classifier = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Maps (N, 3, 32, 32) to (N, 10)."""
        x = self.blocks(torch.relu(self.stem(image)))
        return self.classifier(torch.flatten(self.pool(x), 1))


class MobileNetV1(nn.Module):
    """MLPerf Tiny's person detector: MobileNetV1 with a quarter of the channels, images of 96x96 in, 2 classes out."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 8, 3, stride=2), nn.ReLU()]
        channels = 8
        strided = [(16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *[(128, 1)] * 5, (256, 2), (256, 1)]
        for outputs, stride in strided:
            layers += [_convolution(channels, channels, 3, stride, groups=channels), nn.ReLU()]
            layers += [_convolution(channels, outputs, 1), nn.ReLU()]
            channels = outputs
        self.layers = nn.Sequential(*layers, nn.AvgPool2d(3))
        self.classifier = nn.Linear(channels, 2)

    def forward(self, image: Tensor) -> Tensor:
        """Maps (N, 3, 96, 96) to (N, 2)."""
        return self.classifier(torch.flatten(self.layers(image), 1))


def _double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(_convolution(inputs, outputs, 3), nn.ReLU()), *(_convolution(outputs, outputs, 3), nn.ReLU())
    )


class UNet(nn.Module):
    """A U-Net of three levels with transposed convolutions: images of 32x32 in, scores of 2 classes per pixel out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([_double_convolution(3, 8), _double_convolution(8, 16)])
        self.bottom = _double_convolution(16, 32)
        self.upsample = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.decoder = nn.ModuleList([_double_convolution(32, 16), _double_convolution(16, 8)])
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Maps (N, 3, 32, 32) to (N, 2, 32, 32)."""
        skipped = []
        x = image
        for block in self.encoder:
            x = block(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for upsample, block in zip(self.upsample, self.decoder, strict=True):
            x = block(torch.cat([upsample(x), skipped.pop()], 1))
        return self.head(x)


class GruSpotter(nn.Module):
    """A keyword spotter of a GRU and a linear layer: 20 frames of 10 MFCC features in, 12 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(10, 32, batch_first=True)
        self.classifier = nn.Linear(32, 12)

    def forward(self, frames: Tensor) -> Tensor:
        """Maps (N, 20, 10) to (N, 12), from the last state."""
        result: Tensor = self.classifier(self.layer(frames)[0][:, -1])
        return result


_BUILDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "resnet8": (ResNet8, (1, 3, 32, 32), CONVOLUTION),
    "mobilenet_v1_025": (MobileNetV1, (1, 3, 96, 96), CONVOLUTION),
    "unet": (UNet, (1, 3, 32, 32), CONVOLUTION),
    "gru_spotter": (GruSpotter, (1, 20, 10), RECURRENT),
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)
"""Names of the models."""


def build(name: str, samples: int = 4, seed: int = 0) -> Entry:
    """Build a model, as ``zoo.build`` does. Inputs are uniform in [-1, 1).

    Raises:
        KeyError: if there is no model of that name.
        ValueError: if ``samples`` is not positive.
    """
    make, shape, kind = _BUILDERS[name]
    return build_entry(make, lambda: torch.rand(shape) * 2 - 1, kind, samples, seed)
