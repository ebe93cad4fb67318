"""The Ethos-U emulator of ``runtime/emulator`` from Python, for tests."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from arm_backend_core import events
from arm_backend_core.tosa import reference
from arm_recipes.runtime.ethosu_abi import FINDINGS, Figures, declare_functions
from arm_recipes.runtime.ethosu_payload import EthosUTensor, read_parts
from arm_recipes.runtime.ethosu_stream import Stream
from tests.ops.runner import Lowered
from tests.runtime.building import RUNTIME, compile_cpp

Array = np.ndarray[Any, Any]
#: Bytes of fast scratch that Vela may use where a memory mode has any: the payload does not tell how many it does.
_FAST_SCRATCH = 4 << 20


@dataclass(frozen=True)
class Payload:
    """The parts of an Ethos-U payload that the driver is given."""

    commands: bytes
    weights: bytes
    scratch: int
    inputs: tuple[EthosUTensor, ...]
    outputs: tuple[EthosUTensor, ...]


def read_payload(data: bytes) -> Payload:
    """Take a block stream apart."""
    parts = read_parts(data)
    told = parts.payload
    return Payload(bytes(parts.commands), bytes(parts.weights), told.scratch_bytes, told.inputs, told.outputs)


def build(directory: Path) -> Path:
    """Compile the emulator into a shared library."""
    sources = sorted((RUNTIME / "emulator").glob("*.cpp"))
    flags = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", f"-I{RUNTIME}"]
    return compile_cpp(directory / "libethosu_emulator.so", sources, flags, link=["-shared"])


def _of_size(tensor: EthosUTensor, nbytes: int) -> EthosUTensor:
    """As many bytes in the same place."""
    return replace(tensor, shape=(nbytes,), element_size=1)


class Emulator:
    """A loaded library."""

    def __init__(self, path: Path) -> None:
        self._library = declare_functions(ctypes.CDLL(str(path)))
        self.figures = Figures()

    def run(
        self,
        payload: Payload,
        inputs: Sequence[Array],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
        *,
        fails: int | None = FINDINGS,
    ) -> list[Array]:
        """Execute once, watched; ``figures`` are then those of this execution.

        Args:
            outputs: element type and shape of each result.
            fails: findings of the watch that are errors, as bits; None: it is not watched.

        Raises:
            StreamError: it does not load, or fails.
        """
        given = [np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8) for array in inputs]
        results = [np.empty(shape, dtype) for dtype, shape in outputs]
        taken, returned = (
            [_of_size(tensor, array.nbytes) for tensor, array in zip(tensors, arrays, strict=True)]
            for tensors, arrays in ((payload.inputs, given), (payload.outputs, results))
        )
        stream = Stream(
            self._library, payload.commands, payload.weights, payload.scratch, _FAST_SCRATCH, taken, returned
        )
        try:
            if fails is not None:
                stream.enable_access_checks(fails)
            written = stream.run(given)
        finally:
            self.figures = stream.figures()
            stream.close()
        return [
            np.frombuffer(data.tobytes(), result.dtype).reshape(result.shape)
            for data, result in zip(written, results, strict=True)
        ]

    def gives_what_tosa_does(self, delegate: events.Delegate, payload: bytes) -> bool:
        """Whether the program and the TOSA reference model compute the same of random numbers."""
        inputs = random_inputs(delegate, seed=0)
        expected = reference.run(delegate.tosa, inputs)
        results = self.run(read_payload(payload), inputs, [(array.dtype.name, array.shape) for array in expected])
        return all(np.array_equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


def compiled(lowered: Lowered) -> list[tuple[events.Delegate, bytes]]:
    """Delegates with their payloads."""
    by_checksum = {zlib.crc32(payload).to_bytes(4, "little"): payload for payload in payloads(lowered.program)}
    return [(made, by_checksum[made.checksum]) for made in lowered.log.delegates]


def payloads(program: ExportedProgram) -> Iterator[bytes]:
    """Payloads of a delegated program, in the order of its calls."""
    modules: Mapping[str, Any] = dict(program.graph_module.named_modules())
    for node in program.graph.nodes:
        if node.op == "call_function" and "executorch_call_delegate" in str(node.target):
            yield modules[node.args[0].target].processed_bytes


def random_inputs(delegate: events.Delegate, seed: int) -> list[Array]:
    """Every number of the element types, not only those that a calibrated input has; indices stay small."""
    generator = np.random.default_rng(seed)
    arrays = []
    for io in delegate.inputs:
        if io.dtype == "bool":
            arrays.append(generator.random(io.shape) < 0.5)
            continue
        info = np.iinfo(io.dtype)
        low, high = (info.min, info.max + 1) if info.bits < 32 else (0, 2)
        arrays.append(generator.integers(low, high, io.shape).astype(io.dtype))
    return arrays
