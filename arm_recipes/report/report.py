"""``Report``: what an export did, as data, as aligned text, and as HTML for notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arm_recipes._internal.files import check_writable
from arm_recipes.report.page import ComparisonRecord, Page, build_page
from arm_recipes.report.record import ExportRecord


@dataclass(frozen=True)
class Report(ExportRecord):
    """The record of one export, which ``print`` shows as text and a notebook as tables.

    See ``ExportRecord`` for the attributes.
    """

    def page(self, *comparisons: ComparisonRecord) -> Page:
        """Everything that the report has, with pictures: one file that needs nothing else, which a notebook shows.

        Args:
            comparisons: what ``ExportResult.compare`` found, for the accuracy by layer.

        Raises:
            ImportError: Plotly is not installed.
        """
        return build_page(self, comparisons)

    def save_html(self, path: str | Path, *comparisons: ComparisonRecord) -> Path:
        """Write the ``page``.

        Raises:
            ValueError: nothing can be written at ``path``; the message says why.
            ImportError: Plotly is not installed.
        """
        check_writable(path)  # before the page is made
        return self.page(*comparisons).save(path)
