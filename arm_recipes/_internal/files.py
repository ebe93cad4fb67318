"""Files that users name: checked before any work starts, written whole or not at all."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from arm_recipes._internal.file_kinds import describe_file


def check_file(path: str | Path, argument: str) -> Path:
    """The path of a file that is there.

    Raises:
        ValueError: there is none; the message names the argument.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{argument}: there is no file '{path}'")
    return file


def check_saved_program(path: str | Path) -> Path:
    """The path of a program that ``torch.export.save`` wrote, as far as that can be told without importing PyTorch.

    Raises:
        ValueError: there is no such file, or it is something else.
    """
    file = check_file(path, "model")
    reason = "another kind of archive"
    cause: Exception | None = None
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        names, reason, cause = [], str(error), error
    # The first is how the files of PyTorch 2.7 and before are known.
    if "version" not in names and not any(name.endswith("/archive_format") for name in names):
        what = describe_file(file) or reason
        raise ValueError(f"model: '{path}' is not a program saved by torch.export.save, but {what}") from cause
    return file


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


def make_folder(path: str | Path, argument: str) -> Path:
    """A folder that files can be written in, made if it is not there.

    Raises:
        ValueError: it cannot be; the message names the argument.
    """
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{argument}: cannot make '{path}': {error.strerror}") from error
    check_writable(folder / "file")
    return folder


def write(target: Path, *pieces: bytes | memoryview) -> None:
    """Write a file whole or not at all, as the core does, which is not imported before there is something to write."""
    from arm_backend_core.alternatives import disk_cache

    disk_cache.write(target, *pieces)
