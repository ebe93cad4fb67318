"""Accuracy of a sweep's programs: execute them and compute the output SQNR or a user's metric."""

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
    """Measures the accuracy of programs on the samples of a sweep.

    Args:
        program: captured floating-point model.
        samples: samples as the model takes them.
        originals: the same samples as the user passed them, for the metric.
        metric: ``metric(outputs, sample)`` returns a number, higher is better; None: SQNR against the model.
        store: cache of outputs.
        with_progress: wraps the iterable of samples, with or without a progress bar.
    """

    def __init__(
        self,
        program: ExportedProgram,
        samples: Sequence[Inputs],
        originals: Sequence[Any],
        metric: Metric | None,
        store: ResultStore,
        with_progress: Callable[[Iterable[Inputs]], Iterable[Inputs]],
    ) -> None:
        self._samples, self._originals, self._metric = samples, originals, metric
        self._store, self._with_progress = store, with_progress
        # A copy: a model that writes buffers must start from their values, and the user's model must not change.
        model = copy.deepcopy(program).module(check_guards=False)
        with torch.no_grad():
            outputs = (model(*sample, **sample.keywords) for sample in samples)
            # A model may return one of its buffers, which the next call overwrites.
            self._expected = [pytree.tree_map_only(torch.Tensor, torch.clone, output) for output in outputs]

    @property
    def name(self) -> str:
        """Name of the accuracy metric."""
        return "SQNR in dB" if self._metric is None else str(getattr(self._metric, "__name__", "metric"))

    def __call__(self, program: ExportedProgram, configurations: Iterable[Configuration]) -> float:
        """Measure the accuracy of a quantized program; a metric is averaged over the samples.

        Args:
            program: quantized program.
            configurations: configurations with bit-equal results. The first that compiles is executed.

        Raises:
            ExportError, ArmBackendError: no configuration compiles; this is the last one's error.
            RunError: this machine cannot run the program.
        """
        outputs = self._outputs(program, configurations)
        if self._metric is None:
            return compute_sqnr(self._expected, outputs)
        values = [float(self._metric(*pair)) for pair in zip(outputs, self._originals, strict=True)]
        return sum(values) / len(values)

    def _outputs(self, program: ExportedProgram, configurations: Iterable[Configuration]) -> list[Any]:
        by_accelerator = {configuration.spec.accelerator: configuration for configuration in configurations}
        last_error: Exception | None = None
        for configuration in by_accelerator.values():
            try:
                result = run_export(program, configuration.export_recipe(), list(self._samples), progress=False)
                break
            except (ArmBackendError, ExportError) as error:
                last_error = error
        else:
            assert last_error is not None
            raise last_error
        key = _outputs_key(result.buffer, self._samples)
        specs = [pytree.tree_structure(expected) for expected in self._expected]
        leaves = self._store.load_outputs(key)
        if leaves is None:
            runs = (result.run(sample) for sample in self._with_progress(self._samples))
            leaves = [pytree.tree_leaves(output) for output in runs]
            self._store.save_outputs(key, leaves)
        return [pytree.tree_unflatten(values, spec) for values, spec in zip(leaves, specs, strict=True)]


def compute_sqnr(expected: Iterable[Any], actual: Iterable[Any]) -> float:
    """Compute the SQNR in dB over all elements of all output tensors."""
    signal = noise = 0.0
    for reference, output in zip(pytree.tree_leaves(list(expected)), pytree.tree_leaves(list(actual)), strict=True):
        if isinstance(reference, torch.Tensor):
            expected_values, actual_values = in_float64(reference), in_float64(output)
            signal += float((expected_values**2).sum())
            noise += float(((expected_values - actual_values) ** 2).sum())
    return decibels(signal, noise)


def _outputs_key(buffer: bytes, samples: Sequence[Inputs]) -> str:
    """Return the cache key of a program's outputs: a hash of the program and its samples."""
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
