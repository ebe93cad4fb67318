"""Parallel execution with joblib, on this machine or on the backend of the user's ``joblib.parallel_config``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs
from joblib.parallel import get_active_backend

_SAFE_PATH = "PYTHONSAFEPATH"


def in_parallel(work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the results of ``work(*task)`` in completion order. Default: one process per core."""
    backend, jobs = get_active_backend()
    jobs = -1 if jobs is None else jobs
    calls = (delayed(work)(*task) for task in tasks)
    with _safe_path():
        if backend.supports_return_generator:
            yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
            return
        # Ray returns results only when all tasks are complete: submit portions, so that finished results are not lost.
        with Parallel(n_jobs=jobs) as parallel:
            while portion := list(islice(calls, 4 * effective_n_jobs(jobs))):
                yield from parallel(portion)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH for worker processes, so that they import the standard library.

    A worker starts with a module of joblib, and Python searches the working directory first. A ``queue.py`` of the user
    would shadow the standard library there and end the worker without a message.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
