"""How right a program of a sweep is: it is executed, and its outputs are compared with the model's, or rated."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.quantization.diagnostics.error_metrics import decibels, in_float64
from arm_recipes._internal.messages import ExportError
from arm_recipes.explore.sweep.configurations import Configuration
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.pipeline.export import run_export
from arm_recipes.samples.sample import Inputs

Metric = Callable[[Any, Any], Any]


class AccuracyMeasurement:
    """Rates programs with the samples of a sweep.

    Args:
        program: the model in floating point, captured.
        samples: what the model takes; ``given``: the same samples as the user gave them, which the metric gets.
        metric: gives a number for outputs and a sample, the higher the better; None compares with the model.
        marked: an iteration over the samples, with a progress bar or without.
    """

    def __init__(
        self,
        program: ExportedProgram,
        samples: Sequence[Inputs],
        given: Sequence[Any],
        metric: Metric | None,
        kept: ResultStore,
        marked: Callable[[Iterable[Inputs]], Iterable[Inputs]],
    ) -> None:
        self._samples, self._given, self._metric = samples, given, metric
        self._kept, self._marked = kept, marked
        # Of its own: one that writes buffers must begin with their values, and so must the user's model.
        model = copy.deepcopy(program).module(check_guards=False)
        with torch.no_grad():
            outputs = (model(*sample, **sample.keywords) for sample in samples)
            # A model may return a buffer of its own, which the next call writes.
            self._expected = [pytree.tree_map_only(torch.Tensor, torch.clone, output) for output in outputs]

    @property
    def name(self) -> str:
        """What the number is."""
        return "SQNR in dB" if self._metric is None else str(getattr(self._metric, "__name__", "metric"))

    def __call__(self, program: ExportedProgram, configurations: Iterable[Configuration]) -> float:
        """The accuracy of a quantized program, mean over the samples for a metric.

        Args:
            configurations: that give equal numbers. The first that compiles is executed.

        Raises:
            ExportError, ArmBackendError: none compiles; the error is that of the last.
            RunError: this machine cannot run it.
        """
        outputs = self._outputs(program, configurations)
        if self._metric is None:
            return compute_sqnr(self._expected, outputs)
        values = [float(self._metric(*pair)) for pair in zip(outputs, self._given, strict=True)]
        return sum(values) / len(values)

    def _outputs(self, program: ExportedProgram, configurations: Iterable[Configuration]) -> list[Any]:
        by_target = {configuration.spec.accelerator: configuration for configuration in configurations}
        error: Exception | None = None
        for configuration in by_target.values():
            try:
                result = run_export(program, configuration.export_recipe(), list(self._samples), progress=False)
                break
            except (ArmBackendError, ExportError) as failure:
                error = failure
        else:
            assert error is not None
            raise error
        key = _key(result.buffer, self._samples)
        specs = [pytree.tree_structure(expected) for expected in self._expected]
        leaves = self._kept.load_outputs(key)
        if leaves is None:
            runs = (result.run(sample) for sample in self._marked(self._samples))
            leaves = [pytree.tree_leaves(output) for output in runs]
            self._kept.save_outputs(key, leaves)
        return [pytree.tree_unflatten(values, spec) for values, spec in zip(leaves, specs, strict=True)]


def compute_sqnr(expected: Iterable[Any], actual: Iterable[Any]) -> float:
    """Power of the signal over power of the error, in dB, over all numbers of all outputs."""
    signal = noise = 0.0
    for one, other in zip(pytree.tree_leaves(list(expected)), pytree.tree_leaves(list(actual)), strict=True):
        if isinstance(one, torch.Tensor):
            right, given = in_float64(one), in_float64(other)
            signal += float((right**2).sum())
            noise += float(((right - given) ** 2).sum())
    return decibels(signal, noise)


def _key(buffer: bytes, samples: Sequence[Inputs]) -> str:
    """By what outputs are kept: the program and all numbers that it is given."""
    digest = hashlib.sha256(buffer)
    for sample in samples:
        leaves, spec = pytree.tree_flatten((tuple(sample), sample.keywords))
        digest.update(str(spec).encode())
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode() if is_tensor else repr(leaf).encode())
            if is_tensor:
                digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
