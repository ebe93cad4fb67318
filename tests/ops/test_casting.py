"""Casts between integer types drop the high bits, as in PyTorch."""

from __future__ import annotations

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, export

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Casts(nn.Module):
    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Cast the result of an addition on every input, and every input itself, to every type."""
        return [(x + 1).to(dtype) for x in inputs for dtype in INTEGERS] + [
            x.to(dtype) for x in inputs for dtype in INTEGERS if x.dtype is not dtype
        ]


@pytest.mark.filterwarnings("ignore:.*int64, which TOSA does not support")
@pytest.mark.parametrize("recipe", ["TOSA_FP", "TOSA_INT8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8"])
def test_casts_of_values_out_of_range_wrap(recipe: str) -> None:
    limits = [torch.iinfo(torch.int32 if dtype is torch.int64 else dtype) for dtype in INTEGERS]
    drawn = [
        torch.randint(limit.min, limit.max, (32,), generator=torch.Generator().manual_seed(limit.bits))
        for limit in limits
    ]
    known = torch.tensor([300, -300, 1, 2, 3, 128, 255, -129, 70_000, -70_000, (1 << 29) + 200])
    assumed = drawn[-1] >> 2  # int64 inputs are assumed to be below 2**30
    sample = tuple(
        torch.cat([known.clamp(limit.min, limit.max), numbers]).to(dtype)
        for dtype, limit, numbers in zip(INTEGERS, limits, [*drawn[:-1], assumed], strict=True)
    )
    model = _Casts().eval()
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), [sample])
    for found, expected in zip(result.run(*sample), model(*sample), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
