"""Our recipes and ExecuTorch's own Arm recipes in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OURS, PEER = "arm_recipes", "executorch.backends.arm.recipes"

_BOTH_BACKENDS_SCRIPT = """
import {first}
import {second}
import torch
from executorch.export import ExportRecipe, recipe_registry
from executorch.export import export as export_with_executorch
from executorch.backends.arm.recipes import ArmRecipeType as Theirs
from arm_recipes import ArmRecipeType as Ours, export

assert {{"arm", "arm_recipes"}} <= set(recipe_registry.list_backends()), recipe_registry.list_backends()
assert list(recipe_registry.get_supported_recipes("arm")) and not isinstance(Theirs.TOSA_FP, Ours)
assert list(recipe_registry.get_supported_recipes("arm_recipes")) == list(Ours)
assert not {{recipe.value for recipe in Theirs}} & {{recipe.value for recipe in Ours}}

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
samples = [(torch.randn(1, 8),) for _ in range(2)]

def partitioner(kind):
    recipe = ExportRecipe.get_recipe(kind)
    (found,) = recipe.lowering_recipe.partitioners
    return recipe, type(found).__module__.split(".")[0]

for kind in {order}:
    recipe, package = partitioner(kind)
    if isinstance(kind, Ours):
        assert package == "arm_backend_core", package
        result = export(model, recipe, samples)
        (delegate,) = result.report.delegates
        assert delegate.backend == "TOSABackend" and not result.report.cpu_operators
        assert (result.run(*samples[0]) - model(*samples[0])).abs().max() < 0.05
    else:
        assert package == "executorch", package
        session = export_with_executorch(model, samples, recipe)
        assert b"TOSABackend" in bytes(session.get_pte_buffer())
quantize = torch.ops.cortex_m.quantize_per_tensor.default
assert quantize._defined_in_python, "torch.ops has another operator than the one that ExecuTorch registered"
assert quantize(torch.ones(2), 0.5, 3, -128, 127, torch.int8).tolist() == [5, 5]
print("done")
"""


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        (OURS, PEER, "(Ours.TOSA_INT8, Theirs.TOSA_INT8, Ours.TOSA_INT8)"),
        (PEER, OURS, "(Theirs.TOSA_INT8, Ours.TOSA_INT8, Theirs.TOSA_INT8)"),
    ],
    ids=["ours-first", "theirs-first"],
)
@pytest.mark.verify
def test_both_export_in_one_process(first: str, second: str, order: str) -> None:
    assert _run(_BOTH_BACKENDS_SCRIPT.format(first=first, second=second, order=order)).splitlines()[-1] == "done"


_EXPORT_SCRIPT = """
import sys
import torch
from executorch.export import ExportRecipe
from arm_recipes import ArmRecipeType, export

model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
samples = [(torch.randn(1, 8),) for _ in range(2)]
for name in ("TOSA_INT8", "ETHOSU_U55_A16W8", "VGF_INT8", "TOSA_FP"):
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType[name]), samples)
    result.run(*samples[0], backend="tosa")
print(*(name for name in sys.modules if name.startswith("executorch.backends.arm")))
"""


def test_no_module_of_the_other_backend_is_loaded() -> None:
    assert _run(_EXPORT_SCRIPT).split() == []


def _run(script: str) -> str:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
