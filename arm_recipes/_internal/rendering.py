"""Rendering of reports and results as text, HTML and JSON. A section has a heading and aligned rows."""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

#: A heading and its rows. A row is a tuple of cells.
Section = tuple[str, list[tuple[str, ...]]]


#: A cell with at least this many characters gets the HTML class ``long``. Style sheets may wrap such cells.
_LONG_CELL = 36
#: Characters of text bar charts, from the lowest to the highest bar, and ASCII replacements for encodings without them.
BAR_CHARACTERS, _ASCII_BAR_CHARACTERS = "▁▂▃▄▅▆▇█", "_.-:=+*#"


class Renderable:
    """Base of reports and results: text for ``print``, HTML for notebooks, ``to_dict()`` for JSON."""

    def sections(self) -> Iterator[Section]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the content as dicts, lists, strings, numbers, booleans and None, ready for JSON."""
        content: dict[str, Any] = to_jsonable(self)
        return content

    def __str__(self) -> str:
        return to_encodable(as_text(self.sections()), getattr(sys.stdout, "encoding", None) or "utf-8")

    def _repr_html_(self) -> str:
        return as_html(self.sections())


def as_text(sections: Iterable[Section]) -> str:
    """Render sections as text with aligned cells."""
    lines = []
    for heading, rows in sections:
        lines.append(heading)
        widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
        for *cells, last in rows:
            padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append("  " + "  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def to_encodable(text: str, encoding: str) -> str:
    r"""Replace the characters that an encoding lacks, so that ``print`` does not raise an exception.

    Bars become ASCII characters, other characters become escapes such as ``\xe9``.
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(str.maketrans(BAR_CHARACTERS, _ASCII_BAR_CHARACTERS))
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def as_html(sections: Iterable[Section]) -> str:
    """Render sections as HTML tables."""
    parts = []
    for heading, rows in sections:
        body = "".join("<tr>" + "".join(map(cell_as_html, row)) + "</tr>" for row in rows)
        parts.append(f"<h4>{html.escape(heading)}</h4><table>{body}</table>")
    return "".join(parts)


def cell_as_html(cell: str, tag: str = "td") -> str:
    """Render a table cell. The class ``long`` marks long cells, which style sheets may wrap."""
    attribute = ' class="long"' if len(cell) >= _LONG_CELL else ""
    return f"<{tag}{attribute}>{html.escape(cell)}</{tag}>"


def format_bytes(count: int) -> str:
    """Format a size: ``1,234 B``, ``12.3 KiB``, ``14.5 MiB``."""
    if count < 10_000:
        return f"{count:,} B"
    return f"{count / 1024:,.1f} KiB" if count < 10 * 1024**2 else f"{count / 1024**2:,.1f} MiB"


def to_jsonable(value: Any) -> Any:
    """Convert dataclasses to dicts, tuples to lists, and objects that JSON lacks to strings.

    Skips the field ``tosa`` of dataclasses, which may take megabytes.

    JSON has neither infinity nor NaN. They become the strings "Infinity", "-Infinity" and "NaN", which Python's
    ``float`` and JavaScript's ``Number`` parse.
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
