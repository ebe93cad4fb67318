"""Sample dispatch: run a comparison in this process, or in worker processes if their start-up cost pays off."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import joblib
import numpy as np

from arm_recipes._internal.parallel import starmap_unordered
from arm_recipes.comparison.worker import run_item
from arm_recipes.comparison.worker_job import ComparisonJob, SampleResult, SampleRunner, WorkItem
from arm_recipes.runtime import host_plugin

#: Seconds of remaining work that justify worker processes: each one imports PyTorch and ExecuTorch.
_MIN_PARALLEL_SECONDS = 20.0


def run_samples(
    job: ComparisonJob, items: Sequence[WorkItem], workers: int | None, with_progress: Callable[[Iterable[Any]], Any]
) -> list[SampleResult]:
    """Run all samples and return their results in order.

    The first case that applies decides where samples run:

    1. ``workers`` is 1, there is one sample, or a program has state: this process runs all samples. A program without
       an interpreter plan (for example a saved program) counts as a program with state, because its state is unknown.
    2. ``workers`` is None, and the user has set ``joblib.parallel_config``: worker processes run all samples.
    3. Otherwise, this process runs the first samples. After each sample, it estimates the time of the remaining ones.
       If this exceeds 20 s, and the machine has several cores, worker processes run the remaining samples.

    Args:
        workers: maximum number of processes; None: the setting of ``joblib.parallel_config``, or one per core.
        with_progress: wraps the iterable of results; it may show a progress bar.
    """
    host_plugin.load_plugin()  # build the plugin once, and raise its errors, before processes start
    results: dict[int, SampleResult] = {}
    for index, result in with_progress(_iter_results(job, items, workers)):
        results[index] = result
    return [results[item.index] for item in items]


def _iter_results(
    job: ComparisonJob, items: Sequence[WorkItem], workers: int | None
) -> Iterator[tuple[int, SampleResult]]:
    if workers == 1 or job.is_sequential or len(items) == 1:
        runner = SampleRunner(job)
        yield from ((item.index, runner(item)) for item in items)
        return
    remaining = list(items)
    if workers is not None or not _is_parallel_configured():
        runner = SampleRunner(job)
        start = time.perf_counter()
        while remaining:
            item = remaining.pop(0)
            yield item.index, runner(item)
            seconds_per_sample = (time.perf_counter() - start) / (len(items) - len(remaining))
            if joblib.cpu_count() > 1 and seconds_per_sample * len(remaining) > _MIN_PARALLEL_SECONDS:
                break
    if remaining:
        data = pickle.dumps(job, protocol=pickle.HIGHEST_PROTOCOL)
        key, array = hashlib.sha256(data).hexdigest(), np.frombuffer(data, np.uint8)
        with joblib.parallel_config(**({} if workers is None else {"n_jobs": workers})):
            yield from starmap_unordered(run_item, ((key, array, pickle.dumps(item)) for item in remaining))


def _is_parallel_configured() -> bool:
    """Whether the user has configured joblib's parallelism."""
    from joblib.parallel import LokyBackend, get_active_backend

    backend, jobs = get_active_backend()
    return jobs is not None or not isinstance(backend, LokyBackend)
