"""Host run: execute a program on this machine as firmware does, in memory pools of given sizes.

The executable is built from ``runtime/tools/measure_pools.cpp``.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arm_recipes.runtime import build
from arm_recipes.runtime.errors import RunError

#: Maximum number of lines from the end of the runtime's log in an error message.
_LOG_LINES = 6


@dataclass(frozen=True)
class PoolSizes:
    """Sizes of the memory pools in bytes; None means unlimited.

    Attributes:
        fast_scratch: fast scratch of the NPU.
        temp: temp allocator of ExecuTorch's runtime.
        shared: memory-planned buffers with index 1 and above, which all methods share.
        methods: for each method: its name, size of its method allocator, and size of its memory-planned buffer 0.
    """

    fast_scratch: int
    temp: int | None
    shared: tuple[int, ...]
    methods: tuple[tuple[str, int | None, int], ...]


@dataclass(frozen=True)
class FirmwareTestCase:
    """A test case: one execution of a method.

    Attributes:
        method: name of the method.
        inputs: bytes of each input, as they are in memory.
        output_count: number of outputs of the method.
    """

    method: str
    inputs: tuple[bytes, ...]
    output_count: int


@dataclass(frozen=True)
class HostRun:
    """Memory use and outputs of a host run.

    Attributes:
        method_allocator_bytes: method -> bytes used in its method allocator.
        temp: peak bytes used in the temp allocator.
        outputs: bytes of the outputs of each case.
    """

    method_allocator_bytes: dict[str, int]
    temp: int
    outputs: tuple[tuple[bytes, ...], ...]


def run_on_host(
    program: bytes, sizes: PoolSizes, cases: Sequence[FirmwareTestCase], data_file: bytes | None = None
) -> HostRun:
    """Load the methods that ``sizes.methods`` lists, then execute the test cases in order.

    ``data_file``: the bytes of the program's ``.ptd``; None without one.

    Raises:
        RunError: a pool is too small, or the run failed for another reason.
        RuntimeUnavailable: this machine cannot build the executable, for example because there is no compiler.
    """
    executable = build.build_measure_pools()
    with tempfile.TemporaryDirectory(prefix="arm-firmware-") as name:
        folder = Path(name)
        (folder / "model.pte").write_bytes(program)
        if data_file is not None:
            (folder / "model.ptd").write_bytes(data_file)
        request = _write_inputs_and_request(folder, sizes, cases)
        completed = subprocess.run(
            [str(executable), str(request)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if completed.returncode != 0:
            log = "\n".join(completed.stderr.strip().splitlines()[-_LOG_LINES:]) or f"exit code {completed.returncode}"
            raise RunError(
                f"the program failed on this machine, with the firmware's memory pools ({_describe_sizes(sizes)}):"
                f"\n{log}"
            )
        lines = [line.split() for line in completed.stdout.splitlines()]
        return HostRun(
            method_allocator_bytes={line[1]: int(line[2]) for line in lines if line[0] == "method"},
            temp=next(int(line[1]) for line in lines if line[0] == "temp"),
            outputs=tuple(
                tuple((folder / f"output{number}.{index}").read_bytes() for index in range(case.output_count))
                for number, case in enumerate(cases)
            ),
        )


def _write_inputs_and_request(folder: Path, sizes: PoolSizes, cases: Sequence[FirmwareTestCase]) -> Path:
    """Write the files of the inputs, and the request file that ``measure_pools.cpp`` reads; return the request file."""
    data_file = folder / "model.ptd"
    lines: list[object] = [folder / "model.pte", data_file if data_file.exists() else ""]
    lines += [sizes.fast_scratch, _encode_size(sizes.temp), len(sizes.shared), *sizes.shared, len(sizes.methods)]
    for name, method_allocator, planned in sizes.methods:
        lines += [name, _encode_size(method_allocator), planned]
    names = [name for name, *_ in sizes.methods]
    lines.append(len(cases))
    for number, case in enumerate(cases):
        lines += [names.index(case.method), len(case.inputs)]
        for index, content in enumerate(case.inputs):
            path = folder / f"input{number}.{index}"
            path.write_bytes(content)
            lines.append(path)
        lines += [case.output_count, *(folder / f"output{number}.{index}" for index in range(case.output_count))]
    request = folder / "request"
    request.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return request


def _encode_size(size: int | None) -> int:
    """Encode a size for the request; -1 means unlimited."""
    return -1 if size is None else size


def _describe_sizes(sizes: PoolSizes) -> str:
    def format_size(size: int | None) -> str:
        return "unlimited" if size is None else f"{size:,} B"

    methods = [
        f"'{name}': method allocator {format_size(method_allocator)}, planned memory {planned:,} B"
        for name, method_allocator, planned in sizes.methods
    ]
    shared = [f"shared planned memory {size:,} B" for size in sizes.shared]
    allocators = [f"temp allocator {format_size(sizes.temp)}", f"fast scratch {sizes.fast_scratch:,} B"]
    return ", ".join([*methods, *shared, *allocators])
