"""Which lines of the compiler core the tests run: ``pytest --line-coverage``.

A trace function would be asked about every line of PyTorch's Python code too (tests of exports need 1.7 times the
processor time with coverage.py 7.17, 1.05 times with this), and Python 3.11 has no ``sys.monitoring`` yet. So a marker
is compiled in front of every statement, in the modules that are measured and nowhere else.

What runs in a process of its own is not seen here: ``APART``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import groupby
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "arm_backend_core"
APART = ("workers/reference_process.py", "workers/serving.py", "workers/vela_process.py")
"""Files of worker processes."""

_RUN = "__lines_that_ran__"


class LineCoverage:
    """Plugin that marks the lines that run, and shows at the end of the session those that did not."""

    def __init__(self) -> None:
        self._ran: dict[str, bytearray] = {}
        self._lines: dict[str, set[int]] = {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual specification of a module of the core, with a loader that marks lines; None for other modules."""
        if name.split(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._ran)
        return spec

    def _collect(self, lines: dict[str, list[int]]) -> None:
        for file, numbers in lines.items():
            self._lines.setdefault(file, set()).update(numbers)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Take the lines of this process; one of pytest-xdist's sends them to the first process."""
        marked = {file: [n for n, ran in enumerate(lines) if ran] for file, lines in self._ran.items()}
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is None:
            self._collect(marked)
        else:
            output["line_coverage"] = marked

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the lines of a process of pytest-xdist; one that crashed sent none."""
        self._collect(getattr(node, "workeroutput", {}).get("line_coverage", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show for each file what did not run."""
        missing, count = {}, 0
        for path in sorted((ROOT / PACKAGE).rglob("*.py")):
            name = str(path.relative_to(ROOT / PACKAGE))
            if name not in APART:
                statements = {statement.lineno for statement in _statements(ast.parse(path.read_text()))}
                count += len(statements)
                missing[name] = sorted(statements - self._lines.get(str(path), set()))
        left = sum(map(len, missing.values()))
        terminalreporter.section(f"{PACKAGE}: {count - left} of {count} statements ran, {1 - left / count:.2%}")
        for name, lines in missing.items():
            if lines:
                terminalreporter.write_line(f"{name}: {_ranges(lines)}")


class _Loader(SourceFileLoader):
    """Compiles markers into a module, past the cache of bytecode."""

    def __init__(self, name: str, path: str, ran: dict[str, bytearray]) -> None:
        super().__init__(name, path)
        self._ran = ran

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self._ran[self.path] = bytearray(source.count(b"\n") + 2)
        return compile(_marked(source.decode()), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        module.__dict__[_RUN] = self._ran[self.path]
        exec(code, module.__dict__)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, but for what only type checkers read."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not (name == "body" and _is_for_type_checkers(node)):
                yield block


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_counted(statement: ast.stmt) -> bool:
    """Not docstrings and ``...``, which do nothing, nor what must stand at the head of its block."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    return not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (statement for block in _blocks(tree) for statement in block if _is_counted(statement))


def _marked(source: str) -> ast.Module:
    """The syntax tree of a module that notes each statement in front of it; line numbers stay."""
    tree = ast.parse(source)
    for block in list(_blocks(tree)):
        block[:] = [line for statement in block for line in (*_marker(statement), statement)]
    return tree


def _marker(statement: ast.stmt) -> Iterable[ast.stmt]:
    if not _is_counted(statement):
        return ()
    (marker,) = ast.parse(f"{_RUN}[{statement.lineno}] = 1").body
    for node in ast.walk(marker):
        ast.copy_location(node, statement)
    return (marker,)


def _ranges(numbers: list[int]) -> str:
    """``3-5, 8`` for 3, 4, 5 and 8."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
