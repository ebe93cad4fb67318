"""Memory formats: convert 4-D inputs to ``torch.channels_last``, the layout that the NPU computes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_recipes._internal.messages import warn
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.samples.export_arguments import Examples, Model


def to_channels_last(models: Mapping[str, Model], examples: Examples) -> tuple[dict[str, Model], Examples]:
    """Convert every input of shape (N, C, H, W) to ``torch.channels_last``.

    An ``ExportedProgram`` with such an input is replaced by its module. The module is then captured again, because a
    graph is valid only for the memory formats of its trace. A method without such an input gets a warning.

    Returns:
        models and samples by method.
    """
    converted = {method: [_to_channels_last(sample) for sample in samples] for method, samples in examples.items()}
    new_models = dict(models)
    for method, samples in converted.items():
        model = models[method]
        if all(leaf.dim() != 4 for leaf in _tensors(samples[0])):
            warn(f"channels_last has no effect on '{method}': none of its inputs has four dimensions")
        elif isinstance(model, ExportedProgram):
            new_models[method] = model.module(check_guards=False)
    return new_models, converted


def _to_channels_last(sample: Inputs) -> Inputs:
    def convert(leaf: Any) -> Any:
        is_image = isinstance(leaf, torch.Tensor) and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf

    args, keywords = pytree.tree_map(convert, (tuple(sample), sample.keywords))
    return Inputs(*args, **keywords)


def _tensors(sample: Inputs) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((tuple(sample), sample.keywords))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
