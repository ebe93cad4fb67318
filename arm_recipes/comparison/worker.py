"""Worker entry point of a comparison, called by joblib. Imports PyTorch late, and suppresses warnings."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.comparison.worker_job import SampleResult, SampleRunner

_runners: dict[str, SampleRunner] = {}


def run_item(key: str, job: np.ndarray[Any, Any], pickled_item: bytes) -> tuple[int, SampleResult]:
    """Run one sample; return its index and its result.

    Args:
        key: hash of the pickled job. A process unpickles a job only once.
        job: pickled job as an array: joblib shares one copy between all tasks, in shared memory or on a cluster.
        pickled_item: the ``WorkItem`` of the sample. Unpickling imports PyTorch and ExecuTorch, so ``run_item``
            does it, with warnings suppressed.
    """
    from arm_recipes._internal.messages import suppress_warnings

    with suppress_warnings():
        if key not in _runners:
            from arm_recipes.comparison.worker_job import SampleRunner

            _runners.clear()
            _runners[key] = SampleRunner(pickle.loads(job.tobytes()))
        item = pickle.loads(pickled_item)
        return item.index, _runners[key](item)
