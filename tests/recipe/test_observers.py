"""The option ``observer``: the range of each observer, and recipes that use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.quantization import get_symmetric_quantization_config
from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes.recipe.observers import OBSERVERS
from arm_recipes.recipe.options import OBSERVER_NAMES

INT8 = ArmRecipeType.TOSA_INT8
_SPEC: dict[str, Any] = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_affine}


def _range(name: str, x: Tensor) -> tuple[float, float]:
    observer = OBSERVERS[name](**_SPEC)
    observer(x)
    scale, zero_point = (float(value) for value in observer.calculate_qparams())
    return (-128 - zero_point) * scale, (127 - zero_point) * scale


def test_observers_have_the_names_of_the_option() -> None:
    assert tuple(OBSERVERS) == OBSERVER_NAMES


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("kind", ["normal", "relu", "negative", "constant", "zero", "few", "outlier"])
def test_observer_ranges_cover_most_of_the_values(name: str, kind: str) -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    x = {
        "normal": x,
        "relu": x.relu(),
        "negative": -x.abs() - 1,
        "constant": torch.full_like(x, 3.25),
        "zero": torch.zeros_like(x),
        "few": x[:10],
        "outlier": torch.cat([x, torch.tensor([1000.0])]),
    }[kind]
    low, high = _range(name, x)
    assert low <= 0 <= high
    clipped = (x - x.clamp(low, high)).square().sum()
    step = (high - low) / 255
    if name == "minmax" and kind != "zero":
        assert high == pytest.approx(max(float(x.max()), 0.0), abs=step + 1e-12)
    elif kind == "outlier":
        assert high < 800
    if kind != "outlier":
        assert clipped <= 0.01 * x.square().sum()
        least = 1e-4 if kind == "zero" else 1e-12
        assert step <= 2.1 * (max(float(x.max()), 0.0) - min(float(x.min()), 0.0)) / 255 + least


def test_recipes_accept_each_observer() -> None:
    samples = [(torch.cat([torch.randn(1, 4, 64, 64).flatten(), torch.tensor([50.0])])[None],) for _ in range(2)]
    scales = {}
    for name in OBSERVERS:
        result = export(nn.Hardtanh(-60, 60).eval(), ExportRecipe.get_recipe(INT8, observer=name), samples)
        scales[name] = (
            result.exported_programs["forward"]
            .graph.find_nodes(op="call_function", target=torch.ops.quantized_decomposed.quantize_per_tensor.default)[0]
            .args[1]
        )
    assert scales["minmax"] == max(scales.values())
    assert len(set(scales.values())) > 2
    config = get_symmetric_quantization_config(observer=OBSERVERS["entropy"])
    assert config.activation.observer_or_fake_quant_ctr is OBSERVERS["entropy"]
