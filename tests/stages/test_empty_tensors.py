"""Programs with empty tensors run: no CPU kernel computes these."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, export
from tests.ops.runner import FunctionModule

aten = torch.ops.aten
EMPTY_5D, EMPTY_ROWS, X = torch.zeros(1, 2, 3, 4, 0), torch.zeros(2, 0, 3), torch.linspace(-1, 1, 6).reshape(2, 3)


def _add_in_place(empty: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    copy, view = empty.clone(), (x * 1)
    view.transpose(0, -1)[0].add_(1)
    return copy, view


#: Functions of an empty tensor and another one, and the empty tensor.
FUNCTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Tensor]] = {
    "in place beside": (_add_in_place, EMPTY_5D),
    "log_softmax": (lambda e, x: (e.log_softmax(-1), e.log_softmax(0), x + 1), EMPTY_ROWS),
    "extremes": (lambda e, x: (e.amax(0), e.max(2)[0], e.amin((0, 2)), x + 1), EMPTY_ROWS),
    "sums": (lambda e, x: (e.sum(1) + x, e.mean(1), e.prod(), (e > 0).any(1), (e > 0).all(), e.var(1)), EMPTY_ROWS),
    "total": (lambda e, x: (e.sum(), x + (e * 2).abs().sum()), EMPTY_ROWS),
    "padded": (
        lambda e, x: (aten.constant_pad_nd(e, [0, 0, 1, 1], 2.5)[:, 0] * x, aten.constant_pad_nd(e, [1, -1])),
        EMPTY_ROWS,
    ),
    "padded in five dimensions": (lambda e, x: (aten.constant_pad_nd(e, [0, 1, 0, 0, 1, 2]), x + 1), EMPTY_5D),
    "rows": (lambda e, x: (e.index_select(1, torch.arange(0)), e.roll(1, 1), x.abs()), EMPTY_ROWS),
    "joined": (lambda e, x: (torch.cat([x[:, None], e, x[:, None]], 1), torch.cat([e, e], 1)), EMPTY_ROWS),
    "pieces": (lambda e, x: (*x.split_with_sizes([0, 3], 1), x.unfold(1, 2, 1)[:, :0], *e.unbind(0)), EMPTY_ROWS),
    "chosen": (
        lambda e, x: (x.topk(0)[0], x[:, torch.zeros(0, dtype=torch.long)], x.gather(1, e.long()[:, :, 0])),
        EMPTY_ROWS,
    ),
    "written": (
        lambda e, x: (x.scatter(1, e.long()[:, :, 0], e[:, :, 0]), x.index_put((e.long()[0, :, 0],), e[0])),
        EMPTY_ROWS,
    ),
    "indices": (
        lambda e, x: (
            x.index_add(0, e.long()[0, :, 0], e[0]),
            x.index_fill(1, e.long()[0, :, 0], 3.0),
            x.index_copy(0, e.long()[0, :, 0], e[0]),
            x.scatter_add(1, e.long()[:, :, 0], e[:, :, 0]),
            x.scatter(1, e.long()[:, :, 0], 2.0),
        ),
        EMPTY_ROWS,
    ),
    "matrices": (lambda e, x: (e.mT @ e, e @ x.t(), torch.addmm(x.t(), e[0].t(), e[1][:, :2]), x * 2), EMPTY_ROWS),
    "images": (
        lambda e, x: (torch.max_pool2d(e, 2), torch.conv2d(e, torch.ones(2, 3, 1, 1)), x.exp()),
        torch.zeros(0, 3, 4, 4),
    ),
    "types": (lambda e, x: (e.long(), e > 0, ~(e > 0), x.relu(), torch.where(e > 0, e, 1.0)), EMPTY_ROWS),
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, ArmRecipeType.TOSA_FP) for name in FUNCTIONS),
        *((name, ArmRecipeType.TOSA_INT8) for name in ("in place beside", "log_softmax", "extremes", "padded")),
        *((name, ArmRecipeType.CORTEX_M_INT8) for name in ("total", "padded", "joined")),
    ],
)
def test_programs_with_empty_tensors_run(name: str, recipe: ArmRecipeType) -> None:
    """The program runs in a child process, because portable kernels may end it."""
    function, empty = FUNCTIONS[name]
    model, sample = FunctionModule(function).eval(), (empty, X)
    result = export(model, ExportRecipe.get_recipe(recipe), [sample])
    assert not result.report.methods[0].not_runnable
    expected = model(*sample)
    assert _in_child(lambda: _same(result.run(*sample), expected)) == 0


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.CORTEX_M_INT8])
def test_complex_tensors_without_elements_are_reported(recipe: ArmRecipeType) -> None:
    """A program has no complex constants to replace them by."""
    empty = torch.zeros(2, 0, dtype=torch.complex64)
    with pytest.warns(ArmRecipesWarning, match=r"'forward' will not run.*[\s\S]*aten.mm.default .*without elements"):
        result = export(FunctionModule(lambda z: (z @ z.T).abs()).eval(), ExportRecipe.get_recipe(recipe), [(empty,)])
    reasons = {operator.operator: operator.reason for operator in result.report.methods[0].not_runnable}
    assert "may abort on a tensor without elements: remove it from the model" in reasons["aten.mm.default"]


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (1, 3, 0, 8), (2, 3, 8, 0)], ids=str)
@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8])
def test_a_channels_last_input_without_elements(shape: tuple[int, ...], recipe: ArmRecipeType) -> None:
    """The runtime ended the process if strides did not fit the dim order; PyTorch ignores those of such tensors."""
    model = FunctionModule(lambda e, x: (e * 2, x * 2)).eval()
    sample = (torch.zeros(shape).to(memory_format=torch.channels_last), X)
    result = export(model, ExportRecipe.get_recipe(recipe), [sample])
    expected = model(*sample)
    assert _in_child(lambda: _same(result.run(*sample), expected)) == 0


def _same(made: Any, expected: Any) -> bool:
    return all(
        x.shape == y.shape and x.dtype is y.dtype and torch.allclose(x.double(), y.double(), atol=0.1, equal_nan=True)
        for x, y in zip(made, expected, strict=True)
    )


def _in_child(check: Callable[[], bool]) -> int:
    """Run ``check`` in a child process: 0 if it is true, 1 if false, 2 if it raised, -n if signal n ended it."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
