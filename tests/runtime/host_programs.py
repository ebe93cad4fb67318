"""Programs for the tests of the host runtime, each exported once in a process."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from executorch.export import ExportRecipe
from executorch.export import export as executorch_export
from torch import Tensor, nn

from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportResult, export
from arm_recipes.runtime.signature import _CHECKSUM_PLACEHOLDER, _CHECKSUM_PREFIX
from tests.small_models import Small, images, vectors


class Mixed(nn.Module):
    """Takes and returns floating-point numbers, integers, booleans and scalars."""

    def forward(self, x: Tensor, scale: Tensor, count: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return results of all inputs, in another order than the inputs."""
        y = x * scale
        return count + 1, torch.where(mask, x, y), x > 0, scale + 1, y.sum()


MIXED = (
    torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, -8.0]]),
    torch.tensor(2.5),
    torch.tensor([1, -7, 2**30, 0], dtype=torch.int32),
    torch.tensor([[True, False, True], [False, True, False]]),
)


class Counting(nn.Module):
    """Adds the number of its calls to the result of a linear layer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Count the call, and return the sum."""
        self.calls.add_(1)
        return self.layer(x) + self.calls


class CpuBetween(nn.Module):
    """Has operators between its layers that no target supports and that the runtime has kernels for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 720), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return the largest running sum."""
        return self.second(torch.cumsum(self.first(x), 1).topk(6).values)


class Striped(nn.Module):
    """Larger than the NPU's buffers: Vela splits it into stripes, and not all tensors fit into fast memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, padding=1, groups=24),
            nn.Hardswish(),
            nn.Conv2d(24, 40, 3, stride=2),
            nn.MaxPool2d(2),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return an image and the means of its channels."""
        y = self.layers(x)
        return y, y.mean((2, 3))


@cache
def export_small(recipe: ArmRecipeType, **options: Any) -> ExportResult:
    """Export ``Small``."""
    return export(Small().eval(), ExportRecipe.get_recipe(recipe, **options), images())


def export_striped(recipe: ArmRecipeType, **options: Any) -> tuple[ExportResult, Tensor]:
    """Export ``Striped``; return the result and an input."""
    generator = torch.Generator().manual_seed(2)
    samples = [(torch.randn(1, 3, 40, 40, generator=generator),) for _ in range(3)]
    return export(Striped().eval(), ExportRecipe.get_recipe(recipe, **options), samples), samples[0][0]


@cache
def export_mixed(recipe: ArmRecipeType) -> ExportResult:
    """Export ``Mixed``."""
    return export(Mixed().eval(), ExportRecipe.get_recipe(recipe), [MIXED])


@cache
def export_methods() -> bytes:
    """Export a program with three methods: ``Counting`` twice, and ``CpuBetween``."""
    models = {"first": Counting().eval(), "between": CpuBetween().eval(), "second": Counting().eval()}
    return export(models, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), dict.fromkeys(models, vectors(1))).buffer


@cache
def export_without_recipe(recipe: ArmRecipeType) -> bytes:
    """Export ``Small`` by ExecuTorch's own export, without input names and checksum of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArmRecipesWarning)
        return bytes(executorch_export(Small().eval(), images(), ExportRecipe.get_recipe(recipe)).get_pte_buffer())


def remove_file_checksum(program: bytes) -> bytes:
    """Replace the checksum of the file with its placeholder, so that the reader does not verify the file."""
    at = program.rindex(_CHECKSUM_PREFIX) + len(_CHECKSUM_PREFIX)
    return program[:at] + _CHECKSUM_PLACEHOLDER.encode() + program[at + len(_CHECKSUM_PLACEHOLDER) :]


def remove_checksums(program: bytes) -> bytes:
    """Remove the checksums of file and payloads by renaming the keys of their compile specs."""
    return remove_file_checksum(program).replace(b"payload_crc32", b"payload_other")
