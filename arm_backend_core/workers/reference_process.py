"""Worker script of Arm's TOSA reference model; ``worker.Worker`` starts it."""

from __future__ import annotations

import os
from typing import Any

from arm_backend_core.workers.request_loop import serve


def _run(*arguments: Any) -> tuple[list[Any], str]:
    """Run the reference model; returns the outputs and the name of the graph's final status."""
    import tosa_reference_model

    outputs, status = tosa_reference_model.run(*arguments)
    return list(outputs), status.name


def _prepare() -> None:
    os.environ["PATH"] = ""  # otherwise a failing operator starts gdb for a backtrace, which takes seconds
    import tosa_reference_model  # noqa: F401


if __name__ == "__main__":
    serve({"run": _run}, _prepare)
