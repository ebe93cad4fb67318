"""What is set up once in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

_Result = TypeVar("_Result")


def once(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """Call the function once; threads that come meanwhile wait for its result. After an exception it is called again.

    ``functools.lru_cache`` alone lets all threads in until there is a result.
    """
    lock, cached = threading.RLock(), lru_cache(maxsize=1)(function)

    @wraps(function)
    def call() -> _Result:
        with lock:
            return cached()

    return call
