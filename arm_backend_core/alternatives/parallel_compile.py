"""Two compilations of a flatbuffer at once: in Vela's process, of which a copy, made by fork, does the second."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from typing import Any

from arm_backend_core.workers.serving import receive, send
from arm_backend_core.workers.vela_process import compile_tosa

#: Seconds after which the copy ends by itself, should the process have ended that waits for it.
_LONGEST = 1800


def compile_both(
    flatbuffer: bytes, accelerator: str, system_config: str, options: str, others: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The answers of ``compile_tosa`` with two texts of options; None for the second where Vela fails on it.

    Raises:
        Exception: Vela failed on the first.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(_LONGEST)
            with os.fdopen(writing, "wb") as stream:
                send(stream, compile_tosa(flatbuffer, accelerator, system_config, others))
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
        os.kill(child, signal.SIGKILL)  # nothing to lose: it has answered, or nobody wants its answer
        os.waitpid(child, 0)
