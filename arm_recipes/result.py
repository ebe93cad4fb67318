"""What ``export`` returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from arm_recipes.files import check_writable, write
from arm_recipes.programs import pieces_of, with_tosa_delegates
from arm_recipes.report import MethodReport, Report, TensorInfo
from arm_recipes.runtime.program import Program, twin_path
from arm_recipes.runtime.signature import NAMES_KEY, sealed, stored_names

if TYPE_CHECKING:
    from executorch.devtools import Inspector
    from executorch.exir import ExecutorchProgramManager
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.advising.result import AdviceList
    from arm_recipes.comparing.compare import Metric
    from arm_recipes.comparing.original import Kept
    from arm_recipes.comparing.result import Comparison
    from arm_recipes.firmware.saving import Firmware
    from arm_recipes.runtime.sized import Pad
    from arm_recipes.runtime.trace import TracedOperation
    from arm_recipes.sample import Inputs, Pattern
    from arm_recipes.sizes import Sized


@dataclass(frozen=True)
class Parts:
    """What PyTorch and ExecuTorch have of an export, as ``ExportResult`` has it."""

    exported_programs: dict[str, ExportedProgram]
    executorch_program: ExecutorchProgramManager
    kept: Kept


class ExportResult:
    """A program for the target, with the record of how it came about.

    Attributes:
        report: delegates, operators on the CPU, quantization, Vela's figures, sizes and seconds.
    """

    def __init__(
        self,
        report: Report,
        patterns: dict[str, Pattern],
        out_specs: dict[str, Any],
        sized: Mapping[str, Sized],
        recipe: ExportRecipe | None,
        parts: Callable[[], Parts],
        pieces: Sequence[bytes] | None = None,
    ) -> None:
        """``parts``: asked when they are needed first; ``pieces``: the program's, where it is there without these."""
        self.report = report
        self._patterns, self._out_specs, self._sized = patterns, out_specs, sized
        self._recipe = recipe
        self._make, self._written = parts, pieces
        self._program: Program | None = None

    @cached_property
    def _parts(self) -> Parts:
        return self._make()

    @property
    def exported_programs(self) -> dict[str, ExportedProgram]:
        """What was lowered, by method: the ATen program, quantized for INT recipes."""
        return self._parts.exported_programs

    @property
    def executorch_program(self) -> ExecutorchProgramManager:
        """ExecuTorch's manager of the emitted program."""
        return self._parts.executorch_program

    @property
    def _kept(self) -> Kept:
        return self._parts.kept

    @property
    def _pieces(self) -> Sequence[bytes]:
        return pieces_of(self.executorch_program) if self._written is None else self._written

    @cached_property
    def buffer(self) -> bytes:
        """The ``.pte`` file."""
        return b"".join(sealed(self._pieces))

    @property
    def stored_bytes(self) -> int:
        """Of the program with all that is stored beside it."""
        beside = (
            0 if self._written is not None else sum(map(len, (self.executorch_program._tensor_data or {}).values()))
        )
        return self.report.program_bytes + beside

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Inputs of ``forward`` (others: see ``report.methods``), with their scales and zero points."""
        return self._main.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Outputs of the same method."""
        return self._main.outputs

    @property
    def _main(self) -> MethodReport:
        methods = self.report.methods
        return next((method for method in methods if method.name == "forward"), methods[0])

    @property
    def main_method(self) -> str:
        """``forward``, or the first one where there is no such method."""
        return self._main.name

    def save(self, path: str | Path, *, tosa: bool = False, etrecord: bool = False, bundled: Any = None) -> Path:
        """Write the ``.pte``; an existing file is replaced only when the new one is complete.

        Args:
            tosa: write its TOSA twin beside it too, ``model.tosa.pte`` for ``model.pte``: the same program with
                the graphs that the delegates were compiled from. With it, a program that ``arm_recipes.load``
                reads can be compared with them, by ``run(..., via="tosa")``.
            etrecord: write ``model.etrecord``, which ExecuTorch's Inspector needs beside an ETDump; of each further
                method one of its own, ``model.NAME.etrecord``.
            bundled: samples as for ``export``: write ``model.bpte``, ExecuTorch's bundled program, which holds them and
                what the program, loaded anew, gives for one after the other on this machine. The record has them too.

        Raises:
            ValueError: nothing can be written at ``path``, or ``bundled`` is not what the model takes; the message says
                why.
            RunError: ``bundled``, and this machine cannot run the program.
        """
        target = check_writable(path)
        beside: dict[str, bytes] = {}
        if etrecord or bundled is not None:
            from arm_recipes.devtools.inspection import files

            beside = files(self, target.stem, etrecord, bundled)
        write(target, *sealed(self._pieces))
        for name, data in beside.items():
            write(target.with_name(name), data)
        if self._written is None:  # empty unless the recipe puts weights outside the program
            self.executorch_program.write_tensor_data_to_file(str(target.parent))
        if tosa:
            write(twin_path(target), self._twin())
        return target

    def save_firmware(self, folder: str | Path, samples: Any = None) -> Firmware:
        """Write what a firmware needs of a program for an Ethos-U, as a folder that builds; its README.md tells how.

        The sizes of the pools are computed, and the program has run in exactly these on this machine.

        Args:
            folder: new, empty, or written by an earlier call; of that, all files are made anew.
            samples: what the self-test runs, as ``example_inputs`` of ``export``. Each stands in flash, so give few;
                without any, noise.

        Raises:
            ValueError: nothing can be written there, the program is for another target, or samples do not fit it.
            RunError: the program does not run on this machine, or there is no compiler here.
        """
        from arm_recipes.firmware.saving import save_firmware

        return save_firmware(self, folder, samples)

    def run(
        self,
        *inputs: Any,
        method: str = "forward",
        via: Literal["tosa"] | None = None,
        pad: Pad | None = None,
        **keywords: Any,
    ) -> Any:
        """Execute the program in ExecuTorch's runtime on this machine.

        TOSA delegates run on Arm's reference model, VGF ones on Vulkan, those for Ethos-U on an emulator of the NPU.

        Args:
            via: "tosa" runs the TOSA graphs that the delegates were compiled from, instead of the delegates.
            pad: see ``Program.run``.
            inputs: as the model takes them; integers for ``quantized_io`` (see ``inputs[0].quantize``). Numbers,
                strings and None must be those that the model was exported with.
            keywords: inputs by name.

        Returns:
            what the model returns; for a constant method its value, or a list of its values. What the model writes
            into its inputs is not written into yours: ``report.notes`` tell where the program returns it.

        Raises:
            ValueError: no such method, or the inputs differ from the program's in structure, shape or dtype.
            RunError: this machine cannot run it; the message says what it takes.
        """
        program = self._loaded()
        if via == "tosa" and not program.runs_via_tosa:
            program.twin = Program(self._twin())
        example = next(iter(self._sized[method].methods)) if method in self._sized else method
        tensors = self._tensors(example, inputs, keywords) if example in self._patterns else inputs
        return self._structured(example, program.run(*tensors, method=method, via=via, pad=pad))

    def _structured(self, method: str, outputs: list[Any]) -> Any:
        """What the program returns, as the model does."""
        if method not in self._out_specs:
            return outputs[0] if len(outputs) == 1 else outputs
        from torch.utils import _pytree as pytree

        spec = self._out_specs[method]
        # New values of inputs that the model writes come first.
        return pytree.tree_unflatten(outputs[len(outputs) - spec.num_leaves :], spec)

    def trace(self, *inputs: Any, method: str = "forward", **keywords: Any) -> Iterator[TracedOperation]:
        """Execute the program; yields each operation of its Ethos-U delegates with its names and what it wrote.

        Args:
            inputs: as for ``run``.
            method: as for ``run``.
            keywords: as for ``run``.

        Raises:
            ValueError, RunError: as ``run``.
        """
        tensors = self._tensors(method, inputs, keywords) if method in self._patterns else inputs
        return self._loaded().trace(*tensors, method=method)

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
            samples: as ``example_inputs`` of ``export``; what stands behind the model's inputs, as the labels that a
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
        from arm_recipes.comparing.compare import compare_with_model

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
        dump = Method(self, name).dump(self._tensors(name, inputs, keywords))
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
        return inspector(self, self._tensors(name, inputs, keywords), name)

    def advice(self) -> AdviceList:
        """What would need fewer cycles or less SRAM, each change compiled by Vela; programs for Ethos-U.

        Tried are the other memory modes, ``--optimise Size``, weights with one scale a tensor, and layers without the
        channels that they have beyond a multiple of 16 (each alone). It takes some seconds.

        Raises:
            ValueError: the recipe is not for an Ethos-U.
        """
        from arm_recipes.advising.advise import advise

        return advise(self._recipe, self.report.delegates, self.exported_programs)

    def _loaded(self) -> Program:
        if self._program is None:
            self._program = self.program()
        return self._program

    def program(self) -> Program:
        """The program, loaded anew, so that its buffers begin with their values."""
        program = Program(self.buffer)
        program.records = {delegate.checksum: delegate for delegate in self.report.delegates}
        return program

    def tensors(self, method: str, sample: Inputs) -> list[Any]:
        """Those of a sample of the model, without what is constant in the program.

        Raises:
            ValueError: there is no such method, or the sample is not what it takes.
        """
        return self._tensors(method, (sample,), {})

    def _tensors(self, method: str, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """What the program takes, of what the model takes."""
        import torch

        from arm_recipes.sample import Inputs, as_inputs

        if method not in self._patterns:
            raise ValueError(f"no method '{method}'; the program has: {', '.join(self._patterns)}")
        what = f"the call of '{method}'"
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Inputs) else Inputs(*inputs, **keywords)
        pattern = self._patterns[method]
        leaves = pattern.check_form(as_inputs(given, what), what)
        pairs = zip(leaves, pattern.leaves, strict=True)
        return [leaf for leaf, expected in pairs if isinstance(expected, torch.Tensor)]

    def program_inputs(self, method: MethodReport, sample: Inputs) -> list[Any]:
        """What ``Program.run`` takes for a sample of the model; real numbers are quantized for ``quantized_io``."""
        import torch

        pattern = self._patterns[method.name]
        leaves = zip(pattern.flatten(sample, "a sample"), pattern.leaves, strict=True)
        tensors = [leaf for leaf, expected in leaves if isinstance(expected, torch.Tensor)]
        return [info.taken(tensor) for info, tensor in zip(method.inputs, tensors, strict=True)]

    def run_real(self, sample: Inputs) -> Any:
        """What ``run`` gives for a sample of the only method, in real numbers with ``quantized_io`` too.

        Raises:
            ValueError, RunError: as ``run``.
        """
        (method,) = self.report.methods
        outputs = self._loaded().run(*self.program_inputs(method, sample), method=method.name)
        pairs = zip(method.outputs, outputs, strict=True)
        return self._structured(method.name, [info.real(value) for info, value in pairs])

    def _twin(self) -> bytes:
        """The program with its delegates as TOSA graphs."""
        tensors = {method.name: (method.inputs, method.outputs) for method in self.report.methods}
        sized = {name: told.told() for name, told in self._sized.items()}
        names = stored_names(tensors, tosa_of=hashlib.sha256(self.buffer).hexdigest(), sized=sized)
        graphs = {delegate.checksum: delegate.tosa for delegate in self.report.delegates}
        return b"".join(sealed([with_tosa_delegates(self.executorch_program, graphs, {NAMES_KEY: names})]))

    def __repr__(self) -> str:
        return f"<ExportResult {self.report.recipe}: {self.report.program_bytes:,} bytes>"
