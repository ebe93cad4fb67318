"""Search for patches with which a program fits a budget: candidates, and whole exports on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.dtype import DType
from arm_backend_core.memory_reduction import patch_search
from arm_backend_core.memory_reduction.patch_search import PatchCandidate, list_candidates, make_graph_saving_pass
from arm_backend_core.targets.compile_spec import EthosUCompileSpec, TosaCompileSpec
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
X = torch.randn(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))


class Narrowing(nn.Module):
    """An image network whose residual connection ends Vela's cascade at a large tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.last, self.head = nn.Conv2d(32, 16, 3, 2, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the image."""
        y = self.first(x).relu()
        return self.head(self.last(y + self.inner(y)).mean((2, 3)))


def _export(recipe: ArmRecipeType, channels_last: bool = False, **options: Any) -> ExportResult:
    built = ExportRecipe.get_recipe(recipe, memory_mode="Shared_Sram", **options)
    return export(Narrowing().eval(), built, [(X,), (-X,)], progress=False, channels_last=channels_last)


def _sram(result: ExportResult) -> int:
    assert result.report.ram is not None
    return result.report.ram.sram_bytes


@pytest.mark.parametrize(("recipe", "channels_last"), [(U55, False), (U85, True)])
def test_patches_fit_where_nothing_else_does(
    recipe: ArmRecipeType, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator computes the same bits. The report has the patches, and the costs of all layers."""
    monkeypatch.setattr(patch_search, "_GRIDS", ((2, 2), (4, 1)))
    least = _export(recipe, channels_last, optimise="ram")
    budget = _sram(least) * 3 // 4
    patched = _export(recipe, channels_last, sram_budget=budget)
    assert _sram(patched) <= budget
    (note,) = (note for note in patched.report.notes if "patches" in note)
    assert "'arm_0' is computed in " in note
    assert "of the work" in note
    assert not any("arena" in other for other in patched.report.notes)
    assert torch.equal(patched.run(X), least.run(X))
    modules = {layer.module for layer in patched.report.layers}
    assert modules == {layer.module for layer in least.report.layers}
    assert patched.report.ram is not None
    assert "compiled for less RAM" in patched.report.ram.ram_reduction


def _chain(*strides: int) -> Graph:
    """Convolutions of 8 channels with these strides, on an image of 32x32 pixels of 8 channels."""
    graph = Graph()
    b = Builder(graph, EthosUCompileSpec("ethos-u55-128").target)
    x: Value = graph.add_input((1, 32, 32, 8), DType.INT8, "x")
    for stride in strides:
        weight, bias = b.const([[[[1] * 8] * 3] * 3] * 8, DType.INT8), b.const([0] * 8, DType.INT32)
        pad = (1, 2 - stride, 1, 2 - stride)
        x = b.rescale(b.conv2d(x, weight, bias, pad=pad, stride=(stride, stride)), DType.INT8, 0.01)
    graph.outputs = [x]
    return graph


def test_candidates_end_at_small_tensors_and_recompute_little() -> None:
    candidates = list_candidates(_chain(1, 2, 1, 2), 12_000)
    assert {candidate.position for candidate in candidates} == {3, 7}  # at the results of the strided convolutions
    assert candidates == sorted(candidates, key=lambda candidate: candidate.recomputed_work)
    assert all(0 < candidate.recomputed_work <= 0.4 for candidate in candidates)
    assert candidates[0].grid == (2, 1)


def test_the_budget_must_hold_input_and_result_of_a_stage() -> None:
    assert {candidate.position for candidate in list_candidates(_chain(1, 2, 1, 2), 8192 + 2048)} == {7}
    assert not list_candidates(_chain(1, 2, 1, 2), 8192)


def test_a_grid_has_no_more_patches_than_rows_and_columns() -> None:
    grids = {candidate.grid for candidate in list_candidates(_chain(2, 2, 2, 2), 20_000) if candidate.position == 7}
    assert grids <= {(2, 1), (2, 2)}  # the image has 2 rows and columns


@pytest.mark.parametrize(("budget", "goal", "keeps"), [(1000, "auto", 1), (None, "auto", 0), (1000, "size", 0)])
def test_the_graph_is_kept_only_if_patches_may_help(budget: int | None, goal: str, keeps: int) -> None:
    spec, graph = EthosUCompileSpec("ethos-u55-128", optimise=goal), _chain(2)
    spec.sram_budget = budget
    choose, kept = make_graph_saving_pass(spec, lambda graph, target: None)
    choose(graph, spec.target)
    assert [len(copied.ops) for copied in kept] == [len(graph.ops)] * keeps
    assert not make_graph_saving_pass(TosaCompileSpec(), choose)[1]


def test_a_candidate_names_its_layers() -> None:
    text = patch_search._describe(_chain(1, 2), PatchCandidate(3, (2, 2), 0.031))
    assert text.startswith("computed in 2 x 2 patches up to '")
    assert text.endswith("which repeats 3.1% of the work")
