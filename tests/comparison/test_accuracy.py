"""Accuracy of programs: the model and the samples stay as they are, and a metric must return numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_recipes.comparison.accuracy import Evaluator, run_model
from arm_recipes.samples.call_inputs import Inputs


class _Writes(nn.Module):
    """Mutates its input and its buffer, and returns the buffer."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        x.add_(1)
        return self.total


def test_running_a_model_changes_neither_the_model_nor_the_samples() -> None:
    program = torch.export.export(_Writes(), (torch.zeros(2),), strict=False)
    samples = [Inputs(torch.ones(2)), Inputs(torch.ones(2))]
    first, second = run_model(program, samples)
    assert first.tolist() == [1, 1]
    assert second.tolist() == [2, 2]
    assert all(sample[0].tolist() == [1, 1] for sample in samples)
    assert program.state_dict["total"].tolist() == [0, 0]


def test_a_rating_is_over_all_samples() -> None:
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))
    evaluator = Evaluator(program, [Inputs(torch.ones(2)), Inputs(3 * torch.ones(2))], ["a", "b"], None)
    result = evaluator.evaluate_outputs([torch.tensor([1.0, 1.0]), torch.tensor([3.0, 2.0])])
    assert result.noise == pytest.approx(1 / 20)
    assert result.sqnr == result.metric == pytest.approx(13.0103, abs=1e-4)
    assert evaluator.float_metric() is None


def test_a_metric_that_gives_no_number_is_named() -> None:
    program = torch.export.export(nn.ReLU(), (torch.ones(2),))

    def label(outputs: Tensor, sample: str) -> str:
        return sample

    evaluator = Evaluator(program, [Inputs(torch.ones(2))], ["a"], label)
    with pytest.raises(ValueError, match=r"metric: label\(outputs, sample\) must return a number; for sample 0"):
        evaluator.float_metric()
