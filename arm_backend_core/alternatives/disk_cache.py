"""Where what is made once is kept: a folder of the user's, files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where this package keeps what it makes once: ``$XDG_CACHE_HOME/arm-recipes``, or below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "arm-recipes"


def write(target: Path, *pieces: bytes | memoryview) -> None:
    """Write a file under another name first, so that there is never half a file under its own."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        try:
            file.writelines(pieces)
            file.close()
            # mkstemp makes files private to the user; give it the mode of any other new file.
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
