"""A keyword spotter of 49 LSTM steps: cycles, bytes and SQNR of its programs, and seconds of its export.

    .venv/bin/python benchmarks/recurrent.py

Seconds are processor time of this process and Vela on one thread, after a warm-up export. The SQNR of "int8 weights" is
that of a model with float states whose weights, input and output are rounded to int8.
"""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arm_recipes import ArmRecipeType, export  # noqa: E402
from arm_recipes.runtime.tensor_info import TensorInfo  # noqa: E402
from benchmarks.compare import processor_seconds  # noqa: E402
from tests.models.keyword_spotter import KeywordSpotter  # noqa: E402

STEPS_PER_CALL = (None, 7, 1)
RECIPES = (ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8, ArmRecipeType.TOSA_INT8)


def _compute_sqnr(exact: Tensor, x: Tensor) -> float:
    return float(10 * torch.log10(exact.pow(2).sum() / (exact - x).pow(2).sum()))


def _fake_quantize(x: Tensor, info: TensorInfo) -> Tensor:
    assert info.scale is not None
    assert info.zero_point is not None
    return (info.quantize(x).float() - info.zero_point) * info.scale


@torch.no_grad()
def _run_with_int8_weights(model: KeywordSpotter, samples: list[Tensor]) -> Tensor:
    """Outputs of a float model with int8 weights. Its input and output have the scales of the program."""
    floating = copy.deepcopy(model)
    for parameter in floating.parameters():
        if parameter.dim() == 2:
            scale = parameter.abs().amax(1, keepdim=True) / 127
            parameter.copy_((parameter / scale).round() * scale)
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, quantized_io=True)
    result = export(model, recipe, [(x,) for x in _samples(49)])
    return _fake_quantize(
        torch.cat([floating(_fake_quantize(x, result.inputs[0])) for x in samples]), result.outputs[0]
    )


def _samples(steps: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, steps, 10) for _ in range(8)]


def _export(model: nn.Module, kind: ArmRecipeType, steps: int, **options: Any) -> tuple[Any, float]:
    samples, recipe = [(x,) for x in _samples(steps)], ExportRecipe.get_recipe(kind, **options)
    begin = processor_seconds()
    return export(model, recipe, samples), processor_seconds() - begin


def _cycles(result: Any) -> str:
    vela = [delegate.vela for delegate in result.report.delegates if delegate.vela is not None]
    return f"{sum(figures.total_cycles for figures in vela):,}" if vela else "-"


@torch.no_grad()
def main() -> None:
    """Measure each recipe, and print the figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = KeywordSpotter().eval()
    samples = [torch.randn(1, 49, 10) for _ in range(32)]
    exact = torch.cat([model(x) for x in samples])
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    sqnr = _compute_sqnr(exact, _run_with_int8_weights(model, samples))
    print(f"weights {weights:,} bytes; SQNR of int8 weights {sqnr:.1f} dB")
    for recipe in RECIPES:
        _export(model, recipe, 2)
        int16_classifier, _ = _export(model, recipe, 49, precisions={"classifier": "A16W8"})
        better = torch.cat([int16_classifier.run(x) for x in samples])
        sqnr = _compute_sqnr(exact, better)
        print(f"{recipe.name}: with the classifier in A16W8 {_cycles(int16_classifier)} cycles, {sqnr:.1f} dB")
        for steps in STEPS_PER_CALL:
            result, seconds = _export(model, recipe, 49, steps_per_call=steps)
            _, more = _export(model, recipe, 98, steps_per_call=steps)
            got = torch.cat([result.run(x) for x in samples])
            print(
                f"  {steps or 'all'} steps per call: {_cycles(result)} cycles, {len(result.buffer):,} bytes = "
                f"{len(result.buffer) / weights:.2f} of the weights, {seconds:.1f} s, "
                f"{(more - seconds) / 4.9:.2f} s for 10 more steps, {_compute_sqnr(exact, got):.1f} dB"
            )


if __name__ == "__main__":
    main()
