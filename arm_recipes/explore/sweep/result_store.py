"""The folder of a sweep: what is finished, by content, so that a sweep that was ended goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import make_folder, write
from arm_recipes.explore.sweep.rows import Figures

if TYPE_CHECKING:
    from arm_recipes.explore.sweep.configurations import Configuration

_OUTPUTS = ".outputs.pt"


class ResultStore:
    """Figures of configurations and outputs of programs, one file for each.

    Args:
        cache_dir: made if it is not there; None keeps nothing.

    Raises:
        ValueError: nothing can be written there.
    """

    def __init__(self, cache_dir: str | Path | None) -> None:
        self._folder = None if cache_dir is None else make_folder(cache_dir, "cache_dir")

    def record(self, key: str) -> dict[str, Any] | None:
        """What was kept under a key; None if there is nothing, or a file that is not of this form."""
        if self._folder is None:
            return None
        try:
            found = json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def keep_record(self, key: str, content: Mapping[str, Any]) -> None:
        """Write what ``record`` gives."""
        if self._folder is not None:
            write(self._folder / f"{key}.json", json.dumps(content, indent=1).encode())

    def figures(self, key: str) -> Figures | None:
        """What was kept for a configuration; None if there is nothing, or a file that is not of this form."""
        try:
            return Figures(**(self.record(key) or {})["figures"])
        except (TypeError, KeyError):
            return None

    def keep(self, key: str, configuration: Configuration, figures: Figures) -> None:
        """Write the figures; the configuration beside them is for people."""
        spec = configuration.spec
        content = {
            "recipe": configuration.recipe,
            "target": spec.accelerator,
            "system_config": spec.system_config,
            "memory_mode": spec.memory_mode,
            "figures": asdict(figures),
        }
        self.keep_record(key, content)

    def outputs(self, key: str) -> list[list[Any]] | None:
        """What a program gave, the tensors of each sample; None if nothing usable was kept."""
        import torch

        if self._folder is None or not (self._folder / f"{key}{_OUTPUTS}").is_file():
            return None
        try:
            found: list[list[Any]] = torch.load(self._folder / f"{key}{_OUTPUTS}", weights_only=True)
        except Exception:  # torch raises what the damage happens to lead to; what is damaged is made again
            return None
        return found

    def keep_outputs(self, key: str, outputs: list[list[Any]]) -> None:
        """Write what a program gave."""
        import io

        import torch

        if self._folder is not None:
            buffer = io.BytesIO()
            torch.save(outputs, buffer)
            write(self._folder / f"{key}{_OUTPUTS}", buffer.getvalue())
