"""Disk cache: the cache folder of the user, and atomic file writes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path


def cache_folder() -> Path:
    """Return the cache folder of this project: ``$XDG_CACHE_HOME/arm-recipes``, by default ``~/.cache/arm-recipes``.

    Raises:
        OSError: ``XDG_CACHE_HOME`` is not set, and the user has no home directory, as in a container with an
            arbitrary user id.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "arm-recipes"
    except RuntimeError as error:
        raise FileNotFoundError(f"no cache folder: {error} Set XDG_CACHE_HOME to a folder") from None


def write_atomically(target: Path, *chunks: bytes | memoryview) -> None:
    """Write ``chunks`` to a temporary file in the same folder, which then atomically replaces ``target``.

    Raises:
        OSError: the file cannot be written. The message names ``target``, and the temporary file is removed.
    """
    try:
        _write_atomically(target, chunks)
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(target)) from None


def _write_atomically(target: Path, chunks: Sequence[bytes | memoryview]) -> None:
    # The module tempfile is not used, because its files have the mode 0600: other users could not read them.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.writelines(chunks)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
