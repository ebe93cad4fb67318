"""Calibration data: the samples of a recipe, and checks on the samples that reach the prepared model.

The prepared model is the captured model with observers. The checks are post-prepare and pre-convert passes of the
recipe, so ExecuTorch's own ``export`` also runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.data import DataLoader

from arm_recipes._internal.messages import warn
from arm_recipes.samples.call_inputs import Inputs, InputSignature, as_inputs, rebatch

_META_KEY = "arm_recipes_calibration"


class Calibration:
    """Calibration samples that can be iterated any number of times.

    Args:
        source: an iterable of samples as in ``as_inputs``, or a callable that returns such an iterable. The samples
            of a generator are stored at the first iteration, because every method of a program iterates over them.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self._source = source

    @property
    def loader(self) -> DataLoader[Any] | None:
        """The source, if it is a ``DataLoader``. ``prepare_qat`` reports its batch size in a note."""
        return self._source if isinstance(self._source, DataLoader) else None

    def __call__(self) -> Iterator[Inputs]:
        """Yield the samples as ``Inputs``, with the batch sizes of the source.

        Raises:
            ValueError: the source is not iterable, there are no samples, or a sample is not a valid model input.
        """
        yield from self._samples(None)

    def rebatch(self, input_signature: InputSignature) -> Iterator[Inputs]:
        """Yield the samples.

        The batches of a ``DataLoader`` lose their labels, and are split or joined to the signature's batch size.

        Raises:
            ValueError: as for ``__call__``.
        """
        yield from self._samples(input_signature)

    def _samples(self, input_signature: InputSignature | None) -> Iterator[Inputs]:
        source = self._source() if callable(self._source) else self._source
        if isinstance(source, Iterator) and source is self._source:
            self._source = source = list(source)
        if not isinstance(source, Iterable):
            raise ValueError(
                "calibration_samples must be an iterable of samples, or a function that returns one; "
                f"got {type(source).__name__}"
            )
        samples: Iterator[Inputs] = (
            as_inputs(sample, f"calibration sample {index}") for index, sample in enumerate(source)
        )
        if input_signature is not None and isinstance(source, DataLoader):
            samples = rebatch(map(input_signature.without_labels, samples), input_signature)
        empty = True
        for sample in samples:
            empty = False
            yield sample
        if empty:
            raise ValueError("calibration has no samples; give at least one tuple of input tensors")


def input_signature_of(model: GraphModule) -> InputSignature:
    """The input signature of a captured model."""
    nodes = [node for node in model.graph.nodes if node.op == "placeholder"]
    return InputSignature(
        tuple(node.name for node in nodes), tuple(node.meta.get("val") for node in nodes), model._in_spec
    )


class _CalibrationMonitor:
    """Forward pre-hook of a prepared model: counts and validates the calibration samples, and removes their labels."""

    def __init__(self, model: GraphModule) -> None:
        self.sample_count = 0
        self._input_signature = input_signature_of(model)
        self.handle = model.register_forward_pre_hook(self, prepend=True, with_kwargs=True)

    def __call__(
        self, model: torch.nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sample, self.sample_count = f"calibration sample {self.sample_count}", self.sample_count + 1
        leaves = self._input_signature.check(self._input_signature.without_labels(Inputs(*args, **keywords)), sample)
        inputs = self._input_signature.unflatten(leaves)
        return tuple(inputs), inputs.keywords


def start_monitor(prepared: GraphModule) -> GraphModule:
    """Post-prepare pass: install the hook that validates calibration samples."""
    prepared.meta[_META_KEY] = _CalibrationMonitor(prepared)
    return prepared


def stop_monitor(calibrated: GraphModule) -> GraphModule:
    """Pre-convert pass: remove the hook, and warn if there was only one sample, unless the model has no inputs."""
    monitor = calibrated.meta.pop(_META_KEY, None)
    if monitor is None:
        return calibrated
    monitor.handle.remove()
    if monitor.sample_count == 1 and calibrated.graph.find_nodes(op="placeholder"):
        warn(
            "calibration used only one sample: the activation ranges are those of this input alone. "
            "Pass more samples to get_recipe(..., calibration_samples=...) or export(..., samples)"
        )
    return calibrated
