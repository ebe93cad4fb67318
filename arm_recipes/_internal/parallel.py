"""Parallel execution with joblib, on this machine or on the backend of the user's ``joblib.parallel_config``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from joblib import Parallel, delayed, effective_n_jobs
from joblib.parallel import get_active_backend

_SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"


def starmap_unordered(work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield the results of ``work(*task)`` in completion order, as ``imap_unordered`` of multiprocessing does.

    By default, there is one process per core, and a single task is executed in this process, because a new process
    takes seconds to import the modules. ``joblib.parallel_config(n_jobs=...)`` overrides this.
    """
    backend, jobs = get_active_backend()
    tasks = iter(tasks)
    first_tasks = list(islice(tasks, 2))
    if jobs is None and len(first_tasks) == 1:
        yield work(*first_tasks[0])
        return
    jobs = -1 if jobs is None else jobs
    calls = (delayed(work)(*task) for task in chain(first_tasks, tasks))
    with _safe_path():
        if backend.supports_return_generator:
            yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
            return
        # Other backends, for example Ray's, return results only when all tasks of a call are complete. With batches, an
        # interruption loses at most the results of one batch.
        with Parallel(n_jobs=jobs) as parallel:
            while batch := list(islice(calls, 4 * effective_n_jobs(jobs))):
                yield from parallel(batch)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH, so that worker processes do not search the working directory for modules.

    A worker starts with a module of joblib, and Python then searches the working directory first. A user's ``queue.py``
    there would shadow the module of the standard library, and the worker would end without a message.
    """
    previous = os.environ.get(_SAFE_PATH_VARIABLE)
    os.environ[_SAFE_PATH_VARIABLE] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_SAFE_PATH_VARIABLE]
        else:
            os.environ[_SAFE_PATH_VARIABLE] = previous
