"""TOSA reference model: execute a TOSA flatbuffer in Arm's reference implementation.

The model runs in a separate process, because an index out of range or a damaged flatbuffer can crash it. The model also
prints to the terminal, which can be suppressed only for a whole process.
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
    """Execute a flatbuffer bit-exactly and return its outputs. Concurrent calls run one after the other.

    Args:
        flatbuffer: TOSA graph (version 1.0, or the 1.1 draft).
        inputs: one array for each graph input, with its shape and element type.

    Raises:
        ArmBackendError: the reference model refused an input, reported an error, or crashed. The message contains the
            reason that the model gave, if any.
    """
    arrays = [np.asarray(array, order="C") for array in inputs]
    try:
        reply = _worker.call("run", bytes(flatbuffer), arrays)
    except WorkerError as error:
        raise ArmBackendError(f"the TOSA reference model refused the graph or its inputs: {error.message}") from error
    except WorkerDied as death:
        raise ArmBackendError(f"the TOSA reference model {death.description}{_extract_reason(death.log)}") from death
    outputs, status = reply.value
    if status != "TOSA_VALID":
        raise ArmBackendError(f"the TOSA reference model ended with {status}{_extract_reason(reply.log)}")
    return list(outputs)


def _extract_reason(log: str) -> str:
    """The reason in the model's log. The model prints the failed condition on one line, and the reason on the next."""
    for condition, reason in itertools.pairwise(log.splitlines()):
        if "fails AT" in condition:
            return f": {reason.strip()}"
    return ""
