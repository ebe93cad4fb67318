"""Garbage collection: exclude existing objects during an export."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the block (``gc.freeze``).

    A full collection over PyTorch's objects takes a quarter of a second, as long as the export of a small model.
    Existing objects that become garbage inside the block are collected after it. The function has no effect if garbage
    collection is disabled, or if the caller has already frozen objects.
    """
    is_owner = gc.isenabled() and not gc.get_freeze_count()  # do not unfreeze objects that the caller has frozen
    if is_owner:
        gc.freeze()
    try:
        yield
    finally:
        if is_owner:
            gc.unfreeze()
