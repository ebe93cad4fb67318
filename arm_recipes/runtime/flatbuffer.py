"""Flatbuffer reader for untrusted files: it checks every offset and bounds the work by the size of the file.

The classes that flatc generates do neither. They truncate a string that exceeds the file, and follow two million
references to the same table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U16, _U32, _I32, _F64 = (struct.Struct(f"<{kind}") for kind in "HIid")
#: Minimum size of a table and the reference to it, in a file that does not share tables.
_TABLE_BYTES = 16


class FlatbufferError(ValueError):
    """The bytes are not a flatbuffer, or a truncated one."""


class Flatbuffer:
    """The bytes of a flatbuffer, which are not copied.

    Args:
        data: the file, which begins with the offset of the root table.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._unread = len(data)

    @property
    def root(self) -> Table:
        """The root table."""
        return Table(self, self.target(0))

    def number(self, kind: struct.Struct, at: int) -> int:
        """Number at byte ``at``."""
        self.check(at, kind.size)
        number: int = kind.unpack_from(self.data, at)[0]
        return number

    def target(self, at: int) -> int:
        """Target of the reference at byte ``at``."""
        return at + self.number(_U32, at)

    def check(self, at: int, count: int) -> None:
        """Raise ``FlatbufferError`` unless the file has ``count`` bytes from ``at``."""
        if at < 0 or at + count > len(self.data):
            raise FlatbufferError(f"bytes {at:,} to {at + count:,} are needed, the file has {len(self.data):,}")

    def charge(self, count: int) -> None:
        """Charge ``count`` bytes against the size of the file: repeated references must not cause unbounded work."""
        self._unread -= count
        if self._unread < 0:
            raise FlatbufferError("its tables refer to more data than it has bytes")


class Table:
    """A table. Fields are numbered in the order of the schema; a union takes two numbers."""

    __slots__ = ("_at", "_buffer", "_vtable", "_vtable_bytes")

    def __init__(self, buffer: Flatbuffer, at: int) -> None:
        buffer.charge(_TABLE_BYTES)
        self._buffer, self._at = buffer, at
        self._vtable = at - buffer.number(_I32, at)
        self._vtable_bytes = buffer.number(_U16, self._vtable)

    def number(self, field: int, kind: str = "i") -> int:
        """Integer field of a ``struct`` format letter; 0 if absent, the default of all fields that we read."""
        at = self._find_field(field)
        return 0 if at is None else self._buffer.number(struct.Struct("<" + kind), at)

    def double(self, field: int) -> float:
        """Double field; 0 if absent."""
        at = self._find_field(field)
        return 0.0 if at is None else float(self._buffer.number(_F64, at))

    def table(self, field: int) -> Table | None:
        """Table field; None if absent."""
        at = self._find_field(field)
        return None if at is None else Table(self._buffer, self._buffer.target(at))

    def text(self, field: int) -> str:
        """String field; empty if absent."""
        at = self._find_field(field)
        return "" if at is None else _text(self._buffer, at)

    def view(self, field: int) -> memoryview:
        """View of a vector of bytes."""
        start, count = self.span(field)
        return self._buffer.data[start : start + count]

    def span(self, field: int) -> tuple[int, int]:
        """Start and length of a vector of bytes."""
        return self._find_vector(field, 1)

    def read_bytes(self, field: int) -> bytes:
        """Copy of a short vector of bytes."""
        view = self.view(field)
        self._buffer.charge(len(view))
        return bytes(view)

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """Vector of numbers of a ``struct`` format letter."""
        size = struct.calcsize("<" + kind)
        start, count = self._find_vector(field, size)
        self._buffer.charge(size * count)
        return struct.unpack_from(f"<{count}{kind}", self._buffer.data, start)

    def texts(self, field: int) -> tuple[str, ...]:
        """Vector of strings."""
        start, count = self._find_vector(field, _U32.size)
        self._buffer.charge(_U32.size * count)
        return tuple(_text(self._buffer, start + _U32.size * index) for index in range(count))

    def field_position(self, field: int) -> int | None:
        """Position of the field itself, which is a number or a reference; None if absent."""
        return self._find_field(field)

    def tables(self, field: int) -> Tables:
        """Vector of tables, which are read on access."""
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
    buffer.check(start, count + 1)  # including the terminating zero
    buffer.charge(count)
    try:
        return str(buffer.data[start : start + count], "utf-8")
    except UnicodeDecodeError:
        raise FlatbufferError(f"the text at byte {start:,} is not UTF-8") from None
