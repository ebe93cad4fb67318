"""Flatbuffer reader for untrusted files: it checks every offset, and the size of the file bounds its work.

The classes that flatc generates do neither. They silently truncate a string that ends beyond the file. If a damaged
vector has two million references to one table, they read the table two million times.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U16, _U32, _I32, _F64 = (struct.Struct(f"<{kind}") for kind in "HIid")
#: Number of bytes that ``count_read_bytes`` counts for each table that is read: about the size of a small table and a
#: reference to it.
_TABLE_BYTES = 16


class FlatbufferError(ValueError):
    """The bytes are not a flatbuffer, or the flatbuffer is truncated or damaged."""


class Flatbuffer:
    """A flatbuffer, which refers to the bytes of a file without a copy.

    Args:
        data: bytes of the file. They begin with the offset of the root table.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self._unread_bytes = len(data)

    @property
    def root(self) -> Table:
        """The root table."""
        return Table(self, self.target(0))

    def number(self, kind: struct.Struct, at: int) -> int:
        """Read the number at byte ``at``."""
        self.check(at, kind.size)
        number: int = kind.unpack_from(self.data, at)[0]
        return number

    def target(self, at: int) -> int:
        """Follow the reference at byte ``at``, and return the byte position of its target."""
        return at + self.number(_U32, at)

    def check(self, at: int, count: int) -> None:
        """Raise ``FlatbufferError`` unless the file contains the ``count`` bytes from ``at``."""
        if at < 0 or at + count > len(self.data):
            raise FlatbufferError(f"bytes {at:,} to {at + count:,} are needed, the file has {len(self.data):,}")

    def count_read_bytes(self, count: int) -> None:
        """Count ``count`` bytes as read.

        If several references have the same target, its bytes are counted once per reference. This bounds the work that
        a damaged file can cause.

        Raises:
            FlatbufferError: all reads together exceed the size of the file.
        """
        self._unread_bytes -= count
        if self._unread_bytes < 0:
            raise FlatbufferError("its tables refer to more data than it has bytes")


class Table:
    """A table. Fields are numbered in the order of the schema. A union is two fields: its type and its value."""

    __slots__ = ("_at", "_buffer", "_vtable", "_vtable_bytes")

    def __init__(self, buffer: Flatbuffer, at: int) -> None:
        buffer.count_read_bytes(_TABLE_BYTES)
        self._buffer, self._at = buffer, at
        self._vtable = at - buffer.number(_I32, at)
        self._vtable_bytes = buffer.number(_U16, self._vtable)

    def number(self, field: int, kind: str = "i") -> int:
        """Read an integer field in a ``struct`` format; 0, the schema default, if the field is absent."""
        at = self._find_field(field)
        return 0 if at is None else self._buffer.number(struct.Struct("<" + kind), at)

    def double(self, field: int) -> float:
        """Read a field of type double; 0 if absent."""
        at = self._find_field(field)
        return 0.0 if at is None else float(self._buffer.number(_F64, at))

    def table(self, field: int) -> Table | None:
        """Read a field that refers to a table; None if absent."""
        at = self._find_field(field)
        return None if at is None else Table(self._buffer, self._buffer.target(at))

    def text(self, field: int) -> str:
        """Read a string field; empty if absent."""
        at = self._find_field(field)
        return "" if at is None else _read_text(self._buffer, at)

    def view(self, field: int) -> memoryview:
        """View a field that is a vector of bytes."""
        start, count = self.span(field)
        return self._buffer.data[start : start + count]

    def span(self, field: int) -> tuple[int, int]:
        """Start and length, in bytes, of a field that is a vector of bytes."""
        return self._find_vector(field, 1)

    def read_bytes(self, field: int) -> bytes:
        """Copy a field that is a short vector of bytes."""
        view = self.view(field)
        self._buffer.count_read_bytes(len(view))
        return bytes(view)

    def numbers(self, field: int, kind: str) -> tuple[int, ...]:
        """Read a field that is a vector of numbers in a ``struct`` format."""
        size = struct.calcsize("<" + kind)
        start, count = self._find_vector(field, size)
        self._buffer.count_read_bytes(size * count)
        return struct.unpack_from(f"<{count}{kind}", self._buffer.data, start)

    def texts(self, field: int) -> tuple[str, ...]:
        """Read a field that is a vector of strings."""
        start, count = self._find_vector(field, _U32.size)
        self._buffer.count_read_bytes(_U32.size * count)
        return tuple(_read_text(self._buffer, start + _U32.size * index) for index in range(count))

    def field_position(self, field: int) -> int | None:
        """Byte position of the number or reference that a field holds; None if the field is absent."""
        return self._find_field(field)

    def tables(self, field: int) -> Tables:
        """Read a field that is a vector of tables. A table is read when it is accessed."""
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
    """A vector of tables, read on access."""

    def __init__(self, buffer: Flatbuffer, start: int, count: int) -> None:
        self._buffer, self._start, self._count = buffer, start, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Table:  # type: ignore[override]  # no slices
        if not 0 <= index < self._count:
            raise IndexError(index)
        return Table(self._buffer, self._buffer.target(self._start + _U32.size * index))


def _read_text(buffer: Flatbuffer, at: int) -> str:
    start = buffer.target(at)
    count = buffer.number(_U32, start)
    start += _U32.size
    buffer.check(start, count + 1)  # including the terminating zero
    buffer.count_read_bytes(count)
    try:
        return str(buffer.data[start : start + count], "utf-8")
    except UnicodeDecodeError:
        raise FlatbufferError(f"the text at byte {start:,} is not UTF-8") from None
