"""Work in parallel, by joblib: on this machine, or wherever the user's ``joblib.parallel_config`` says."""

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
    """What ``work`` returns for each task, as they come; one process for each core where nothing else is said."""
    backend, jobs = get_active_backend()
    jobs = -1 if jobs is None else jobs
    calls = (delayed(work)(*task) for task in tasks)
    with _safe_path():
        if backend.supports_return_generator:
            yield from Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
            return
        # Ray gives results only when all are there: in portions, so that what is finished can be kept.
        with Parallel(n_jobs=jobs) as parallel:
            while portion := list(islice(calls, 4 * effective_n_jobs(jobs))):
                yield from parallel(portion)


@contextmanager
def _safe_path() -> Iterator[None]:
    """Have processes that are started now find the standard library.

    They begin with a module of joblib's, for which Python looks in the working directory first: a ``queue.py`` of the
    user's there would end them without a word.
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
