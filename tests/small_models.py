"""Small models with fixed random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arm_recipes import ExportResult

Samples = list[tuple[Tensor, ...]]


_CHANNELS = 8  #: channels of UnevenGains


class Small(nn.Module):
    """A convolution with batch normalization, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of images."""
        return self.head(self.body(x).mean((2, 3)))


class Wide(nn.Module):
    """An image network whose largest tensors are in the middle. A size program computes a few rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen, self.between = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.narrow = nn.Conv2d(24, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        return self.narrow(self.between(self.widen(x).relu()).relu())


class Sorting(nn.Module):
    """Two linear layers with a ``topk`` of many elements between them, which runs on the CPU on every target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 720), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the second layer to the largest results of the first."""
        return self.second(torch.topk(self.first(x), 8).values)


class AttentionBlock(nn.Module):
    """A convolution, attention with a residual and a norm; two results; counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean over the pixels, and all pixels times the number of calls."""
        y = nn.functional.hardswish(self.conv(x)).flatten(2).transpose(1, 2)
        y = self.norm(y + self.attention(y, y, y)[0])
        self.calls.add_(1)
        return y.mean(1), self.calls * y


class MovingAverage(nn.Module):
    """The moving average of a linear layer's results, in a buffer."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.ones(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Update the average and return it."""
        self.state.copy_(0.5 * self.state + 0.5 * self.linear(x))
        return self.state


class UnevenGains(nn.Module):
    """A digit classifier of eight channels whose gains differ by a factor of up to 32: hard for per-tensor scales."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, _CHANNELS, 3, padding=1, bias=False)]
        for stride in (1, 2, 1):
            layers += [nn.BatchNorm2d(_CHANNELS), nn.ReLU()]
            layers += [nn.Conv2d(_CHANNELS, _CHANNELS, 3, stride, padding=1, groups=_CHANNELS, bias=False)]
            layers += [nn.BatchNorm2d(_CHANNELS), nn.ReLU(), nn.Conv2d(_CHANNELS, _CHANNELS, 1, bias=False)]
        layers += [nn.BatchNorm2d(_CHANNELS), nn.ReLU(), nn.Conv2d(_CHANNELS, 32, 1), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        generator = torch.Generator().manual_seed(0)
        for norm, following in zip(layers[1:-1:3], layers[3::3], strict=True):
            gains = 2 ** (5 * torch.rand(_CHANNELS, generator=generator) - 2.5)
            assert isinstance(norm, nn.BatchNorm2d)
            assert isinstance(following, nn.Conv2d)
            norm.weight.data *= gains
            following.weight.data /= gains.reshape([-1, 1, 1, 1] if following.groups > 1 else [1, -1, 1, 1])

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.layers(image)
        return logits


class ConstantHeads(nn.Module):
    """A product with a constant of several matrices, which U55 quantizes as layers and U85 as one MATMUL."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Map (4, 8, 8) to the same shape."""
        return torch.matmul(x, self.weight)


def images(count: int = 4) -> Samples:
    """Make inputs for ``Small``."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, 8, 8, generator=generator),) for _ in range(count)]


def vectors(count: int = 4) -> Samples:
    """Make vectors of 8 numbers: inputs of ``Sorting`` and of the other models without images."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 8, generator=generator),) for _ in range(count)]


def run(result: ExportResult, *inputs: Any) -> Any:
    """Run a program on this machine; programs for an NPU run as their TOSA graphs."""
    return result.run(*inputs, backend="tosa" if result.report.recipe.startswith("arm_recipes_ethosu") else None)
