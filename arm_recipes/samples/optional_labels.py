"""Labels of a ``DataLoader`` that would become an optional input of the model: ``forward(x, labels=None)``.

The batches of a ``DataLoader`` are usually (inputs, labels). If the model's second parameter is required, the second
tensor of a batch is the argument for it. If the parameter is optional, this tensor may be the labels or the argument.
A tensor with one integer or boolean per sample of the batch is refused. A tensor with one float per sample is an
argument, and the report gets a note. Tensors of other shapes are arguments. For an optional parameter named after
labels, such as ``target``, every tensor is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

from arm_backend_core.scalar_kind import INTEGER_OR_BOOL, ScalarKind, kind_of
from arm_recipes._internal.conversions import describe_tensor, dtype_name
from arm_recipes.samples.call_inputs import Inputs

#: Parameters with these names take labels, whatever their dtype and shape. With labels, a model computes its loss.
_LABEL_NAMES = frozenset({"label", "labels", "target", "targets"})


def reject_optional_label(model: Any, sample: Any, suffix: str) -> None:
    """Refuse a batch of a ``DataLoader`` with an item that may be labels or an optional input of the model.

    Raises:
        ValueError: the item holds one integer or boolean per sample of the batch, such as labels or the lengths of
            sequences; or the parameter is named after labels.
    """
    for index, value, name in _optional_tensors(model, sample):
        is_number_per_sample = kind_of(value.dtype) in INTEGER_OR_BOOL and _has_one_number_per_sample(value)
        if is_number_per_sample or name in _LABEL_NAMES:
            raise ValueError(
                f"samples{suffix}: item {index} of the DataLoader's batches is {_describe(value)}, which may be labels "
                f"or the optional input '{name}' of the model. If labels, leave them out: {_inputs_code(index)}; "
                f"labels=[...] measures the accuracy with them. If inputs, pass a list of the batches: "
                "[tuple(batch) for batch in loader]"
            )


def optional_input_notes(method: str, model: Any, sample: Any) -> Iterator[str]:
    """Yield a note on each optional input that gets one float per sample of a ``DataLoader``'s batch."""
    for index, value, name in _optional_tensors(model, sample):
        if kind_of(value.dtype) is ScalarKind.FLOAT and _has_one_number_per_sample(value):
            yield (
                f"item {index} of the DataLoader's batches, {_describe(value)}, is the optional input '{name}' of "
                f"'{method}'; if it is the label, leave it out: {_inputs_code(index)}"
            )


def _optional_tensors(model: Any, sample: Any) -> Iterator[tuple[int, torch.Tensor, str]]:
    """Yield (index in the sample, tensor, parameter name) for each tensor that an optional parameter takes."""
    if isinstance(model, ExportedProgram) or not isinstance(sample, (tuple, list)):
        return
    if isinstance(sample, Inputs) and sample.keywords:
        return
    parameters = inspect.signature(model.forward).parameters.values()
    for index, (value, parameter) in enumerate(zip(sample, parameters, strict=False)):
        if parameter.default is not parameter.empty and index > 0 and isinstance(value, torch.Tensor):
            yield index, value, parameter.name


def _has_one_number_per_sample(x: torch.Tensor) -> bool:
    return x.dim() < 2 or (x.dim() == 2 and x.shape[1] == 1)


def _inputs_code(count: int) -> str:
    """Python code of the samples with the first ``count`` items of each batch."""
    inputs = "(batch[0],)" if count == 1 else f"batch[:{count}]"
    return f"[{inputs} for batch in loader]"


def _describe(x: torch.Tensor) -> str:
    return describe_tensor(dtype_name(x.dtype), x.shape)
