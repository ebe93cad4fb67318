"""Compile lock: only one thread captures or compiles at a time. ``check_fork`` checks PyTorch after a fork.

``torch.export`` and ExecuTorch's passes keep their state in global variables, so two threads would corrupt it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from arm_recipes._internal.errors import ExportError

_IMPORT_PID = os.getpid()
#: Seconds after which the probe, a parallel operator in a forked process, is considered to hang. A probe that does not
#: hang takes milliseconds.
_PROBE_SECONDS = 15.0
#: Number of elements of the probe's operand: 8 times the minimum for which PyTorch computes in parallel.
_PROBE_ELEMENTS = 8 * 32768
_lock = threading.RLock()
#: (process id, thread id) for which the probe has succeeded.
_probed: set[tuple[int, int]] = set()


def _renew_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def compile_lock() -> Iterator[None]:
    """Run the block in one thread at a time. A thread inside the block may enter it again (reentrant lock).

    Raises:
        ExportError: PyTorch's operators hang in this process (``check_fork``).
    """
    check_fork()
    with _lock:
        yield


def check_fork() -> None:
    """Check that parallel operators run in this process, if it was forked.

    A fork does not copy the threads of PyTorch's pool. If the parent had used the pool, the first parallel operator of
    the forked process waits forever for these threads. To detect this, this function forks once more, and the new
    child runs a parallel operator.

    Raises:
        ExportError: the operator hangs.
    """
    key = (os.getpid(), threading.get_ident())
    if not _is_forked() or key in _probed:
        return
    if not _runs_parallel_operator():
        raise ExportError(
            "this process was forked from one that had used PyTorch's threads, so PyTorch's operators hang in it: "
            "start processes with multiprocessing.get_context('spawn'), for a ProcessPoolExecutor as its mp_context"
        )
    _probed.add(key)


def _is_forked() -> bool:
    """Whether the process was forked: after the import of this module, or by ``multiprocessing``."""
    process_class = getattr(multiprocessing.context, "ForkProcess", None)
    is_fork_process = process_class is not None and isinstance(multiprocessing.current_process(), process_class)
    return os.getpid() != _IMPORT_PID or is_fork_process


def _runs_parallel_operator() -> bool:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork of a process with threads
        child = os.fork()
    if child == 0:
        try:
            torch.ones(_PROBE_ELEMENTS).add(1)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _PROBE_SECONDS
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
