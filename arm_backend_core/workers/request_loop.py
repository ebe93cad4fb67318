"""Request loop of a worker process, the counterpart of ``worker.Worker``.

Requests and replies are pickles with an 8-byte length prefix, on the process's original standard input and output.
Printed text goes to standard error, which is the worker's log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import struct
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def serve(functions: Mapping[str, Callable[..., object]], prepare: Callable[[], object]) -> None:
    """Serve requests until the parent closes the pipe.

    Args:
        functions: {name of a request: its function}. Other names are resolved as ``package.module:function``.
        prepare: called before the first request, for slow imports. An ImportError is ignored here, because a request
            that needs the module raises it again.
    """
    requests: BinaryIO = os.fdopen(os.dup(0), "rb")
    replies: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        # Crashes are expected and reported; they must not leave core files in the user's folder.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import ctypes

    libc = ctypes.CDLL(None) if os.name == "posix" else None
    with contextlib.suppress(ImportError):
        prepare()
    while (request := receive(requests)) is not None:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        reply = _handle_request(functions, *request)
        sys.stdout.flush()
        sys.stderr.flush()
        if libc is not None:
            libc.fflush(None)  # native code prints through C stdio buffers
        with contextlib.suppress(BrokenPipeError):
            send(replies, reply)


def _handle_request(
    functions: Mapping[str, Callable[..., object]], name: str, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Call a function; return ("ok", value) or ("error", class name, message, ``detail`` of the exception)."""
    try:
        return "ok", (functions.get(name) or pkgutil.resolve_name(name))(*arguments)
    except (Exception, SystemExit) as error:
        # Vela's errors hold their message in an attribute; their str() is a repr.
        message = str(getattr(error, "error_msg", error))
        return "error", type(error).__name__, message, getattr(error, "detail", ())


def receive(stream: IO[bytes]) -> Any:
    """Read the next message; None if the stream ends before it or within its length prefix.

    Raises:
        EOFError: the stream ends after the length prefix.
    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message and flush the stream."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()
