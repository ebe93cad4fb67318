"""The other side of ``worker.Worker``: what a process that it starts does.

Requests and replies are pickles behind an 8-byte length, on the standard input and output that the process was
started with. What is printed goes to the standard error, which is the worker's log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import IO, Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def serve(answer: Callable[[str, tuple[Any, ...]], tuple[Any, ...]], prepare: Callable[[], object]) -> None:
    """Answer requests until the other end closes.

    Args:
        answer: makes ``("ok", value)`` or ``("error", exception class, message, arguments of the exception)`` of the
            name and the arguments of a request.
        prepare: called before the first request; does what takes time. A failed import is left to the request.
    """
    requests: BinaryIO = os.fdopen(os.dup(0), "rb")
    replies: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        # A crash is expected and reported; it must not fill the user's folder with core files.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import ctypes

    libc = ctypes.CDLL(None) if os.name == "posix" else None
    with contextlib.suppress(ImportError):
        prepare()
    while (request := receive(requests)) is not None:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        reply = answer(*request)
        sys.stdout.flush()
        sys.stderr.flush()
        if libc is not None:
            libc.fflush(None)  # native code prints through C's buffers
        with contextlib.suppress(BrokenPipeError):
            send(replies, reply)


def receive(stream: IO[bytes]) -> Any:
    """The next message, or None at the end of the stream.

    Raises:
        EOFError: the stream ends within the message.
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
    """Write a message, all of it."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()
