"""Accuracy of quantized programs in PyTorch: SQNR against the floating-point model, and a user's metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums, in_float64, sum_errors
from arm_recipes.comparison.accuracy import compute_metric
from arm_recipes.samples.sample import Inputs

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Rating:
    """Accuracy of a program on samples that were not used for calibration.

    Attributes:
        sqnr: SQNR against the floating-point model, in dB.
        noise: noise power relative to signal power.
        metric: mean of the user's metric; the SQNR without one.
    """

    sqnr: float
    noise: float
    metric: float

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> Rating | None:
        """Read a rating from a stored record; None if the record is missing or invalid."""
        names = ("sqnr", "noise", "metric")
        values = [value for name in names if isinstance(value := (record or {}).get(name), float)]
        return cls(*values) if len(values) == len(names) else None


class Evaluator:
    """Rates programs by their outputs on a set of samples.

    Args:
        program: captured model.
        samples: samples as the model takes them.
        originals: the same samples as the user passed them, for the metric.
        metric: ``metric(outputs, sample)``, higher is better; None: SQNR.
    """

    def __init__(
        self, program: ExportedProgram, samples: Sequence[Inputs], originals: Sequence[Any], metric: Metric | None
    ) -> None:
        self.samples, self._given, self._metric = list(samples), list(originals), metric
        self._expected = self._outputs(program)

    @property
    def metric_name(self) -> str:
        """Name of the accuracy metric."""
        return "SQNR in dB" if self._metric is None else str(getattr(self._metric, "__name__", "metric"))

    @property
    def is_cacheable(self) -> bool:
        """Whether ratings may be stored: a user's metric may change between runs."""
        return self._metric is None

    def float_metric(self) -> float | None:
        """Return the metric of the floating-point model; None for the SQNR, which is infinite."""
        return None if self._metric is None else self._mean(self._expected)

    def rate(self, program: ExportedProgram) -> Rating:
        """Rate a quantized program run in PyTorch. The program on the target differs in rounding only."""
        return self.rate_outputs(self._outputs(program))

    def rate_outputs(self, outputs: Sequence[Any]) -> Rating:
        """Rate outputs for the samples against the model's outputs."""
        pairs = zip(pytree.tree_leaves(self._expected), pytree.tree_leaves(list(outputs)), strict=True)
        sums = sum_errors(
            ErrorSums.of(in_float64(expected), in_float64(actual))
            for expected, actual in pairs
            if isinstance(expected, torch.Tensor)
        )
        sqnr = sums.metrics.sqnr
        noise = sums.noise / sums.signal if sums.signal else 0.0
        return Rating(sqnr, noise, sqnr if self._metric is None else self._mean(outputs))

    def _outputs(self, program: ExportedProgram) -> list[Any]:
        model = copy.deepcopy(program).module(check_guards=False)  # a copy: the model may write buffers
        with torch.no_grad():
            samples = map(copy.deepcopy, self.samples)  # the model may write its inputs too
            outputs = (model(*sample, **sample.keywords) for sample in samples)
            return [pytree.tree_map_only(torch.Tensor, torch.clone, output) for output in outputs]

    def _mean(self, outputs: Sequence[Any]) -> float:
        assert self._metric is not None
        return compute_metric(self._metric, outputs, outputs, self._given).program
