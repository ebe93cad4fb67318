"""What ``export`` returns."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes.report import Report, TensorInfo

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

    from arm_recipes.host import HostMethod


class ExportResult:
    """A program for the target, with the record of how it came about.

    Attributes:
        report: delegates, operators on the CPU, quantization, Vela's figures, sizes and seconds.
        exported_programs: what was lowered, by method: the ATen program, quantized for INT recipes.
        executorch_program: ExecuTorch's manager of the emitted program.
    """

    def __init__(
        self,
        report: Report,
        exported_programs: dict[str, ExportedProgram],
        methods: dict[str, HostMethod],
        executorch_program: ExecutorchProgramManager,
    ) -> None:
        self.report = report
        self.exported_programs = exported_programs
        self.executorch_program = executorch_program
        self._methods = methods

    @property
    def buffer(self) -> bytes:
        """The ``.pte`` file."""
        return bytes(self.executorch_program.buffer)

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """Inputs of the first method (others: see ``report.methods``), with their scales and zero points."""
        return self.report.methods[0].inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Outputs of the first method."""
        return self.report.methods[0].outputs

    def save(self, path: str | Path) -> Path:
        """Write the ``.pte``; an existing file is replaced only when the new one is complete.

        Raises:
            ValueError: nothing can be written at ``path``; the message says why.
        """
        target = check_writable(path)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                self.executorch_program.write_to_file(file)
                file.close()
                # mkstemp makes files private to the user; give it the mode of any other new file.
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(file.name, 0o666 & ~umask)
                os.replace(file.name, target)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        # Empty unless the recipe puts weights outside the program.
        self.executorch_program.write_tensor_data_to_file(str(target.parent))
        return target

    def run(self, *inputs: Any, method: str = "forward") -> Any:
        """Execute the program on this machine, bit-true.

        Delegates run on Arm's TOSA reference model, other operators in PyTorch. For Ethos-U and VGF this
        executes the TOSA graph that their compilers were given.

        Args:
            inputs: as the model takes them; integers for ``quantized_io`` (see ``inputs[0].quantize``).

        Returns:
            what the model returns.

        Raises:
            ValueError: no such method, or the inputs differ from the program's in number, shape or dtype.
        """
        if method not in self._methods:
            raise ValueError(f"no method '{method}'; the program has: {', '.join(self._methods)}")
        return self._methods[method](*inputs)

    def __repr__(self) -> str:
        return f"<ExportResult {self.report.recipe}: {self.report.program_bytes:,} bytes>"


def check_writable(path: str | Path) -> Path:
    """The path, absolute, after finding out that a file can be written there.

    Raises:
        ValueError: it cannot.
    """
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise ValueError(f"cannot write '{path}': it is a directory")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write '{path}': there is no directory '{target.parent}'")
    try:
        # Permission bits do not tell the whole truth (read-only mounts, access lists), so try.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write '{path}': {error.strerror}") from error
    return target
