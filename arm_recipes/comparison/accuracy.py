"""Task accuracy of the model and of the program: top-1 accuracy by labels, or the mean of a user's metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arm_backend_core.kinds import INTEGER_OR_BOOL, ScalarKind, kind_of

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Accuracy:
    """Task accuracy of the reference and of the program.

    Attributes:
        metric: name of the metric.
        reference, program: value of the metric for the reference and for the program.
        items: number of items that the metric is averaged over.
        agreeing: number of items with equal predictions of program and reference; None for a user's metric.
    """

    metric: str
    reference: float
    program: float
    items: int
    agreeing: int | None = None


def compute_metric(
    metric: Metric, reference: Sequence[Any], program: Sequence[Any], samples: Sequence[Any]
) -> Accuracy:
    """Average ``metric(outputs, sample)`` over all samples.

    Args:
        reference, program: outputs of each sample.

    Raises:
        ValueError: the metric does not return a number.
    """

    def mean(outputs: Sequence[Any]) -> float:
        values = [
            _as_number(metric, metric(*pair), index) for index, pair in enumerate(zip(outputs, samples, strict=True))
        ]
        return sum(values) / len(values)

    return Accuracy(str(getattr(metric, "__name__", "metric")), mean(reference), mean(program), len(samples))


def _as_number(metric: Metric, value: Any, index: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        name = getattr(metric, "__name__", "metric")
        raise ValueError(
            f"metric: {name}(outputs, sample) must return a number; for sample {index} it gave {type(value).__name__}"
        ) from error


def compute_top1_accuracy(
    labels: Tensor, reference: Sequence[Any], program: Sequence[Any], *, has_padding: bool
) -> Accuracy:
    """Compute the share of items for which the class with the largest score is the label.

    Args:
        labels: one class index for each item of each sample, in order.
        reference, program: first output of each sample: class scores.
        has_padding: the last batch may be filled up with repeated items, which have no label and are ignored.

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
        ValueError: the labels are not integers.
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

    It is the dimension whose removal leaves as many items as there are labels, or with padding fewer than one sample's
    items more; -1 if neither does.
    """
    for axis in (1, -1):
        items = scores.numel() // max(scores.shape[axis], 1)  # of one sample
        if 0 <= samples * items - labels < (max(items, 1) if has_padding else 1):
            return axis
    return -1
