"""Masked scores have no weight, however far they are above the others; rows that are masked entirely give 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.sqnr import sqnr

R = ArmRecipeType
RECIPES = [R.TOSA_INT8, R.TOSA_A16W8, R.ETHOSU_U55_INT8, R.ETHOSU_U85_INT8]
KEEP = torch.tensor([True, True, True, False, False])
MASKED_VALUES = torch.eye(5)[None, :, 3:]  #: attention of these values is the weight of the masked keys


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def _run(function: Callable[..., Tensor], samples: Sequence[tuple[Tensor, ...]], recipe: ArmRecipeType) -> Tensor:
    result: Any = export(_Function(function).eval(), ExportRecipe.get_recipe(recipe), list(samples)).run(*samples[0])
    assert isinstance(result, Tensor)
    return result


def _attention(q: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, MASKED_VALUES, attn_mask=mask[None], scale=1.0)


def _weights(scores: Tensor) -> Tensor:
    return scores.softmax(-1) @ MASKED_VALUES


LEAKS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "attention": (lambda q: _attention(q, KEEP), ()),
    "attention, input": (_attention, (KEEP,)),
    "attention, float input": (_attention, (torch.where(KEEP, 0.0, -torch.inf),)),
    "added": (lambda q: _weights(q @ q.mT + (1 - KEEP.float()) * -10000.0), ()),
    "added, input": (lambda q, keep: _weights(q @ q.mT + (1 - keep.float()) * -10000.0), (KEEP,)),
    "subtracted, input": (lambda q, keep: _weights(q @ q.mT - (1 - keep.float()) * 1e9), (KEEP,)),
    "filled": (lambda q: _weights((q @ q.mT).masked_fill(~KEEP, torch.finfo(torch.float32).min)), ()),
    "filled and divided": (lambda q, keep: _weights(torch.where(keep, q @ q.mT, -torch.inf) / 2), (KEEP,)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", LEAKS)
def test_masked_scores_that_exceed_the_others_by_hundreds_have_no_weight(name: str, recipe: ArmRecipeType) -> None:
    function, masks = LEAKS[name]
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(1, 5, 8, generator=generator) * 4, *masks) for _ in range(6)]
    assert not _run(function, samples, recipe).any()


def test_scores_with_a_large_span_and_two_masks_keep_their_accuracy() -> None:
    causal = torch.full((5, 5), -torch.inf).triu(1)

    def attention(q: Tensor, padding: Tensor) -> Tensor:
        return (q @ q.mT + causal).masked_fill(padding, -1e9).softmax(-1) @ q

    generator = torch.Generator().manual_seed(0)
    padding = torch.tensor([False, False, True, False, False])
    samples = [(torch.randn(1, 5, 8, generator=generator) * 4, padding) for _ in range(6)]
    assert sqnr([attention(*samples[0])], [_run(attention, samples, R.TOSA_INT8)]) > 30


SINKS = torch.tensor([0.5, -0.3]).reshape(1, 2, 1, 1)
LOWEST = torch.finfo(torch.float32).min


def _with_sinks(scores: Tensor) -> Tensor:
    """Softmax with a sink beside the keys, as gpt-oss writes it."""
    logits = torch.cat([scores, SINKS.expand(-1, -1, scores.shape[2], -1)], -1)
    return (logits - logits.max(-1, keepdim=True).values).softmax(-1)[..., :-1]


def _stable(scores: Tensor) -> Tensor:
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("recipe", [R.TOSA_INT8, R.TOSA_A16W8])
@pytest.mark.parametrize("weights", [_with_sinks, _stable])
@pytest.mark.parametrize("mask_value", [LOWEST, -1e9, -torch.inf])
def test_masks_before_a_concatenation_or_a_subtracted_maximum_are_bounded(
    weights: Callable[[Tensor], Tensor], mask_value: float, recipe: ArmRecipeType
) -> None:
    causal = torch.full((5, 5), mask_value).triu(1)

    def attention(q: Tensor) -> Tensor:
        return weights(q @ q.mT / 3 + causal) @ q

    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(1, 2, 5, 8, generator=generator),) for _ in range(6)]
    assert sqnr([attention(*samples[0])], [_run(attention, samples, recipe)]) > 28


ROWS = torch.ones(5, 7, dtype=torch.bool)
ROWS[2], ROWS[3, 4:] = False, False
FLOAT_ROWS = torch.where(ROWS, 0.0, -torch.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


EMPTY_ROWS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "boolean": (lambda q, k, v: _attend(q, k, v, ROWS), ()),
    "float": (lambda q, k, v: _attend(q, k, v, FLOAT_ROWS), ()),
    "boolean input": (_attend, (ROWS,)),
    "float input": (_attend, (FLOAT_ROWS,)),
    "computed": (lambda q, k, v, keep: _attend(q, k, v, torch.where(keep, 0.0, -torch.inf)[None]), (ROWS,)),
    "nan_to_num": (
        lambda q, k, v, keep: torch.nan_to_num((q @ k.mT).masked_fill(~keep, -torch.inf).softmax(-1)) @ v,
        (ROWS,),
    ),
    "nan_to_num, moved": (
        lambda q, k, v: torch.nan_to_num((q @ k.mT / 3 + FLOAT_ROWS).transpose(2, 3).softmax(2)).transpose(2, 3) @ v,
        (),
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_without_a_key_give_zero(name: str, recipe: ArmRecipeType) -> None:
    function, masks = EMPTY_ROWS[name]
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 7, 7)
    samples = [(*(torch.randn(1, 2, n, 8, generator=generator) for n in sizes), *masks) for _ in range(4)]
    result = _run(function, samples, recipe)
    assert not result[0, :, 2].any()
    assert sqnr([function(*samples[0])], [result]) > 28


def test_rows_without_a_key_give_the_number_of_nan_to_num() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nan_to_num((q @ k.mT).masked_fill(~ROWS, -torch.inf).softmax(-1), nan=0.25) @ v

    generator = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randn(1, 2, n, 8, generator=generator) for n in (5, 7, 7)) for _ in range(4)]
    result = _run(attention, samples, RECIPES[0])
    assert sqnr([attention(*samples[0])[:, :, 2]], [result[:, :, 2]]) > 28


def test_each_nan_to_num_of_a_softmax_gives_its_own_number() -> None:
    def weights(q: Tensor, k: Tensor) -> Tensor:
        attention = (q @ k.mT).masked_fill(~ROWS, -torch.inf).softmax(-1)
        return torch.nan_to_num(attention, nan=0.25) - 2 * torch.nan_to_num(attention)

    generator = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randn(1, 2, n, 8, generator=generator) for n in (5, 7)) for _ in range(4)]
    result = _run(weights, samples, RECIPES[0])
    assert sqnr([weights(*samples[0])[:, :, 2]], [result[:, :, 2]]) > 28


def test_masks_that_leave_each_row_a_key_cost_nothing() -> None:
    """A constant mask is checked at export, so its program has no selection."""
    samples = [tuple(torch.randn(1, 2, 7, 8) for _ in range(3)) for _ in range(2)]
    sizes = []
    for mask in (torch.ones(7, 7).tril() > 0, torch.ones(7, 7) * ROWS[3] > 0, torch.ones(7, 7).triu(1) > 0):
        model = _Function(lambda q, k, v, mask=mask: _attend(q, k, v, mask)).eval()
        result = export(model, ExportRecipe.get_recipe(R.ETHOSU_U85_INT8), samples)
        sizes.append(sum(cost.cycles for cost in result.report.layers))
    assert sizes[0] == sizes[1] < sizes[2]
