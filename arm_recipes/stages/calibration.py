"""Calibration data: what users may pass, and the checks on what reaches the prepared model.

The checks hang on the recipe (its post-prepare and pre-convert passes), not on our ``export``, so they also
work when ExecuTorch's own ``export`` runs the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from arm_recipes.messages import warn

_META_KEY = "arm_recipes_calibration"


class Calibration:
    """Calibration samples as tuples of input tensors, any number of times.

    Args:
        source: an iterable, or a callable that returns one, of tuples or lists of tensors, or of tensors.
            A generator can be read only once, so its samples are kept after the first reading: a program with
            several methods calibrates each of them.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self._source = source

    def __call__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the samples.

        Raises:
            ValueError: there are none, or one is neither a tensor nor a tuple or list.
        """
        if callable(self._source):
            samples = self._source()
        else:
            if isinstance(self._source, Iterator):
                self._source = list(self._source)
            samples = self._source
        if not isinstance(samples, Iterable):
            raise ValueError(f"calibration() must return an iterable, not {type(samples).__name__}")
        empty = True
        for index, sample in enumerate(samples):
            empty = False
            yield _as_tuple(sample, index)
        if empty:
            raise ValueError("calibration has no samples; give at least one tuple of input tensors")


def _as_tuple(sample: Any, index: int) -> tuple[Any, ...]:
    if isinstance(sample, torch.Tensor):
        return (sample,)
    if isinstance(sample, (tuple, list)):
        return tuple(sample)
    raise ValueError(
        f"calibration sample {index} is of type {type(sample).__name__}; "
        "each sample must be a tensor or a tuple of the model's input tensors"
    )


class _Monitor:
    """Forward pre-hook of a prepared model: counts the samples and checks each before the model sees it."""

    def __init__(self, model: GraphModule) -> None:
        self.samples = 0
        self._inputs = [node for node in model.graph.nodes if node.op == "placeholder"]
        # (image, label) pairs of a DataLoader have more items than the model takes; the first ones are used.
        spec = getattr(model, "_in_spec", None)
        self._arity = spec.children()[0].num_children if spec is not None else len(self._inputs)
        self.handle = model.register_forward_pre_hook(self, prepend=True)

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index, self.samples = self.samples, self.samples + 1
        if len(args) < self._arity:
            counts = f"{len(args)} inputs, the model takes {self._arity}"
            raise ValueError(f"calibration sample {index} has {counts}")
        args = args[: self._arity]
        leaves = pytree.tree_leaves(args)
        for position, (node, value) in enumerate(zip(self._inputs, leaves, strict=False)):
            expected = node.meta.get("val")
            if not isinstance(expected, torch.Tensor):
                continue
            what = f"calibration sample {index}, input {position} ('{node.name}')"
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{what} is of type {type(value).__name__}, not a tensor")
            if not _same_shape(value.shape, expected.shape):
                shapes = f"{tuple(value.shape)}, the model takes {tuple(expected.shape)}"
                raise ValueError(f"{what} has shape {shapes}")
            if value.dtype != expected.dtype:
                raise ValueError(f"{what} is {value.dtype}, the model takes {expected.dtype}")
        return args


def _same_shape(given: torch.Size, expected: torch.Size) -> bool:
    if len(given) != len(expected):
        return False
    # A symbolic dimension takes any size here; torch.export's own guard checks its range.
    return all(not isinstance(e, int) or g == e for g, e in zip(given, expected, strict=True))


def start_monitor(prepared: GraphModule) -> GraphModule:
    """Post-prepare pass: watch the samples that calibrate ``prepared``."""
    prepared.meta[_META_KEY] = _Monitor(prepared)
    return prepared


def stop_monitor(calibrated: GraphModule) -> GraphModule:
    """Pre-convert pass: end the watch; warns when there was only one sample."""
    monitor = calibrated.meta.pop(_META_KEY, None)
    if monitor is None:
        return calibrated
    monitor.handle.remove()
    if monitor.samples == 1:
        warn(
            "calibration saw only one sample: the ranges of activations are those of this input alone. "
            "Pass more to get_recipe(..., calibration=...) or as example_inputs"
        )
    return calibrated
