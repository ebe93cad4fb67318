"""Samples and labels of a comparison: convert every accepted form to model inputs and a label tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from arm_backend_core.kinds import ScalarKind, kind_of
from arm_recipes.comparison.accuracy import flatten_labels
from arm_recipes.runtime.signature import Value
from arm_recipes.samples.inputs import to_sample_list
from arm_recipes.samples.sample import Inputs, InputSignature, as_inputs, rebatch


@dataclass(frozen=True)
class ComparisonSamples:
    """Samples of one method.

    Attributes:
        originals: samples as the user passed them.
        samples: samples as the model takes them.
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
        ValueError: there are no samples, or a sample does not fit the model. The message names the sample.
    """
    originals = _to_list(method, samples, argument)
    arity = input_signature.spec.children()[0].num_children
    positional = [_drop_extras(sample, arity) for sample in originals]
    converted = [as_inputs(sample, f"{argument}[{index}]") for index, sample in enumerate(positional)]
    is_loader = isinstance(samples, DataLoader)
    if is_loader:
        converted = list(rebatch(converted, input_signature))
    if is_loader and metric is not None and len(converted) != len(originals):
        raise ValueError(
            f"metric: the DataLoader's {len(originals)} batches become {len(converted)} batches of the program's batch "
            "size, so a metric per batch is undefined; use a DataLoader with the program's batch_size"
        )
    if is_loader and labels is None and metric is None:
        labels = _loader_labels(originals, arity)
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


def prepare_program_samples(
    expected: Sequence[Value], method: str, samples: Any, labels: Any, metric: Any
) -> ComparisonSamples:
    """Prepare samples for a saved program, which stores only the names and the order of its inputs.

    Raises:
        ValueError: there are no samples, or a sample's number of tensors differs from the program's inputs.
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
    if isinstance(samples, DataLoader) and labels is None and metric is None:
        labels = _loader_labels(originals, len(expected))
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


def _loader_labels(batches: Sequence[Any], arity: int) -> list[Tensor] | None:
    """Return the integer labels that follow the inputs in a DataLoader's batches; None without labels."""
    labels = [batch[arity] for batch in batches if isinstance(batch, (tuple, list)) and len(batch) > arity]
    is_integer = [isinstance(x, Tensor) and kind_of(x.dtype) is ScalarKind.INTEGER for x in labels]
    return labels if labels and len(labels) == len(batches) and all(is_integer) else None
