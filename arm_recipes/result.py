"""What ``export`` returns."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_writable, write
from arm_recipes._internal.old_names import reject_old_names
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.runtime.load import reference_path
from arm_recipes.runtime.signature import sealed
from arm_recipes.runtime.tensor_info import TensorInfo

if TYPE_CHECKING:
    from executorch.devtools import Inspector

    from arm_recipes.comparison.compare import Metric
    from arm_recipes.comparison.result import Comparison
    from arm_recipes.explore.advice.result import AdviceList
    from arm_recipes.firmware.saving import Firmware


class ExportResult(Artifact):
    """What ``export`` returns: the program for the target, its report, and what can be done with both.

    Attributes:
        report: delegates, operators on the CPU, quantization, Vela's figures, sizes and seconds.
    """

    @classmethod
    def of(cls, artifact: Artifact) -> ExportResult:
        """The result of an export whose artifact is known."""
        return cls(**{one.name: getattr(artifact, one.name) for one in fields(Artifact) if one.init})

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Inputs of ``forward`` (others: see ``report.methods``), with their scales and zero points."""
        return self.main.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Outputs of the same method."""
        return self.main.outputs

    @reject_old_names(bundled="bundled_samples", tosa="reference")
    def save(
        self, path: str | Path, *, reference: bool = False, etrecord: bool = False, bundled_samples: Any = None
    ) -> Path:
        """Write the ``.pte``; an existing file is replaced only when the new one is complete.

        Args:
            reference: write its reference program beside it too, ``model.tosa.pte`` for ``model.pte``: the same program
                with the graphs that the delegates were compiled from. With it, a program that ``arm_recipes.load``
                reads can be compared with them, by ``run(..., backend="tosa")``.
            etrecord: write ``model.etrecord``, which ExecuTorch's Inspector needs beside an ETDump; of each further
                method one of its own, ``model.NAME.etrecord``.
            bundled_samples: samples as for ``export``: write ``model.bpte``, ExecuTorch's bundled program, which holds
                them and what the program, loaded anew, gives for one after the other on this machine. The record has
                them too.

        Raises:
            ValueError: nothing can be written at ``path``, or ``bundled_samples`` is not what the model takes; the
                message says why.
            RunError: ``bundled_samples``, and this machine cannot run the program.
        """
        target = check_writable(path)
        beside: dict[str, bytes] = {}
        if etrecord or bundled_samples is not None:
            from arm_recipes.devtools.inspection import files

            beside = files(self, target.stem, etrecord, bundled_samples)
        write(target, *sealed(self.pieces))
        for name, data in beside.items():
            write(target.with_name(name), data)
        if self.cached_pieces is None:  # empty unless the recipe puts weights outside the program
            self.executorch_program.write_tensor_data_to_file(str(target.parent))
        if reference:
            write(reference_path(target), self.reference_program())
        return target

    def save_firmware(self, folder: str | Path, samples: Any = None) -> Firmware:
        """Write what a firmware needs of a program for an Ethos-U, as a folder that builds; its README.md tells how.

        The sizes of the pools are computed, and the program has run in exactly these on this machine.

        Args:
            folder: new, empty, or written by an earlier call; of that, all files are made anew.
            samples: what the self-test runs, as ``samples`` of ``arm_recipes.export``. Each stands in flash, so give
                few; without any, noise.

        Raises:
            ValueError: nothing can be written there, the program is for another target, or samples do not fit it.
            RunError: the program does not run on this machine, or there is no compiler here.
        """
        from arm_recipes.firmware.saving import save_firmware

        return save_firmware(self, folder, samples)

    def compare(
        self,
        samples: Any,
        labels: Any = None,
        *,
        metric: Metric | None = None,
        method: str = "forward",
        layers: bool | int = True,
        workers: int | None = None,
        progress: bool = True,
    ) -> Comparison:
        """Compare the program as it runs on this machine with the model in floating point, output by output and layer
        by layer.

        Args:
            samples: as of ``export``; what stands behind the model's inputs, as the labels that a
                ``DataLoader`` gives, is left out of the calls. A model with state gets them in this order.
            labels: classes, one for each item of the samples: the share of first outputs whose largest score is there.
                Without them, integers that stand behind a ``DataLoader``'s inputs are taken.
            metric: ``metric(outputs, sample)`` gives a number; its means are set beside each other. ``sample`` is as it
                was given, outputs are real numbers in the model's structure.
            layers: compare what is inside delegates too: it takes the time of the TOSA reference model. A number: with
                as many samples, the first ones.
            workers: processes; None: as many as are worth it, or as ``joblib.parallel_config`` says.
            progress: show a progress bar if standard error is a terminal.

        Raises:
            ValueError: samples, labels, metric or method cannot be used, or the model has been changed since.
            RunError: this machine cannot run the program; the message says what it takes.
        """
        from arm_recipes.comparison.compare import compare_with_model

        return compare_with_model(self, samples, labels, metric, method, layers, workers, progress)

    def etdump(self, *inputs: Any, path: str | Path, method: str | None = None, **keywords: Any) -> Path:
        """Execute the program, loaded anew, and write what happened as ExecuTorch's ETDump.

        Beside ``model.etdp`` is ``model.debug.bin``, the buffer with the tensors. ExecuTorch's Inspector takes both,
        with what ``save(..., etrecord=True)`` writes. What is logged of each delegate see ``inspector``.

        Args:
            path: of the ETDump, for example ``model.etdp``.
            method: by default ``main_method``.
            inputs: as for ``run``.
            keywords: as for ``run``.

        Raises:
            ValueError, RunError: as ``run``; or nothing can be written at ``path``.
        """
        from arm_recipes.devtools.inspection import Method

        target = check_writable(path)
        name = method or self.main_method
        dump = Method(self, name).dump(self.tensors_of_call(name, inputs, keywords))
        write(target.with_suffix(".debug.bin"), dump.debug)
        write(target, dump.etdump)
        return target

    def inspector(self, *inputs: Any, method: str | None = None, **keywords: Any) -> Inspector:
        """Execute the program, loaded anew, and give ExecuTorch's Inspector of the run, record included.

        Each layer of a delegate for TOSA or an Ethos-U is an event with the tensor that it computes, as real numbers:
        ``calculate_numeric_gap("SNR")`` compares it with PyTorch. Durations of operators on the CPU and of whole
        delegates are this machine's, an emulator's for an Ethos-U. Those of its layers are Vela's estimate: cycles at
        the clock of the system configuration. Layers of TOSA have none. Of a VGF its outputs alone are known.

        Args:
            method: by default ``main_method``; the Inspector calls it "forward".
            inputs: as for ``run``.
            keywords: as for ``run``.

        Raises:
            ValueError, RunError: as ``run``.
        """
        from arm_recipes.devtools.inspection import inspector

        name = method or self.main_method
        return inspector(self, self.tensors_of_call(name, inputs, keywords), name)

    def advice(self) -> AdviceList:
        """What would need fewer cycles or less SRAM, each change compiled by Vela; programs for Ethos-U.

        Tried are the other memory modes, ``--optimise Size``, weights with one scale a tensor, and layers without the
        channels that they have beyond a multiple of 16 (each alone). It takes some seconds.

        Raises:
            ValueError: the recipe is not for an Ethos-U.
        """
        from arm_recipes.explore.advice.advise import advise

        return advise(self.recipe, self.report.delegates, self.exported_programs)

    def __repr__(self) -> str:
        return f"<ExportResult {self.report.recipe}: {self.report.program_bytes:,} bytes>"
