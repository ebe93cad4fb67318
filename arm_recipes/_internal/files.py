"""User files: check paths before the work starts, and write files atomically."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from arm_recipes._internal.file_kinds import describe_file, is_saved_program


def check_file(path: str | Path, argument: str) -> Path:
    """Check that a file exists, and return its path.

    Raises:
        ValueError: the file does not exist; the message names the argument.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{argument}: there is no file '{path}'")
    return file


def check_saved_program(path: str | Path) -> Path:
    """Check that ``torch.export.save`` wrote a file, as far as possible without importing PyTorch. Returns its path.

    Raises:
        ValueError: the file does not exist, or it has another format.
    """
    file = check_file(path, "model")
    reason = "another kind of archive"
    cause: Exception | None = None
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        names, reason, cause = [], str(error), error
    if not is_saved_program(names):
        description = describe_file(file) or reason
        raise ValueError(f"model: '{path}' is not a program saved by torch.export.save, but {description}") from cause
    return file


def check_writable(path: str | Path) -> Path:
    """Check that a file can be written, and return its absolute path.

    Raises:
        ValueError: the path is a directory, or its directory does not exist or is not writable.
    """
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise ValueError(f"cannot write '{path}': it is a directory")
    if not target.parent.is_dir():
        raise ValueError(f"cannot write '{path}': there is no directory '{target.parent}'")
    try:
        # Permission bits are not sufficient (read-only mounts, access lists), so write a temporary file.
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write '{path}': {error.strerror}") from error
    return target


def make_folder(path: str | Path, argument: str) -> Path:
    """Create a folder if needed, check that it is writable, and return its absolute path.

    Raises:
        ValueError: the folder cannot be created or is not writable; the message names the argument.
    """
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{argument}: cannot create '{path}': {error.strerror}") from error
    check_writable(folder / "file")
    return folder


def write_file_atomically(target: Path, *chunks: bytes | memoryview) -> None:
    """Write a file atomically.

    Raises:
        OSError: the file cannot be written, for example because the disk is full. The message names the file.
    """
    from arm_backend_core import disk_cache

    disk_cache.write_atomically(target, *chunks)
