"""The host plugin: building, installation, exceptions, threads and the end of the process."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, RunError, RuntimeUnavailable, load
from arm_recipes.runtime import build, host_backends, host_plugin
from tests.runtime import child_processes
from tests.runtime.child_processes import run_in_child, start_in_child
from tests.runtime.cpp_build import ROOT
from tests.runtime.host_programs import export_small
from tests.small_models import images

#: The tests run in one xdist worker, so that they share worker processes and exported programs.
pytestmark = pytest.mark.xdist_group("child_processes")

TOSA, VGF, NPU = ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8, ArmRecipeType.ETHOSU_U85_INT8


def _are_equal(results: list[Any], expected: list[Any]) -> bool:
    return len(results) == len(expected) and all(map(np.array_equal, results, expected))


# Installing.


def test_installing_again_changes_nothing() -> None:
    executors = host_backends.register_backends()
    assert host_backends.register_backends() is executors
    assert run_in_child(child_processes.install_copies_then_plugin, [], 3) == []


def test_second_copy_of_the_plugin_is_refused_and_programs_still_run(tmp_path: Path) -> None:
    copy = shutil.copy(build.build_plugin(), tmp_path / "copy.so")
    (x,) = images(1)[0]
    messages, outputs = run_in_child(
        child_processes.install_plugin_then_copy_twice, str(copy), export_small(TOSA).buffer, x
    )
    assert len(messages) == 2
    for text in messages:
        assert text.startswith("something else in this process implements TOSABackend already: another copy of the")
    assert torch.equal(torch.from_numpy(outputs[0]), load(export_small(TOSA).buffer).execute(x)[0])


def test_plugin_is_refused_after_another_implementation(tmp_path: Path) -> None:
    copies = [str(shutil.copy(build.build_plugin(), tmp_path / f"copy{number}.so")) for number in range(2)]
    with pytest.raises(
        RuntimeUnavailable,
        match="in this process cannot be used: something else in this process implements TOSABackend already",
    ):
        run_in_child(child_processes.install_copies_then_plugin, copies)


def test_second_installation_of_one_library_is_refused() -> None:
    path = str(build.build_plugin())
    with pytest.raises(RuntimeUnavailable, match="this copy of the Arm host plugin is installed already"):
        run_in_child(child_processes.install_copies_then_plugin, [path])


def test_unknown_backend_id_is_refused() -> None:
    with pytest.raises(RuntimeUnavailable, match="the plugin has no backend 'OtherBackend'"):
        host_backends._call_or_raise(host_plugin.load_plugin().arm_host_set_executor, b"OtherBackend", None)


# Building.


def _without_compiler(folder: Path) -> dict[str, str | None]:
    """Environment variables: an empty cache, and a PATH without programs."""
    empty = folder / "bin"
    empty.mkdir(exist_ok=True)
    return {"PATH": str(empty), "CXX": None, "XDG_CACHE_HOME": str(folder / "cache")}


def _write_executable(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


def _run_in_child(environment: Mapping[str, str | None]) -> None:
    """Load and run a small program in a child process with these environment variables."""
    run_in_child(child_processes.run, export_small(TOSA).buffer, *images(1)[0], environment=environment)


def test_missing_compiler_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        _run_in_child(_without_compiler(tmp_path))
    assert re.search(
        r"needs a C\+\+17 compiler, which builds the plugin for ExecuTorch's runtime once, "
        r"and none of g\+\+, clang\+\+, c\+\+ is on PATH\. Install one \(Debian: apt-get install g\+\+\), "
        r"or set CXX\. "
        "Exporting does not need it",
        str(caught.value),
    )


def test_nonexistent_cxx_is_an_error(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(RuntimeUnavailable, match="and CXX='no-such-compiler' does not exist"):
        _run_in_child(environment)


def test_cxx_may_have_a_launcher_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "my launcher"
    _write_executable(launcher, '#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"'{launcher}' g++ -O0")
    assert build.build_plugin().read_text().startswith("g++ -O0 -std=c++17 ")
    monkeypatch.setenv("CXX", "'")
    with pytest.raises(RuntimeUnavailable, match="CXX=' cannot be read as a command: No closing quotation"):
        build.build_plugin()


def test_export_needs_no_compiler(tmp_path: Path) -> None:
    exported, messages = run_in_child(child_processes.export_and_run, environment=_without_compiler(tmp_path))
    assert exported > 1000
    assert "needs a C++17 compiler" in messages
    assert not (tmp_path / "cache").exists()


def test_failing_compiler_is_an_error_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"the plugin for ExecuTorch's runtime failed:\n/.*false -std"):
        _run_in_child({"CXX": "false", "XDG_CACHE_HOME": str(tmp_path)})
    loud = tmp_path / "loud"
    _write_executable(loud, "#!/bin/sh\necho no such option: -std=c++17 >&2\nexit 1\n")
    with pytest.raises(RuntimeUnavailable, match=r"failed:\n.*loud -std=c\+\+17 .*\nno such option: -std=c\+\+17$"):
        _run_in_child({"CXX": str(loud), "XDG_CACHE_HOME": str(tmp_path)})
    assert list((tmp_path / "arm-recipes").iterdir()) == []  # no partial output is left


def test_compiler_output_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    _write_executable(wrong, '#!/bin/sh\nfor last; do :; done\necho text > "$last"\n')
    with pytest.raises(RuntimeUnavailable, match=r"The plugin for .* cannot be loaded: .*file too short"):
        _run_in_child({"CXX": str(wrong), "XDG_CACHE_HOME": str(tmp_path)})


def test_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "arm-recipes").write_text("a file where the folder should be")
    message = (
        rf"cannot write to the cache '{tmp_path}/arm-recipes': File exists\. Set XDG_CACHE_HOME to a writable folder"
    )
    with pytest.raises(RuntimeUnavailable, match=message):
        _run_in_child({"XDG_CACHE_HOME": str(tmp_path)})


def test_concurrent_processes_build_the_plugin_once(tmp_path: Path) -> None:
    """Two processes at the same time, of which one compiles, then one without a compiler."""
    cache: dict[str, str | None] = {"XDG_CACHE_HOME": str(tmp_path)}
    (x,) = images(1)[0]
    program = export_small(TOSA).buffer
    expected = load(program).execute(x)[0].numpy()
    both = [start_in_child(child_processes.build_and_run, program, x, environment=cache) for _ in range(2)]
    answers = [answer() for answer in both]
    answers.append(
        run_in_child(child_processes.build_and_run, program, x, environment=_without_compiler(tmp_path) | cache)
    )
    for path, (output,) in answers:
        assert Path(path).parent == tmp_path / "arm-recipes"
        assert np.array_equal(output, expected)
    assert len({path for path, _ in answers}) == 1
    assert [str(file) for file in (tmp_path / "arm-recipes").iterdir()] == [answers[0][0]]


def test_only_one_of_two_concurrent_builds_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes: each opens the folder, so that each needs the lock."""
    linked: list[str] = []

    def compile_slowly(what: str, command: Sequence[str]) -> None:
        time.sleep(0.05)
        if "-c" not in command:
            linked.append(command[-1])
            Path(command[-1]).touch()

    monkeypatch.setattr(build, "_run_compiler", compile_slowly)
    arguments = "a library", build._executorch_folder(), tmp_path / "cache/library.so", [Path("a.cpp")], ()
    threads = [threading.Thread(target=build._build_binary, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(linked) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["library.so"]


def test_changed_source_changes_the_cache_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build._cache_key(build._executorch_folder())
    sources = shutil.copytree(build.CPP_FOLDER, tmp_path / "cpp", ignore=shutil.ignore_patterns("tests"))
    monkeypatch.setattr(build, "CPP_FOLDER", Path(sources))
    assert build._cache_key(build._executorch_folder()) == before
    with (tmp_path / "cpp/host/plugin.h").open("a") as file:
        file.write("\n")
    assert build._cache_key(build._executorch_folder()) != before


def test_each_compiler_has_its_own_binary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in (build.build_plugin, build.build_measure_pools):
        binaries = []
        for variable in (f"{compiler} first", f"{compiler} second", f"{compiler} first"):
            monkeypatch.setenv("CXX", variable)
            binaries.append(function())
            assert binaries[-1].read_text().startswith(variable.split()[1])
        assert binaries[0] == binaries[2] != binaries[1]


def test_compiler_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\0")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(RuntimeUnavailable, match=f"the compiler '{broken}' cannot be started: Exec format error"):
        build.build_plugin()
    plugin_path = tmp_path / "plugin.so"
    monkeypatch.setattr(build, "build_plugin", lambda: plugin_path)
    with pytest.raises(RuntimeUnavailable, match="Building the firmware program measure_pools: the compiler"):
        build.build_measure_pools()


def test_wheel_has_the_cpp_sources_and_firmware_templates(tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # setuptools builds in the folder
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("arm_recipes", "arm_backend_core", "runtime", "tests/runtime"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in (*build._PLUGIN_FOLDERS, *build._MEASURE_POOLS_FOLDERS):
        for source in (path for path in (ROOT / "runtime" / folder).iterdir() if path.is_file()):
            assert f"arm_recipes/runtime/cpp/{folder}/{source.name}" in names
    templates = [path for path in (ROOT / "arm_recipes/firmware/templates").rglob("*") if path.is_file()]
    assert len(templates) > 10
    assert all(path.relative_to(ROOT).as_posix() in names for path in templates)
    units = [unit.relative_to(build.CPP_FOLDER) for unit in build.list_plugin_sources()]
    assert len(units) > 10
    assert all(f"arm_recipes/runtime/cpp/{unit}" in names for unit in units)
    assert not any(name.startswith(("tests/", "arm_recipes/runtime/cpp/tests")) for name in names)


# Exceptions in an executor.


def test_ctrl_c_interrupts_a_run_and_the_next_run_works() -> None:
    (x,) = images(1)[0]
    raised, (output,) = run_in_child(child_processes.interrupt_run, export_small(TOSA).buffer, x)
    assert raised == "KeyboardInterrupt"
    assert torch.equal(torch.from_numpy(output), load(export_small(TOSA).buffer).execute(x)[0])


@pytest.mark.parametrize("failure", [ArmBackendError("no luck"), ValueError("no luck"), KeyError("no luck")])
def test_executor_exception_is_the_cause_and_the_next_run_works(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = images(1)[0]
    program = load(export_small(TOSA).buffer)
    (expected,) = program.execute(x)

    def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(reference_model, "run", fail)
        with pytest.raises(RunError, match=r"'forward' cannot be run: .*no luck") as caught:
            program.execute(x)
    assert caught.value.__cause__ is failure
    assert torch.equal(program.execute(x)[0], expected)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([], "zip"),
        ([np.zeros((1, 4), np.int8)] * 2, "zip"),
        ([np.zeros((2, 4), np.int8)], "reshape"),
    ],
)
def test_executor_results_of_wrong_number_or_shape_are_refused(
    results: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = images(1)[0]
    program = load(export_small(TOSA).buffer)
    with monkeypatch.context() as patch:
        patch.setattr(reference_model, "run", lambda *_: results)
        with pytest.raises(RunError, match=f"'forward' cannot be run: .*{message}"):
            program.execute(x)
    assert program.execute(x)[0].shape == (1, 4)


@pytest.mark.parametrize(("recipe", "backend"), [(TOSA, "TOSABackend"), (NPU, "EthosUBackend")])
def test_delegates_are_destroyed_with_their_programs(recipe: ArmRecipeType, backend: str) -> None:
    executor = next(executor for executor in host_backends.register_backends() if executor._backend == backend)
    gc.collect()  # what earlier tests left
    before = len(executor._delegates)
    programs = [load(export_small(recipe).buffer) for _ in range(3)]
    for program in programs:
        program.execute(*images(1)[0])
    assert len(executor._delegates) == before + 3
    del programs, program
    assert len(executor._delegates) == before


# Several programs, several threads, and the end of the process.


@pytest.mark.parametrize("shared", [False, True], ids=["own programs", "shared programs"])
@pytest.mark.parametrize(
    "recipes",
    [(TOSA, TOSA), (TOSA, VGF), (VGF, VGF), (NPU, NPU)],
    ids=["TOSA", "TOSA and VGF", "VGF", "NPU"],
)
def test_threads(recipes: tuple[ArmRecipeType, ArmRecipeType], shared: bool) -> None:
    samples = [images(8), images(16)[8:]]
    jobs = [([export_small(recipe).buffer], sample) for recipe, sample in zip(recipes, samples, strict=True)]
    results = run_in_child(child_processes.run_in_threads, jobs, shared)
    for thread_samples, outputs in zip(samples, results, strict=True):
        expected = [load(export_small(TOSA).buffer).execute(*sample)[0].numpy() for sample in thread_samples]
        assert _are_equal([output for (output,) in outputs], expected)


def test_several_programs_per_thread() -> None:
    samples = images(40)
    jobs = [([export_small(TOSA).buffer, export_small(VGF).buffer], samples)] * 3
    expected = [load(export_small(TOSA).buffer).execute(*sample)[0].numpy() for sample in samples]
    for outputs in run_in_child(child_processes.run_in_threads, jobs):
        assert _are_equal([output for (output,) in outputs[::2]], expected)
        assert _are_equal([output for (output,) in outputs[1::2]], expected)


@pytest.mark.parametrize(
    ("kept", "dropped"), [(TOSA, TOSA), (VGF, VGF), (TOSA, VGF), (NPU, NPU)], ids=lambda value: value.name
)
def test_programs_end_while_others_run(kept: ArmRecipeType, dropped: ArmRecipeType) -> None:
    (x,) = images(1)[0]
    outputs = run_in_child(
        child_processes.destroy_while_running, export_small(kept).buffer, export_small(dropped).buffer, (x,), 60
    )
    expected = load(export_small(TOSA).buffer).execute(x)[0].numpy()
    assert len(outputs) > 60
    assert all(np.array_equal(output, expected) for (output,) in outputs)


def test_output_of_other_threads_is_not_lost() -> None:
    assert (
        run_in_child(child_processes.count_lines_printed_while_running, export_small(TOSA).buffer, images(1)[0], 2000)
        == 2000
    )


def test_interpreter_exits_without_error_while_programs_are_alive(tmp_path: Path) -> None:
    for recipe in (TOSA, VGF, NPU):
        (tmp_path / f"{recipe.name}.pte").write_bytes(export_small(recipe).buffer)
    script = f"""
        import sys, threading, torch
        from pathlib import Path
        from arm_recipes import load
        x = torch.ones(1, 3, 8, 8)
        programs = [load(path) for path in sorted(Path({str(tmp_path)!r}).iterdir()) * 2]
        results = [program.execute(x)[0] for program in programs]
        for program in programs[:2]:
            program.itself = program             # only the garbage collector can drop it
        sys.modules["kept"] = programs[2:]       # dropped late
        thread = threading.Thread(target=program.run, args=(x,))
        thread.start()
        thread.join()
        print(all(torch.equal(result, results[0]) for result in results))
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
