"""Files of a cache: each is whole and what was written, or it is not read."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import make_folder, write
from arm_recipes.report.report import Report

_MAGIC = b"arm-recipes export 1\n"
_DIGEST = hashlib.sha256().digest_size
#: Modules with the classes that a report consists of. Nothing else is made of what a file says.
_MODULES = (
    "arm_recipes.report.report",
    "arm_recipes.report.record",
    "arm_recipes.runtime.tensor_info",
    "arm_recipes.stages.edge.cpu_operators",
    "arm_backend_core.events",
    "arm_backend_core.backends.payload",
    "arm_backend_core.tosa.graph",
)


@dataclass(frozen=True)
class CacheEntry:
    """What an export made.

    Attributes:
        program: the ``.pte``, before its checksum is put in.
        warnings: that were given.
    """

    report: Report
    program: bytes
    warnings: tuple[str, ...]


class CorruptEntry(Exception):
    """A file holds something else than what was written; the message says what is wrong."""


class Store:
    """A folder of exports by their keys. Several processes may use it at the same time.

    Raises:
        ValueError: nothing can be written there.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = make_folder(folder, "cache_dir")

    def file(self, key: str) -> Path:
        """Of a key, whether it is there or not."""
        return self._folder / f"{key}.export"

    def read(self, key: str) -> CacheEntry | None:
        """What was written under a key, None if nothing was.

        Raises:
            Damaged: the file cannot be read, or is something else.
        """
        try:
            data = self.file(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptEntry(f"it cannot be read: {error.strerror}") from error
        start = len(_MAGIC) + _DIGEST
        if not data.startswith(_MAGIC):
            raise CorruptEntry("it is no file of this cache")
        content = memoryview(data)[start:]
        if data[len(_MAGIC) : start] != _entry_digest(key, content):
            raise CorruptEntry("its content is not what was written")
        try:
            report, program, warnings = _Reader(io.BytesIO(content)).load()
        except Exception as error:  # what pickle raises depends on what is there
            raise CorruptEntry(f"{type(error).__name__}: {error}") from error
        return CacheEntry(report, program, warnings)

    def write(self, key: str, saved: CacheEntry) -> None:
        """Keep an export; a file that is there is replaced."""
        content = pickle.dumps((saved.report, saved.program, saved.warnings), protocol=5)
        write(self.file(key), _MAGIC, _entry_digest(key, content), content)


def _entry_digest(key: str, content: bytes | memoryview) -> bytes:
    """The digest of a file's content, with the key that it was written under."""
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module not in _MODULES or "." in name:
            raise pickle.UnpicklingError(f"'{module}.{name}' is no part of a report")
        return super().find_class(module, name)
