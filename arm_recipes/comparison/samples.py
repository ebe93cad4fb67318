"""Samples and labels of a comparison: convert every accepted form to model inputs and a label tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler

from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes.comparison.accuracy import flatten_labels
from arm_recipes.runtime.signature import IOValue
from arm_recipes.samples.call_inputs import Inputs, InputSignature, as_inputs, rebatch
from arm_recipes.samples.export_arguments import to_sample_list


@dataclass(frozen=True)
class ComparisonSamples:
    """Samples of one method.

    Attributes:
        originals: samples as the user passed them.
        samples: positional and keyword inputs of the model, for each sample.
        inputs: tensors of each sample, flattened.
        labels: int64 labels [N]; None without labels.
        has_padding: whether the last batch may be filled up with repeated items (``rebatch``), which have no label.
    """

    originals: list[Any]
    samples: list[Inputs]
    inputs: list[list[Tensor]]
    labels: Tensor | None
    has_padding: bool


def prepare_samples(
    input_signature: InputSignature, method: str, samples: Any, labels: Any, metric: Any, *, argument: str = "samples"
) -> ComparisonSamples:
    """Prepare samples for a program that was captured with ``input_signature``.

    Args:
        argument: name of the argument in messages.

    Raises:
        ValueError: there are no samples, a sample does not fit the model, the labels are invalid or missing, labels are
            given for a ``DataLoader`` that shuffles, or a metric is given for a ``DataLoader`` whose batches are split,
            joined or filled up. The message names the sample or the argument.
    """
    originals = _to_list(method, samples, argument)
    arity = input_signature.spec.children()[0].num_children
    positional = [_drop_extras(sample, arity) for sample in originals]
    converted = [as_inputs(sample, f"{argument}[{index}]") for index, sample in enumerate(positional)]
    is_loader = isinstance(samples, DataLoader)
    if is_loader:
        rebatched = list(rebatch(converted, input_signature))
        if metric is not None:
            check_batches_unchanged(converted, rebatched)
        converted = rebatched
    labels = _resolve_labels(samples, originals, arity, labels, metric)
    inputs, normalized = [], []
    for index, sample in enumerate(converted):
        leaves = input_signature.check(sample, f"{argument}[{index}]")
        normalized.append(input_signature.unflatten(leaves))
        inputs.append(
            [x for x, expected in zip(leaves, input_signature.leaves, strict=True) if isinstance(expected, Tensor)]
        )
    return ComparisonSamples(
        originals, normalized, inputs, None if labels is None else flatten_labels(labels), is_loader
    )


def check_batches_unchanged(batches: Sequence[Inputs], rebatched: Sequence[Inputs]) -> None:
    """Check that rebatching did not change the batches: a metric needs the outputs of exactly the items of each batch.

    Raises:
        ValueError: the batches have been split, joined, or filled up to the program's batch size.
    """
    if len(batches) != len(rebatched):
        raise ValueError(
            f"metric: the DataLoader's {len(batches)} batches become {len(rebatched)} batches of the program's batch "
            "size, so a metric per batch is undefined; use a DataLoader with the program's batch_size"
        )
    if any(_shapes(before) != _shapes(after) for before, after in zip(batches, rebatched, strict=True)):
        raise ValueError(
            "metric: a batch of the DataLoader, such as the last one, is smaller than the program's batch size and is "
            "filled up with other items, which the metric would count; use a DataLoader with drop_last=True, or labels="
        )


def _shapes(sample: Inputs) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves((tuple(sample), sample.keywords))]


def prepare_program_samples(
    expected: Sequence[IOValue], method: str, samples: Any, labels: Any, metric: Any
) -> ComparisonSamples:
    """Prepare samples for a saved program, whose inputs are a flat list of tensors instead of the model's structure.

    Raises:
        ValueError: there are no samples, a sample's number of tensors differs from the number of the program's inputs,
            the labels are invalid or missing, or labels are given for a ``DataLoader`` that shuffles.
    """
    originals = _to_list(method, samples, "samples")
    converted, inputs = [], []
    for index, sample in enumerate(originals):
        description = f"samples[{index}]"
        if isinstance(sample, Mapping) and {value.name for value in expected} == set(sample):
            sample = tuple(sample[value.name] for value in expected)
        inputs_of_sample = as_inputs(_drop_extras(sample, len(expected)), description)
        leaves = [
            x for x in pytree.tree_leaves((tuple(inputs_of_sample), inputs_of_sample.keywords)) if isinstance(x, Tensor)
        ]
        if len(leaves) != len(expected):
            names = ", ".join(f"{value.name}: {value}" for value in expected)
            raise ValueError(f"{description} has {len(leaves)} tensors, the program takes {len(expected)} ({names})")
        converted.append(inputs_of_sample)
        inputs.append(leaves)
    labels = _resolve_labels(samples, originals, len(expected), labels, metric)
    return ComparisonSamples(
        originals, converted, inputs, None if labels is None else flatten_labels(labels), has_padding=False
    )


def _to_list(method: str, samples: Any, argument: str) -> list[Any]:
    sample_items = [] if samples is None else to_sample_list(method, samples, argument)
    if not sample_items:
        raise ValueError(f"{argument}: there are none; give a list of input tuples, [(x,)], a DataLoader or the like")
    return sample_items


def _drop_extras(sample: Any, arity: int) -> Any:
    """Drop the elements after the model's positional inputs, such as labels."""
    return sample[:arity] if isinstance(sample, (tuple, list)) and not isinstance(sample, Inputs) else sample


def _resolve_labels(samples: Any, originals: Sequence[Any], arity: int, labels: Any, metric: Any) -> Any:
    """Return the argument ``labels``, or the integers that follow the inputs in the samples.

    The integers are used with ``labels=True``, and by default for a ``DataLoader`` without a metric.

    Raises:
        ValueError: ``labels=True``, and the samples have no labels; or labels are given for a DataLoader that shuffles.
    """
    if labels is None:
        return _appended_labels(originals, arity) if isinstance(samples, DataLoader) and metric is None else None
    if labels is True:
        found = _appended_labels(originals, arity)
        if found is None:
            raise ValueError(
                "labels=True: the samples have no labels; give integers after the inputs of each sample, [(x, label)], "
                "or a list of labels"
            )
        return found
    if isinstance(samples, DataLoader) and isinstance(samples.sampler, RandomSampler):
        raise ValueError(
            "labels: the DataLoader shuffles its samples, so the labels are in another order; use labels=True "
            "for the labels in its batches, or shuffle=False"
        )
    return labels


def _appended_labels(samples: Sequence[Any], arity: int) -> list[Any] | None:
    """Return the integer labels that follow the inputs in the samples; None if a sample has no integer label."""
    labels = [sample[arity] for sample in samples if isinstance(sample, (tuple, list)) and len(sample) > arity]
    is_integer = [
        isinstance(label, int)
        or (isinstance(label, (Tensor, np.ndarray, np.integer)) and _is_integer(torch.as_tensor(label)))
        for label in labels
    ]
    return labels if labels and len(labels) == len(samples) and all(is_integer) else None


def _is_integer(tensor: Tensor) -> bool:
    return kind_of(tensor.dtype) is ScalarKind.INTEGER
