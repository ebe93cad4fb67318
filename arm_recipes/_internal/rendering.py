"""Sections of headings and aligned lines, as text, HTML and JSON: what reports and results are printed with."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


#: A heading with its lines; a line is its cells.
Section = tuple[str, list[tuple[str, ...]]]


class Renderable:
    """What is told in sections: ``print`` it, show it in a notebook, or take ``to_dict()``."""

    def sections(self) -> Iterator[Section]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The same as dicts, lists, str and numbers, ready for JSON."""
        made: dict[str, Any] = to_jsonable(self)
        return made

    def __str__(self) -> str:
        return as_text(self.sections())

    def _repr_html_(self) -> str:
        return as_html(self.sections())


def as_text(sections: Iterable[Section]) -> str:
    """Headings with their lines, cells aligned."""
    lines = []
    for heading, rows in sections:
        lines.append(heading)
        widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
        for *cells, last in rows:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append("  " + "  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def as_html(sections: Iterable[Section]) -> str:
    """Headings with their lines as tables."""
    parts = []
    for heading, rows in sections:
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<h4>{html.escape(heading)}</h4><table>{body}</table>")
    return "".join(parts)


def format_bytes(count: int) -> str:
    """Bytes for people: ``1,234 B``, ``12.3 KiB``, ``4.5 MiB``."""
    if count < 10_000:
        return f"{count:,} B"
    return f"{count / 1024:,.1f} KiB" if count < 10 * 1024**2 else f"{count / 1024**2:,.1f} MiB"


def to_jsonable(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists. Bytes are left out of the walk: they may be megabytes.

    JSON has no infinity: it is "Infinity", which ``float`` of Python and ``Number`` of JavaScript read.
    """
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: to_jsonable(getattr(value, name)) for name in fields if name != "tosa"}
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
