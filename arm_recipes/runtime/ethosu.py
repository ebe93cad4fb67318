"""Ethos-U programs on this machine: the command stream itself, by the emulator in the host plugin."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import PayloadError, RunError
from arm_recipes.runtime.ethosu_abi import FINDINGS, REGIONS, Figures, Operation, Span, emulator
from arm_recipes.runtime.ethosu_payload import (
    FAST_SCRATCH,
    SCRATCH,
    WEIGHTS,
    EthosUPayload,
    EthosUTensor,
    read_parts,
    with_fast_scratch,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_MESSAGE_BYTES = 512
#: Scratch and fast scratch are counted in 32 bits: a stream cannot reach further into them.
_MOST_BYTES = 2**32


@dataclass(frozen=True)
class EthosUOperation:
    """An operation of a command stream that has run, and what it wrote.

    Attributes:
        command: for example ``NPU_OP_CONV``.
        offset: byte of the stream, counted from its header; the emulator's errors name it too.
        region: of the memory that it writes; -1 where the result stays in the NPU, 8 for the NPU's tables.
        address: of the result's first element in the region.
        integers: what it wrote, as rows, columns and channels; bytes for a DMA. Empty if it wrote nothing: its sums
            stay in the NPU for the next operation.
    """

    command: str
    offset: int
    region: int
    address: int
    integers: Array


@dataclass(frozen=True)
class EthosUFigures:
    """What one execution did, measured. Lists have a number for each region; an operation reads each byte once.

    Attributes:
        peak: the byte after the last one that is read or written; ``touched``: how many different ones are.
    """

    operations: int
    commands: int
    macs: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]
    peak: tuple[int, ...]
    touched: tuple[int, ...]


class EthosUDelegate:
    """A command stream with the memory that a device would give it.

    Args:
        payload: ExecuTorch's container of a compiled program.
        compile_specs: of the delegate; may tell the size of fast scratch. Otherwise it is what the stream touches.

    Raises:
        PayloadError: it is damaged, or the emulator does not execute it.
        RuntimeUnavailable: the plugin cannot be built or loaded.
    """

    def __init__(self, payload: bytes, compile_specs: Mapping[str, bytes]) -> None:
        import numpy as np

        parts = read_parts(payload)
        described = self._described = with_fast_scratch(parts.payload, compile_specs)
        self.inputs: Sequence[EthosUTensor] = described.inputs
        self.outputs: Sequence[EthosUTensor] = described.outputs
        unplaced = [str(index) for index, tensor in enumerate(self.outputs) if tensor.offset < 0]
        if unplaced:
            raise PayloadError(f"{self._name}: nothing computes output {unplaced[0]}: it has no place in memory")
        sizes = _region_sizes(described)
        # A copy, which can be written: what a damaged stream writes there must not reach the program's bytes.
        weights = np.frombuffer(parts.weights, np.uint8).copy()
        self._program = self._load(bytes(parts.commands), weights, sizes)
        sizes[FAST_SCRATCH] = min(sizes[FAST_SCRATCH], emulator().arm_npu_reach(self._program, FAST_SCRATCH))
        self._memory = [weights, *(np.zeros(size, np.uint8) for size in sizes[1:])]
        self._bases = (ctypes.c_void_p * REGIONS)(*[array.ctypes.data for array in self._memory])

    @property
    def stream(self) -> str:
        """``COP1``, or ``COP2`` for Direct Drive."""
        return self._described.stream

    @property
    def _name(self) -> str:
        return f"a program for Ethos-U{self._described.product}-{self._described.macs}"

    def _load(self, commands: bytes, weights: Array, sizes: Sequence[int]) -> int:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        limits = (ctypes.c_uint64 * REGIONS)(*sizes)
        program: int | None = emulator().arm_npu_load(
            commands, len(commands), weights.ctypes.data, limits, message, _MESSAGE_BYTES
        )
        if program is None:
            said = message.value.decode(errors="replace")
            raise PayloadError(
                f"{self._name} is damaged, or does what the emulator does not know. In its command stream, {said}"
            )
        return program

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """See ``Delegate``. Takes and returns bytes: what they stand for is in the program around it."""
        self._place(arrays)
        self._call("execute", self._program, self._bases)
        return [self._bytes_of(tensor) for tensor in self.outputs]

    def watched(self, arrays: Sequence[Array]) -> EthosUFigures:
        """Execute once with all accesses watched; so are later executions.

        Raises:
            RunError: a byte is read, or is a result, that nothing has written; or nothing makes an operation wait for
                another one whose accesses must come before its own. The message names command, offset and byte.
        """
        spans = [_spans(tensors) for tensors in (self.inputs, self.outputs)]
        arguments = [argument for span in spans for argument in (span, len(span))]
        self._call("watch", self._program, *arguments, FINDINGS)
        self.run(arrays)
        figures = Figures()
        emulator().arm_npu_measure(self._program, ctypes.byref(figures))
        lists = (figures.bytes_read, figures.bytes_written, figures.peak, figures.touched)
        return EthosUFigures(figures.operations, figures.commands, figures.macs, *map(tuple, lists))

    def trace(self, arrays: Sequence[Array]) -> list[EthosUOperation]:
        """Execute once, operation by operation."""
        self._place(arrays)
        described, operations = Operation(), list[EthosUOperation]()
        while emulator().arm_npu_describe(self._program, len(operations), ctypes.byref(described)) == 0:
            index = len(operations)
            self._call("step", self._program, index, self._bases)
            operations.append(
                EthosUOperation(
                    described.name.decode(),
                    described.offset,
                    described.region,
                    described.address,
                    self._result(index, described),
                )
            )
        return operations

    def _result(self, index: int, described: Operation) -> Array:
        import numpy as np

        if described.element_size == 0:
            return np.empty(0, np.uint8)
        dtype = np.dtype(f"{'i' if described.is_signed else 'u'}{described.element_size}")
        result = np.empty(tuple(described.shape), dtype)
        if emulator().arm_npu_result(self._program, index, result.ctypes.data, result.nbytes) != 0:
            raise RunError(
                f"{self._name}: what {described.name.decode()} at byte {described.offset} wrote is not known"
            )
        return result

    def _place(self, arrays: Sequence[Array]) -> None:
        for tensor, array in zip(self.inputs, arrays, strict=True):
            if tensor.offset >= 0:  # else nothing reads it
                self._bytes_of(tensor)[:] = array

    def _call(self, function: str, *arguments: Any) -> None:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if getattr(emulator(), f"arm_npu_{function}")(*arguments, message, _MESSAGE_BYTES) != 0:
            said = message.value.decode(errors="replace")
            raise RunError(f"{self._name} failed. In its command stream, {said}")

    def _bytes_of(self, tensor: EthosUTensor) -> Array:
        return self._memory[tensor.region][tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """See ``Delegate``."""
        emulator().arm_npu_free(self._program)


def _spans(tensors: Sequence[EthosUTensor]) -> ctypes.Array[Span]:
    placed = [Span(tensor.region, tensor.offset, tensor.nbytes) for tensor in tensors if tensor.offset >= 0]
    return (Span * len(placed))(*placed)


def _region_sizes(payload: EthosUPayload) -> list[int]:
    """Bytes of every region; fast scratch has all that can be addressed where nothing tells its size."""
    sizes = [0] * REGIONS
    # Regions of their own that inputs and outputs may have.
    for tensor in (*payload.inputs, *payload.outputs):
        sizes[tensor.region] = max(sizes[tensor.region], tensor.offset + tensor.nbytes)
    sizes[WEIGHTS], sizes[SCRATCH] = payload.weight_bytes, payload.scratch_bytes
    told = payload.fast_scratch_bytes
    sizes[FAST_SCRATCH] = _MOST_BYTES if told is None else min(told, _MOST_BYTES)
    return sizes
