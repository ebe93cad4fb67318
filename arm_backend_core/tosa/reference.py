"""Execute a TOSA flatbuffer on Arm's reference model, in this process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from arm_backend_core.errors import ArmBackendError

#: One run at a time: the file descriptors below are those of the process, and the model keeps the GIL anyway.
_lock = threading.Lock()


def run(flatbuffer: bytes, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Run every operator of the flatbuffer bit-true.

    Args:
        flatbuffer: TOSA 1.0 graph.
        inputs: arrays in the order of the graph's inputs, in its shapes and element types.

    Raises:
        ArmBackendError: the reference model refused an input or met an error.
    """
    import tosa_reference_model

    arrays = [np.asarray(array, order="C") for array in inputs]
    with _lock, _quiet():  # it prints a version warning for each load
        try:
            outputs, status = tosa_reference_model.run(flatbuffer, arrays)
        except ValueError as error:
            raise ArmBackendError(f"the TOSA reference model refused its inputs: {error}") from error
    if status != tosa_reference_model.GraphStatus.TOSA_VALID:
        raise ArmBackendError(f"the TOSA reference model ended with status {status}")
    return list(outputs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what native code prints to nowhere while the block runs."""
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in saved:
            os.dup2(null, fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)
