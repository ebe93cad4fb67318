"""Configures all tests: one thread and fixed random seeds in each worker of pytest-xdist."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# Read once, when the native libraries are loaded: before torch and numpy are imported. Two workers on two
# cores with a thread pool each would only wait for one another.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault(
    "ARM_BACKEND_CORE_STRICT", "1"
)  # a compiler fault raises an exception instead of refusing the operator
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the transformers models are built from configurations only

if shutil.which("ccache"):  # workers, tests and later runs compile the same C++, most of them in a folder of their own
    for _variable, _value in {
        "CCACHE_DIR": str(Path(__file__).parents[1] / "build/ccache"),
        "CCACHE_BASEDIR": tempfile.gettempdir(),
        "CCACHE_NOHASHDIR": "1",
        "CMAKE_C_COMPILER_LAUNCHER": "ccache",
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
    }.items():
        os.environ.setdefault(_variable, _value)

import random

import numpy as np
import pytest
import torch

from tests.case_selection import MISSING, Measure, list_missing_cases, mark_unselected
from tests.cpp_suites import RecordDigest, mark_unchanged
from tests.line_coverage import LineCoverage
from tests.verify_only import mark_tests_with_verify_cases

if TYPE_CHECKING:
    from tests.runtime.ethosu_emulator import Emulator

torch.set_num_threads(1)

#: Names of test arguments that hold (a part of) a message.
_MESSAGE_ARGUMENTS = ("advice", "error", "match", "message", "note", "problem", "reason", "remedy", "text", "warning")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="record the figures of tests/models/expectations.json anew")
    parser.addoption("--verify", action="store_true", help="run Ethos-U programs of all NPUs and models, not of some")
    parser.addoption(
        "--cpp-suites", action="store_true", help="run the tests of tests/cpp_suites.py; record that they pass"
    )
    parser.addoption("--measure", metavar="FOLDER", help="measure all tests for tests/case_selection.py")
    parser.addoption("--line-coverage", action="store_true", help="show which lines of the core no test ran")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("line_coverage"):
        config.pluginmanager.register(LineCoverage())
    if folder := config.getoption("measure"):
        config.pluginmanager.register(Measure(Path(folder)))
    if config.getoption("cpp_suites"):
        config.option.verify = True
        config.pluginmanager.register(RecordDigest())


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Leave messages out of the ids of cases: a reworded message would rename its case in ``selected_cases.json``."""
    return argname if isinstance(val, str) and argname in _MESSAGE_ARGUMENTS else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``verify`` without ``--verify``. Schedule xdist groups first: they are the longest jobs."""
    is_complete = {item.path for item in items} >= set(Path(__file__).parent.rglob("test_*.py"))
    config.stash[MISSING] = list_missing_cases(items) if is_complete else []
    if not config.getoption("measure"):
        mark_unselected(items)
    if config.getoption("verify"):
        mark_tests_with_verify_cases(items)
    else:
        mark_unchanged(items)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    if not config.getoption("verify"):
        left_out = {item for item in items if item.get_closest_marker("verify")}
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Set the seeds before a test module is imported: many draw weights for their cases then."""
    if isinstance(collector, pytest.Module):
        _set_seeds()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    _set_seeds()


def _set_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    """The Ethos-U emulator of the host plugin."""
    from tests.runtime.ethosu_emulator import Emulator  # not earlier: --line-coverage instruments its imports

    return Emulator()


@pytest.fixture(scope="session")
def accelerators(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """The NPUs to compile for: those of ``make test``, or more with ``--verify``."""
    from tests.accelerators import ACCELERATORS, VERIFY_ACCELERATORS

    return (*ACCELERATORS, *VERIFY_ACCELERATORS) if pytestconfig.getoption("verify") else ACCELERATORS
