"""cos and sin of positions times constants: accurate for every position, independent of calibration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

import arm_recipes
from arm_recipes import ArmRecipeType

FREQUENCIES = 10000.0 ** -(torch.arange(8) / 8)


class Angles(nn.Module):
    """cos and sin of the angle that the function ``angle`` computes from positions and frequencies."""

    frequencies: Tensor

    def __init__(self, angle: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES)
        self.angle = angle

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = self.angle(positions, self.frequencies)
        return angle.cos(), angle.sin() * 0.5


def _product(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[..., None].to(frequencies.dtype) * frequencies


def _doubled(positions: Tensor, frequencies: Tensor) -> Tensor:
    angle = _product(positions, frequencies)
    return torch.cat([angle, angle], -1).unsqueeze(1)


def _outer(positions: Tensor, frequencies: Tensor) -> Tensor:
    column = frequencies[None, :, None].expand(positions.shape[0], -1, 1)
    return (column @ positions[:, None, :].to(frequencies.dtype)).transpose(1, 2)


def _promoted(positions: Tensor, frequencies: Tensor) -> Tensor:
    return positions[..., None] * frequencies


def _steps(positions: Tensor, frequencies: Tensor) -> Tensor:
    return frequencies[2] * (positions * 3 - 1).to(frequencies.dtype)


@pytest.mark.parametrize(
    ("recipe", "max_error"),
    [("TOSA_INT8", 0.006), ("TOSA_A16W8", 2e-4), ("ETHOSU_U85_INT8", 0.006), ("ETHOSU_U55_INT8", 0.006)],
)
@pytest.mark.parametrize(
    ("angle", "dtype"),
    [
        (_product, torch.int64),
        (_doubled, torch.int32),
        (_outer, torch.int64),
        (_steps, torch.int32),
        (_promoted, torch.int64),
    ],
)
def test_every_position(
    angle: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, recipe: str, max_error: float
) -> None:
    seen = [(torch.tensor([[i, i + 1, i + 2]], dtype=dtype),) for i in range(8)]
    positions = torch.tensor([[0, 8191, -70_000_001]], dtype=dtype)
    result = arm_recipes.export(Angles(angle).eval(), ExportRecipe.get_recipe(ArmRecipeType[recipe]), seen)
    (method,) = result.report.methods
    assert not method.cpu_operators
    assert len(method.delegates) == 1
    exact = angle(positions, FREQUENCIES.double())
    for found, expected in zip(result.run(positions), (exact.cos(), exact.sin() / 2), strict=True):
        assert (found - expected).abs().max() < max_error


class Rotary(nn.Module):
    """Rotary embedding with computed angles; both halves of the result read the cosine and the sine.

    Args:
        shares: whether the two halves share the cosine and the sine, or compute each again.
    """

    frequencies: Tensor

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES[:4])
        self.shares = shares

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = _product(positions, self.frequencies)
        cosine, sine = angle.cos(), angle.sin()
        again = (cosine, sine) if self.shares else (angle.cos(), angle.sin())
        first, second = x[..., :4], x[..., 4:]
        return first * cosine - second * sine, first * again[1] + second * again[0]


@pytest.mark.parametrize(
    ("recipe", "shape", "shares"),
    [
        *(("ETHOSU_U55_INT8", shape, shares) for shape in ((1, 8), (6, 8), (2, 6, 8)) for shares in (True, False)),
        ("ETHOSU_U65_INT8", (1, 8), True),
        ("ETHOSU_U85_INT8", (1, 8), True),
    ],
)
def test_rotary_embedding(recipe: str, shape: tuple[int, ...], shares: bool) -> None:
    """Several products read the cosine, a rescaled product, in another shape (Vela's ``duplicated_rescale_reshape``).

    The bug needs a cosine or a sine with zero point 0, as these samples give.
    """
    torch.manual_seed(0)
    samples = [(torch.randn(shape), torch.randint(0, 5000, shape[-2:-1], dtype=torch.int32)) for _ in range(6)]
    made = ExportRecipe.get_recipe(ArmRecipeType[recipe])
    result = arm_recipes.export(Rotary(shares=shares).eval(), made, samples)
    for emulated, expected in zip(result.run(*samples[0]), result.run(*samples[0], backend="tosa"), strict=True):
        assert torch.equal(emulated, expected)
