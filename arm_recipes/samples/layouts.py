"""How inputs lie in memory: programs that take images with the channels last, as an NPU computes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_recipes._internal.messages import warn
from arm_recipes.samples.inputs import Examples, Model
from arm_recipes.samples.sample import Inputs


def to_channels_last(models: Mapping[str, Model], examples: Examples) -> tuple[dict[str, Model], Examples]:
    """Models and samples with every input of four dimensions, (N, C, H, W), in ``torch.to_channels_last``.

    A program that is captured already is captured anew, as its graph holds for the layout that it was traced with.
    """
    laid = {method: [_to_channels_last(sample) for sample in samples] for method, samples in examples.items()}
    found = dict(models)
    for method, samples in laid.items():
        model = models[method]
        if all(leaf.dim() != 4 for leaf in _tensors(samples[0])):
            warn(f"channels_last: no input of '{method}' has four dimensions, so that it changes nothing")
        elif isinstance(model, ExportedProgram):
            found[method] = model.module(check_guards=False)
    return found, laid


def _to_channels_last(sample: Inputs) -> Inputs:
    def turned(leaf: Any) -> Any:
        is_image = isinstance(leaf, torch.Tensor) and leaf.dim() == 4
        return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf

    args, keywords = pytree.tree_map(turned, (tuple(sample), sample.keywords))
    return Inputs(*args, **keywords)


def _tensors(sample: Inputs) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((tuple(sample), sample.keywords))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
