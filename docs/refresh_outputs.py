"""Refresh the outputs that the pages show: run the examples of a page and write under each one what it prints.

    python docs/refresh_outputs.py                      # all pages
    python docs/refresh_outputs.py docs/users/sweep.md  # one page
    python docs/refresh_outputs.py --check              # compare the text without its numbers; write nothing

A ``text`` block that directly follows a ``python`` or ``bash`` block is the output of that block. A line ``...`` in the
``text`` block stands for omitted lines of the output. The lines before the first ``...`` are the first lines of the
output, the lines after the last ``...`` are its last lines. If n lines are between two ``...``, n consecutive lines of
the output replace them. The first of these output lines is the one whose words are most similar to the first of the n
replaced lines.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).parent
_ROOT = _DOCS.parent
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?")
#: Line of a ``text`` block that stands for omitted lines of the output.
_OMITTED = "..."
#: An output line replaces a line of the page only if the similarity of their words (0 to 1) is at least this number.
_MIN_SIMILARITY = 0.5


def main() -> int:
    """Refresh or check the pages that the arguments name."""
    parser = argparse.ArgumentParser(description="Refresh the outputs that the pages show.")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="compare the text without its numbers; write nothing")
    arguments = parser.parse_args()
    pages = arguments.pages or [_ROOT / "README.md", *sorted(_DOCS.rglob("*.md"))]
    stale = 0
    for page in pages:
        before = page.read_text()
        after = refresh(page, before)
        changed = [old for old, new in _pairs(before, after) if _mask_numbers(old) != _mask_numbers(new)]
        stale += len(changed)
        print(f"{page.name}: {len(changed)} outputs whose words changed")
        if not arguments.check:
            page.write_text(after)
    return 1 if arguments.check and stale else 0


def refresh(page: Path, text: str) -> str:
    """Return the text of a page with the outputs that its examples print now."""
    result, end = [], 0
    names: dict[str, Any] = {"__name__": "__main__"}  # shared by the examples of the page
    output: str | None = None
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for match in _BLOCK.finditer(text):
            between = text[end : match.start()]
            result.append(between)
            kind, body = match[1], match[2]
            if kind == "text" and output is not None and not between.strip():
                body = select(body, _without_paths(output, folder))
            result.append(f"```{kind}\n{body}```")
            line = text.count("\n", 0, match.start()) + 1
            output = _run(page, line, kind, body, names)
            end = match.end()
    return "".join([*result, text[end:]])


def select(shown: str, output: str) -> str:
    """Select the lines of an output that a page shows.

    Args:
        shown: the page's block, with ``...`` for omitted lines.
        output: the complete output.

    Raises:
        ValueError: no line of the output is similar to the first line between two ``...``.
    """
    lines = output.splitlines()
    parts = [part.strip("\n").splitlines() for part in re.split(rf"^{re.escape(_OMITTED)}$", shown, flags=re.MULTILINE)]
    if len(parts) == 1:
        return "\n".join(lines) + "\n"
    chosen: list[str] = []
    at = 0
    for i, part in enumerate(parts):
        if i:
            chosen.append(_OMITTED)
        if not part:
            continue
        if i == 0:
            at = 0
        elif i == len(parts) - 1:
            at = max(at, len(lines) - len(part))
        else:
            at = _most_similar(part[0], lines, at)
        chosen += lines[at : at + len(part)]
        at += len(part)
    return "\n".join(chosen) + "\n"


def _most_similar(line: str, lines: list[str], first: int) -> int:
    """Return the index of the line, at ``first`` or later, whose words are most similar to the words of ``line``.

    Raises:
        ValueError: no line reaches ``_MIN_SIMILARITY``.
    """
    words = _mask_numbers(line)
    ratios = {n: SequenceMatcher(None, words, _mask_numbers(lines[n])).ratio() for n in range(first, len(lines))}
    best = max(ratios, key=lambda n: ratios[n], default=first)
    if ratios.get(best, 0.0) < _MIN_SIMILARITY:
        raise ValueError(f"no line of the output has words similar to {line!r}:\n" + "\n".join(lines))
    return best


def _run(page: Path, line: int, kind: str, body: str, names: dict[str, Any]) -> str | None:
    if kind == "python":
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + body, page.name, "exec"), names)
        return printed.getvalue()
    if kind == "bash":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT)}
        command = ["bash", "-euo", "pipefail", "-c", body]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout
    return None


def _without_paths(output: str, folder: str) -> str:
    """Remove this machine's paths and trailing spaces from an output."""
    for path in (sysconfig.get_path("purelib"), str(_ROOT), folder):
        output = output.replace(f"{path}/", "").replace(path, ".")
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def _mask_numbers(text: str) -> str:
    """Replace the numbers of a text by ``#``, and each sequence of spaces by one space."""
    return " ".join(_NUMBER.sub("#", text).split())


def _pairs(before: str, after: str) -> list[tuple[str, str]]:
    return list(zip((m[2] for m in _BLOCK.finditer(before)), (m[2] for m in _BLOCK.finditer(after)), strict=True))


if __name__ == "__main__":
    sys.exit(main())
