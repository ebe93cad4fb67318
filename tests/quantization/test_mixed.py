"""Mixed precision: tensors between precisions are rounded once, and programs match their quantized graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums
from arm_recipes import ArmRecipeType, ExportResult, export
from tests.ops.runner import FunctionModule


class _Many(nn.Module):
    """Most kinds of operators, each with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.swish = nn.Hardswish()
        self.pool = nn.MaxPool2d(2)
        self.left = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.right = nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU()
        self.add = FunctionModule(torch.add)
        self.times = FunctionModule(torch.mul)
        self.gate = nn.Sigmoid()
        self.join = FunctionModule(lambda x, y: torch.cat([x, y], 1))
        self.split = FunctionModule(lambda x: x.split(8, 1)[1])
        self.mean = FunctionModule(lambda x: x.mean((2,)))
        self.turn = FunctionModule(lambda x: x.transpose(1, 2))
        self.norm = nn.LayerNorm(8)
        self.query = nn.Linear(8, 8)
        self.product = FunctionModule(lambda x, y: x @ y.transpose(1, 2))
        self.softmax = nn.Softmax(-1)
        self.weigh = FunctionModule(torch.matmul)
        self.gelu = nn.GELU()
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.swish(self.first(x)))
        y = self.add(self.relu(self.left(x)), self.right(x))
        y = self.split(self.join(x, self.times(y, self.gate(y))))
        y = self.norm(self.turn(self.mean(y)))
        query = self.query(y)
        y = self.add(self.weigh(self.softmax(self.product(query, y)), y), y)
        return self.last(self.gelu(y))


_NAMES = [name for name, _ in _Many().named_children()]


def _mixed(precisions: dict[str, str]) -> tuple[ExportResult, list[tuple[Tensor, ...]], nn.Module]:
    torch.manual_seed(5)
    model = _Many().eval()
    samples: list[tuple[Tensor, ...]] = [(torch.randn(1, 3, 12, 12),) for _ in range(5)]
    made = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, precisions=precisions, calibration_samples=samples)
    return export(model, made, [samples[0]], progress=False), samples, model


@pytest.mark.parametrize("seed", range(6))
def test_a_program_of_any_mixture_gives_what_its_quantized_graph_gives(seed: int) -> None:
    draw = random.Random(seed)
    result, samples, _ = _mixed({name: draw.choice(["INT8", "A16W8"]) for name in ["", *_NAMES]})
    assert not result.report.cpu_operators
    graph = result.exported_programs["forward"].module(check_guards=False)
    for sample in samples:
        expected, actual = graph(*sample), result.run(*sample)
        # TABLEs and integer sums round intermediate values differently, as in INT8 programs.
        assert ErrorSums.of(expected, actual).metrics.sqnr > 35


def test_a_result_that_only_int16_operators_read_is_int16() -> None:
    """One RESCALE converts the accumulator to int16, without rounding to int8 in between."""
    result, _, _ = _mixed({"swish": "A16W8"})
    steps = [node for node in result.exported_programs["forward"].graph.nodes if "quantize_per" in node.name]
    of_first = next(node for node in steps if node.args[0].name.startswith("conv2d"))
    assert of_first.args[5] is torch.int16
    assert len(of_first.users) == 1


def test_more_int16_operators_do_not_lower_the_sqnr() -> None:
    """From INT8 for all operators to A16W8 for all. Mixtures are at most 1 dB below INT8."""
    sqnrs = []
    for precisions in ({}, {"last": "A16W8"}, {"last": "A16W8", "gelu": "A16W8", "weigh": "A16W8"}, {"": "A16W8"}):
        result, samples, model = _mixed(precisions)
        graph = result.exported_programs["forward"].module(check_guards=False)
        sqnrs.append(ErrorSums.of(model(*samples[0]), graph(*samples[0])).metrics.sqnr)
    assert sqnrs[-1] > sqnrs[0] + 2
    assert min(sqnrs) == pytest.approx(sqnrs[0], abs=1)


#: A model, and its modules that are in floating point behind integer ones.
ISLANDS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "function": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()), ("1",)),
    "chain": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Softmax(-1)), ("1", "2")),
    "function before weights": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), ("1", "2")),
    "moved": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(0), nn.Tanh()), ("1", "2")),
    "piece": (lambda: nn.Sequential(nn.Linear(8, 8), FunctionModule(lambda x: x.split(4, 1)[1])), ("1",)),
    "read as both": (lambda: _Both(), ("gate",)),
}


class _Both(nn.Module):
    """The gate is returned in floating point, and also quantized for the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.gate(self.first(x))
        return y, self.last(y)


@pytest.mark.parametrize("name", ISLANDS)
def test_islands_in_floating_point_stay_in_the_delegate(name: str) -> None:
    make, names = ISLANDS[name]
    torch.manual_seed(1)
    samples: list[tuple[Tensor, ...]] = [(torch.randn(4, 8),) for _ in range(3)]
    precisions = dict.fromkeys(names, "FP")
    recipe = ExportRecipe.get_recipe(ArmRecipeType.VGF_INT8, precisions=precisions, calibration_samples=samples)
    result = export(make().eval(), recipe, [samples[0]], progress=False)
    assert not result.report.cpu_operators
    graph = result.exported_programs["forward"].module(check_guards=False)
    for expected, actual in zip(*map(tree_leaves, (graph(*samples[1]), result.run(*samples[1]))), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_outputs_are_int16_unless_quantized_io_is_set() -> None:
    result, samples, _ = _mixed({})
    assert result.outputs[0].dtype == "float32"
    (delegate,) = result.report.delegates
    assert [output.dtype for output in delegate.outputs] == ["int16"]
    made = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, quantized_io=True, calibration_samples=samples)
    combined = ExportRecipe.combine([made, ExportRecipe.get_recipe(ArmRecipeType.VGF_FP)])
    for recipe in (made, combined):
        assert export(_Many().eval(), recipe, [samples[0]], progress=False).outputs[0].dtype == "int8"
