"""Worker script of Vela; ``worker.Worker`` starts it.

It does not import torch, so it is ready after 0.1 s; with the argument ``PARSER_OPTION``, after 0.3 s.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

from arm_backend_core.workers.request_loop import serve

#: Argument of this script: import Vela's command line parser at the start.
PARSER_OPTION = "--import-parser"
_NO_COMPILATION_MESSAGE = "a flag such as --version makes Vela print information and exit without compiling"


class FlagError(Exception):
    """Vela's argument parser rejected the flags. ``known_flags``: all option strings that the parser knows."""

    def __init__(self, message: str, known_flags: list[str]) -> None:
        super().__init__(message)
        self.detail = (known_flags,)


class _Parser(argparse.ArgumentParser):
    """Argument parser for Vela that raises ``FlagError`` instead of exiting the process."""

    last_instance: _Parser | None = None

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        type(self).last_instance = self
        return super().parse_args(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise FlagError(message, sorted(self._option_string_actions))

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise FlagError(_NO_COMPILATION_MESSAGE, sorted(self._option_string_actions))

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except KeyError:  # Vela's argument types look up names in an enum
            names = [item.name if isinstance(item, Enum) else str(item) for item in action.choices or ()]
            raise argparse.ArgumentError(
                action, f"invalid choice: {arg_string!r} (choose from {', '.join(names)})"
            ) from None


def parse_command_line(argv: list[str]) -> dict[str, Any]:
    """Parse ``argv`` as Vela's command line does, without compiling.

    Returns:
        The arguments of Vela's C++ core, the NPU's clock, and the properties of the memory configuration.

    Raises:
        FlagError: the argument parser rejected a flag, or a flag makes Vela exit without compiling.
    """
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

    # Patching is safe because the process runs nothing else. ``capture`` replaces the last step, the compilation, and
    # stores its arguments. ``_Parser`` replaces the argument parser, and raises errors instead of exiting.
    vela.process_regor = capture
    vela.argparse = types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser})
    vela.main(["network.tosa", *argv])
    if not captured:
        known_flags = sorted(_Parser.last_instance._option_string_actions) if _Parser.last_instance else []
        raise FlagError(_NO_COMPILATION_MESSAGE, known_flags)
    return captured


def compile_tosa(flatbuffer: bytes, accelerator: str, system_config: str, options: str) -> dict[str, Any]:
    """Compile with Vela's C++ core; returns only built-in types, which unpickle without Vela."""
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
            if name in ("perf", "source", "queue", "group", "tensors")
        },
    }


def split_weights(requests: list[tuple[bytes, list[int]]]) -> list[list[bytes]]:
    """See ``arm_backend_core.workers.vela.split_weights``.

    Decoded weights are ordered by output channel, so each part is one contiguous range.
    """
    from ethosu import mlw_codec

    encoded = []
    for weights, depths in requests:
        values = mlw_codec.decode(bytearray(weights))
        size, padding = divmod(len(values), sum(depths))
        ends = [size * depth for depth in itertools.accumulate(depths)]
        parts = [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        encoded.append([] if padding else [bytes(mlw_codec.encode(part)) for part in parts])
    return encoded


def _prepare() -> None:
    from ethosu import regor  # noqa: F401

    if PARSER_OPTION in sys.argv:
        from ethosu.vela import vela  # noqa: F401


if __name__ == "__main__":
    functions: dict[str, Callable[..., object]] = {
        "parse_command_line": parse_command_line,
        "compile": compile_tosa,
        "split_weights": split_weights,
    }
    serve(functions, _prepare)
