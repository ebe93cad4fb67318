"""Conversions that messages suggest: applied to a tensor, they give the expected dtype and shape."""

from __future__ import annotations

import pytest
import torch

from arm_recipes._internal.conversions import list_shape_conversions, suggest_conversion


@pytest.mark.parametrize("shape", [(8,), (4, 8), (1, 5), (2, 4, 8), (1, 4, 8, 3), (1, 2, 4, 8, 3)])
def test_each_conversion_gives_its_shape(shape: tuple[int, ...]) -> None:
    conversions = list(list_shape_conversions(shape))
    assert conversions
    for conversion in conversions:
        assert eval(f"x{conversion.code}", {"x": torch.zeros(shape)}).shape == conversion.shape


@pytest.mark.parametrize(
    ("dtype", "shape", "expected_dtype", "expected_shape", "text"),
    [
        ("float64", (1, 3), "float32", (1, 3), "; pass x.float()"),
        ("float32", (1, 3), "int8", (1, 3), "; pass x.to(torch.int8)"),
        ("float32", (3, 4), "float32", (1, 3, 4), ": the batch dimension is missing; pass x.unsqueeze(0)"),
        (
            "float16",
            (1, 4, 4, 3),
            "float32",
            (1, 3, 4, 4),
            ": the channels are last; pass x.permute(0, 3, 1, 2).float()",
        ),
        ("float32", (1, 3), "float32", (1, 3), ""),
        ("float32", (1, 3), "float32", (1, 4), ""),
    ],
)
def test_suggestions(
    dtype: str, shape: tuple[int, ...], expected_dtype: str, expected_shape: tuple[int, ...], text: str
) -> None:
    assert suggest_conversion(dtype, shape, expected_dtype, expected_shape) == text
