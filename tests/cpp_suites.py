"""Tests that compile C++ for devices, or compile the plugin again. ``make test`` runs them if a source has changed.

Their builds take a third of the time of all other tests, and few sources of the tree determine their results.
``--cpp-suites``, a part of ``make verify``, runs all of them and records the digest of these sources in
``cpp_suites.sha256`` if they pass. A new compiler or a new release of ExecuTorch does not change the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/cpp_suites.sha256"
#: Files and folders of the compiled sources, of the code that generates some of them, and of the tests.
SOURCES = (
    "arm_recipes/firmware",
    "arm_recipes/runtime/build.py",
    "runtime",
    "tests/firmware",
    "tests/runtime/child_processes.py",
    "tests/runtime/cpp_build.py",
    "tests/runtime/firmware.py",
    "tests/runtime/test_cortex_m.py",
    "tests/runtime/test_ethosu_linux.py",
    "tests/runtime/test_firmware.py",
    "tests/runtime/test_host_backends.py",
    "tests/runtime/test_vgf_backend.py",
)
#: Test functions by file.
SUITES = {
    "tests/firmware/test_board_files.py": (
        "test_sections_are_in_the_memories_of_the_board",
        "test_the_link_fails_if_the_npu_does_not_reach_its_scratch",
        "test_zephyr_places_the_sections_that_its_linker_script_does_not",
    ),
    "tests/firmware/test_device.py": (
        "test_a_program_and_its_data_file_on_a_cortex_m55",
        "test_files_of_different_exports_are_detected",
        "test_int8_kernels_on_a_cortex_m55",
        "test_planned_memories_on_a_cortex_m55",
        "test_sections_of_the_folder_in_the_boards_linker_script",
        "test_the_self_test_on_a_cortex_m55",
    ),
    "tests/firmware/test_host_run.py": ("test_no_access_is_beyond_a_pool",),
    "tests/firmware/test_render_templates.py": (
        "test_c_compiles_without_a_warning",
        "test_scratch_memory_for_another_instruction_set_does_not_compile",
        "test_the_self_test_compiles_with_the_assumed_type_sizes",
        "test_zephyr_sources_compile",
    ),
    "tests/runtime/test_cortex_m.py": (
        "test_a_missing_path_is_named",
        "test_backend_with_a_driver_double",
        "test_cross_compiles_without_heap_and_exceptions",
    ),
    "tests/runtime/test_ethosu_linux.py": ("test_cpp_tests_of_the_backend_pass", "test_exported_program"),
    "tests/runtime/test_firmware.py": (
        "test_128_bit_arithmetic_without_a_compiler_type",
        "test_errors_are_printed",
        "test_program_with_fast_scratch_runs_on_the_device",
        "test_the_device_gives_the_numbers_of_this_machine",
    ),
    "tests/runtime/test_host_backends.py": (
        "test_concurrent_processes_build_the_plugin_once",
        "test_interpreter_exits_without_error_while_programs_are_alive",
    ),
    "tests/runtime/test_vgf_backend.py": (
        "test_damaged_payloads_raise",
        "test_float_program_agrees_with_the_reference_model",
        "test_int8_program_has_the_reference_models_bits",
        "test_missing_driver_and_layer_raise",
        "test_missing_loader_is_named",
        "test_second_copy_of_the_plugin_is_refused",
        "test_wrong_inputs_raise",
    ),
}


def compute_digest(root: Path = ROOT) -> str:
    """The SHA-256 of names and contents of ``SOURCES``, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(_list_files(root)):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def is_unchanged() -> bool:
    """Whether all tests of ``SUITES`` have passed with these sources."""
    return RECORD.read_text().strip() == compute_digest()


def select_suites(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The items that are tests of ``SUITES``."""
    return [item for item in items if _name(item) in SUITES.get(item.path.relative_to(ROOT).as_posix(), ())]


def mark_unchanged(items: Iterable[pytest.Item]) -> None:
    """Mark the tests of ``SUITES`` with ``verify`` if they have passed with these sources."""
    if (selected := select_suites(items)) and is_unchanged():
        for item in selected:
            item.add_marker(pytest.mark.verify)


class RecordDigest:
    """Pytest plugin of ``--cpp-suites``: runs the tests of ``SUITES`` only, all cases, and records the digest."""

    def __init__(self) -> None:
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the names of functions with a case that passed."""
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid.split("[")[0].split("@")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the other tests."""
        selected = select_suites(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = selected

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Record the digest of the sources if all tests have passed."""
        functions = {f"{file}::{name}" for file, names in SUITES.items() for name in names}
        is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist: it runs some of the tests
        if exitstatus == pytest.ExitCode.OK and self._passed >= functions and not is_worker:
            RECORD.write_text(f"{compute_digest()}\n")


def _name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def _list_files(root: Path) -> Iterator[Path]:
    for source in SOURCES:
        path = root / source
        if not path.exists():
            raise FileNotFoundError(f"{source}, a source of the C++ tests, does not exist: update tests/cpp_suites.py")
        files = path.rglob("*") if path.is_dir() else [path]
        yield from (file for file in files if file.is_file() and file.suffix not in (".md", ".pyc"))
