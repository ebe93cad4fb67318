"""What users may give as samples and labels, in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from arm_backend_core.kinds import ScalarKind, kind_of
from arm_recipes.comparison.accuracy import flat_labels
from arm_recipes.runtime.signature import Value
from arm_recipes.samples.inputs import sample_list
from arm_recipes.samples.sample import Inputs, Pattern, as_inputs, fit_batches


@dataclass(frozen=True)
class Samples:
    """Samples of one method.

    Attributes:
        given: as the user gave them.
        samples: as the model takes them; ``inputs``: their tensors.
        labels: in a row.
        wrapped: the last items may be repeated ones, which no label is for.
    """

    given: list[Any]
    samples: list[Inputs]
    inputs: list[list[Tensor]]
    labels: Tensor | None
    wrapped: bool


def samples_of(
    pattern: Pattern, method: str, samples: Any, labels: Any, metric: Any, *, argument: str = "samples"
) -> Samples:
    """Samples for what was captured with ``pattern``.

    Args:
        argument: what messages call them.

    Raises:
        ValueError: there are none, or one is not what the model takes; the message names it.
    """
    given = _listed(method, samples, argument)
    arity = pattern.spec.children()[0].num_children
    cut = [_cut(sample, arity) for sample in given]
    made = [as_inputs(sample, f"{argument}[{index}]") for index, sample in enumerate(cut)]
    is_loader = isinstance(samples, DataLoader)
    if is_loader:
        made = list(fit_batches(made, pattern))
    if is_loader and metric is not None and len(made) != len(given):
        raise ValueError(
            f"metric: {len(given)} batches of the DataLoader are {len(made)} of the size that the program takes, so "
            "that a batch is no sample; give a DataLoader of that batch_size"
        )
    if is_loader and labels is None and metric is None:
        labels = _labels(given, arity)
    inputs = []
    for index, sample in enumerate(made):
        leaves = pattern.check(sample, f"{argument}[{index}]")
        inputs.append([x for x, kind in zip(leaves, pattern.leaves, strict=True) if isinstance(kind, Tensor)])
    return Samples(given, made, inputs, None if labels is None else flat_labels(labels), is_loader)


def samples_of_program(expected: Sequence[Value], method: str, samples: Any, labels: Any, metric: Any) -> Samples:
    """Samples for a saved program, which knows its inputs by their names and order alone.

    Raises:
        ValueError: there are none, or one has another number of tensors than the program has inputs.
    """
    given = _listed(method, samples, "samples")
    made, inputs = [], []
    for index, sample in enumerate(given):
        what = f"samples[{index}]"
        if isinstance(sample, Mapping) and {value.name for value in expected} == set(sample):
            sample = tuple(sample[value.name] for value in expected)
        one = as_inputs(_cut(sample, len(expected)), what)
        leaves = [x for x in pytree.tree_leaves((tuple(one), one.keywords)) if isinstance(x, Tensor)]
        if len(leaves) != len(expected):
            names = ", ".join(f"{value.name}: {value}" for value in expected)
            raise ValueError(f"{what} has {len(leaves)} tensors, the program takes {len(expected)} ({names})")
        made.append(one)
        inputs.append(leaves)
    if isinstance(samples, DataLoader) and labels is None and metric is None:
        labels = _labels(given, len(expected))
    return Samples(given, made, inputs, None if labels is None else flat_labels(labels), wrapped=False)


def _listed(method: str, samples: Any, argument: str) -> list[Any]:
    found = [] if samples is None else sample_list(method, samples, argument)
    if not found:
        raise ValueError(f"{argument}: there are none; give a list of input tuples, [(x,)], a DataLoader or the like")
    return found


def _cut(sample: Any, arity: int) -> Any:
    """Without what stands behind the model's positional inputs."""
    return sample[:arity] if isinstance(sample, (tuple, list)) and not isinstance(sample, Inputs) else sample


def _labels(batches: Sequence[Any], arity: int) -> list[Tensor] | None:
    """Integers behind the inputs of a DataLoader's batches."""
    behind = [batch[arity] for batch in batches if isinstance(batch, (tuple, list)) and len(batch) > arity]
    is_integer = [isinstance(x, Tensor) and kind_of(x.dtype) is ScalarKind.INTEGER for x in behind]
    return behind if behind and len(behind) == len(batches) and all(is_integer) else None
