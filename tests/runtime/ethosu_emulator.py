"""The Ethos-U emulator of ``runtime/ethosu_emulator`` from Python, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.export import ExportedProgram

from arm_backend_core import events
from arm_recipes.runtime.ethosu_abi import FINDINGS, Figures, Span
from arm_recipes.runtime.ethosu_payload import EthosUTensor, read_parts
from tests.runtime.building import RUNTIME, compile_cpp

Array = np.ndarray[Any, Any]
_REGIONS = 8
_MESSAGE_BYTES = 512
#: Bytes of fast scratch that Vela may use where a memory mode has any: the payload does not tell how many it does.
_FAST_SCRATCH = 4 << 20


class EmulatorError(Exception):
    """What the emulator says of a program that it does not run."""


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


def places(tensors: Sequence[EthosUTensor], sizes: Sequence[int]) -> list[Span]:
    """Where tensors of these sizes lie."""
    pairs = zip(tensors, sizes, strict=True)
    return [Span(tensor.region, tensor.offset, size) for tensor, size in pairs if tensor.offset >= 0]


def build(directory: Path) -> Path:
    """Compile the emulator into a shared library."""
    sources = sorted((RUNTIME / "ethosu_emulator").glob("*.cpp"))
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{RUNTIME}"]
    return compile_cpp(directory / "libethosu_emulator.so", sources, flags)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


class Emulator:
    """A loaded library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.arm_npu_load.restype = ctypes.c_void_p
        self._library.arm_npu_free.argtypes = [ctypes.c_void_p]
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
            EmulatorError: it does not load, or fails.
        """
        memory = [np.frombuffer(payload.weights, np.uint8), np.zeros(payload.scratch, np.uint8)]
        memory += [np.zeros(_FAST_SCRATCH, np.uint8)]
        # Regions of their own, if the stream has any for inputs and outputs.
        sizes = [np.asarray(array).nbytes for array in inputs], [_nbytes(*output) for output in outputs]
        for region in range(len(memory), _REGIONS):
            tensors = [*zip(payload.inputs, sizes[0], strict=True), *zip(payload.outputs, sizes[1], strict=True)]
            ends = [place.offset + size for place, size in tensors if place.region == region]
            memory.append(np.zeros(max(ends, default=0), np.uint8))
        for place, array in zip(payload.inputs, inputs, strict=True):
            data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
            if place.offset >= 0:
                memory[place.region][place.offset : place.offset + data.size] = data
        program = self._load(payload, memory)
        try:
            if fails is not None:
                self._watch(program, places(payload.inputs, sizes[0]), places(payload.outputs, sizes[1]), fails)
            self._execute(program, memory)
        finally:
            self._library.arm_npu_free(program)
        results = []
        for place, (dtype, shape) in zip(payload.outputs, outputs, strict=True):
            data = memory[place.region][place.offset : place.offset + _nbytes(dtype, shape)]
            results.append(np.frombuffer(data.tobytes(), dtype).reshape(shape))
        return results

    def _load(self, payload: Payload, memory: Sequence[Array]) -> int:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        sizes = (ctypes.c_uint64 * _REGIONS)(*[array.size for array in memory])
        program: int | None = self._library.arm_npu_load(
            payload.commands,
            ctypes.c_uint64(len(payload.commands)),
            ctypes.c_void_p(memory[0].ctypes.data),
            sizes,
            message,
            ctypes.c_uint64(_MESSAGE_BYTES),
        )
        if program is None:
            raise EmulatorError(message.value.decode())
        return program

    def _watch(self, program: int, inputs: Sequence[Span], outputs: Sequence[Span], fails: int) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        arguments: list[Any] = [ctypes.c_void_p(program)]
        for spans in (inputs, outputs):
            arguments += [(Span * len(spans))(*spans), ctypes.c_uint64(len(spans))]
        status = self._library.arm_npu_watch(
            *arguments, ctypes.c_uint32(fails), message, ctypes.c_uint64(_MESSAGE_BYTES)
        )
        assert status == 0, message.value.decode()

    def _execute(self, program: int, memory: Sequence[Array]) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        bases = (ctypes.c_void_p * _REGIONS)(*[array.ctypes.data for array in memory])
        arguments = ctypes.c_void_p(program), bases, message, ctypes.c_uint64(_MESSAGE_BYTES)
        status = self._library.arm_npu_execute(*arguments)
        self._library.arm_npu_measure(ctypes.c_void_p(program), ctypes.byref(self.figures))
        if status != 0:
            raise EmulatorError(message.value.decode())


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
