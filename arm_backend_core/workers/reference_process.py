"""The process that Arm's reference model runs in; ``worker.py`` starts this file as a script."""

from __future__ import annotations

import os
from typing import Any

from arm_backend_core.workers.serving import serve


def _answer(_: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The outputs and the name of the status that the graph ended with, as ``serving.serve`` wants it."""
    try:
        import tosa_reference_model

        outputs, status = tosa_reference_model.run(*arguments)
        return "ok", (list(outputs), status.name)
    except Exception as error:
        return "error", type(error).__name__, str(error), ()


def _prepare() -> None:
    os.environ["PATH"] = ""  # where an operator fails, it would have gdb write a backtrace, which takes seconds
    import tosa_reference_model  # noqa: F401


if __name__ == "__main__":
    serve(_answer, _prepare)
