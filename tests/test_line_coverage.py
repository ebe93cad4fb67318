"""Line coverage: markers record the lines that ran and change nothing else."""

from __future__ import annotations

import traceback

import pytest

from tests import line_coverage

SOURCE = '''"""A module."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nowhere import Nothing

class Thing:
    """A class."""
    size: int = 3

    def __half(self, x: Nothing) -> float:
        """A method."""
        if x:
            return self.size / x
        elif x is None:
            return 1.0
        try:
            return self.size / x
        except ZeroDivisionError:
            return 0.0
        finally:
            x = 0

    def half(self, x: Nothing) -> float:
        return self.__half(x)
'''


def _record_lines(call: str) -> set[int]:
    ran = bytearray(SOURCE.count("\n") + 2)
    names = {line_coverage._RUN: ran}
    exec(compile(line_coverage._insert_markers(SOURCE), "thing.py", "exec"), names)
    definition = {line for line, hit in enumerate(ran) if hit}
    exec(call, names)
    return {line for line, hit in enumerate(ran) if hit} - definition


@pytest.mark.parametrize(
    ("argument", "lines"),
    [("2", {13, 14, 25}), ("None", {13, 15, 16, 25}), ("0", {13, 15, 17, 18, 20, 22, 25})],
)
def test_only_lines_of_the_taken_branch_are_recorded(argument: str, lines: set[int]) -> None:
    assert _record_lines(f"Thing().half({argument})") == lines


def test_tracebacks_keep_line_numbers() -> None:
    with pytest.raises(TypeError) as caught:
        _record_lines("Thing().half('a')")
    assert [frame.lineno for frame in traceback.extract_tb(caught.tb) if frame.filename == "thing.py"] == [25, 14]


def test_line_numbers_are_formatted_as_ranges() -> None:
    assert line_coverage._format_ranges([3, 4, 5, 8]) == "3-5, 8"
