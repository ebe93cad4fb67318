"""The progress bar of an export."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from executorch.export import StageType


class Progress:
    """Progress bars over the stages and over the calibration samples.

    Args:
        enabled: show the bars if standard error is a terminal.

    Attributes:
        sample_counts: number of calibration samples of each method.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and sys.stderr.isatty()
        self.sample_counts: dict[str, int] = {}

    def track_stages(self, stages: list[StageType]) -> Iterable[StageType]:
        """Yield the stages; the bar shows the current one."""
        if not self.enabled:
            yield from stages
            return
        from tqdm import tqdm

        with tqdm(total=len(stages), leave=False, bar_format="{desc:<40} {n_fmt}/{total_fmt} |{bar}| {elapsed}") as bar:
            for stage in stages:
                bar.set_description_str(stage.value.replace("_", " "))
                yield stage
                bar.update()

    def track_calibration(self, samples: Iterable[Any], method: str) -> Iterable[Any]:
        """Yield the calibration samples of a method and count them."""
        if self.enabled:
            from tqdm import tqdm

            samples = tqdm(samples, desc=f"calibrating {method}", leave=False, unit="sample")
        self.sample_counts[method] = 0
        for sample in samples:
            yield sample
            self.sample_counts[method] += 1
