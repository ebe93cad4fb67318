"""Worker process: one reusable process for native tools that may crash (Vela, the reference model).

The process runs a separate script, started on first use with the parent's module search path. Unlike
``multiprocessing``, it does not import the user's ``__main__`` again, so it works in notebooks, under pytest and
without an ``if __name__`` guard.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from arm_backend_core.workers.request_loop import receive, send


class WorkerDied(Exception):
    """The worker process ended during a request.

    Attributes:
        description: how it ended, for example ``crashed with SIGSEGV`` or ``ended with exit code 1``.
        log: text that it had printed.
    """

    def __init__(self, description: str, log: str) -> None:
        super().__init__(description)
        self.description = description
        self.log = log


class WorkerError(Exception):
    """The request raised an exception in the worker process, which keeps running.

    Attributes:
        kind: class name of the exception.
        message: its text.
        detail: the attribute ``detail`` of the exception, or ().
        log: text printed during the request.
    """

    def __init__(self, kind: str, message: str, detail: tuple[Any, ...], log: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.detail = detail
        self.log = log


@dataclass(frozen=True)
class Reply:
    """The result of a request, and the text printed during it."""

    value: Any
    log: str


class Worker:
    """A process that serves one request at a time. Calls from several threads wait for each other.

    Args:
        script: Python file that reads requests from its standard input and writes replies to its standard output.
            Each message is a pickle with an 8-byte little-endian length prefix.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._drop_after_fork)

    @property
    def pid(self) -> int | None:
        """Process id, or None when no process is running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def prestart(self, *arguments: str) -> None:
        """Start the process and return at once, so that its start-up overlaps other work.

        Args:
            arguments: arguments of the script; ignored if the process runs already.
        """
        with self._lock:
            if self.pid is None:
                self._start(arguments)

    def call(self, name: str, *arguments: Any, timeout: float | None = None) -> Reply:
        """Run request ``name`` and wait for the answer.

        Args:
            timeout: seconds after which the process is killed; None waits forever.

        Raises:
            WorkerError: the request raised an exception.
            WorkerDied: the process crashed, exited, or exceeded ``timeout`` and was killed.
        """
        with self._lock:
            self.prestart()
            assert self._process is not None
            expired = threading.Event()
            timer = threading.Timer(timeout or 0, self._kill_on_timeout, (self._process, expired))
            timer.daemon = True
            if timeout is not None:
                timer.start()
            try:
                reply = self._exchange((name, arguments))
            except (EOFError, OSError, pickle.UnpicklingError):
                description = f"did not finish within {timeout:g} s" if expired.is_set() else None
                raise self._make_died_error(description) from None
            except BaseException:
                # Interrupted: the pending reply must not be read as the reply to the next request.
                self.close()
                raise
            finally:
                timer.cancel()
            log = self._read_log()
        if reply[0] == "ok":
            return Reply(reply[1], log)
        raise WorkerError(reply[1], reply[2], reply[3], log)

    def close(self) -> None:
        """Kill the process, if there is one. The next call starts a new one."""
        with self._lock:
            process, log, self._process, self._log = self._process, self._log, None, None
            if process is not None:
                process.kill()
                process.wait()
                for stream in filter(None, (process.stdin, process.stdout)):
                    with contextlib.suppress(OSError):
                        stream.close()
            if log is not None:
                log.close()

    def _start(self, arguments: Sequence[str] = ()) -> None:
        self.close()
        # Both processes share the file offset. The worker truncates and rewinds the file before each request.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            # -P keeps the script's folder off sys.path: its modules are named like the tools that they drive.
            [sys.executable, "-P", str(self._script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(),
            # A new session, so that Ctrl-C in a notebook reaches only the parent.
            start_new_session=True,
        )

    def _exchange(self, message: object) -> tuple[Any, ...]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, message)
        reply: tuple[Any, ...] | None = receive(self._process.stdout)
        if reply is None:
            raise EOFError
        return reply

    @staticmethod
    def _kill_on_timeout(process: subprocess.Popen[bytes], expired: threading.Event) -> None:
        expired.set()
        process.kill()

    def _make_died_error(self, description: str | None) -> WorkerDied:
        assert self._process is not None
        # The pipe closes before the process exits. A process that closes the pipe and keeps running is killed.
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        log = self._read_log()
        self.close()
        return WorkerDied(description or describe_exit(code), log)

    def _read_log(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def _drop_after_fork(self) -> None:
        """Drop the process in a forked child. The process belongs to the parent, so it is not killed."""
        self._lock = threading.RLock()
        process, log, self._process, self._log = self._process, self._log, None, None
        if process is not None:
            process.returncode = 0  # not a child of this process, so there is nothing to wait for
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    os.close(stream.fileno())
                    with contextlib.suppress(OSError):
                        stream.close()
        if log is not None:
            log.close()


def child_environment() -> dict[str, str]:
    """Environment of a child Python: the same module search path, with the standard library before the user's files."""
    library = (os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload"))
    entries = sorted((path or os.getcwd() for path in sys.path), key=lambda path: path not in library)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def describe_exit(code: int) -> str:
    """Describe how a process ended, from its return code (negative: number of a signal)."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed with {signal.Signals(-code).name}"
    except ValueError:
        return f"crashed with signal {-code}"
