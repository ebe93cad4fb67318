"""Mask fill values: a bounded value replaces them, so that they do not consume the int8 range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.sqnr import sqnr

LENGTH = 12


def _causal(value: float) -> Tensor:
    return torch.full((LENGTH, LENGTH), value).triu(1)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "-inf added": lambda scores, keep: scores + _causal(-torch.inf),
    "finfo.min added": lambda scores, keep: scores + _causal(torch.finfo(torch.float32).min),
    "-10000 added": lambda scores, keep: scores + _causal(-1e4),
    "-inf filled": lambda scores, keep: scores.masked_fill(~keep, -torch.inf),
    "finfo.min filled": lambda scores, keep: scores.masked_fill(~keep, torch.finfo(torch.float32).min),
    "where": lambda scores, keep: torch.where(keep, scores, -1e9),
    "where, moved": lambda scores, keep: torch.where(keep, scores, torch.tensor(-1e9)).unsqueeze(0).squeeze(0),
    "1 - mask": lambda scores, keep: scores + (1.0 - keep.float()) * -10000.0,
    "-(1 - mask)": lambda scores, keep: scores - 1e9 * (1.0 - keep.float()),
    "mask tensor filled": lambda scores, keep: scores + torch.zeros(LENGTH, LENGTH).masked_fill(~keep, -torch.inf),
}


class _Attention(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * 0.25
        return F.softmax(MASKS[self.mask](scores, keep), -1) @ x


@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_a_mask_fill_keeps_precision_in_int8(mask: str) -> None:
    torch.manual_seed(0)
    model = _Attention(mask).eval()
    samples = [(torch.randn(2, LENGTH, 16), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()) for _ in range(3)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    with torch.no_grad():
        assert sqnr([model(*samples[0])], [result.run(*samples[0])]) > 30


_HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "temperature": lambda scores, keep: torch.softmax(torch.where(keep, scores, -1e8) / 2, -1),
    "log_softmax": lambda scores, keep: torch.where(keep, scores, -1e8).log_softmax(-1).exp(),
    "distribution": lambda scores, keep: torch.distributions.Categorical(logits=torch.where(keep, scores, -1e8)).probs,
    "max": lambda scores, keep: torch.where(keep, scores, -1e8).amax(-1),
    "max of -inf": lambda scores, keep: scores.masked_fill(~keep, -torch.inf).max(-1)[0],
    "topk": lambda scores, keep: scores.masked_fill(~keep, -1e9).topk(2, -1)[0],
    "min": lambda scores, keep: torch.where(keep, scores, 1e9).amin(-1),
    "min with swapped branches": lambda scores, keep: torch.where(keep, 1e9, scores).min(-1)[0],
    "smallest of topk": lambda scores, keep: torch.where(keep, scores, 1e9).topk(2, -1, False)[0],
    "argmax": lambda scores, keep: F.one_hot(torch.where(keep, scores, -1e9).argmax(-1), 8).float(),
}


@pytest.mark.parametrize("head", _HEADS)
def test_reductions_and_selections_with_a_mask_fill_keep_precision(head: str) -> None:
    class Model(nn.Module):
        def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
            return _HEADS[head](scores, keep)

    torch.manual_seed(0)
    samples = []
    for _ in range(8):
        keep = torch.rand(16, 8) > 0.4
        keep[:, :2], keep[:, 2:4] = True, False
        samples.append((2 * torch.randn(16, 8), keep))
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    found, expected = (torch.cat([model(*sample) for sample in samples]) for model in (result.run, Model()))
    assert sqnr([expected], [found]) > (12 if head == "argmax" else 18)  # a step decides between two of 128 rows


_PRIORS = torch.tensor([-95.0, -110.0, -88.0, -120.0, -101.0, -90.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sigmoid(x * 1000 - 500.0),
        lambda x: torch.softmax(x * 20 + _PRIORS, -1),
        lambda x: torch.logsumexp(-0.5 * x * x + (-117.6), -1) + 117,
        lambda x: torch.softmax(x / -1e-3, -1),
        lambda x: torch.log_softmax(-1000 * x.sin(), -1),
    ],
    ids=["scaled and shifted", "priors", "normalizer", "temperature", "scaled"],
)
def test_large_constants_that_are_no_mask_fill_keep_their_value(function: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    torch.manual_seed(0)
    samples = [(torch.rand(4, 6),) for _ in range(8)]
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_A16W8), samples)
    found, expected = (torch.cat([model(*sample) for sample in samples]) for model in (result.run, Model()))
    assert sqnr([expected], [found]) > 20


def test_rows_without_an_unmasked_element_are_still_detected() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
            return x.masked_fill(~keep, -1e9).amax(-1) > -1e8, x.masked_fill(~keep, -1e4).argmax(-1)

    x, keep = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(4, 6, dtype=torch.bool)
    keep[1], keep[2], keep[2, 3], x[2, 3] = False, False, True, -4.0
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(x, keep)] * 2)
    some, best = result.run(x, keep)
    assert some.tolist() == [True, False, True, True]
    assert best[2] == 3  # the only unmasked element, although it is the smallest
    assert any("fill value -10000 is replaced" in note for note in result.report.notes)


def test_a_large_fill_value_that_amax_selects_is_kept() -> None:
    class Model(nn.Module):
        def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
            return torch.where(keep, scores, 2000.0).amax(-1)

    samples = [(2 * torch.randn(16, 8), torch.rand(16, 8) > 0.4) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert (result.run(*samples[0]) - Model()(*samples[0])).abs().max() < 20
