"""Equal rows: linear layers have as many rows in each method, so that Vela encodes their weights alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.export import ExportedProgram

import arm_recipes
from arm_backend_core.nodes import overload_of
from arm_backend_core.program import copy_program
from arm_recipes import ArmRecipeType, ExportResult
from arm_recipes.runtime.payload_parts import WEIGHTS_PREFIX
from arm_recipes.stages.edge import row_tiling
from arm_recipes.stages.edge.row_tiling import tile_rows_for_weight_sharing

WIDTH, HIDDEN = 128, 640
LINEAR = torch.ops.aten.linear.default


class Block(nn.Module):
    """Two linear layers that read one tensor, a third that reads the results of both, and a state in a buffer."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1, WIDTH))
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        self.last.copy_(y.flatten(0, -2)[:1])
        return torch.as_tensor(self.down(torch.tanh(self.gate(y)) * self.up(y)) + 1)


def _recipe(macs: int = 256) -> ExportRecipe:
    return ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=macs)


@cache
def _exported(macs: int = 256) -> ExportResult:
    torch.manual_seed(0)
    model = Block().eval()
    samples = {"many": [(torch.randn(2, 16, WIDTH),) for _ in range(4)], "one": [(torch.randn(1, WIDTH),)] * 2}
    return arm_recipes.export({"many": model, "one": model}, _recipe(macs), samples)


def _rows(programs: Mapping[str, ExportedProgram]) -> dict[str, list[int]]:
    return {
        method: [node.meta["val"].shape[-2] for node in program.graph.nodes if overload_of(node.target) is LINEAR]
        for method, program in programs.items()
    }


def test_groups_have_sixteen_rows_and_unchanged_results() -> None:
    before = _exported().exported_programs
    programs = {method: copy_program(program) for method, program in before.items()}
    tile_rows_for_weight_sharing(programs, _recipe())
    assert _rows(before) == {"many": [16] * 3, "one": [1] * 3}
    assert _rows(programs) == {"many": [16] * 6, "one": [16] * 3}
    pads = programs["one"].graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert len(pads) == 2  # two layers share one
    for method, x in (("many", torch.randn(2, 16, WIDTH)), ("one", torch.randn(1, WIDTH))):
        programs[method].graph.lint()
        assert torch.equal(programs[method].module()(x), before[method].module()(x))


def test_weights_are_stored_once() -> None:
    result = _exported()
    inspection = arm_recipes.inspect_program(result.buffer)
    (size,) = (size for name, size in inspection.named_data.items() if name.startswith(WEIGHTS_PREFIX))
    assert size < 1.3 * 3 * WIDTH * HIDDEN  # twice as much without groups
    for method, x in (("many", torch.randn(2, 16, WIDTH)), ("one", torch.randn(1, WIDTH))):
        found = result.run(x, method=method)
        expected = result.exported_programs[method].module()(x)
        assert float((found - expected).abs().max()) <= 2.1 * float(expected.unique().diff().min())


@pytest.mark.parametrize(
    "change", ["one method", "equal row counts", "128 MACs", "TOSA", "small weights", "one block", "31 rows"]
)
def test_programs_that_are_not_grouped(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {method: copy_program(program) for method, program in _exported().exported_programs.items()}
    recipe = _recipe(128 if change == "128 MACs" else 256)
    if change == "one method":
        del programs["one"]
    elif change == "equal row counts":
        programs["one"] = copy_program(programs["many"])
    elif change == "TOSA":
        recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    elif change == "small weights":
        monkeypatch.setattr(row_tiling, "_MIN_WEIGHT_ELEMENTS", WIDTH * HIDDEN + 1)
    elif change == "one block":
        monkeypatch.setattr(row_tiling, "_INPUT_CHANNEL_BLOCK", HIDDEN)
    elif change == "31 rows":
        monkeypatch.setattr(row_tiling, "_ROWS_PER_GROUP", {256: 31})
    before = _rows(programs)
    tile_rows_for_weight_sharing(programs, recipe)
    assert _rows(programs) == before
