"""Exported programs run on this machine, from the export result and from the file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

import arm_recipes
from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportResult, RunError, export
from tests.small_models import Small, Sorting, images, vectors

INT8, FP, U85 = ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_FP, ArmRecipeType.ETHOSU_U85_INT8


def _small(recipe: ArmRecipeType, samples: int = 4, **options: Any) -> ExportResult:
    return export(Small().eval(), ExportRecipe.get_recipe(recipe, **options), images(samples))


class Nested(nn.Module):
    """Takes and returns containers."""

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> dict[str, Any]:
        """Sums and products."""
        return {"sum": x + more["y"], "both": (x * 2, [more["y"] * 3])}


def test_nested_inputs_and_outputs() -> None:
    x, y = torch.ones(1, 4), torch.full((1, 4), 2.0)
    result = export(Nested().eval(), ExportRecipe.get_recipe(FP), [(x, {"y": y})])
    output = result.run(x, {"y": y})
    assert torch.equal(output["sum"], x + y)
    assert torch.equal(output["both"][0], x * 2)
    assert torch.equal(output["both"][1][0], y * 3)
    # The file has a flat list of tensors, in the order of the containers.
    program = arm_recipes.load(result.buffer)
    assert [value.name for value in program.inputs] == ["x", "more_y"]
    for loaded, expected in zip(program.execute(x, y), (x + y, x * 2, y * 3), strict=True):
        assert torch.equal(loaded, expected)


@pytest.mark.parametrize("quantized_io", [False, True])
@pytest.mark.parametrize("recipe", [INT8, ArmRecipeType.VGF_INT8, U85], ids=lambda recipe: recipe.name)
def test_the_file_has_names_and_quantization_of_its_tensors(recipe: ArmRecipeType, quantized_io: bool) -> None:
    result = _small(recipe, quantized_io=quantized_io)
    program = arm_recipes.load(result.buffer)
    assert program.methods == ("forward",)
    assert program.inputs == result.inputs
    assert program.outputs == result.outputs
    assert program.inputs[0].name == "x"
    assert (result.inputs[0].scale is not None) == quantized_io


@pytest.mark.parametrize("quantized_io", [False, True])
def test_several_methods(quantized_io: bool) -> None:
    models: dict[str, nn.Module] = {"classify": Small().eval(), "sort": Sorting().eval()}
    recipe = ExportRecipe.get_recipe(INT8, quantized_io=quantized_io)
    result = export(models, recipe, {"classify": images(), "sort": vectors(3)})
    assert [method.quantization and method.quantization.samples for method in result.report.methods] == [4, 3]
    program = arm_recipes.load(result.buffer)
    assert program.methods == tuple(method.name for method in result.report.methods) == ("classify", "sort")
    for method, (x,) in zip(result.report.methods, (images(1)[0], vectors(1)[0]), strict=True):
        assert program.signature(method.name).inputs == method.inputs
        assert program.signature(method.name).outputs == method.outputs
        (source,), (sink,) = method.inputs, method.outputs
        assert (source.scale is not None) == quantized_io
        given = source.quantize(x) if quantized_io else x
        (loaded,) = program.execute(given, method=method.name)
        assert torch.equal(loaded, result.run(given, method=method.name))
        expected = models[method.name](x)
        error = (sink.dequantize(loaded) if quantized_io else loaded) - expected
        assert error.abs().max() < 0.05 * expected.abs().max()
    with pytest.raises(ValueError, match="no method 'forward'; the program has: classify, sort"):
        result.run(x)


def test_an_ethosu_program_runs_as_its_reference_program(tmp_path: Path) -> None:
    result, (x,) = _small(U85), images(1)[0]
    expected = _small(INT8).run(x)
    path = result.save(tmp_path / "small.pte", reference=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.pte", "small.tosa.pte"]
    program = arm_recipes.load(path)
    assert program.inputs == result.inputs
    for backend in ("tosa", None):
        (output,) = program.execute(x, backend=backend)
        assert torch.equal(output, expected)
        assert torch.equal(result.run(x, backend=backend), expected)
    # Without the reference program beside it.
    alone = arm_recipes.load(path.read_bytes())
    assert torch.equal(alone.execute(x)[0], expected)
    with pytest.raises(
        RunError, match=r"backend='tosa' needs the TOSA graphs of this program, and no reference program is loaded"
    ):
        alone.execute(x, backend="tosa")
    (output,) = arm_recipes.load(path.read_bytes(), reference=tmp_path / "small.tosa.pte").execute(x, backend="tosa")
    assert torch.equal(output, expected)


def test_the_reference_program_of_another_program_is_refused(tmp_path: Path) -> None:
    path = _small(U85).save(tmp_path / "small.pte", reference=True)
    stale = (tmp_path / "small.tosa.pte").read_bytes()
    _small(U85, per_channel=False).save(path)
    with pytest.warns(ArmRecipesWarning, match=r"small\.tosa\.pte' is ignored: .* belongs to another program"):
        assert arm_recipes.load(path).reference is None
    with pytest.raises(RunError, match="the reference program belongs to another program, so its results would differ"):
        arm_recipes.load(path, reference=stale)
    with pytest.raises(RunError, match="the reference program belongs to another program"):
        arm_recipes.load(path, reference=_small(INT8).buffer)  # it is that of no program


def test_a_kernel_that_the_runtime_lacks_is_named() -> None:
    class Neighbour(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nextafter(x + 1, x)

    result = export(Neighbour().eval(), ExportRecipe.get_recipe(FP), vectors(1))
    with pytest.raises(
        RunError, match=r"'forward' needs kernels .* are not registered .*: aten::nextafter\.\w+\. Load"
    ):
        result.run(*vectors(1)[0])


@pytest.mark.filterwarnings("ignore:.*is int64, which TOSA does not support")
@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_int64_between_a_delegate_and_the_cpu(recipe: ArmRecipeType) -> None:
    """Delegates compute indices in int32; operators on the CPU read int64."""

    class Indices(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            index = (x + 1) * 2
            return torch.gather(table, 1, index) + 1.0, torch.cumsum(index, 1)

    samples: list[tuple[Tensor, ...]] = [(torch.randint(0, 3, (4, 6)), torch.randn(4, 9)) for _ in range(4)]
    result = export(Indices().eval(), ExportRecipe.get_recipe(recipe), samples)
    (real, integers), expected = result.run(*samples[0]), Indices()(*samples[0])
    assert (real - expected[0]).abs().max() < 0.03 * expected[0].abs().max()
    assert torch.equal(integers, expected[1])


def test_constant_methods() -> None:
    constants = {"classes": 3, "threshold": 2.5, "table": torch.ones(2), "name": "small", "sizes": [8, 8]}
    result = export(Small().eval(), ExportRecipe.get_recipe(FP), images(1), constant_methods=constants)
    for name, value in constants.items():
        returned = result.run(method=name)
        assert torch.equal(returned, value) if isinstance(value, Tensor) else returned == value
    with pytest.raises(ValueError, match="'classes' takes 0 inputs"):
        result.run(torch.ones(1), method="classes")


@pytest.mark.parametrize("quantized_io", [False, True])
def test_a_model_that_writes_its_input(quantized_io: bool) -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            x.mul_(0.5)
            return {"sum": x + y, "product": x * y}

    samples = [(torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0, 2, 6).reshape(2, 3)) for _ in range(2)]
    options = {"quantized_io": True} if quantized_io else {}
    with pytest.warns(ArmRecipesWarning, match=r"mutates its input 'x': .* returns the new value as output 0"):
        result = export(Shift().eval(), ExportRecipe.get_recipe(INT8 if quantized_io else FP, **options), samples)
    assert [value.name for value in result.outputs] == ["x_written", "output1", "output2"]
    program = arm_recipes.load(result.buffer)
    assert program.outputs == result.outputs
    x, y = torch.full((2, 3), 0.5), torch.full((2, 3), 1.0)
    given = [value.quantize(real) if value.scale else real for value, real in zip(result.inputs, (x, y), strict=True)]
    before = given[0].clone()
    returned = result.run(*given)
    assert list(returned) == ["sum", "product"]
    values = [program.execute(*given)[0], returned["sum"], returned["product"]]
    for value, info, expected in zip(values, result.outputs, (x * 0.5, x * 0.5 + y, x * 0.5 * y), strict=True):
        real = info.dequantize(value) if info.scale else value
        assert (real - expected).abs().max() < 0.03
    assert torch.equal(given[0], before)


@pytest.mark.filterwarnings("ignore:.*mutates its input", "ignore:.*is int64, which TOSA does not support")
def test_a_mutated_input_is_not_copied_before_the_delegate() -> None:
    """The CPU converts int64 indices, and ExecuTorch traces the operators around the delegate again."""

    class Write(nn.Module):
        def forward(self, x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
            return x.index_copy_(0, index, rows)

    sample = torch.randn(4, 5), torch.tensor([2, 0]), torch.randn(2, 5)
    result = export(Write().eval(), ExportRecipe.get_recipe(FP), [sample])
    assert result.report.cpu_operators == ()
    assert torch.equal(result.run(*sample), Write()(*sample))


@pytest.mark.parametrize("recipe", [FP, ArmRecipeType.VGF_FP], ids=lambda recipe: recipe.name)
def test_a_mutated_buffer_starts_with_its_initial_value(recipe: ArmRecipeType) -> None:
    class Count(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor([5.0]))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * self.count

    result = export(Count().eval(), ExportRecipe.get_recipe(recipe), [(torch.ones(3),)])
    for _ in range(2):
        program = arm_recipes.load(result.buffer)
        assert [float(program.execute(torch.ones(3))[0][0]) for _ in range(3)] == [6, 7, 8]
