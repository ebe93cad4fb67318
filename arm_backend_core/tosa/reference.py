"""Execute a TOSA flatbuffer on Arm's reference model.

The model runs in a process of its own. An index out of range or a damaged flatbuffer can crash it, and its output to
the terminal cannot be suppressed without suppressing that of the whole process.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arm_backend_core import workers
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.workers.worker import Worker, WorkerDied, WorkerError

_worker = Worker(Path(workers.__file__).with_name("reference_process.py"))


def run(flatbuffer: bytes, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Run every operator of the flatbuffer bit-true. Concurrent calls wait for each other.

    Args:
        flatbuffer: TOSA 1.0 graph.
        inputs: arrays in the order of the graph's inputs, in its shapes and element types.

    Raises:
        ArmBackendError: the reference model refused an input, reported an error, or crashed; the message has its
            output.
    """
    arrays = [np.asarray(array, order="C") for array in inputs]
    try:
        reply = _worker.call("run", bytes(flatbuffer), arrays)
    except WorkerError as error:
        raise ArmBackendError(f"the TOSA reference model refused the graph or its inputs: {error.message}") from error
    except WorkerDied as death:
        raise ArmBackendError(f"the TOSA reference model {death.description}{_reason(death.log)}") from death
    outputs, status = reply.value
    if status != "TOSA_VALID":
        raise ArmBackendError(f"the TOSA reference model ended with {status}{_reason(reply.log)}")
    return list(outputs)


def _reason(log: str) -> str:
    """The line that the reference model prints after the condition that failed."""
    for condition, reason in itertools.pairwise(log.splitlines()):
        if "fails AT" in condition:
            return f": {reason.strip()}"
    return ""
