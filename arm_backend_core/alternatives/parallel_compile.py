"""Compile a flatbuffer with two sets of options in parallel: Vela's worker process forks a child for the second set."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from typing import Any

from arm_backend_core.workers.request_loop import receive, send
from arm_backend_core.workers.vela_process import compile_tosa

#: Seconds after which the child ends by itself, in case its parent has died.
_TIMEOUT_SECONDS = 1800


def compile_both(
    flatbuffer: bytes, accelerator: str, system_config: str, options: str, other_options: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Compile with ``options`` and with ``other_options`` in parallel.

    Returns:
        Both results of ``compile_tosa``. The second is None if Vela fails with ``other_options``, or if the child ends
        after ``_TIMEOUT_SECONDS``.

    Raises:
        Exception: Vela failed with ``options``.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(_TIMEOUT_SECONDS)
            with os.fdopen(writing, "wb") as stream:
                send(stream, compile_tosa(flatbuffer, accelerator, system_config, other_options))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as stream:
            first = compile_tosa(flatbuffer, accelerator, system_config, options)
            second = None
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                second = receive(stream)
            return first, second
    finally:
        os.kill(child, signal.SIGKILL)  # the child's result has arrived or is not needed
        os.waitpid(child, 0)
