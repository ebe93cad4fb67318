"""Which of many graphs the reference model refuses; each runs in a fork, because the model crashes on some of them.

A script: a pickled list of (flatbuffer, inputs) comes on standard input, a list of booleans goes to standard output.
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
    """Whether the model ends otherwise than well."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    try:
        _, status = tosa_reference_model.run(flatbuffer, inputs)
        os._exit(status.name != "TOSA_VALID")
    except Exception:
        os._exit(1)


def main() -> None:
    """Answer what is asked on standard input."""
    os.environ["PATH"] = ""  # it would have gdb write a backtrace, which takes seconds
    answer, silence = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    graphs: list[Graph] = pickle.load(sys.stdin.buffer)
    with os.fdopen(answer, "wb") as file:
        pickle.dump([refuses(*graph) for graph in graphs], file)


if __name__ == "__main__":
    main()
