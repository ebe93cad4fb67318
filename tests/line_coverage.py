"""Line coverage of the compiler core: ``pytest --line-coverage``.

A trace function would also be called for every line of PyTorch's Python code (coverage.py 7.17 needs 1.7 times the
processor time in tests of exports, this plugin 1.05 times), and Python 3.11 has no ``sys.monitoring``. Instead, the
measured modules, and only these, are compiled with a marker in front of every statement.

Code of worker processes is not measured: ``WORKER_FILES``.
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
WORKER_FILES = (
    "alternatives/parallel_compile.py",
    "workers/reference_process.py",
    "workers/request_loop.py",
    "workers/vela_process.py",
)
"""Files that only worker processes execute."""

_RUN = "__lines_that_ran__"


class LineRecorder:
    """Finder of modules that records which lines of some packages run. Install it before their import."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self._ran: dict[str, bytearray] = {}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual specification of a module of the packages, with a loader that marks lines; None for others."""
        if name.split(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self._ran)
        return spec

    def reset(self) -> None:
        """Forget the lines that ran."""
        for lines in self._ran.values():
            lines[:] = bytes(len(lines))

    def executed_lines(self) -> dict[str, list[int]]:
        """The lines that ran, by path."""
        return {
            file: numbers for file, lines in self._ran.items() if (numbers := [n for n, ran in enumerate(lines) if ran])
        }


class LineCoverage:
    """Pytest plugin that records the executed lines, and reports the others at the end of the session."""

    def __init__(self) -> None:
        self._recorder = LineRecorder(PACKAGE)
        self._lines: dict[str, set[int]] = {}

    def _collect(self, lines: dict[str, list[int]]) -> None:
        for file, numbers in lines.items():
            self._lines.setdefault(file, set()).update(numbers)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Collect the lines of this process; a pytest-xdist worker sends them to the main process."""
        executed = self._recorder.executed_lines()
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is None:
            self._collect(executed)
        else:
            output["line_coverage"] = executed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the lines of a pytest-xdist worker; a crashed worker sent none."""
        self._collect(getattr(node, "workeroutput", {}).get("line_coverage", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report the lines of each file that did not run."""
        missing, count = {}, 0
        for path in sorted((ROOT / PACKAGE).rglob("*.py")):
            name = str(path.relative_to(ROOT / PACKAGE))
            if name not in WORKER_FILES:
                statements = {statement.lineno for statement in _statements(ast.parse(path.read_text()))}
                count += len(statements)
                missing[name] = sorted(statements - self._lines.get(str(path), set()))
        left = sum(map(len, missing.values()))
        terminalreporter.section(f"{PACKAGE}: {count - left} of {count} statements ran, {1 - left / count:.2%}")
        for name, lines in missing.items():
            if lines:
                terminalreporter.write_line(f"{name}: {_format_ranges(lines)}")


class _Loader(SourceFileLoader):
    """Loader that compiles markers into a module and bypasses the bytecode cache."""

    def __init__(self, name: str, path: str, ran: dict[str, bytearray]) -> None:
        super().__init__(name, path)
        self._ran = ran

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self._ran[self.path] = bytearray(source.count(b"\n") + 2)
        return compile(_insert_markers(source.decode()), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        code = self.get_code(module.__name__)
        module.__dict__[_RUN] = self._ran[self.path]
        exec(code, module.__dict__)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, except those for type checkers only."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not (name == "body" and _is_for_type_checkers(node)):
                yield block


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_counted(statement: ast.stmt) -> bool:
    """Whether a statement counts: not docstrings, ``...`` and imports of ``__future__``."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return False
    return not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (statement for block in _blocks(tree) for statement in block if _is_counted(statement))


def _insert_markers(source: str) -> ast.Module:
    """Parse a module and insert a marker in front of each statement; line numbers stay."""
    tree = ast.parse(source)
    for block in list(_blocks(tree)):
        block[:] = [line for statement in block for line in (*_make_marker(statement), statement)]
    return tree


def _make_marker(statement: ast.stmt) -> Iterable[ast.stmt]:
    if not _is_counted(statement):
        return ()
    (marker,) = ast.parse(f"{_RUN}[{statement.lineno}] = 1").body
    for node in ast.walk(marker):
        ast.copy_location(node, statement)
    return (marker,)


def _format_ranges(numbers: list[int]) -> str:
    """Format line numbers: ``3-5, 8`` for 3, 4, 5 and 8."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
