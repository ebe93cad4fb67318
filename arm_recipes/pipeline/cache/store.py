"""Cache files: written atomically, and read only if their checksum matches."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import make_folder, write_file_atomically
from arm_recipes.report.report import Report

_MAGIC = b"arm-recipes export 2\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
#: Modules that define the classes of a report. The unpickler refuses classes of other modules.
_UNPICKLED_MODULES = (
    "arm_recipes.report.report",
    "arm_recipes.report.context",
    "arm_recipes.report.kernels",
    "arm_recipes.report.npu_layer_costs",
    "arm_recipes.report.ram",
    "arm_recipes.report.record",
    "arm_recipes.runtime.tensor_info",
    "arm_recipes.stages.edge.cpu_operators",
    "arm_backend_core.compilation_log",
    "arm_backend_core.backends.vela_estimates",
    "arm_backend_core.targets.cortex_m",
    "arm_backend_core.tosa.graph",
)


@dataclass(frozen=True)
class CacheEntry:
    """A cached export.

    Attributes:
        report: the report of the export.
        program: the ``.pte``, before the checksum of an exported ``.pte`` is added.
        warnings: the warnings of the export.
        data_file: the ``.ptd``; None if all weights and command streams are in the ``.pte``.
    """

    report: Report
    program: bytes
    warnings: tuple[str, ...]
    data_file: bytes | None = None


class CorruptEntry(Exception):
    """A cache file cannot be read, has another format or was modified; the message says what is wrong."""


class Store:
    """A folder of cached exports by key. Several processes may use it concurrently.

    Raises:
        ValueError: the folder is not writable.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = make_folder(folder, "cache_dir")

    def file(self, key: str) -> Path:
        """Return the path of the file for a key. The file may not exist."""
        return self._folder / f"{key}.export"

    def read(self, key: str) -> CacheEntry | None:
        """Read the entry of a key; None if there is none.

        Raises:
            CorruptEntry: the file cannot be read or unpickled, is no file of this cache, or does not match its digest.
        """
        try:
            data = self.file(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CorruptEntry(f"it cannot be read: {error.strerror}") from error
        start = len(_MAGIC) + _DIGEST_BYTES
        if not data.startswith(_MAGIC):
            raise CorruptEntry("it is not a file of this cache")
        content = memoryview(data)[start:]
        if data[len(_MAGIC) : start] != _entry_digest(key, content):
            raise CorruptEntry("its content does not match its digest")
        try:
            report, program, warnings, data_file = _ReportUnpickler(io.BytesIO(content)).load()
        except Exception as error:  # pickle raises exceptions of many types
            raise CorruptEntry(f"{type(error).__name__}: {error}") from error
        return CacheEntry(report, program, warnings, data_file)

    def write(self, key: str, entry: CacheEntry) -> None:
        """Store an export. Replaces an existing file.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """
        content = pickle.dumps((entry.report, entry.program, entry.warnings, entry.data_file), protocol=5)
        write_file_atomically(self.file(key), _MAGIC, _entry_digest(key, content), content)


def _entry_digest(key: str, content: bytes | memoryview) -> bytes:
    """Digest of the key and the content of a file."""
    digest = hashlib.sha256(key.encode())
    digest.update(content)
    return digest.digest()


class _ReportUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module not in _UNPICKLED_MODULES or "." in name:
            raise pickle.UnpicklingError(f"'{module}.{name}' is not part of a report")
        return super().find_class(module, name)
