"""``Report``: the report of an export as data, text, HTML tables for notebooks, and an HTML page."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from arm_recipes._internal.files import check_writable
from arm_recipes.report.comparisons import ComparisonRecord
from arm_recipes.report.context import ExportContext
from arm_recipes.report.page import Page, build_page
from arm_recipes.report.record import ExportRecord


@dataclass(frozen=True)
class Report(ExportRecord):
    """The report of one export. ``print`` shows it as text, a notebook as tables.

    See ``ExportRecord`` for the other attributes.

    Attributes:
        context: model, date, board and limits of the export.
    """

    context: ExportContext = field(default_factory=ExportContext)

    def page(self, *comparisons: ComparisonRecord) -> Page:
        """Build a self-contained HTML page with the report and interactive charts. A notebook displays it.

        Args:
            comparisons: results of ``ExportResult.compare``, for the accuracy of each layer.

        Raises:
            ImportError: Plotly is not installed.
        """
        return build_page(self, self.context, comparisons)

    def save_html(self, path: str | Path, *comparisons: ComparisonRecord) -> Path:
        """Write the HTML page (see ``page``) to a file.

        Raises:
            ValueError: ``path`` is not writable; the message says why.
            ImportError: Plotly is not installed.
        """
        check_writable(path)  # before the page is built
        return self.page(*comparisons).save(path)
