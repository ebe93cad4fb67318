"""Tests which graphs the reference model refuses. Each runs in a forked process, because some crash the model.

The script reads a pickled list of (flatbuffer, inputs) from standard input, and writes a pickled list of booleans to
standard output.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import numpy as np
import tosa_reference_model

Graph = tuple[bytes, list[np.ndarray[Any, Any]]]


def refuses(flatbuffer: bytes, inputs: list[np.ndarray[Any, Any]]) -> bool:
    """Whether the reference model refuses the graph or crashes."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    try:
        _, status = tosa_reference_model.run(flatbuffer, inputs)
        os._exit(status.name != "TOSA_VALID")
    except Exception:
        os._exit(1)


def main() -> None:
    """Read the graphs, and write for each whether it is refused."""
    os.environ["PATH"] = ""  # otherwise the model starts gdb for a backtrace, which takes seconds
    answer, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    graphs: list[Graph] = pickle.load(sys.stdin.buffer)
    with os.fdopen(answer, "wb") as file:
        pickle.dump([refuses(*graph) for graph in graphs], file)


if __name__ == "__main__":
    main()
