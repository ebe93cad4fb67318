"""Run a program on this machine as firmware runs it, in pools of given sizes; see ``runtime/firmware/pools.cpp``."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arm_recipes.runtime import build
from arm_recipes.runtime.errors import RunError

#: Lines of the runtime's log that an error shows.
_LINES = 6


@dataclass(frozen=True)
class PoolSizes:
    """Pools, in bytes; None is as much as it takes.

    Attributes:
        shared: memories of the plan from the second on, which methods share.
        methods: name, method allocator and first memory of the plan.
    """

    fast_scratch: int
    temp: int | None
    shared: tuple[int, ...]
    methods: tuple[tuple[str, int | None, int], ...]


@dataclass(frozen=True)
class Case:
    """One execution of a method: the bytes of its inputs, in the order in memory, and the number of its outputs."""

    method: str
    inputs: tuple[bytes, ...]
    outputs: int


@dataclass(frozen=True)
class HostRun:
    """What a run took.

    Attributes:
        pools: bytes of the method allocator by method.
        temp: most bytes of the temp allocator at a time.
        outputs: bytes of each case's.
    """

    pools: dict[str, int]
    temp: int
    outputs: tuple[tuple[bytes, ...], ...]


def run_on_host(program: bytes, sizes: PoolSizes, cases: Sequence[Case]) -> HostRun:
    """Load all methods of ``sizes``, then execute the cases in order.

    Raises:
        RunError: a pool is too small, or something else failed.
        RuntimeUnavailable: there is no compiler here, for example.
    """
    executable = build.build_firmware_runner()
    with tempfile.TemporaryDirectory(prefix="arm-firmware-") as name:
        folder = Path(name)
        (folder / "model.pte").write_bytes(program)
        (folder / "request").write_text("".join(f"{line}\n" for line in _request(folder, sizes, cases)))
        done = subprocess.run([str(executable), str(folder / "request")], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = "\n".join(done.stderr.strip().splitlines()[-_LINES:]) or f"it ended with {done.returncode}"
            raise RunError(f"the program does not run as firmware would run it, with {_describe_sizes(sizes)}:\n{said}")
        lines = [line.split() for line in done.stdout.splitlines()]
        return HostRun(
            pools={line[1]: int(line[2]) for line in lines if line[0] == "method"},
            temp=next(int(line[1]) for line in lines if line[0] == "temp"),
            outputs=tuple(
                tuple((folder / f"output{number}.{index}").read_bytes() for index in range(case.outputs))
                for number, case in enumerate(cases)
            ),
        )


def _request(folder: Path, sizes: PoolSizes, cases: Sequence[Case]) -> Iterator[object]:
    yield folder / "model.pte"
    yield from (sizes.fast_scratch, _number(sizes.temp), len(sizes.shared), *sizes.shared)
    yield len(sizes.methods)
    for name, pool, planned in sizes.methods:
        yield from (name, _number(pool), planned)
    names = [name for name, *_ in sizes.methods]
    yield len(cases)
    for number, case in enumerate(cases):
        yield from (names.index(case.method), len(case.inputs))
        for index, content in enumerate(case.inputs):
            path = folder / f"input{number}.{index}"
            path.write_bytes(content)
            yield path
        yield case.outputs
        yield from (folder / f"output{number}.{index}" for index in range(case.outputs))


def _number(size: int | None) -> int:
    return -1 if size is None else size


def _describe_sizes(sizes: PoolSizes) -> str:
    def of(size: int | None) -> str:
        return "enough" if size is None else f"{size:,} B"

    methods = [
        f"for '{name}' {of(pool)} of method allocator and {planned:,} B" for name, pool, planned in sizes.methods
    ]
    shared = [f"{size:,} B shared" for size in sizes.shared]
    others = [f"{of(sizes.temp)} of temp allocator", f"{sizes.fast_scratch:,} B of fast scratch"]
    return ", ".join([*methods, *shared, *others])
