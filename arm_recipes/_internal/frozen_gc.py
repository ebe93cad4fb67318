"""Garbage collections while this package works."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Have garbage collections inside the block look at new objects alone.

    One that goes through all that PyTorch made takes a quarter of a second, as long as exporting a small model. What
    the caller's objects leave behind meanwhile is collected afterwards.
    """
    ours = gc.isenabled() and not gc.get_freeze_count()  # what others have frozen stays so
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
