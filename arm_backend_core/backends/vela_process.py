"""The process that Vela runs in.

``worker.py`` starts this file as a script. It imports nothing of this project and no torch, so that it is
ready in a third of a second. Requests and replies are pickles behind an 8-byte length, on the standard input
and output that the process was started with. What Vela and its C++ core print goes to the standard error,
which is the worker's log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, BinaryIO, NoReturn

_LENGTH = struct.Struct("<Q")
_ONLY_PRINTS = "a flag only prints something and does not compile"


class FlagError(Exception):
    """Vela's argument parser refused the flags. ``flags``: the option strings that it knows."""

    def __init__(self, message: str, flags: list[str]) -> None:
        super().__init__(message, flags)


class _Parser(argparse.ArgumentParser):
    """Vela's parser, made to raise where it would leave the process."""

    last: _Parser | None = None

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        type(self).last = self
        return super().parse_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise FlagError(message, sorted(self._option_string_actions))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise FlagError(_ONLY_PRINTS, sorted(self._option_string_actions))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except KeyError:  # Vela's types look names up in an enum
            names = [item.name if isinstance(item, Enum) else str(item) for item in action.choices or ()]
            raise argparse.ArgumentError(
                action, f"invalid choice: {arg_string!r} (choose from {', '.join(names)})"
            ) from None


def describe() -> dict[str, Any]:
    """What the installed Vela offers: accelerator names and its folder of configuration files."""
    from ethosu.vela import architecture_features

    return {
        "accelerators": architecture_features.Accelerator.member_list(),
        "config_files": architecture_features.CONFIG_FILES_PATH,
    }


def configure(argv: list[str]) -> dict[str, Any]:
    """Let Vela's own command line turn ``argv`` into what its C++ core takes, without compiling anything."""
    from ethosu.vela import vela

    captured: dict[str, Any] = {}

    def capture(arch: Any, _network: str, accelerator: str, system_config: str, options: str, *_: Any) -> None:
        captured.update(
            accelerator=accelerator,
            system_config=system_config,
            options=options,
            core_clock=float(arch.core_clock),
            arena_on_second_port=arch.arena_mem_area.name == "Axi1",
            const_memory=arch.permanent_storage_mem_area.name,
            arena_cache_size=int(arch.arena_cache_size),
            address_space=int(arch.max_address_offset),
        )

    # This process is ours. Vela's entry point is kept; only its last step, the compilation, is replaced.
    vela.process_regor = capture
    vela.argparse = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})
    vela.main(["network.tosa", *argv])
    if not captured:
        known = sorted(_Parser.last._option_string_actions) if _Parser.last else []
        raise FlagError(_ONLY_PRINTS, known)
    return captured


def compile_tosa(flatbuffer: bytes, accelerator: str, system_config: str, options: str) -> dict[str, Any]:
    """Compile with Vela's C++ core; returns plain data only."""
    from ethosu import regor

    model = regor.compile(accelerator, flatbuffer, "TOSA", system_config, options=options, verbose=False)
    report = model.perf_report
    database = model.opt_database

    def tensor(item: Any) -> tuple[list[int], int, int, int]:
        return list(item.shape), int(item.element_size), int(item.address), int(item.region)

    return {
        "command_stream": bytes(model.command_stream),
        "weights": bytes(model.read_only.data),
        "weight_region": int(model.read_only.region),
        "scratch": (int(model.scratch.size), int(model.scratch.region)),
        "scratch_fast": (int(model.scratch_fast.size), int(model.scratch_fast.region)),
        "inputs": [tensor(item) for item in model.inputs],
        "outputs": [tensor(item) for item in model.outputs],
        "variables": [tensor(item) for item in model.variables],
        "report": {
            name: int(getattr(report, name))
            for name in (
                "npuCycles",
                "totalCycles",
                "npuOps",
                "macCount",
                "originalWeights",
                "encodedWeights",
                "readOnlyPeakUsage",
            )
        },
        "memories": {
            str(name): {
                "peak": int(memory.peakUsage),
                "cycles": int(memory.totalAccessCycles),
                "read": sum(int(access.bytesRead) for access in memory.accesses.values()),
                "written": sum(int(access.bytesWritten) for access in memory.accesses.values()),
            }
            for name, memory in report.memories.items()
        },
        "tables": {
            name: (list(table.header), [list(row) for row in table.data])
            for name, table in (database.tables.items() if database else ())
            if name in ("perf", "source")
        },
    }


_REQUESTS: dict[str, Callable[..., Any]] = {
    "describe": describe,
    "configure": configure,
    "compile": compile_tosa,
}


def _receive(stream: BinaryIO) -> Any:
    """The next message, or None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    return pickle.loads(stream.read(length))


def _send(stream: BinaryIO, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _answer(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``("ok", value)`` or ``("error", exception class, message, arguments of the exception)``."""
    try:
        return "ok", _REQUESTS[name](*arguments)
    except (Exception, SystemExit) as error:
        # Vela's errors carry their sentence in an attribute; str() of them is a repr.
        message = str(getattr(error, "error_msg", error))
        detail = error.args[1:] if isinstance(error, FlagError) else ()
        return "error", type(error).__name__, str(error.args[0]) if detail else message, detail


def main() -> None:
    """Answer requests until the other end closes."""
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
    with contextlib.suppress(ImportError):  # a missing Vela is the answer to the first request
        from ethosu.vela import vela  # noqa: F401
    while (request := _receive(requests)) is not None:
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        reply = _answer(*request)
        sys.stdout.flush()
        sys.stderr.flush()
        if libc is not None:
            libc.fflush(None)  # the C++ core prints through C's buffers
        with contextlib.suppress(BrokenPipeError):
            _send(replies, reply)


if __name__ == "__main__":
    main()
