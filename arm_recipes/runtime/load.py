"""``load``: a program file that runs on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.messages import warn
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.signature import read_reference_digest

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass


def load(source: str | Path | bytes, *, reference: str | Path | bytes | None = None) -> Program:
    """Load a program to run it on this machine.

    A ``.pte`` runs in ExecuTorch's runtime: TOSA delegates on Arm's reference model, VGF ones on Vulkan, the command
    streams of Ethos-U on an emulator of the NPU. A TFLite model that Vela compiled runs on this emulator, as a
    ``VelaProgram``, if all of it is one operator for the NPU. What is bit-exact on the target is so here.

    Args:
        source: path or bytes of a ``.pte``, or of a ``.tflite`` that Vela compiled.
        reference: path or bytes of a ``.pte``'s reference program (see ``ExportResult.save``), for ``run(...,
            backend="tosa")``. By default the file ``model.tosa.pte`` beside ``model.pte``, if there is one; if that is
            of another program, there is a warning, and the program has none.

    Raises:
        FileNotFoundError: there is no such file.
        ProgramError: it is no program, or a damaged one (a ``ValueError``); some of a TFLite model's operators stay on
            the CPU.
        RunError: ``reference`` is not that of this program; the emulator does not execute a TFLite model.
    """
    from arm_recipes.runtime.vela_tflite import is_tflite

    data = _bytes(source)
    if is_tflite(data):
        from arm_recipes.runtime.vela_program import VelaProgram

        if reference is not None:
            raise RunError("a TFLite model has no reference program: leave reference= out")
        return VelaProgram(data)
    program = Program(data)
    if reference is not None:
        program.reference = _reference_program(data, _bytes(reference))
    elif isinstance(source, (str, Path)) and (beside := reference_path(source)).exists():
        try:
            program.reference = _reference_program(data, _bytes(beside))
        except (RunError, ProgramError) as error:
            warn(f"'{beside}' is left aside: {error}")
    return program


def reference_path(path: str | Path) -> Path:
    """Where the reference program of a program is kept: ``model.tosa.pte`` beside ``model.pte``."""
    return Path(path).expanduser().with_suffix(REFERENCE_SUFFIX)


def _bytes(source: str | Path | bytes) -> bytes:
    if isinstance(source, (str, Path)):
        return Path(source).expanduser().read_bytes()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    raise TypeError(f"a program is given as a path or bytes, not as {type(source).__name__}")


def _reference_program(data: bytes, reference: bytes) -> Program:
    program = Program(reference)
    if read_reference_digest(program.content) != hashlib.sha256(data).hexdigest():
        raise RunError(
            "the reference program was made from another program, so it would give other results. "
            "Save both again with save(path, reference=True), or remove the reference program"
        )
    return program


#: What follows the stem of a program's path in that of its reference program: ``model.pte``, ``model.tosa.pte``.
REFERENCE_SUFFIX = ".tosa.pte"
