"""Outputs in the structure of the model: of a result, and of a program that was loaded from its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arm_recipes import ArmRecipeType, ExportRecipe, export, load
from arm_recipes.runtime.output_structure import unflatten_outputs


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Both:
    first: Tensor
    second: Tensor


torch.export.register_dataclass(Both)


def _mutate(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


class _Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


CASES: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x + 1,
    "tuple of one": lambda x: (x + 1,),
    "list of one": lambda x: [x + 1],
    "tuple": lambda x: (x + 1, x * 2),
    "nested": lambda x: {"a": x + 1, "b": (x * 2, [x - 1])},
    "keys not sorted": lambda x: {"b": x + 1, "a": x * 2},
    "numbers and None": lambda x: (x + 1, None, 3),
    "mutated input": _mutate,
    "empty tuple": lambda x: (x + 1, (), []),
}


def _values(leaves: list[Any]) -> list[Any]:
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_program_returns_what_the_model_returns(name: str) -> None:
    model, x = _Model(CASES[name]).eval(), torch.randn(2, 3)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    expected, structure = pytree.tree_flatten(model(x.clone()))
    program = load(result.buffer)
    for outputs in (result.run(x), program.run(x), *program.run_batch([x])):
        leaves, spec = pytree.tree_flatten(outputs)
        assert spec == structure
        assert _values(leaves) == _values(expected)


def test_loaded_program_returns_tuples_for_classes() -> None:
    x = torch.randn(2, 3)
    for kind in (Pair, Both):
        model = _Model(lambda x, kind=kind: kind(x + 1, x * 2)).eval()  # type: ignore[misc]
        result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
        assert type(result.run(x)) is kind
        outputs = load(result.buffer).run(x)
        assert type(outputs) is tuple
        assert _values(list(outputs)) == _values([x + 1, x * 2])


def test_execute_returns_every_output_of_the_program() -> None:
    x = torch.randn(2, 3)
    result = export(_Model(_mutate).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    for backend in (None, "tosa"):
        assert _values(load(result.buffer).execute(x, backend=backend)) == _values([x + 1, (x + 1) * 2])


@pytest.mark.parametrize(
    "encoded",
    ["", "[", "[1]", "3", json.dumps([1, {"type": "builtins.set", "context": None, "children_spec": []}]), "[1, []]"],
)
def test_outputs_with_an_unreadable_structure_are_not_unflattened(encoded: str) -> None:
    assert unflatten_outputs([1, 2], encoded, 0) == [1, 2]
    assert unflatten_outputs([1, 2], encoded, 1) == 2
