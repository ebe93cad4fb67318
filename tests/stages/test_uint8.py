"""uint8 images that a model permutes, slices, concatenates or casts itself, and uint8 outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.capture import Capture

_MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.permute(0, 2, 3, 1).float() / 255,
    "no cast": lambda x: x.permute(0, 2, 3, 1) / 255,
    "cut": lambda x: (x[:, :, 2:7].to(torch.float32) - 127) / 58,
    "joined": lambda x: torch.cat([x, x.flip(3)], 3).float(),
    "planes": lambda x: torch.stack([x[..., ::2, ::2], x[..., 1::2, ::2]], 1).float() / 255,
    "rounded on the way": lambda x: (x.float() * 0.499).to(torch.uint8).flip(1).permute(0, 2, 3, 1).float() * 0.5,
    "bytes": lambda x: (x.float() * 0.5).to(torch.uint8),
    "moved bytes": lambda x: (x.float() * 0.5).to(torch.uint8).permute(0, 2, 3, 1).contiguous(),
}


class _Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return _MOVED[self.how](x)


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8])
@pytest.mark.parametrize("how", _MOVED)
def test_bytes_that_are_moved(how: str, kind: ArmRecipeType) -> None:
    torch.manual_seed(0)
    samples = [(torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8),) for _ in range(3)]
    model = _Model(how).eval()
    result = export(model, ExportRecipe.get_recipe(kind), samples)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    found, expected = result.run(*samples[0]), model(*samples[0])
    assert found.dtype is expected.dtype
    step = (
        1e-5
        if kind is ArmRecipeType.TOSA_FP
        else 1.0
        if "bytes" in how or "way" in how
        else float(expected.max()) / 200
    )
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=step)


def test_a_uint8_cast_reads_the_values_before_a_later_write() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2.0
            made = y.to(torch.uint8)
            y.add_(10.0)
            return made.flip(0), y

    x = torch.arange(8.0)
    program = Capture(None)("forward", Model().eval(), Inputs(x))
    for found, expected in zip(program.module()(x), Model()(x), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
def test_casts_to_uint8_wrap_around(kind: ArmRecipeType) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 4).to(torch.uint8).float()

    x = torch.arange(128.0)  # up to 508
    result = export(Model().eval(), ExportRecipe.get_recipe(kind), [(x,)] * 2)
    assert len(result.report.delegates) == 1
    assert (result.run(x) - Model()(x)).abs().max() <= (0 if kind is ArmRecipeType.TOSA_FP else 3)  # int8: steps of 2


def test_uint8_times_float16_is_float16() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.flip(0) * y

    x, y = torch.arange(6, dtype=torch.uint8), torch.linspace(-1, 1, 6, dtype=torch.float16)
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x, y)])
    assert result.run(x, y).dtype is torch.float16
    torch.testing.assert_close(result.run(x, y), Model()(x, y))


def test_in_place_writes_keep_uint8() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            part = x[:, 1:]
            part.fill_(7)
            return part.float() + x[:, :3].float()

    x = torch.randint(0, 256, (2, 4), dtype=torch.uint8)
    program = Capture(None)("forward", Model().eval(), Inputs(x))
    assert torch.equal(program.module()(x), Model()(x))
