"""Accuracy of programs on samples: SQNR against the floating-point model, a user's metric, or top-1 accuracy by labels.

``export``, ``compare``, ``sweep`` and ``tune`` use this module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorSums, sum_errors, to_float64
from arm_backend_core.scalar_kind import INTEGER_OR_BOOL, ScalarKind, kind_of
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.types import Metric


@dataclass(frozen=True)
class EvaluationResult:
    """Accuracy of a program on all samples of an ``Evaluator``.

    Attributes:
        sqnr: SQNR against the floating-point model, in dB, over all elements of all outputs.
        noise: noise power relative to signal power; 0 if all outputs of the model are 0.
        metric: mean of the user's metric; without a metric, the SQNR.
    """

    sqnr: float
    noise: float
    metric: float

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> EvaluationResult | None:
        """Read a result from a stored record; None if the record is missing or invalid."""
        names = ("sqnr", "noise", "metric")
        values = [value for name in names if isinstance(value := (record or {}).get(name), float)]
        return cls(*values) if len(values) == len(names) else None


class Evaluator:
    """Evaluates programs of a model by their outputs on a set of samples.

    Args:
        program: captured floating-point model.
        samples: inputs of the model, one entry per sample.
        originals: the same samples as the user passed them, for the metric.
        metric: ``metric(outputs, sample)`` returns a number, higher is better; None: SQNR.
    """

    def __init__(
        self, program: ExportedProgram, samples: Sequence[Inputs], originals: Sequence[Any], metric: Metric | None
    ) -> None:
        self.samples, self._originals, self._metric = list(samples), list(originals), metric
        self._expected = run_model(program, self.samples)

    @property
    def metric_name(self) -> str:
        """Name of the accuracy metric."""
        return "SQNR in dB" if self._metric is None else _metric_name(self._metric)

    @property
    def is_cacheable(self) -> bool:
        """Whether results may be stored. False for a user's metric, because the function may change between runs."""
        return self._metric is None

    def float_metric(self) -> float | None:
        """Return the metric of the floating-point model; None for the SQNR, which is infinite."""
        return None if self._metric is None else _mean_metric(self._metric, self._expected, self._originals)

    def evaluate(self, program: ExportedProgram) -> EvaluationResult:
        """Run a quantized program in PyTorch, and evaluate it. Results on the target differ by rounding only."""
        return self.evaluate_outputs(run_model(program, self.samples))

    def task_accuracy(
        self, program: ExportedProgram, labels: Tensor | None = None, *, has_padding: bool = False
    ) -> Accuracy | None:
        """Run a quantized program in PyTorch, and compute its task accuracy; see ``compute_accuracy``."""
        outputs = run_model(program, self.samples)
        return compute_accuracy(self._expected, outputs, self._originals, labels, self._metric, has_padding=has_padding)

    def evaluate_outputs(self, outputs: Sequence[Any]) -> EvaluationResult:
        """Evaluate the outputs of a program for the samples against the model's outputs.

        Raises:
            ValueError: the metric does not return a number.
        """
        sums = sum_output_errors(self._expected, outputs)
        sqnr, noise = sums.metrics.sqnr, sums.noise / sums.signal if sums.signal else 0.0
        return EvaluationResult(
            sqnr, noise, sqnr if self._metric is None else _mean_metric(self._metric, outputs, self._originals)
        )


def run_model(program: ExportedProgram, samples: Sequence[Inputs]) -> list[Any]:
    """Run a captured program in PyTorch, and return the outputs of each sample.

    Runs a copy of the program on copies of the samples, because a model may write its buffers and inputs. Copies the
    outputs, because a model may return a buffer, which the next call overwrites.
    """
    model = copy.deepcopy(program).module(check_guards=False)
    with torch.no_grad():
        outputs = (model(*sample, **sample.keywords) for sample in map(copy.deepcopy, samples))
        return [pytree.tree_map_only(Tensor, torch.clone, output) for output in outputs]


def sum_output_errors(expected: Iterable[Any], actual: Iterable[Any]) -> ErrorSums:
    """Sum up the errors over all elements of all output tensors, in float64."""
    pairs = zip(pytree.tree_leaves(list(expected)), pytree.tree_leaves(list(actual)), strict=True)
    return sum_errors(
        ErrorSums.of(to_float64(reference), to_float64(output))
        for reference, output in pairs
        if isinstance(reference, Tensor)
    )


@dataclass(frozen=True)
class Accuracy:
    """Task accuracy of the reference and of the program.

    Attributes:
        metric: name of the metric.
        reference, program: value of the metric for the reference and for the program.
        items: number of items that the top-1 accuracy is averaged over; number of samples for a user's metric.
        agreeing: number of items with equal predictions of program and reference; None for a user's metric.
    """

    metric: str
    reference: float
    program: float
    items: int
    agreeing: int | None = None

    @property
    def figures(self) -> tuple[str, str]:
        """The metric of the reference and of the program, as text. Top-1 accuracy is in percent."""
        is_share = self.agreeing is not None
        reference, program = (f"{100 * x:.2f} %" if is_share else f"{x:.6g}" for x in (self.reference, self.program))
        return reference, program

    @property
    def drop(self) -> float:
        """Metric of the reference minus metric of the program."""
        return self.reference - self.program

    @property
    def drop_figure(self) -> str:
        """The drop as text, in percentage points for top-1 accuracy."""
        return f"{100 * self.drop:.2f} points" if self.agreeing is not None else f"{self.drop:.6g}"

    def rows(self, reference: str) -> list[tuple[str, ...]]:
        """Rows of a table; ``reference`` is the name of the reference."""
        of_reference, of_program = self.figures
        label = f"{self.metric}, {self.items} {'samples' if self.agreeing is None else 'items'}"
        rows: list[tuple[str, ...]] = [(label, f"{of_reference} of {reference}", f"{of_program} of the program")]
        rows.append(("drop", self.drop_figure, ""))
        if self.agreeing is not None:
            rows.append(("predictions that agree", f"{self.agreeing} of {self.items}", ""))
        return rows


def check_metric(metric: Any) -> None:
    """Check the argument ``metric``.

    Raises:
        ValueError: it is neither None nor callable.
    """
    if metric is not None and not callable(metric):
        raise ValueError(f"metric: {metric!r} is not callable; give a function of outputs and a sample, or None")


def compute_accuracy(
    reference: Sequence[Any],
    program: Sequence[Any],
    samples: Sequence[Any],
    labels: Tensor | None,
    metric: Metric | None,
    *,
    has_padding: bool,
) -> Accuracy | None:
    """Compute the mean of the metric, or without a metric the top-1 accuracy. None if metric and labels are None.

    Args:
        reference, program: outputs of each sample, in the model's structure. With labels, the first tensor must hold
            class scores.
        samples: samples as the user passed them, for the metric.
        labels, has_padding: as for ``compute_top1_accuracy``.

    Raises:
        ValueError: as ``compute_metric`` and ``compute_top1_accuracy``.
    """
    if metric is not None:
        return compute_metric(metric, reference, program, samples)
    if labels is None:
        return None
    first = next((i for i, x in enumerate(pytree.tree_leaves(reference[0])) if isinstance(x, Tensor)), 0)
    scores = ([pytree.tree_leaves(output)[first] for output in outputs] for outputs in (reference, program))
    return compute_top1_accuracy(labels, *scores, has_padding=has_padding)


def compute_metric(
    metric: Metric, reference: Sequence[Any], program: Sequence[Any], samples: Sequence[Any]
) -> Accuracy:
    """Average ``metric(outputs, sample)`` over all samples.

    Args:
        reference, program: outputs of each sample.

    Raises:
        ValueError: the metric does not return a number.
    """
    of_reference, of_program = (_mean_metric(metric, outputs, samples) for outputs in (reference, program))
    return Accuracy(_metric_name(metric), of_reference, of_program, len(samples))


def _metric_name(metric: Metric) -> str:
    return str(getattr(metric, "__name__", "metric"))


def _mean_metric(metric: Metric, outputs: Sequence[Any], samples: Sequence[Any]) -> float:
    values = [_to_float(metric, metric(*pair), index) for index, pair in enumerate(zip(outputs, samples, strict=True))]
    return sum(values) / len(values)


def _to_float(metric: Metric, value: Any, index: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metric: {_metric_name(metric)}(outputs, sample) must return a number; for sample {index} it gave "
            f"{type(value).__name__}"
        ) from error


def compute_top1_accuracy(
    labels: Tensor, reference: Sequence[Any], program: Sequence[Any], *, has_padding: bool
) -> Accuracy:
    """Compute the share of items for which the class with the largest score is the label.

    Args:
        labels: one class index for each item of each sample, in order.
        reference, program: first output of each sample: class scores.
        has_padding: if True, repeated items, which have no label and are ignored, may fill up the last batch.

    Raises:
        ValueError: the numbers of labels and items differ, or the first output holds no class scores.
    """
    both_predictions = []
    for outputs in (reference, program):
        scores = [_check_scores(output) for output in outputs]
        axis = _class_axis(scores[0], len(scores), labels.numel(), has_padding)
        predictions = torch.cat([batch.argmax(axis).flatten() for batch in scores])
        both_predictions.append(predictions[: labels.numel()] if has_padding else predictions)
    for predictions in both_predictions:
        if predictions.numel() != labels.numel():
            raise ValueError(
                f"labels: there are {labels.numel()}, but {len(reference)} samples have {predictions.numel()} items; "
                "give one label for each item, in the order of the samples"
            )
    reference_share, program_share = (
        float((predictions == labels).double().mean()) for predictions in both_predictions
    )
    return Accuracy(
        "top-1 accuracy",
        reference_share,
        program_share,
        labels.numel(),
        int((both_predictions[0] == both_predictions[1]).sum()),
    )


def flatten_labels(labels: Any) -> Tensor:
    """Flatten labels to an int64 tensor [N] on the CPU.

    Raises:
        ValueError: the labels are neither integers nor booleans.
    """
    try:
        if isinstance(labels, (Tensor, np.ndarray, int)):
            flat = torch.as_tensor(labels).flatten()
        else:
            flat = torch.cat([torch.as_tensor(label).flatten() for label in labels])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"labels: must be integers, one per item, in a list, an array or a tensor: {error}") from error
    if kind_of(flat.dtype) not in INTEGER_OR_BOOL:
        raise ValueError(f"labels: must be integer class indices, got {flat.dtype}; use metric= for other tasks")
    return flat.long().cpu()


def _check_scores(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or kind_of(output.dtype) is not ScalarKind.FLOAT or not output.dim():
        description = f"{output.dtype}{list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"labels: the first output is {description}, not class scores; use metric=, a function of outputs and "
            "sample"
        )
    return output if output.dim() > 1 else output[None]


def _class_axis(scores: Tensor, samples: int, labels: int, has_padding: bool) -> int:
    """Return the class dimension: 1 (images, [N, C, ...]) or -1 (tokens, [N, T, C]).

    The number of items of a sample is the product of all dimensions except the class dimension. The result is the
    dimension for which the number of items of all samples equals the number of labels. With padding, the number of
    items may be larger, by less than the items of one sample. If neither dimension matches, the result is -1.
    """
    for axis in (1, -1):
        items = scores.numel() // max(scores.shape[axis], 1)  # of one sample
        if 0 <= samples * items - labels < (max(items, 1) if has_padding else 1):
            return axis
    return -1
