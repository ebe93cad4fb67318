"""Selections by masks and indices: of a constant number of elements, or rewritten for all elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportError, ExportRecipe, export
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.capture import Capture
from tests.ops import runner

_UPPER = torch.ones(4, 4).triu(1).bool()
_SOME = torch.tensor([True, False, True, True])


class _FunctionModule(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.some: Tensor
        self.register_buffer("some", _SOME.clone())

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _put(x: Tensor, mask: Tensor, new: Tensor) -> Tensor:
    x = x * 1.0
    x[mask] = new
    return x


def _swapped(_: Any, x: Tensor) -> Tensor:
    """The selected elements are read before the tensors are written."""
    x, y = x * 1.0, -x.flip(0)
    mask = x > 0.3
    kept = x[mask]
    x[mask] = y[mask]
    y[mask] = kept
    return x + 2 * y


def _twice(_: Any, x: Tensor) -> Tensor:
    """The second mask is computed from the result of the first write."""
    x = x * 2.0
    x[x < 0] = x[x < 0] * 0.25
    x[x < 0.5] = x[x < 0.5] + 1
    return x


def _rows(_: Any, x: Tensor) -> Tensor:
    y, mask = x * 2, x[:, 0] > 0
    y[mask] = x[mask].tanh() + y[mask] * torch.tensor([1.0, 0.5, 2.0, -1.0])
    y[:, mask] = y[:, mask] * 3
    return y


_CONSTANT: dict[str, Callable[..., Any]] = {
    "upper": lambda _, x: x[_UPPER] * 2,
    "columns": lambda m, x: (x[:, m.some] * 2).sum(-1) + x[:, m.some].reshape(4, -1).mean(-1),
    "rows_and_columns": lambda m, x: x[m.some][:, m.some],
    "nonzero": lambda _, x: x[torch.ones(4, 4).tril().nonzero(as_tuple=True)],
    "places": lambda _, x: x.reshape(-1)[_UPPER.reshape(-1).nonzero()[:, 0]],
    "where": lambda m, x: x[torch.where(m.some)[0]],
    "masked_select": lambda m, x: torch.masked_select(x, m.some),
    "size": lambda m, x: x[m.some].sum() / x[m.some].size(0),
}
_COMPUTED: dict[str, Callable[..., Any]] = {
    "leaky": lambda _, x: _put(x, x < 0, x[x < 0] * 0.1),
    "of_two": lambda _, x: _put(x, x > 0.1, x[x > 0.1] * 2 + x.flip(0)[x > 0.1].exp()),
    "numbers": lambda _, x: _put(x, x > 0.1, x[x > 0.1] * x.mean() + 1),
    "swapped": _swapped,
    "twice": _twice,
    "rows": _rows,
}


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
@pytest.mark.parametrize("name", [*_CONSTANT, *_COMPUTED])
@torch.no_grad()
def test_selections_run_in_one_delegate(name: str, kind: ArmRecipeType) -> None:
    model, draw = _FunctionModule((_CONSTANT | _COMPUTED)[name]).eval(), torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, 4, generator=draw) + 0.05,) for _ in range(8)]
    result = export(model, ExportRecipe.get_recipe(kind), samples)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    got, wanted = result.run(*samples[3]), model(*samples[3])
    if kind is ArmRecipeType.TOSA_FP:
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    else:  # an element within a step of a mask's bound is on either side of it
        far = (got - wanted).abs() > 0.03 * wanted.abs().amax() + 0.02
        assert far.sum() <= got.numel() / 8


def _element(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return x[i] * 2, x[:, x[0].argmax()] + 1, x[None, i, ..., i].exp(), x[1:, i] - x[0, i]


def _written_element(x: Tensor, i: Tensor) -> Tensor:
    y = x * 2
    y[i] = 0
    y[1:, i] = x[1:, 0]
    y[..., i] = x[..., 1] * 3
    y[2, i] = 4.0
    return y


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8])
@pytest.mark.parametrize("function", [_element, _written_element])
@torch.no_grad()
def test_indexing_by_a_scalar_tensor(function: Callable[..., Any], kind: ArmRecipeType) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Any:
            return function(x, i)

    torch.manual_seed(0)
    first = 0 if function is _written_element else -4
    samples = [(torch.randn(4, 4), torch.tensor(i)) for i in range(first, 4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(kind), samples)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    for sample in samples:
        for got, wanted in zip(
            runner.flatten_tensors(result.run(*sample)), runner.flatten_tensors(function(*sample)), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if kind is ArmRecipeType.TOSA_FP else 0.15)


def test_an_indexed_view_that_is_written_afterwards_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            y = x * 1.0
            element = y[i]
            y.add_(1)
            return element * 1

    with pytest.raises(ExportError, match="must not depend on the values of tensors"):
        export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.randn(3, 2), torch.tensor(1))])


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_FP, ArmRecipeType.ETHOSU_U85_INT8], ids=str)
def test_the_error_for_a_data_dependent_size_names_remedies(
    kind: ArmRecipeType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")  # PyTorch's errors in decompositions of such programs are no faults

    class Model(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = x.clone()
            y[mask] = 3.0
            y[:, mask[0]] += 1
            return y

    sample = torch.randn(4, 5), torch.rand(4, 5) > 0.5
    line = Model.forward.__code__.co_firstlineno + 3
    with pytest.raises(ExportError, match=rf"aten\.index\.Tensor \(.*:{line}\): ") as caught:
        export(Model().eval(), ExportRecipe.get_recipe(kind), [sample] * 2)
    _, _, words = str(caught.value).partition("): ")
    assert words == (
        "a size depends on data, such as on the number of elements that an index or a mask selects; shapes and "
        "branches must not depend on the values of tensors: use torch.where, a mask, or a fixed number of elements "
        "(topk)"
    )


def test_distributions_are_captured_without_argument_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # PyTorch's own tracing leaves it off

    class Policy(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            normal = torch.distributions.Normal(x, torch.nn.functional.softplus(x))
            return normal.mean * 2, torch.distributions.Categorical(logits=x).probs

    samples = [(torch.randn(1, 5),) for _ in range(4)]
    result = export(Policy().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), samples)
    for got, wanted in zip(result.run(*samples[0]), Policy()(*samples[0]), strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(torch.zeros(2), -torch.ones(2))


def _written_mask(_: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[1] = True
    return x[mask] * 2


@pytest.mark.parametrize(
    "function",
    [
        _written_mask,
        lambda _, x: x[x > 0].sum(),
        lambda _, x: _put(x, x > 0, x[x > 0].cumsum(0)),
        lambda _, x: _put(x, x > 0, x[x < 0].sum() + x[x > 0].sort()[0]),
    ],
    ids=["written", "sum", "order", "sorted"],
)
@torch.no_grad()
def test_results_that_depend_on_the_number_of_elements_are_not_rewritten(function: Callable[..., Any]) -> None:
    model, x = _FunctionModule(function).eval(), torch.linspace(-1, 1, 16).reshape(4, 4)
    program = Capture(None)("forward", model, Inputs(x))
    assert any(node.target is torch.ops.aten.index.Tensor for node in program.graph.nodes)
    torch.testing.assert_close(runner.flatten_tensors(program.module()(x)), runner.flatten_tensors(model(x)))


def test_a_mask_that_changes_from_call_to_call_is_no_constant() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Tensor
            self.register_buffer("mask", _SOME.clone())

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[self.mask].sum()
            self.mask.logical_not_()
            return chosen

    program = Capture(None)("forward", Turning().eval(), Inputs(torch.ones(4)))
    module = program.module()
    assert [float(module(torch.ones(4))) for _ in range(2)] == [3, 1]


def test_constant_elements_of_a_parameter_are_outputs() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.layer = nn.Parameter(torch.randn(12, 4)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            chosen = self.table[torch.arange(12) % 3 == 0]
            return chosen, self.layer(x), torch.masked_select(self.table, self.table > 0)

    model, samples = Chosen().eval(), [(torch.randn(2, 4),) for _ in range(3)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples, progress=False)
    results, (chosen, expected, selected) = result.run(*samples[0]), model(*samples[0])
    assert torch.equal(results[0], chosen)
    assert torch.equal(results[2], selected)
    torch.testing.assert_close(results[1], expected, rtol=0, atol=0.05)


_FAMILIES = [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.CORTEX_M_INT8]


@pytest.mark.parametrize("kind", _FAMILIES, ids=str)
@pytest.mark.parametrize(
    "function",
    [
        torch.nonzero,
        lambda x: torch.argwhere(x > 0),
        lambda x: torch.where(x > 0),
        lambda x: (torch.nonzero(x), torch.nonzero(x > 0) * 2, x * 2),
        lambda x: torch.nonzero(x)[:, 1].float() * 0.5,
        lambda x: torch.nonzero(x.flatten()),
        lambda x: torch.masked_select(x * 2, x > 0) * 2,
        lambda x: x * x[0, 0].item(),
    ],
    ids=["nonzero", "argwhere", "where", "several", "column", "vector", "masked_select", "item"],
)
def test_operators_whose_size_depends_on_data_run_on_the_cpu(function: Callable[..., Any], kind: ArmRecipeType) -> None:
    """PyTorch stores the columns of ``nonzero``, ExecuTorch the rows."""
    sample = (torch.tensor([[1.0, 0, -1, 1, 0], [0, 0, 1, 1, 1], [-1, 1, 0, 0, 0]]),)
    result = export(runner.FunctionModule(function).eval(), ExportRecipe.get_recipe(kind), [sample])
    for got, expected in zip(
        runner.flatten_tensors(result.run(*sample)), runner.flatten_tensors(function(*sample)), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=0.05, rtol=0)


def test_nonzero_of_a_channels_last_input() -> None:
    x = torch.randint(-1, 2, (1, 3, 4, 5)).float().to(memory_format=torch.channels_last)
    result = export(runner.FunctionModule(torch.nonzero).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    assert torch.equal(result.run(x), torch.nonzero(x))
