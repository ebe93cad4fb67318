"""Samples by which programs are rated, and what the model in floating point makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import Sums, added, in_float64
from arm_recipes.comparison.accuracy import compute_metric
from arm_recipes.samples.sample import Inputs

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Rating:
    """How right a program is on samples that did not calibrate it.

    Attributes:
        sqnr: against the model in floating point, dB.
        noise: power of the error over power of the signal.
        metric: mean of the user's metric; the SQNR where there is none.
    """

    sqnr: float
    noise: float
    metric: float

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> Rating | None:
        """What was kept; None if that is nothing, or of another form."""
        names = ("sqnr", "noise", "metric")
        found = [value for name in names if isinstance(value := (record or {}).get(name), float)]
        return cls(*found) if len(found) == len(names) else None


class Evaluator:
    """Rates the outputs of programs.

    Args:
        program: the model, captured.
        samples: as the model takes them. ``given``: the same as the user gave them, which the metric gets.
        metric_name: ``metric_name(outputs, sample)``, the higher the better; None for the SQNR.
    """

    def __init__(
        self, program: ExportedProgram, samples: Sequence[Inputs], given: Sequence[Any], metric: Metric | None
    ) -> None:
        self.samples, self._given, self._metric = list(samples), list(given), metric
        self._expected = self._outputs(program)

    @property
    def metric_name(self) -> str:
        """What accuracy is."""
        return "SQNR in dB" if self._metric is None else str(getattr(self._metric, "__name__", "metric"))

    @property
    def is_cacheable(self) -> bool:
        """Whether a rating says the same tomorrow: a metric of the user's may have changed by then."""
        return self._metric is None

    def float_metric(self) -> float | None:
        """The metric of the model in floating point; None for the SQNR, which is infinite."""
        return None if self._metric is None else self._mean(self._expected)

    def rate(self, program: ExportedProgram) -> Rating:
        """How right a quantized program is, in PyTorch: the program on the target differs by roundings."""
        return self.rate_outputs(self._outputs(program))

    def rate_outputs(self, outputs: Sequence[Any]) -> Rating:
        """Outputs for the samples, compared with the model's."""
        pairs = zip(pytree.tree_leaves(self._expected), pytree.tree_leaves(list(outputs)), strict=True)
        sums = added(
            Sums.of(in_float64(one), in_float64(other)) for one, other in pairs if isinstance(one, torch.Tensor)
        )
        sqnr = sums.gap.sqnr
        noise = sums.noise / sums.signal if sums.signal else 0.0
        return Rating(sqnr, noise, sqnr if self._metric is None else self._mean(outputs))

    def _outputs(self, program: ExportedProgram) -> list[Any]:
        model = copy.deepcopy(program).module(check_guards=False)  # of its own: it may write buffers
        with torch.no_grad():
            samples = map(copy.deepcopy, self.samples)  # into which it may write too
            outputs = (model(*sample, **sample.keywords) for sample in samples)
            return [pytree.tree_map_only(torch.Tensor, torch.clone, output) for output in outputs]

    def _mean(self, outputs: Sequence[Any]) -> float:
        assert self._metric is not None
        return compute_metric(self._metric, outputs, outputs, self._given).program
