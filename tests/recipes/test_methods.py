"""Several methods in one program: they share weights, scales and state."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor

import arm_recipes
from arm_recipes import ArmRecipeType, ExportResult
from tests.models.decoder import Prefill, Sample, decoder, prompt

PROMPT, STEPS = 8, 32
Run = Callable[[str, Sample], Tensor]


@cache
def _exported(recipe: str) -> ExportResult:
    model = decoder()
    samples = {"prefill": [prompt(PROMPT)], "decode": [prompt(1, PROMPT + i) for i in range(STEPS)]}
    methods = {"prefill": Prefill(model), "decode": model}
    return arm_recipes.export(methods, ExportRecipe.get_recipe(ArmRecipeType[recipe]), samples)


def _decoded(run: Run) -> list[int]:
    """Tokens that follow the prompt, each the likeliest."""
    tokens = [int(run("prefill", prompt(PROMPT)).argmax())]
    for position in range(PROMPT, PROMPT + STEPS - 1):
        place = torch.tensor([position], dtype=torch.int32)
        tokens.append(int(run("decode", (torch.tensor([[tokens[-1]]], dtype=torch.int32), place)).argmax()))
    return tokens


def _as_quantized(result: ExportResult) -> Run:
    """Both methods as PyTorch runs their quantized graphs, on one state."""
    modules = {method: program.module() for method, program in result.exported_programs.items()}
    for module in modules.values():
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # attention lays its result out as it was not traced
        module.recompile()
    states = {
        method: {name.removeprefix("decoder."): buffer for name, buffer in module.named_buffers() if "cache" in name}
        for method, module in modules.items()
    }

    def run(method: str, sample: Sample) -> Tensor:
        scores = modules[method](*sample)
        for other in states.values():
            for name, buffer in other.items():
                buffer.copy_(states[method][name])
        return torch.as_tensor(scores)

    return run


@pytest.mark.parametrize("recipe", ["TOSA_INT8", "TOSA_A16W8", "ETHOSU_U85_INT8"])
def test_a_decoder_goes_on_from_its_prompt(recipe: str) -> None:
    result = _exported(recipe)
    for method in result.report.methods:
        assert not method.cpu
        assert len(method.delegates) == 1
    program = arm_recipes.load(result.buffer)
    found = _decoded(lambda method, sample: program.run(*sample, method=method)[0])
    assert found == _decoded(_as_quantized(result))
    assert len(set(found)) > 4
