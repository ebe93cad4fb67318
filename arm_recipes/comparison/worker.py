"""What joblib calls in a worker process of a comparison. It imports what is costly late, to do so in silence."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.comparison.worker_job import SampleResult, SampleRunner, WorkItem

_runners: dict[str, SampleRunner] = {}


def run_item(key: str, job: np.ndarray[Any, Any], item: WorkItem) -> tuple[int, SampleResult]:
    """The sample's number, and what came of it.

    Args:
        key: of the job; one that the process has had already is not read again.
        job: pickled, as an array: joblib keeps one copy of it for all tasks, in memory that they share or on a cluster.
    """
    from arm_recipes._internal.messages import quiet

    with quiet():
        if key not in _runners:
            from arm_recipes.comparison.worker_job import SampleRunner

            _runners.clear()
            _runners[key] = SampleRunner(pickle.loads(job.tobytes()))
        return item.index, _runners[key](item)
