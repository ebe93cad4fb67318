"""Lazy initialization (``once``): one call for all threads, and another one after an exception."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from arm_recipes.runtime.lazy import once


def test_threads_wait_for_the_first_call() -> None:
    calls, results = [], []

    @once
    def initialize() -> object:
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return object()

    threads = [threading.Thread(target=lambda: results.append(initialize())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [initialize()] * 4


def test_after_an_exception_the_next_call_retries() -> None:
    outcomes: Iterator[ValueError | str] = iter([ValueError("not yet"), "ready"])

    @once
    def initialize() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="not yet"):
        initialize()
    assert initialize() == initialize() == "ready"
