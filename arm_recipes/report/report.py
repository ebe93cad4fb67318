"""``Report``: the report of an export as data, text, HTML tables for notebooks, and an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from arm_recipes._internal.files import check_writable
from arm_recipes._internal.rendering import Section, format_bytes, to_jsonable
from arm_recipes.report.comparisons import ComparisonRecord
from arm_recipes.report.context import ExportContext
from arm_recipes.report.measurements import Measurement, compare_measurements, read_measurements
from arm_recipes.report.page import Page, build_page
from arm_recipes.report.record import ExportRecord
from arm_recipes.runtime.payload_parts import COMMANDS_PREFIX, WEIGHTS_PREFIX


@dataclass(frozen=True)
class Report(ExportRecord):
    """The report of one export. ``print`` shows it as text, a notebook as tables.

    See ``ExportRecord`` for the other attributes.

    Attributes:
        context: model, date, board and limits of the export.
        measurements: measurements of runs on a device, added by ``with_measurements``.
    """

    context: ExportContext = field(default_factory=ExportContext)
    measurements: tuple[Measurement, ...] = ()

    def with_measurements(self, path: str | Path) -> Report:
        """Return the report with measurements of a device in addition to the estimates.

        Args:
            path: log of the firmware's self-test, which prints a line of JSON for each run.

        Raises:
            ValueError: the file cannot be read or has no measurements, a line is damaged, or the measurements are of
                another program.
        """
        measured = replace(self, measurements=read_measurements(path))
        compare_measurements(measured.measurements, self.to_dict())
        return measured

    @property
    def external_blocks(self) -> dict[str, int]:
        """Size in bytes of each block in the data file (``.ptd``), by key of the block."""
        return {key: size for delegate in self.delegates for key, size in delegate.external_blocks.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the dict of ``ExportRecord``, with the external blocks and the measurements."""
        figures = [to_jsonable(run) for run in self.measurements]
        return {**super().to_dict(), "external_blocks": self.external_blocks, "measurements": figures}

    def sections(self) -> Iterator[Section]:
        """Sections of the report, for text and HTML."""
        for number, (heading, rows) in enumerate(super().sections()):
            yield heading, [rows[0], *self._data_file_rows(), *rows[1:]] if number == 0 else rows
            if number == 0 and self.measurements:
                yield from compare_measurements(self.measurements, super().to_dict()).sections()

    def _data_file_rows(self) -> Iterator[tuple[str, ...]]:
        blocks = self.external_blocks
        for name, prefix in (("command streams", COMMANDS_PREFIX), ("weights", WEIGHTS_PREFIX)):
            sizes = [size for key, size in blocks.items() if key.startswith(prefix)]
            if sizes:
                yield f"{name} in the .ptd", format_bytes(sum(sizes))

    def page(self, *comparisons: ComparisonRecord) -> Page:
        """Build a self-contained HTML page with the report and interactive charts. A notebook displays it.

        Args:
            comparisons: results of ``ExportResult.compare``, for the accuracy of each layer.

        Raises:
            ImportError: Plotly is not installed.
        """
        measured = compare_measurements(self.measurements, super().to_dict()).methods if self.measurements else ()
        npu_cycles = {method.method: method.npu_cycles for method in measured if method.npu_cycles is not None}
        return build_page(self, self.context, comparisons, npu_cycles)

    def save_html(self, path: str | Path, *comparisons: ComparisonRecord) -> Path:
        """Write the HTML page (see ``page``) to a file.

        Raises:
            ValueError: ``path`` is not writable; the message says why.
            ImportError: Plotly is not installed.
        """
        check_writable(path)  # before the page is built
        return self.page(*comparisons).save(path)
