"""Operators on the CPU that read ``channels_last`` inputs: their results equal PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes._internal.errors import ExportError
from arm_recipes.stages.edge.dim_orders import check_dim_orders, legalize_dim_orders

CORTEX_M, U55, INT8 = ArmRecipeType.CORTEX_M_INT8, ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.TOSA_INT8
COPY = "dim_order_ops._to_dim_order_copy.default"
INDEX = torch.tensor([2, 0, 1])
INTEGER_OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "gather": lambda x: x.gather(2, torch.ones(1, 3, 2, 8, dtype=torch.long)),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(3, -1).values,
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "repeat": lambda x: x.repeat(1, 1, 1, 2),
    "index": lambda x: x[:, :, INDEX],
    "add": lambda x: x + 1,
    "maximum": lambda x: torch.maximum(x, x.flip(1)),
    "where": lambda x: torch.where(x > 9, x, x.flip(2)),
    "split": lambda x: x.split(1, 1)[1],
    "unfold": lambda x: x.unfold(2, 2, 2),
    "sum": lambda x: x.sum(1),
    "cast": lambda x: (x.int() + 1).flip(1),
    "constant": lambda x: x + torch.arange(192, dtype=torch.uint8).view(1, 8, 8, 3).permute(0, 3, 1, 2),
}


class Integers(nn.Module):
    """An operator on integers, and a second reader of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x is uint8 of shape (1, 3, 8, 8)."""
        return self.function(x), x.float() / 255


class State(nn.Module):
    """A contiguous buffer to which a method writes."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.write = nn.Conv2d(3, 4, 3, padding=1), write
        self.state = nn.Buffer(torch.zeros(1, 3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """x is float32 of shape (1, 3, 8, 8)."""
        self.write(self.state, x)
        return self.layer(self.state)


def _pixels() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    draw = [torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8) for _ in range(3)]
    return [(x.to(memory_format=torch.channels_last),) for x in draw]


def _images() -> list[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return [(torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last),) for _ in range(4)]


def _sqnr(actual: Tensor, expected: Tensor) -> float:
    return float(10 * torch.log10(expected.square().mean() / (actual - expected).square().mean()))


@pytest.mark.filterwarnings("ignore:.*is int64, which TOSA does not support")
@pytest.mark.parametrize("recipe", [CORTEX_M, U55, INT8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", INTEGER_OPERATORS)
def test_an_operator_on_integers_reads_a_channels_last_input(name: str, recipe: ArmRecipeType) -> None:
    model, samples = Integers(INTEGER_OPERATORS[name]).eval(), _pixels()
    result = export(model, ExportRecipe.get_recipe(recipe), samples)
    for sample in samples:
        integers, scaled = result.run(*sample)
        expected, expected_scaled = model(*sample)
        assert torch.equal(integers, expected)
        assert (scaled - expected_scaled).abs().max() < 0.005


@pytest.mark.parametrize("recipe", [CORTEX_M, U55, INT8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    "write",
    [lambda state, x: state.copy_(x), lambda state, x: state.mul_(0.5).add_(x * 0.5)],
    ids=["copy", "average"],
)
def test_a_contiguous_buffer_takes_a_channels_last_input(
    write: Callable[[Tensor, Tensor], Any], recipe: ArmRecipeType
) -> None:
    samples = _images()
    result, model = export(State(write).eval(), ExportRecipe.get_recipe(recipe), samples), State(write).eval()
    program = result.program()
    for sample in samples:
        (actual,) = program.execute(*sample)
        assert _sqnr(actual, model(*sample).detach()) > 30


@pytest.mark.parametrize("recipe", [CORTEX_M, U55, INT8], ids=lambda recipe: recipe.name)
def test_a_float_operator_reads_a_channels_last_input(recipe: ArmRecipeType) -> None:
    class Angle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(x, x.flip(1))

    samples = _images()
    result = export(Angle().eval(), ExportRecipe.get_recipe(recipe), samples)
    contiguous = export(Angle().eval(), ExportRecipe.get_recipe(recipe), [(x.contiguous(),) for (x,) in samples])
    for (x,) in samples:
        assert torch.equal(result.run(x), contiguous.run(x.contiguous()))


@pytest.mark.filterwarnings("ignore:.*mutates its input")
def test_a_channels_last_input_that_the_model_writes() -> None:
    class Swap(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            x.copy_(y.flip(-1))
            return y

    samples = _pixels()
    program = export(Swap().eval(), ExportRecipe.get_recipe(INT8), samples).program()
    written, result = program.execute(*samples[0])
    expected = samples[0][0] + 1
    assert torch.equal(result, expected)
    assert torch.equal(written, expected.flip(-1))


def test_programs_without_cpu_operators_have_no_copies() -> None:
    result = export(nn.Conv2d(3, 4, 3).eval(), ExportRecipe.get_recipe(U55), _images())
    assert not any(COPY in name or "clone" in name for name in result.report.methods[0].boundary)


def test_the_input_of_an_operator_chain_is_copied_once() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = ((x & 15).to(torch.int16) * 3).flip(-1)
            return y, (y & 7).to(torch.uint8)

    model, samples = Chain().eval(), _pixels()
    result = export(model, ExportRecipe.get_recipe(CORTEX_M), samples)
    for actual, expected in zip(result.run(*samples[0]), model(*samples[0]), strict=True):
        assert torch.equal(actual, expected)
    nodes = result.executorch_program.exported_program("forward").graph.nodes
    copies = [node for node in nodes if "dim_order_ops" in str(node.target)]
    layouts = [node for node in copies if node.args[0].meta["val"].dtype == node.meta["val"].dtype]
    assert [node.args[0].op for node in layouts] == ["placeholder"]


def test_each_input_is_copied_once() -> None:
    class Readers(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x.flip(-1), x.flip(-2), x & 15

    result = export(Readers().eval(), ExportRecipe.get_recipe(INT8), _pixels())
    assert result.report.methods[0].boundary == {COPY: 1}


class Flip(nn.Module):
    """One operator without a check of dim orders."""

    def forward(self, x: Tensor) -> Tensor:
        """x has any shape."""
        return x.flip(-1)


def test_results_of_a_constant_that_becomes_contiguous_are_contiguous() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Buffer(torch.arange(192, dtype=torch.uint8).view(1, 8, 8, 3).permute(0, 3, 1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.table.flip(-1).flip(-2) + x

    x = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    program = torch.export.export(Table(), (x,))
    manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    legalize_dim_orders(manager)
    nodes = [node for node in manager.exported_program("forward").graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in nodes if "dim_order_ops" in str(node.target)] == []
    assert all(node.meta["val"].is_contiguous() for node in nodes)


def test_check_dim_orders_names_operator_and_input() -> None:
    def emit(legalize: bool) -> Any:
        program = torch.export.export(Flip(), _pixels()[0])
        manager = to_edge_transform_and_lower(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        if legalize:
            assert legalize_dim_orders(manager) == []
        return manager.to_executorch()

    check_dim_orders(emit(legalize=True), ["forward"])
    with pytest.raises(ExportError, match=r"aten\.flip\.out \(.*test_dim_orders.*\[0, 2, 3, 1\] of 'x'"):
        check_dim_orders(emit(legalize=False), ["forward"])
