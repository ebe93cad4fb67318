"""Lazy initialization: a thread-safe cache for functions that set up something once in a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

_Result = TypeVar("_Result")


def once(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """Make a function run once and cache its result. Concurrent callers wait; after an error, the next call retries.

    ``functools.lru_cache`` alone would let several threads call the function concurrently before it returns a result.
    """
    lock, cached = threading.RLock(), lru_cache(maxsize=1)(function)

    @wraps(function)
    def call() -> _Result:
        with lock:
            return cached()

    return call
