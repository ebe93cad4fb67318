"""Docstrings name exceptions and parameters that exist: renaming tools do not update docstrings."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.import_graph import CORE, RECIPES, list_sources, module_name, parse

FILES = [path for package in (CORE, RECIPES) for path in list_sources(package)]


def _defined(path: Path) -> Iterator[str]:
    """Names of the classes and modules that a file defines or imports."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)


@cache
def _known() -> set[str]:
    """All names that a docstring may refer to; found when a test runs, not when pytest collects it in each worker."""
    return {*dir(builtins), *(name for path in FILES for name in _defined(path))}


def _entries(docstring: str, section: str) -> list[str]:
    """The names before the colons of a section, one or several an entry."""
    body = re.search(rf"^{section}:\n((?:    .*(?:\n|$)|\n)*)", docstring, re.MULTILINE)
    entries = re.findall(r"^    (\*{0,2}\w[\w.,* ]*):", body[1], re.MULTILINE) if body else []
    return [name.strip("* ") for entry in entries for name in entry.split(",")]


def _documented(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and (
            text := ast.get_docstring(node)
        ):
            yield node, text


def test_exceptions_in_docstrings_exist() -> None:
    unknown = [
        f"{module_name(path)}: {name}"
        for path in FILES
        for _, text in _documented(path)
        for name in _entries(text, "Raises")
        if name.split(".")[0] not in _known()
    ]
    assert unknown == []


def test_arguments_in_docstrings_exist() -> None:
    unknown = [
        f"{module_name(path)}.{node.name}: {name}"
        for path in FILES
        for node, text in _documented(path)
        if isinstance(node, ast.FunctionDef)
        for name in _entries(text, "Args")
        if name not in _parameters(node)
    ]
    assert unknown == []


def _parameters(function: ast.FunctionDef) -> set[str]:
    arguments = function.args
    every = *arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg
    return {argument.arg for argument in every if argument is not None}
