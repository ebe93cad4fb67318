"""``load``: load a program file to run it on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arm_recipes._internal.file_kinds import describe_uncompiled_file
from arm_recipes._internal.messages import warn
from arm_recipes._internal.unknown_arguments import reject_unknown_arguments
from arm_recipes.runtime.data_file import data_file_path
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import ProgramError
from arm_recipes.runtime.signature import read_reference_digest


@reject_unknown_arguments({"tosa": "reference"})
def load(
    source: str | Path | bytes, ptd: str | Path | bytes | None = None, *, reference: str | Path | bytes | None = None
) -> Program:
    """Load a program to run it on this machine.

    A ``.pte`` runs in ExecuTorch's runtime. Arm's reference model executes TOSA delegates, Vulkan executes VGF
    delegates, and an emulator of the NPU executes the command streams of Ethos-U delegates. A TFLite model that Vela
    compiled runs on the same emulator, as a ``VelaProgram``, if the entire model is one operator for the NPU. The
    reference model and the emulator compute integer results bit-exactly.

    Args:
        source: path or bytes of a ``.pte``, or of a ``.tflite`` that Vela compiled.
        ptd: path or bytes of the data file of a ``.pte`` whose recipe has the option ``external``. Default: the file
            ``model.ptd`` beside ``model.pte``, if it exists.
        reference: path or bytes of a ``.pte``'s reference program (see ``ExportResult.save``), for ``run(...,
            backend="tosa")``. Default: the file ``model.tosa.pte`` beside ``model.pte``, if it exists. If this file is
            damaged or belongs to another program, ``load`` warns and ignores the file.

    Raises:
        FileNotFoundError: a given file does not exist.
        TypeError: an argument is neither a path nor bytes.
        ProgramError: a path is a directory, a file is not a program or is damaged, or a TFLite model has operators on
            the CPU or several operators for the NPU. This is a ``ValueError``.
        RunError: the program needs a ``.ptd`` and there is none; ``ptd`` or ``reference`` belongs to another program,
            or is given for a TFLite model; the content of ``ptd`` has changed; or the emulator does not support the
            TFLite model, or cannot be built on this machine.
    """
    from arm_recipes.runtime.vela_tflite import is_tflite

    data = _read_bytes(source, "source")
    if is_tflite(data):
        from arm_recipes.runtime.vela_program import VelaProgram

        if reference is not None or ptd is not None:
            name = "reference" if ptd is None else "ptd"
            raise RunError(f"a TFLite model is one file, with its data and without a reference program: omit {name}=")
        with _name_file(source):
            return VelaProgram(data)
    with _name_file(source):
        program = Program(data, _read_data_file(source, ptd))
    if reference is not None:
        with _name_file(reference):
            program.reference = _load_reference(data, _read_bytes(reference, "reference"))
    elif isinstance(source, (str, Path)) and (beside := reference_path(source)).exists():
        try:
            program.reference = _load_reference(data, _read_bytes(beside, "reference"))
        except (RunError, ProgramError) as error:
            warn(f"'{beside}' is ignored: {error}")
    return program


def _read_data_file(source: str | Path | bytes, ptd: str | Path | bytes | None) -> bytes | None:
    """Read the data file of a program: ``ptd``, or the file beside ``source`` if it exists."""
    if ptd is not None:
        return _read_bytes(ptd, "ptd")
    beside = None if isinstance(source, (bytes, bytearray, memoryview)) else data_file_path(source)
    return None if beside is None or not beside.is_file() else beside.read_bytes()


def reference_path(path: str | Path) -> Path:
    """Path of the reference program: ``model.tosa.pte`` for ``model.pte``."""
    return Path(path).expanduser().with_suffix(REFERENCE_SUFFIX)


@contextmanager
def _name_file(source: str | Path | bytes) -> Iterator[None]:
    """Add the name of the file to errors in the ``with`` block. If the file is of another known kind, add the kind."""
    try:
        yield
    except (ProgramError, RunError) as error:
        if not isinstance(source, (str, Path)):
            raise
        kind = describe_uncompiled_file(Path(source).expanduser()) if isinstance(error, ProgramError) else None
        raise type(error)(f"'{source}': {error}{(kind and f'; it is {kind}') or ''}") from None


def _read_bytes(source: str | Path | bytes, argument: str) -> bytes:
    """Read an argument of ``load``; ``argument`` is its name, for the message."""
    if isinstance(source, (str, Path)):
        if Path(source).expanduser().is_dir():
            kind = ".ptd" if argument == "ptd" else ".pte"
            raise ProgramError(f"'{source}' is a directory; give the path of a {kind} file")
        return Path(source).expanduser().read_bytes()
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    raise TypeError(f"{argument} must be a path or bytes, got {type(source).__name__}")


def _load_reference(data: bytes, reference: bytes) -> Program:
    program = Program(reference)
    if read_reference_digest(program.content) != hashlib.sha256(data).hexdigest():
        raise RunError(
            "the reference program belongs to another program, so its results would differ. "
            "Save both again with save(path, reference=True), or delete the reference program"
        )
    return program


#: Suffix of a reference program: ``model.tosa.pte`` belongs to ``model.pte``.
REFERENCE_SUFFIX = ".tosa.pte"
