"""How often the model and the program are right: labels, or a metric of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arm_backend_core.kinds import COUNTABLE, ScalarKind, kind_of

Metric = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Accuracy:
    """What a task makes of the outputs.

    Attributes:
        metric: its name.
        reference, program: its value for what is compared with, and for the program.
        items: how many it is the mean of.
        agreeing: of these, how many of the program's predictions are the reference's; None for a metric.
    """

    metric: str
    reference: float
    program: float
    items: int
    agreeing: int | None = None


def compute_metric(metric: Metric, right: Sequence[Any], given: Sequence[Any], samples: Sequence[Any]) -> Accuracy:
    """The mean of a function of outputs and samples.

    Raises:
        ValueError: it gives something else than a number.
    """

    def mean(outputs: Sequence[Any]) -> float:
        values = [
            _number(metric, metric(*pair), index) for index, pair in enumerate(zip(outputs, samples, strict=True))
        ]
        return sum(values) / len(values)

    return Accuracy(str(getattr(metric, "__name__", "metric")), mean(right), mean(given), len(samples))


def _number(metric: Metric, value: Any, index: int) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        name = getattr(metric, "__name__", "metric")
        raise ValueError(
            f"metric: {name}(outputs, sample) must give a number; for sample {index} it gave {type(value).__name__}"
        ) from error


def compute_top1_accuracy(wanted: Tensor, right: Sequence[Any], given: Sequence[Any], *, wrapped: bool) -> Accuracy:
    """How many of the largest scores of the first output are at the labels.

    Args:
        wanted: one for each item of each sample, in order.
        right, given: first outputs by sample, scores of classes.
        wrapped: the last items may be repeated ones, which have no label.

    Raises:
        ValueError: there are more or fewer labels than items, or the first output has no scores.
    """
    found = []
    for outputs in (right, given):
        scores = [_scores(output) for output in outputs]
        axis = _classes(scores[0], len(scores), wanted.numel())
        predictions = torch.cat([one.argmax(axis).flatten() for one in scores])
        found.append(predictions[: wanted.numel()] if wrapped else predictions)
    for predictions in found:
        if predictions.numel() != wanted.numel():
            raise ValueError(
                f"labels: there are {wanted.numel()}, and {len(right)} samples have {predictions.numel()} items; give "
                "one for each item, in the order of the samples"
            )
    one, other = (float((predictions == wanted).double().mean()) for predictions in found)
    return Accuracy("top-1 accuracy", one, other, wanted.numel(), int((found[0] == found[1]).sum()))


def flatten_labels(labels: Any) -> Tensor:
    """Labels in a row.

    Raises:
        ValueError: they are no integers.
    """
    try:
        if isinstance(labels, (Tensor, np.ndarray, int)):
            flat = torch.as_tensor(labels).flatten()
        else:
            flat = torch.cat([torch.as_tensor(label).flatten() for label in labels])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"labels: must be integers, one for each item, in a list, an array or a tensor: {error}"
        ) from error
    if kind_of(flat.dtype) not in COUNTABLE:
        raise ValueError(f"labels: must be integers, numbers of classes; got {flat.dtype}: use metric= for other tasks")
    return flat.long().cpu()


def _scores(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or kind_of(output.dtype) is not ScalarKind.FLOAT or not output.dim():
        what = f"{output.dtype}{list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"labels: the first output is {what}, no scores of classes; give metric=, a function of outputs and sample"
        )
    return output if output.dim() > 1 else output[None]


def _classes(scores: Tensor, samples: int, labels: int) -> int:
    """The dimension that is the classes': the second one of images, the last one of tokens, by the number of labels."""
    fits = [axis for axis in (1, -1) if samples * scores.numel() // max(scores.shape[axis], 1) == labels]
    return fits[0] if fits else -1
