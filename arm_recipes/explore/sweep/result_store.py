"""Result store: a folder of finished results, with hashes of their inputs as file names.

An interrupted ``sweep`` or ``tune`` resumes from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import make_folder, write_file_atomically
from arm_recipes._internal.messages import warn
from arm_recipes.explore.sweep.rows import ProgramEstimates

if TYPE_CHECKING:
    from arm_recipes.explore.sweep.configurations import SweepConfiguration

_OUTPUTS_SUFFIX = ".outputs.pt"


class ResultStore:
    """Folder of Vela's estimates (``ProgramEstimates``), evaluation results and program outputs, one file for each key.

    Args:
        cache_dir: folder, created if missing; None disables the store.

    Raises:
        ValueError: the folder is not writable.
    """

    def __init__(self, cache_dir: str | Path | None) -> None:
        self._folder = None if cache_dir is None else make_folder(cache_dir, "cache_dir")
        self._has_warned = False

    def load_record(self, key: str) -> dict[str, Any] | None:
        """Load the record of a key; None if it is missing or invalid."""
        if self._folder is None:
            return None
        try:
            record = json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def save_record(self, key: str, content: Mapping[str, Any]) -> None:
        """Write a record for ``load_record``."""
        self._write(f"{key}.json", json.dumps(content, indent=1).encode())

    def load_estimates(self, key: str) -> ProgramEstimates | None:
        """Load the estimates of a configuration; None if they are missing or invalid."""
        try:
            return ProgramEstimates(**(self.load_record(key) or {})["figures"])
        except (TypeError, KeyError):
            return None

    def save_estimates(self, key: str, configuration: SweepConfiguration, estimates: ProgramEstimates) -> None:
        """Write estimates. The file also describes the configuration, for human readers only."""
        spec = configuration.spec
        content = {
            "recipe": configuration.recipe,
            "target": spec.accelerator,
            "system_config": spec.system_config,
            "memory_mode": spec.memory_mode,
            "figures": asdict(estimates),
        }
        self.save_record(key, content)

    def load_outputs(self, key: str) -> list[list[Any]] | None:
        """Load a program's outputs, a flat list for each sample; None if they are missing or invalid."""
        import torch

        if self._folder is None or not (self._folder / f"{key}{_OUTPUTS_SUFFIX}").is_file():
            return None
        try:
            outputs: list[list[Any]] = torch.load(self._folder / f"{key}{_OUTPUTS_SUFFIX}", weights_only=True)
        except Exception:  # torch.load raises many types for a damaged file; the caller computes the outputs again
            return None
        return outputs

    def save_outputs(self, key: str, outputs: list[list[Any]]) -> None:
        """Write a program's outputs."""
        import io

        import torch

        if self._folder is not None:
            buffer = io.BytesIO()
            torch.save(outputs, buffer)
            self._write(f"{key}{_OUTPUTS_SUFFIX}", buffer.getvalue())

    def _write(self, name: str, data: bytes) -> None:
        """Write a file. If this fails, for example because the disk is full, only warn, once for this store.

        The caller still has the result. It is only not cached.
        """
        if self._folder is None:
            return
        try:
            write_file_atomically(self._folder / name, data)
        except OSError as error:
            if not self._has_warned:
                warn(f"cache_dir: results are not cached, because a file cannot be written: {error}")
            self._has_warned = True
