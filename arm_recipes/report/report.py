"""``Report``: the report of an export as data, text, HTML tables for notebooks, and an HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arm_recipes._internal.files import check_writable
from arm_recipes.report.page import ComparisonRecord, Page, build_page
from arm_recipes.report.record import ExportRecord


@dataclass(frozen=True)
class Report(ExportRecord):
    """The report of one export. ``print`` shows it as text, a notebook as tables.

    See ``ExportRecord`` for the attributes.
    """

    def page(self, *comparisons: ComparisonRecord) -> Page:
        """Build a self-contained HTML page with the report and interactive charts. A notebook displays it.

        Args:
            comparisons: results of ``ExportResult.compare``, for the accuracy of each layer.

        Raises:
            ImportError: Plotly is not installed.
        """
        return build_page(self, comparisons)

    def save_html(self, path: str | Path, *comparisons: ComparisonRecord) -> Path:
        """Write the HTML page (see ``page``) to a file.

        Raises:
            ValueError: ``path`` is not writable; the message says why.
            ImportError: Plotly is not installed.
        """
        check_writable(path)  # before the page is built
        return self.page(*comparisons).save(path)
