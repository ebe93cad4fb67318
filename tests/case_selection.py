"""Selection of the cases of ``make test``: they execute the same statements as all tests, in a third of the time.

``make selection`` runs all tests that are not marked ``verify`` in their source and measures for each the seconds and
the lines of both packages that it executes (``--measure``). It records the selection in ``selected_cases.json``, and
digests of the other measured cases in ``unselected_cases.json``. The other cases are marked ``verify``. A case that is
in neither file is new: it runs.
"""

from __future__ import annotations

import gzip
import hashlib
import heapq
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cpp_suites import SUITES
from tests.line_coverage import ROOT, LineRecorder

RECORD = ROOT / "tests/selected_cases.json"
UNSELECTED = ROOT / "tests/unselected_cases.json"
_DIGEST_LENGTH = 6
#: What ``list_missing_cases`` returned, in the stash of pytest's configuration.
MISSING = pytest.StashKey[list[str]]()
#: A function runs all its cases if they take fewer seconds than this together.
_QUICK_FUNCTION = 1.0
#: A function runs a case if one takes fewer seconds than this, also if other tests execute the same statements.
_QUICK_CASE = 2.0
#: Functions that run a case in any case. They protect the tree, the start-up and the main uses.
_ALWAYS = (
    "tests/_internal/test_compile_lock.py::test_a_forked_process_in_which_operators_hang",
    "tests/models/test_models.py::test_int8_output_is_at_most_a_step_from_pytorchs",
    "tests/pipeline/test_methods.py::test_methods_that_reset_set_and_read_state",
    "tests/qat/test_prepared.py::test_models_trained_with_torchao_keep_their_quantization_exactly",
    "tests/test_architecture.py::test_functions_can_be_read_without_scrolling",
    "tests/test_architecture.py::test_no_import_of_executorchs_arm_backend",
    "tests/test_architecture.py::test_only_listed_graph_walks_are_recursive",
    "tests/test_coexistence.py::test_no_module_of_the_other_backend_is_loaded",
    "tests/test_documentation.py::test_the_site_is_built_without_a_warning",
    "tests/test_plain_flow.py::test_several_methods",
    "tests/test_provider.py::test_imports_load_only_what_they_need",
    "tests/test_provider.py::test_imports_of_third_parties_are_silent",
    "tests/test_wheel.py::test_the_wheel_has_the_sources_of_all_backends",
)


@dataclass(frozen=True)
class Measured:
    """A test: its function (``tests/ops/test_ops.py::test_float``), case, seconds, and lines (``path:line``)."""

    function: str
    case: str
    seconds: float
    lines: frozenset[str]


def mark_unselected(items: Iterable[pytest.Item]) -> None:
    """Mark the measured cases that are not selected with ``verify``."""
    selected, unselected = _read(), {name: _split_digests(text) for name, text in _read_unselected().items()}
    for item in items:
        function, case = split_name(item.nodeid)
        if case not in selected.get(function, (case,)) and digest_case(case) in unselected.get(function, ()):
            item.add_marker(pytest.mark.verify)


def digest_case(case: str) -> str:
    """A short digest of a case: the ids of all cases would take megabytes."""
    return hashlib.blake2b(case.encode(), digest_size=_DIGEST_LENGTH // 2).hexdigest()


def digest_unselected(tests: Iterable[tuple[str, str]], selection: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The digests, joined, of the cases that are not in ``selection``, by function.

    Args:
        tests: (function, case) of all tests.
        selection: the result of ``select_cases``.
    """
    digests: dict[str, set[str]] = {}
    for function, case in tests:
        if case not in selection.get(function, (case,)):
            digests.setdefault(function, set()).add(digest_case(case))
    return {function: "".join(sorted(digests[function])) for function in sorted(digests)}


def _split_digests(text: str) -> frozenset[str]:
    return frozenset(text[start : start + _DIGEST_LENGTH] for start in range(0, len(text), _DIGEST_LENGTH))


def list_missing_cases(items: Iterable[pytest.Item]) -> list[str]:
    """The recorded functions and cases that are not among all tests."""
    present = {split_name(item.nodeid) for item in items}
    functions = {function for function, _ in present}
    missing = [function for function, cases in _read().items() if not cases and function not in functions]
    recorded = {(function, case) for function, cases in _read().items() for case in cases}
    return missing + [f"{function}[{case}]" for function, case in sorted(recorded - present)]


def select_cases(tests: Sequence[Measured]) -> dict[str, list[str]]:
    """Select cases: of each function that does not run all of them, the cases that run.

    The union of their lines is that of all ``tests``. The cases that are not needed for that are one of each function
    that has a quick one or is in ``_ALWAYS``, and all of functions that are quick with all of them.
    """
    functions: dict[str, list[Measured]] = {}
    for test in tests:
        functions.setdefault(test.function, []).append(test)
    quick = {name for name, cases in functions.items() if sum(case.seconds for case in cases) < _QUICK_FUNCTION}
    chosen = [test for test in tests if test.function in quick]
    chosen += _cover(
        set().union(*(test.lines for test in chosen)), [test for test in tests if test.function not in quick]
    )
    for name in functions.keys() - {test.function for test in chosen}:
        cheapest = min(functions[name], key=lambda test: test.seconds)
        if cheapest.seconds < _QUICK_CASE or name in _ALWAYS:
            chosen.append(cheapest)
    cases: dict[str, list[str]] = {name: [] for name in sorted(functions)}
    for test in chosen:
        cases[test.function].append(test.case)
    return {name: sorted(kept) for name, kept in cases.items() if len(kept) < len(functions[name])}


def _cover(covered: set[str], tests: Sequence[Measured]) -> Iterator[Measured]:
    """Yield tests until ``covered`` has the lines of all: the next one has most new lines a second.

    The greedy algorithm of weighted set cover (Chvatal, 1979). A gain only shrinks, so that it is computed anew for
    the first of the queue only.
    """
    queue = [(-len(test.lines - covered) / test.seconds, number) for number, test in enumerate(tests)]
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        test = tests[number]
        gain = len(test.lines - covered) / test.seconds
        if not gain:
            continue
        if queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, number))
            continue
        covered |= test.lines
        yield test


class Measure:
    """Pytest plugin of ``--measure FOLDER``: writes a line of JSON per test into a compressed file per process."""

    def __init__(self, folder: Path) -> None:
        self._recorder = LineRecorder("arm_backend_core", "arm_recipes")
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure the test with its fixtures. What an earlier test has computed and cached is measured there only."""
        self._recorder.reset()
        start = time.monotonic()
        result = yield
        function, case = split_name(item.nodeid)
        lines = {str(Path(path).relative_to(ROOT)): n for path, n in self._recorder.executed_lines().items()}
        line = {"function": function, "case": case, "seconds": time.monotonic() - start, "lines": lines}
        with gzip.open(self._folder / f"{os.getpid()}.jsonl.gz", "at") as file:
            file.write(f"{json.dumps(line)}\n")
        return result


def read_measured(folder: Path) -> Iterator[Measured]:
    """Yield the tests that ``--measure`` wrote, except those of ``cpp_suites``."""
    names = {f"{file}::{name}" for file, functions in SUITES.items() for name in functions}
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            for line in map(json.loads, file):
                if line["function"] not in names:
                    lines = frozenset(f"{name}:{n}" for name, numbers in line["lines"].items() for n in numbers)
                    yield Measured(line["function"], line["case"], line["seconds"], lines)


def split_name(nodeid: str) -> tuple[str, str]:
    """The function of a test, and the id of its case (empty for a test without parameters)."""
    function, _, case = nodeid.partition("[")
    return function.partition("@")[0], case.rpartition("]")[0]  # pytest-xdist appends @ and the group


def main() -> None:
    """``python -m tests.case_selection FOLDER``: record the selection."""
    tests = list(read_measured(Path(sys.argv[1])))
    selection = select_cases(tests)
    _write(RECORD, selection)
    _write(UNSELECTED, digest_unselected(((test.function, test.case) for test in tests), selection))
    kept = [test for test in tests if test.case in selection.get(test.function, (test.case,))]
    for count, what in ((len(tests), "measured"), (len(kept), "selected")):
        seconds = sum(test.seconds for test in (tests if what == "measured" else kept))
        print(f"{count} tests {what}, {seconds:.0f} s")
    for name, cases in selection.items():
        if not cases:
            print(f"no case: {name}")


def _write(path: Path, content: Mapping[str, object]) -> None:
    rows = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in content.items())
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _read() -> Mapping[str, Sequence[str]]:
    content: dict[str, list[str]] = json.loads(RECORD.read_text())
    return content


def _read_unselected() -> Mapping[str, str]:
    content: dict[str, str] = json.loads(UNSELECTED.read_text())
    return content


if __name__ == "__main__":
    main()
