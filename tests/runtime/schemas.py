"""Compares field numbers in the sources with flatbuffer schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

_TABLE = re.compile(r"^table (\w+)\s*\{(.*?)^\}", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"(\w+)\s*:\s*(\w+|\[\w+\])[^;]*;")


def assert_fields_match(
    module: ModuleType, schema: str, fields_of: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """Check the classes of a module against the tables of a schema with their names (``Name`` or ``_Name``).

    Args:
        fields_of: classes that represent several tables; only the numbers of their members are compared.
    """
    known = tables(schema)
    combined = fields_of or {}
    checked = 0
    for name, numbers in _numbers(module).items():
        for table in combined.get(name, (name.removeprefix("_"),)):
            if table not in known:
                continue
            if name in combined:
                assert sorted(known[table].values()) == sorted(numbers.values()), table
            else:
                assert {field: known[table].get(field) for field in numbers} == numbers, table
            checked += len(numbers)
    assert checked > 5, "the classes are not found any more"


def _numbers(module: ModuleType) -> dict[str, dict[str, int]]:
    classes = {name: vars(value) for name, value in vars(module).items() if isinstance(value, type)}
    found = {
        name: {field: number for field, number in members.items() if type(number) is int}
        for name, members in classes.items()
        if members["__module__"] == module.__name__
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def tables(schema: str) -> dict[str, dict[str, int]]:
    """Return the field numbers of each table of a schema. A union has two: type and value."""
    text = re.sub(r"//[^\n]*", "", schema)
    unions = set(re.findall(r"^union (\w+)", text, re.MULTILINE))
    found = {}
    for name, body in _TABLE.findall(text):
        fields: dict[str, int] = {}
        number = 0
        for field, kind in _FIELD.findall(body):
            if kind in unions:
                fields[f"{field}_type"] = number
                number += 1
            fields[field] = number
            number += 1
        found[name] = fields
    return found
