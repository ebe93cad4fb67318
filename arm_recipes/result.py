"""``ExportResult``: the compiled program, its report, and the operations on both."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_writable, write_file_atomically
from arm_recipes._internal.tracebacks import shorten_tracebacks
from arm_recipes._internal.unknown_arguments import reject_unknown_arguments
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.runtime.data_file import DATA_FILE_SUFFIX, data_file_path
from arm_recipes.runtime.load import reference_path
from arm_recipes.runtime.signature import insert_checksum
from arm_recipes.runtime.tensor_info import TensorInfo

if TYPE_CHECKING:
    from executorch.devtools import Inspector
    from executorch.export import RecipeType

    from arm_recipes.comparison.result import Comparison
    from arm_recipes.explore.advice.result import AdviceList
    from arm_recipes.firmware.saving import Firmware
    from arm_recipes.types import Labels, Metric, Samples


class ExportResult(Artifact):
    """The result of ``export``: the program for the target and its report.

    Attributes:
        report: delegates, operators on the CPU, quantization, Vela's estimates, sizes and stage times.
    """

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> ExportResult:
        """Create the result from an artifact."""
        return cls(**{item.name: getattr(artifact, item.name) for item in fields(Artifact) if item.init})

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Inputs of ``main_method`` with scales and zero points. ``report.methods`` describes the other methods."""
        return self.main_report.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Outputs of ``main_method``."""
        return self.main_report.outputs

    @reject_unknown_arguments({"bundled": "bundled_samples", "tosa": "reference"})
    def save(
        self,
        path: str | Path,
        *,
        reference: bool = False,
        etrecord: bool = False,
        bundled_samples: Samples | None = None,
    ) -> Path:
        """Write the ``.pte`` file, and its ``.ptd`` if the recipe has the option ``external``.

        Existing files are replaced atomically. The ``.ptd`` of ``model.pte`` is ``model.ptd``, where ``load`` finds it.
        With a combined recipe, the data files of other backends are written to the same folder under their own names.

        Args:
            path: path of the ``.pte`` file.
            reference: also write the reference program, ``model.tosa.pte`` for ``model.pte``. It holds the TOSA graphs
                that the delegates were compiled from. A program from ``arm_recipes.load`` needs it for
                ``run(..., backend="tosa")``.
            etrecord: also write ``model.etrecord``, which ExecuTorch's Inspector needs with an ETDump. Each further
                method gets its own file, ``model.NAME.etrecord``.
            bundled_samples: samples as in ``export``. Also write ``model.bpte``, ExecuTorch's bundled program. It holds
                the samples and the program's outputs for them. To compute the outputs, a newly loaded program runs the
                samples in order on this machine. With ``etrecord``, the ETRecord also holds samples and outputs.

        Raises:
            ValueError: ``path`` is not writable, ``bundled_samples`` do not match the model's inputs, or a bundled
                program cannot hold the inputs or outputs. With ``reference`` or ``etrecord`` and a result from the
                cache: the model has changed since the export.
            RunError: ``bundled_samples`` or ``etrecord`` is given, and the program cannot run on this machine.
        """
        target = check_writable(path)
        extra_files: dict[str, bytes] = {}
        if etrecord or bundled_samples is not None:
            from arm_recipes.devtools.debug_artifacts import build_debug_files

            extra_files = build_debug_files(self, target.stem, etrecord, bundled_samples)
        write_file_atomically(target, *insert_checksum(self.program_chunks))
        for name, data in extra_files.items():
            write_file_atomically(target.with_name(name), data)
        if self.data_file is not None:
            write_file_atomically(data_file_path(target), self.data_file)
        for tag, data in self.other_data_files.items():
            write_file_atomically(
                target.with_name(tag if tag.endswith(DATA_FILE_SUFFIX) else f"{tag}{DATA_FILE_SUFFIX}"), data
            )
        if reference:
            write_file_atomically(reference_path(target), self.reference_program())
        return target

    @shorten_tracebacks
    def for_target(
        self,
        recipe: RecipeType | str | None = None,
        *,
        verify: bool = False,
        progress: bool = True,
        **options: Any,
    ) -> ExportResult:
        """Compile for another NPU, memory mode, board or optimization goal. Reuses the captured and quantized model.

        The program equals, byte by byte, the program of a complete ``export`` with the new recipe.

        Args:
            recipe: type or name of another recipe for the same kind of target and precision, such as
                ``"ETHOSU_U55_INT8"`` for the result of ``ETHOSU_U85_INT8``. Default: the recipe of this result; with
                ``board``, the recipe for the board's NPU.
            verify: as in ``export``. It runs the first four samples of the export, which the result has kept.
            progress: show a progress bar if standard error is a terminal.
            options: recipe options to change, such as ``macs``, ``memory_mode``, ``board`` or ``optimise``. The
                other options keep the values of this result. If the recipe or ``board`` changes, ``macs``,
                ``system_config``, ``memory_mode``, ``config_ini`` and ``board`` get their default values, unless given.

        Raises:
            ValueError: the quantized model depends on a changed option, an option is invalid, the model has changed
                since the export, the recipe of this result is not of this package, or the recipe's pipeline has no
                stage that captures the model.
            ExportError, ArmBackendError, RunError: as ``export``.

        Example::

            >>> small = result.for_target(macs=128)
            >>> on_u55 = result.for_target("ETHOSU_U55_INT8", macs=128, memory_mode="Shared_Sram")
        """
        from arm_recipes.pipeline.retarget import export_for_target

        artifact = export_for_target(self, recipe, options, verify=verify, progress=progress)
        return ExportResult.from_artifact(artifact)

    def save_firmware(self, folder: str | Path, samples: Samples | None = None) -> Firmware:
        """Write a firmware project for a program for Ethos-U or ``CORTEX_M_INT8``. Its README.md says how to build it.

        The firmware's memory pools have computed sizes, for 32-bit and for 64-bit pointers. To test the 64-bit sizes,
        the program runs on this machine in pools of exactly these sizes.

        If the recipe has the option ``board``, the linker script names the board's memories. The folder then also has
        files for CMake presets, Zephyr and CMSIS, as far as public documents describe the board.

        Args:
            folder: a new or empty folder, or one that an earlier call wrote; its files are replaced.
            samples: inputs of the self-test, as ``samples`` of ``arm_recipes.export``. Each sample is stored in flash,
                so pass few. Default: random inputs.

        Raises:
            ValueError: ``folder`` is not writable, the target is neither Ethos-U nor Cortex-M, or the samples do not
                match the model's inputs.
            RunError: the program cannot run on this machine, or there is no C++ compiler.
        """
        from arm_recipes.firmware.saving import save_firmware

        return save_firmware(self, folder, samples)

    def compare(
        self,
        samples: Samples,
        labels: Labels | None = None,
        *,
        metric: Metric | None = None,
        method: str = "forward",
        layers: bool | int = True,
        workers: int | None = None,
        progress: bool = True,
    ) -> Comparison:
        """Compare the program with the floating-point model, for each output and each layer.

        The program runs on this machine.

        Args:
            samples: samples as in ``export``. Items after the model's inputs, such as the labels of a ``DataLoader``,
                are not passed to the model. A stateful model gets the samples in this order.
            labels: class labels, one for each batch item of the samples. With labels, the result has the top-1 accuracy
                of the first output. ``labels=True`` means that each sample ends with its labels, after the inputs.
                Default: integer labels from the ``DataLoader``, if there are any and no ``metric`` is given.
            metric: a function ``metric(outputs, sample)`` that returns a number. The result reports its mean for the
                model and for the program. ``sample`` is the item of ``samples``; ``outputs`` are floating-point tensors
                in the structure of the model's outputs.
            method: the method to compare.
            layers: also compare layers. For layers inside delegates, this runs the TOSA reference model. If ``layers``
                is an integer, layers are compared for this number of samples only, beginning with the first sample.
            workers: maximum number of processes. Processes are started only if more than 20 s of work remain after the
                first samples. Default: one per core. If ``joblib.parallel_config`` is set and ``workers`` is not, the
                processes of this joblib configuration run all samples. All samples of a model with state run in the
                calling process.
            progress: show a progress bar if standard error is a terminal.

        Raises:
            ValueError: samples, labels, metric or method are invalid, or the model has changed since the export.
            RunError: the program cannot run on this machine; the message says what is missing.
        """
        from arm_recipes.comparison.compare import compare_with_model

        return compare_with_model(self, samples, labels, metric, method, layers, workers, progress)

    def etdump(self, *inputs: Any, path: str | Path, method: str | None = None, **keywords: Any) -> Path:
        """Load and execute the program, and write an ETDump of the run.

        Two files are written: the ETDump with the events (``model.etdp``), and ExecuTorch's debug buffer with the
        tensors (``model.debug.bin``). ExecuTorch's Inspector reads both files, and the ETRecord that
        ``save(..., etrecord=True)`` writes. The method ``inspector`` documents the events of delegates.

        Args:
            path: path of the ETDump, for example ``model.etdp``.
            method: the method to run. Default: ``main_method``.
            inputs: positional inputs, as in ``run``.
            keywords: keyword inputs, as in ``run``.

        Raises:
            ValueError: the inputs are invalid, or ``path`` is not writable.
            RunError: the program cannot run on this machine.
        """
        from arm_recipes.devtools.debug_artifacts import MethodTools

        target = check_writable(path)
        name = method or self.main_method
        run = MethodTools(self, name).run_with_etdump(self.bind_call(name, inputs, keywords))
        write_file_atomically(target.with_suffix(".debug.bin"), run.debug_buffer)
        write_file_atomically(target, run.etdump)
        return target

    def inspector(self, *inputs: Any, method: str | None = None, **keywords: Any) -> Inspector:
        """Load and execute the program, and return ExecuTorch's Inspector of the run, with its ETRecord.

        Each layer of a TOSA or Ethos-U delegate is an event that holds the layer's output, dequantized.
        ``calculate_numeric_gap("SNR")`` compares this output with PyTorch's. A VGF delegate has events for its outputs
        only.

        Durations of CPU operators and of whole delegates are wall-clock times on this machine. An Ethos-U delegate
        runs in the emulator, so its wall-clock time says nothing about the NPU. Durations of Ethos-U layers are Vela's
        estimate: estimated cycles divided by the clock of the system configuration. TOSA layers have no duration.

        Args:
            method: the method to run. Default: ``main_method``. The Inspector calls it "forward".
            inputs: positional inputs, as in ``run``.
            keywords: keyword inputs, as in ``run``.

        Raises:
            ValueError: the inputs are invalid.
            RunError: the program cannot run on this machine.
        """
        from arm_recipes.devtools.debug_artifacts import create_inspector

        name = method or self.main_method
        return create_inspector(self, self.bind_call(name, inputs, keywords), name)

    def advice(self) -> AdviceList:
        """Suggest changes that reduce cycles or SRAM of an Ethos-U program. Vela compiles each suggestion.

        The search tries the other memory modes, ``optimise="size"``, per-tensor weight scales, 2:4 sparse weights (if
        the program has one method), and fewer channels. For fewer channels, it takes the layers whose number of
        channels exceeds a multiple of 16 by one to four. It removes the excess channels of the six largest of these
        layers. The search takes some seconds.

        Raises:
            ValueError: the recipe is not for an Ethos-U, or no part of the program runs on the NPU.
        """
        from arm_recipes.explore.advice.advise import advise

        tensors = [tensor for method in self.report.methods for tensor in (*method.inputs, *method.outputs)]
        return advise(self.recipe, self.report.delegates, self.exported_programs, tensors)

    def __repr__(self) -> str:
        return f"<ExportResult {self.report.recipe}: {self.report.program_bytes:,} bytes>"
