"""The models that ``litert.py`` compares: some of the zoo, and kinds of networks that the zoo lacks.

Both compilers get the same modules. Inputs and outputs are NHWC images (N, H, W, C) or sequences (N, length, channels),
the layout of NPU and LiteRT. For PyTorch, this is an image in ``torch.channels_last``. This module needs only PyTorch
and the imports of ``tests.models.zoo``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.models import zoo


class ChannelsLast(nn.Module):
    """Wraps a network of images or sequences: inputs and outputs are channels-last tensors (N, ..., C)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        """Transpose (N, ..., C) to (N, C, ...), call the network, and transpose its outputs of that rank back."""
        found = self.model(x.movedim(-1, 1))
        return pytree.tree_map(lambda y: y.movedim(1, -1) if y.dim() == x.dim() else y, found)


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """U-Net for segmentation: three levels, 16 to 128 channels, transposed convolutions, 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.down = nn.ModuleList(
            nn.Sequential(_conv(before, width), _conv(width, width))
            for before, width in zip((3, *widths), widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in widths[:-1])
        self.merge = nn.ModuleList(nn.Sequential(_conv(2 * width, width), _conv(width, width)) for width in widths[:-1])
        self.head = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 3, H, W) to (N, 4, H, W); H and W are multiples of 8."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.merge[level](torch.cat([kept[level], self.up[level](x)], 1))
        return self.head(x)


class SuperResolution(nn.Module):
    """Super-resolution by a factor of 2: residual blocks of 32 channels and a pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(4)
        )
        self.last = nn.Conv2d(32, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 3, H, W) to (N, 3, 2 H, 2 W)."""
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return F.pixel_shuffle(self.last(x), 2)


class CausalBlock(nn.Module):
    """Residual block of a TCN: a causal dilated convolution of 3 taps, and a ReLU."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.past = 2 * dilation
        self.conv = nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, channels, T) to the same shape."""
        return F.relu(self.conv(F.pad(x, (self.past, 0)))) + x


class Tcn(nn.Module):
    """Temporal convolutional network (TCN): dilations 1 to 16, 32 channels, 40 input features, 12 classes per step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(40, 32, 1)
        self.blocks = nn.Sequential(*(CausalBlock(32, 2**power) for power in range(5)))
        self.head = nn.Conv1d(32, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 40, T) to (N, 12, T)."""
        return self.head(self.blocks(self.first(x)))


class Wav2Letter(nn.Module):
    """Speech recognition by temporal convolutions: the layers of Wav2Letter with 100 to 750 channels, 29 letters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(39, 100, 48, 2, 23), nn.ReLU()]
        for _ in range(7):
            layers += [nn.Conv1d(100, 100, 7, padding=3), nn.ReLU()]
        layers += [nn.Conv1d(100, 750, 32, padding=16), nn.ReLU(), nn.Conv1d(750, 750, 1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv1d(750, 29, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 39, T) to (N, 29, T / 2)."""
        return self.layers(x)


class Detector(nn.Module):
    """A single-stage detector: strided stages, a spatial pyramid of pools of 5, 9 and 13, two heads of 18 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        self.stem = nn.Sequential(_conv(3, widths[0], stride=2))
        self.stages = nn.ModuleList(
            nn.Sequential(_conv(before, width, stride=2), _conv(width, width // 2, 1), _conv(width // 2, width))
            for before, width in pairwise(widths)
        )
        self.narrow, self.join = _conv(128, 64, 1), _conv(256, 128, 1)
        self.lateral, self.merge = _conv(128, 64, 1), _conv(128, 64)
        self.heads = nn.ModuleList([nn.Conv2d(64, 18, 1), nn.Conv2d(128, 18, 1)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps (N, 3, H, W) to (N, 18, H / 8, W / 8) and (N, 18, H / 16, W / 16)."""
        x = self.stem(x)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        x = self.narrow(x)
        x = self.join(torch.cat([x, *(F.max_pool2d(x, size, 1, size // 2) for size in (5, 9, 13))], 1))
        up = F.interpolate(self.lateral(x), scale_factor=2.0, mode="nearest")
        return self.heads[0](self.merge(torch.cat([up, levels[-2]], 1))), self.heads[1](x)


def _shufflenet() -> nn.Module:
    found: nn.Module = zoo.torchvision().models.shufflenet_v2_x1_0(weights=None)
    return found


#: Networks that the zoo lacks, and the shapes of their inputs, (N, C, ...).
_OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (UNet, (1, 3, 128, 128)),
    "super_resolution": (SuperResolution, (1, 3, 96, 96)),
    "tcn": (Tcn, (1, 40, 128)),
    "wav2letter": (Wav2Letter, (1, 39, 296)),
    "shufflenet_v2_x1_0": (_shufflenet, (1, 3, 224, 224)),
    "detector_spp": (Detector, (1, 3, 224, 224)),
}

NAMES: tuple[str, ...] = (*zoo.NAMES, *_OTHER_MODELS)
"""The names that ``build`` takes."""


def build(name: str, samples: int = 4) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Build a model in evaluation mode and calibration inputs; they are the same in every process.

    Raises:
        KeyError: there is no model of that name.
    """
    if name in zoo.NAMES:
        model, given, _ = zoo.build(name, samples)
    else:
        make, shape = _OTHER_MODELS[name]
        torch.manual_seed(0)
        draw = partial(torch.randn, *shape)
        model = make().eval()
        zoo.initialize_batch_norm(model, lambda: (draw(),))
        given = [(draw(),) for _ in range(samples)]
    if given[0][0].dim() < 4 and name not in _OTHER_MODELS:
        return model, given
    return ChannelsLast(model).eval(), [(x.movedim(1, -1).contiguous(),) for (x,) in given]
