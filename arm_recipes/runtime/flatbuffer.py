"""Reads flatbuffers that may be damaged: every offset is checked, and the work is bounded by the file's size.

The classes that flatc generates check neither: they cut a string that goes past the end, and follow two million
references to one table as gladly as two.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U16, _U32, _I32, _F64 = (struct.Struct(f"<{kind}") for kind in "HIid")
#: The least that a table and the reference to it take in a file that was written without sharing.
_TABLE_BYTES = 16


class FlatbufferError(ValueError):
    """The bytes are no flatbuffer, or only a part of one."""


class Flatbuffer:
    """The bytes of a flatbuffer. Nothing is copied.

    Args:
        data: from the offset of the root table on.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._unread = len(data)

    @property
    def root(self) -> Table:
        """The outermost table."""
        return Table(self, self.target(0))

    def number(self, kind: struct.Struct, at: int) -> int:
        """The number at byte ``at``."""
        self.check(at, kind.size)
        number: int = kind.unpack_from(self.data, at)[0]
        return number

    def target(self, at: int) -> int:
        """Where the reference at byte ``at`` points to."""
        return at + self.number(_U32, at)

    def check(self, at: int, count: int) -> None:
        """Raises ``FlatbufferError`` unless ``count`` bytes from ``at`` on are there."""
        if at < 0 or at + count > len(self.data):
            raise FlatbufferError(f"bytes {at:,} to {at + count:,} are needed, there are {len(self.data):,}")

    def charge(self, count: int) -> None:
        """Note that ``count`` bytes are read. References can make a small file look endless; this ends it."""
        self._unread -= count
        if self._unread < 0:
            raise FlatbufferError("its tables refer to more data than it has bytes")


class Table:
    """A table; its fields are numbered as the schema lists them, a union taking two numbers."""

    __slots__ = ("_at", "_buffer", "_vtable", "_vtable_bytes")

    def __init__(self, buffer: Flatbuffer, at: int) -> None:
        buffer.charge(_TABLE_BYTES)
        self._buffer, self._at = buffer, at
        self._vtable = at - buffer.number(_I32, at)
        self._vtable_bytes = buffer.number(_U16, self._vtable)

    def number(self, field: int, kind: str = "i") -> int:
        """An integer by its ``struct`` letter; 0 if it is absent, which is the default of all that we read."""
        at = self._find_field(field)
        return 0 if at is None else self._buffer.number(struct.Struct("<" + kind), at)

    def double(self, field: int) -> float:
        """A double; 0 if it is absent."""
        at = self._find_field(field)
        return 0.0 if at is None else float(self._buffer.number(_F64, at))

    def table(self, field: int) -> Table | None:
        """A table, None if it is absent."""
        at = self._find_field(field)
        return None if at is None else Table(self._buffer, self._buffer.target(at))

    def text(self, field: int) -> str:
        """A string, empty if it is absent."""
        at = self._find_field(field)
        return "" if at is None else _text(self._buffer, at)

    def view(self, field: int) -> memoryview:
        """A vector of bytes, not copied."""
        start, count = self.span(field)
        return self._buffer.data[start : start + count]

    def span(self, field: int) -> tuple[int, int]:
        """Where a vector of bytes begins, and how many there are."""
        return self._find_vector(field, 1)

    def read_bytes(self, field: int) -> bytes:
        """A short vector of bytes."""
        view = self.view(field)
        self._buffer.charge(len(view))
        return bytes(view)

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """A vector of numbers by their ``struct`` letter."""
        size = struct.calcsize("<" + kind)
        start, count = self._find_vector(field, size)
        self._buffer.charge(size * count)
        return struct.unpack_from(f"<{count}{kind}", self._buffer.data, start)

    def texts(self, field: int) -> tuple[str, ...]:
        """A vector of strings."""
        start, count = self._find_vector(field, _U32.size)
        self._buffer.charge(_U32.size * count)
        return tuple(_text(self._buffer, start + _U32.size * index) for index in range(count))

    def field_position(self, field: int) -> int | None:
        """Where the field itself is: the number, or the reference to what it holds; None if it is absent."""
        return self._find_field(field)

    def tables(self, field: int) -> Tables:
        """A vector of tables, each read when it is taken."""
        return Tables(self._buffer, *self._find_vector(field, _U32.size))

    def _find_field(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._vtable_bytes:
            return None
        offset = self._buffer.number(_U16, self._vtable + slot)
        return self._at + offset if offset else None

    def _find_vector(self, field: int, size: int) -> tuple[int, int]:
        at = self._find_field(field)
        if at is None:
            return 0, 0
        start = self._buffer.target(at)
        count = self._buffer.number(_U32, start)
        self._buffer.check(start + _U32.size, size * count)
        return start + _U32.size, count


class Tables(Sequence[Table]):
    """A vector of tables."""

    def __init__(self, buffer: Flatbuffer, start: int, count: int) -> None:
        self._buffer, self._start, self._count = buffer, start, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Table:  # type: ignore[override]  # no slices
        if not 0 <= index < self._count:
            raise IndexError(index)
        return Table(self._buffer, self._buffer.target(self._start + _U32.size * index))


def _text(buffer: Flatbuffer, at: int) -> str:
    start = buffer.target(at)
    count = buffer.number(_U32, start)
    start += _U32.size
    buffer.check(start, count + 1)  # the zero after it, too
    buffer.charge(count)
    try:
        return str(buffer.data[start : start + count], "utf-8")
    except UnicodeDecodeError:
        raise FlatbufferError(f"the text at byte {start:,} is not UTF-8") from None
