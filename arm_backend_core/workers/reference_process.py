"""The process that Arm's reference model runs in; ``worker.py`` starts this file as a script."""

from __future__ import annotations

import os
from typing import Any

from arm_backend_core.workers.serving import serve


def _run(*arguments: Any) -> tuple[list[Any], str]:
    """The outputs and the name of the status that the graph ended with."""
    import tosa_reference_model

    outputs, status = tosa_reference_model.run(*arguments)
    return list(outputs), status.name


def _prepare() -> None:
    os.environ["PATH"] = ""  # where an operator fails, it would have gdb write a backtrace, which takes seconds
    import tosa_reference_model  # noqa: F401


if __name__ == "__main__":
    serve({"run": _run}, _prepare)
