"""Execution of a sweep's programs on this machine, with a cache of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from arm_backend_core.errors import ArmBackendError
from arm_recipes._internal.errors import ExportError
from arm_recipes.explore.sweep.configurations import SweepConfiguration
from arm_recipes.explore.sweep.quantize_and_lower import METHOD
from arm_recipes.explore.sweep.result_store import ResultStore
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.pipeline.cache.digest import Digest
from arm_recipes.pipeline.export import export_unlowered
from arm_recipes.pipeline.unlowered_programs import UnloweredPrograms
from arm_recipes.report.ram import npu_ram_parts
from arm_recipes.report.report import Report
from arm_recipes.samples.call_inputs import Inputs


class ProgramRunner:
    """Compiles the programs of a sweep and executes them on this machine.

    Args:
        samples: samples in the form of the model's inputs.
        store: cache of outputs.
        with_progress: wraps an iterable of samples to show a progress bar.
    """

    def __init__(
        self,
        samples: Sequence[Inputs],
        store: ResultStore,
        with_progress: Callable[[Iterable[Inputs]], Iterable[Inputs]],
    ) -> None:
        self._samples, self._store, self._with_progress = samples, store, with_progress

    def compile_first(self, unlowered: UnloweredPrograms, configurations: Iterable[SweepConfiguration]) -> Artifact:
        """Compile one program that represents all ``configurations``.

        Tries the last configuration of each NPU in turn, until one compiles.

        Args:
            unlowered: the captured and quantized program.
            configurations: configurations whose programs have bit-equal results.

        Raises:
            ExportError, ArmBackendError: no configuration compiles. The exception concerns the last NPU.
        """
        by_accelerator = {configuration.spec.accelerator: configuration for configuration in configurations}
        last_error: Exception | None = None
        for configuration in by_accelerator.values():
            try:
                return export_unlowered(unlowered, configuration.make_export_recipe(), progress=False)
            except (ArmBackendError, ExportError) as error:
                last_error = error
        assert last_error is not None
        raise last_error

    def execute(self, result: Artifact) -> list[Any]:
        """Execute an exported program on each sample, or load its outputs from the store. Returns the outputs.

        Raises:
            RunError: this machine cannot run the program.
        """
        key = _outputs_key(result.buffer + (result.data_file or b""), self._samples)
        leaves = self._store.load_outputs(key)
        if leaves is None:
            runs = (result.run(sample) for sample in self._with_progress(self._samples))
            leaves = [pytree.tree_leaves(output) for output in runs]
            self._store.save_outputs(key, leaves)
        return [pytree.tree_unflatten(values, result.out_specs[METHOD]) for values in leaves]


def compute_cpu_ram(report: Report) -> int:
    """Compute the RAM in bytes that a program needs in addition to the RAM of its delegates.

    CPU tensors in the NPU's scratch need no additional RAM.
    """
    if report.ram is None:
        return 0
    estimates = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    return report.ram.total_bytes - sum(part.bytes for part in npu_ram_parts(estimates))


def _outputs_key(buffer: bytes, samples: Sequence[Inputs]) -> str:
    """Return the cache key of a program's outputs: a hash of the program and its samples."""
    digest = Digest()
    digest.add(buffer)
    for sample in samples:
        digest.add_sample(sample)
    return digest.hexdigest()
