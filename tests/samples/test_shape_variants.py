"""Dynamic shapes: a method for each combination of listed sizes, under one name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import sympy
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.export import Dim

import arm_recipes
from arm_recipes import ArmRecipeType, ExportResult
from arm_recipes.samples.shape_variants import derive_dimension, program_axes

BATCH, SEQ = Dim("batch", min=1, max=8), Dim("seq", min=1, max=64)
SHAPES = {"x": {0: BATCH, 1: SEQ}, "mask": {0: BATCH, 1: SEQ}}
SIZES = {"batch": [1, 2], "seq": [4, 16]}


class Model(nn.Module):
    """Features of each position, and their sum over the unmasked positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return {"positions": y, "sum": (y * mask[..., None]).sum(1)}


def _sample(batch: int, seq: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, 4, generator=generator), torch.ones(batch, seq)


def _model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def _export(recipe: str, sizes: Any = SIZES, shapes: Any = SHAPES) -> ExportResult:
    samples = [_sample(2, seq, seq) for seq in (3, 7, 16, 20)]
    chosen = ExportRecipe.get_recipe(ArmRecipeType[recipe])
    return arm_recipes.export(_model(), chosen, samples, dynamic_shapes=shapes, sizes=sizes)


@pytest.mark.parametrize("recipe", ["TOSA_FP", "TOSA_INT8", "ETHOSU_U85_INT8"])
def test_the_smallest_exported_size_that_fits_is_run(recipe: str) -> None:
    result = _cached(recipe)
    program = arm_recipes.load(result.buffer)
    assert len(program.methods) == 4
    for batch, seq in ((1, 4), (2, 16), (1, 3), (2, 5)):
        sample = _sample(batch, seq, 100 + seq)
        expected = _model()(*sample)
        for positions, total in (program.execute(*sample, pad=0), result.run(*sample, pad=0.0).values()):
            assert positions.shape == (batch, seq, 32)
            assert total.shape == (batch, 32)
            for found, wanted in ((positions, expected["positions"]), (total, expected["sum"])):
                assert (found - wanted).square().sum() < 3e-3 * wanted.square().sum()
    named = program.execute(_sample(1, 3)[0], mask=torch.ones(1, 3), pad={"x": 0, "mask": 0})
    assert torch.equal(named[1], program.execute(*_sample(1, 3), pad=0)[1])


@cache
def _cached(recipe: str) -> ExportResult:
    return _export(recipe)


def test_all_sizes_share_scales_and_weights() -> None:
    result = _cached("ETHOSU_U85_INT8")
    scales = [
        {(tensor.scale, tensor.zero_point) for tensor in each.delegates[0].inputs} for each in result.report.methods
    ]
    assert all(found == scales[0] for found in scales)
    biases = [
        [tensor for tensor in program.constants.values() if tensor.dtype is torch.int32]
        for program in result.exported_programs.values()
    ]
    assert [len(bias) for bias in biases[0]] == [64, 32]
    assert all(torch.equal(torch.cat(found), torch.cat(biases[0])) for found in biases)
    alone = _export("ETHOSU_U85_INT8", {"batch": [1], "seq": [16]})
    assert len(result.buffer) < len(alone.buffer) + 3 * 5000


@pytest.mark.parametrize(
    ("batch", "seq", "pad", "message"),
    [
        (
            1,
            5,
            None,
            r"'forward' was exported with batch of 1, 2; seq of 4, 16; the inputs have batch = 1, seq = 5: give a "
            r"padding value, run\(..., pad=0\) for example, to pad them to batch = 1, seq = 16",
        ),
        (1, 17, 0, "the inputs have batch = 1, seq = 17, which is larger"),
        (1, 5, {"x": 0}, "pad has no number for the input 'mask'"),
    ],
)
def test_inputs_that_fit_no_exported_size_are_refused(batch: int, seq: int, pad: Any, message: str) -> None:
    program = arm_recipes.load(_cached("TOSA_FP").buffer)
    with pytest.raises(ValueError, match=message):
        program.execute(*_sample(batch, seq), pad=pad)


def test_inputs_with_different_sizes_of_one_dimension_are_refused() -> None:
    program = arm_recipes.load(_cached("TOSA_FP").buffer)
    with pytest.raises(ValueError, match="inputs have 3 and 4 for the dimension 'seq'"):
        program.execute(_sample(1, 3)[0], _sample(1, 4)[1], pad=0)


@pytest.mark.parametrize(
    ("sizes", "shapes", "message"),
    [
        (None, SHAPES, "list the sizes to export, sizes={'name of a dimension'"),
        ({"batch": [1]}, SHAPES, "there are none for the dynamic dimension 'seq'"),
        ({**SIZES, "length": [1]}, SHAPES, "no dynamic dimension 'length'; there are: 'batch', 'seq'"),
        ({"batch": [1], "seq": [128]}, SHAPES, "128 of 'seq' is not a size from 1 to 64"),
        ({"seq": [4]}, None, "no dynamic dimension 'seq'; there are: none"),
        ({"seq": [4]}, {"x": {1: Dim.DYNAMIC}, "mask": None}, "which has no name to list sizes for"),
    ],
)
def test_wrong_sizes_are_refused(sizes: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _export("TOSA_FP", sizes, shapes)


class _Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y[:, ::2] + y[:, 1::2]


def test_dimensions_of_a_program_are_named_by_input_and_axis() -> None:
    shapes = ({0: BATCH, 1: SEQ}, {0: BATCH, 1: 2 * SEQ})
    example = torch.randn(2, 4, 3), torch.randn(2, 8, 3)
    program = torch.export.export(_Halves(), example, dynamic_shapes=shapes)
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)
    result = arm_recipes.export(program, recipe, sizes={"x_0": [1, 2], "x_1": [4, 16]})
    for batch, seq in ((1, 4), (2, 16)):
        x, y = torch.randn(batch, seq, 3), torch.randn(batch, 2 * seq, 3)
        assert torch.allclose(result.run(x, y), _Halves()(x, y), atol=1e-5)
    with pytest.raises(ValueError, match="128 of 'x_1' is not a size from 1 to 64"):
        arm_recipes.export(program, recipe, sizes={"x_0": [1], "x_1": [128]})


def test_a_dimension_that_is_no_multiple_of_another_is_refused() -> None:
    squares = torch.export.export(nn.Identity(), (torch.randn(4, 16),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    first, second = program_axes(squares)[0].values()
    assert (first.__name__, second.__name__) == ("input_0", "input_1")
    symbol = sympy.Symbol("s0")
    with pytest.raises(ValueError, match=r"'x_1' is s0\*\*2, which is not linear"):
        derive_dimension(symbol**2, {symbol: Dim("x_0")}, "x_1")
