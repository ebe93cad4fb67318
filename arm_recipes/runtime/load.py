"""``load``: a program file that runs on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.messages import warn
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.signature import twin_of

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass


def load(source: str | Path | bytes, *, tosa: str | Path | bytes | None = None) -> Program:
    """Load a program to run it on this machine.

    A ``.pte`` runs in ExecuTorch's runtime: TOSA delegates on Arm's reference model, VGF ones on Vulkan, the command
    streams of Ethos-U on an emulator of the NPU. A TFLite model that Vela compiled runs on this emulator, as a
    ``VelaProgram``, if all of it is one operator for the NPU. What is bit-exact on the target is so here.

    Args:
        source: path or bytes of a ``.pte``, or of a ``.tflite`` that Vela compiled.
        tosa: path or bytes of a ``.pte``'s TOSA twin (see ``ExportResult.save``), for ``run(..., via="tosa")``. By
            default the file ``model.tosa.pte`` beside ``model.pte``, if there is one; if that is of another program,
            there is a warning, and the program has no twin.

    Raises:
        FileNotFoundError: there is no such file.
        ProgramError: it is no program, or a damaged one (a ``ValueError``); some of a TFLite model's operators stay on
            the CPU.
        RunError: ``tosa`` is not the twin of this program; the emulator does not execute a TFLite model.
    """
    from arm_recipes.runtime.vela_tflite import is_tflite

    data = _bytes(source)
    if is_tflite(data):
        from arm_recipes.runtime.vela_program import VelaProgram

        if tosa is not None:
            raise RunError("a TFLite model has no TOSA twin: leave tosa= out")
        return VelaProgram(data)
    program = Program(data)
    if tosa is not None:
        program.twin = _twin(data, _bytes(tosa))
    elif isinstance(source, (str, Path)) and (beside := twin_path(source)).exists():
        try:
            program.twin = _twin(data, _bytes(beside))
        except (RunError, ProgramError) as error:
            warn(f"'{beside}' is left aside: {error}")
    return program


def twin_path(path: str | Path) -> Path:
    """Where the TOSA twin of a program is kept: ``model.tosa.pte`` beside ``model.pte``."""
    return Path(path).expanduser().with_suffix(TWIN_SUFFIX)


def _bytes(source: str | Path | bytes) -> bytes:
    if isinstance(source, (str, Path)):
        return Path(source).expanduser().read_bytes()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    raise TypeError(f"a program is given as a path or bytes, not as {type(source).__name__}")


def _twin(data: bytes, twin: bytes) -> Program:
    program = Program(twin)
    if twin_of(program.content) != hashlib.sha256(data).hexdigest():
        raise RunError(
            "the TOSA twin was made from another program, so it would give other results. "
            "Save both again with save(path, tosa=True), or remove the twin"
        )
    return program


#: What follows the stem of a program's path in that of its TOSA twin: ``model.pte``, ``model.tosa.pte``.
TWIN_SUFFIX = ".tosa.pte"
