"""Threads export one after another; a forked process in which PyTorch hangs is detected."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from executorch.export import ExportRecipe
from torch import nn

from arm_recipes import ArmRecipeType, export
from arm_recipes._internal import compile_lock


def _export() -> int:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    return len(export(model, recipe, [(torch.rand(1, 3, 8, 8),)], progress=False).report.delegates)


@pytest.mark.filterwarnings("ignore:calibration used only one sample")
def test_threads_export_one_after_another() -> None:
    """Before the lock, 10 of 16 exports failed, in PyTorch's patchers and dispatch modes."""
    results: list[object] = []

    def work() -> None:
        try:
            results.append(_export())
        except BaseException as error:
            results.append(error)

    filters = list(warnings.filters)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 4
    assert warnings.filters == filters


def test_the_lock_is_reentrant_and_exclusive() -> None:
    entered = threading.Event()

    def enter() -> None:
        with compile_lock.compile_lock():
            entered.set()

    thread = threading.Thread(target=enter)
    with compile_lock.compile_lock(), compile_lock.compile_lock():
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    thread.join()


#: A process that uses PyTorch's pool of two threads, and forks.
_FORK = """
import multiprocessing
import torch
from arm_recipes._internal import compile_lock

compile_lock._PROBE_SECONDS = 3.0

def check(results):
    try:
        compile_lock.check_fork()
        results.put("runs")
    except Exception as error:
        results.put(str(error))

def fork():
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    context.Process(target=check, args=(results,)).start()
    print(results.get())

torch.set_num_threads(2)
fork()
torch.ones(compile_lock._PROBE_ELEMENTS).add(1)
fork()
"""


def test_a_forked_process_in_which_operators_hang() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _FORK]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert before == "runs"
    assert "forked from one that had used PyTorch's threads" in after
    assert "multiprocessing.get_context('spawn')" in after


def test_a_forked_process_in_which_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lock, "_is_forked", lambda: True)
    monkeypatch.setattr(compile_lock, "_runs_parallel_operator", lambda: True)
    monkeypatch.setattr(compile_lock, "_probed", set())
    compile_lock.check_fork()
    monkeypatch.setattr(compile_lock, "_runs_parallel_operator", lambda: False)
    compile_lock.check_fork()  # the result is kept


def test_a_process_that_was_not_forked_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_lock, "_runs_parallel_operator", lambda: False)
    compile_lock.check_fork()
