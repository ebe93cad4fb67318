"""A comparison of many samples, in worker processes where these are worth their start."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import joblib
import numpy as np

from arm_recipes._internal.parallel import in_parallel
from arm_recipes.comparison.worker import run_item
from arm_recipes.comparison.worker_job import ComparisonJob, SampleResult, SampleRunner, WorkItem
from arm_recipes.runtime import host_library

#: Seconds of work that other processes are worth being started for: each imports PyTorch and ExecuTorch.
_WORTH = 20.0


def run_samples(
    job: ComparisonJob, items: Sequence[WorkItem], workers: int | None, mark: Callable[[Iterable[Any]], Any]
) -> list[SampleResult]:
    """All samples in order.

    Args:
        workers: processes; None: as many as are worth it, or as ``joblib.parallel_config`` says.
        mark: goes through what comes, with a progress bar or without.
    """
    host_library.library()  # an error, and the compiler, are better met before processes are started
    found: dict[int, SampleResult] = {}
    for index, made in mark(_made(job, items, workers)):
        found[index] = made
    return [found[item.index] for item in items]


def _made(job: ComparisonJob, items: Sequence[WorkItem], workers: int | None) -> Iterator[tuple[int, SampleResult]]:
    if workers == 1 or job.has_state or len(items) == 1:
        runner = SampleRunner(job)
        yield from ((item.index, runner(item)) for item in items)
        return
    left = list(items)
    if workers is None and not _configured():
        runner = SampleRunner(job)
        start = time.perf_counter()
        while left:
            item = left.pop(0)
            yield item.index, runner(item)
            each = (time.perf_counter() - start) / (len(items) - len(left))
            if joblib.cpu_count() > 1 and each * len(left) > _WORTH:
                break
    if left:
        data = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
        key, array = hashlib.sha256(data).hexdigest(), np.frombuffer(data, np.uint8)
        with joblib.parallel_config(**({} if workers is None else {"n_jobs": workers})):
            yield from in_parallel(run_item, ((key, array, item) for item in left))


def _configured() -> bool:
    """Whether the user says how to work in parallel."""
    from joblib.parallel import LokyBackend, get_active_backend

    backend, jobs = get_active_backend()
    return jobs is not None or not isinstance(backend, LokyBackend)
