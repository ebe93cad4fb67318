"""Ethos-U programs on this machine: the command stream itself, by the emulator in the host plugin."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import PayloadError, RunError
from arm_recipes.runtime.ethosu_payload import (
    FAST_SCRATCH,
    SCRATCH,
    WEIGHTS,
    EthosUPayload,
    EthosUTensor,
    read_parts,
    with_fast_scratch,
)
from arm_recipes.runtime.once import once

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_REGIONS = 8
_MESSAGE_BYTES = 512
#: Scratch and fast scratch are counted in 32 bits: a stream cannot reach further into them.
_MOST_BYTES = 2**32


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
        sizes[FAST_SCRATCH] = min(sizes[FAST_SCRATCH], _emulator().arm_npu_reach(self._program, FAST_SCRATCH))
        self._memory = [weights, *(np.zeros(size, np.uint8) for size in sizes[1:])]
        self._bases = (ctypes.c_void_p * _REGIONS)(*[array.ctypes.data for array in self._memory])

    @property
    def _name(self) -> str:
        return f"a program for Ethos-U{self._described.product}-{self._described.macs}"

    def _load(self, commands: bytes, weights: Array, sizes: Sequence[int]) -> int:
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        limits = (ctypes.c_uint64 * _REGIONS)(*sizes)
        program: int | None = _emulator().arm_npu_load(
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
        for tensor, array in zip(self.inputs, arrays, strict=True):
            if tensor.offset >= 0:  # else nothing reads it
                self._bytes_of(tensor)[:] = array
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if _emulator().arm_npu_execute(self._program, self._bases, message, _MESSAGE_BYTES) != 0:
            said = message.value.decode(errors="replace")
            raise RunError(f"{self._name} failed. In its command stream, {said}")
        return [self._bytes_of(tensor) for tensor in self.outputs]

    def _bytes_of(self, tensor: EthosUTensor) -> Array:
        return self._memory[tensor.region][tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """See ``Delegate``."""
        _emulator().arm_npu_free(self._program)


def _region_sizes(payload: EthosUPayload) -> list[int]:
    """Bytes of every region; fast scratch has all that can be addressed where nothing tells its size."""
    sizes = [0] * _REGIONS
    # Regions of their own that inputs and outputs may have.
    for tensor in (*payload.inputs, *payload.outputs):
        sizes[tensor.region] = max(sizes[tensor.region], tensor.offset + tensor.nbytes)
    sizes[WEIGHTS], sizes[SCRATCH] = payload.weight_bytes, payload.scratch_bytes
    told = payload.fast_scratch_bytes
    sizes[FAST_SCRATCH] = _MOST_BYTES if told is None else min(told, _MOST_BYTES)
    return sizes


@once
def _emulator() -> ctypes.CDLL:
    """The library with the functions of ``runtime/ethosu_emulator/emulator_abi.h``."""
    from arm_recipes.runtime.plugin import library

    loaded = library()
    pointer, size = ctypes.c_void_p, ctypes.c_uint64
    loaded.arm_npu_load.argtypes = [ctypes.c_char_p, size, pointer, pointer, pointer, size]
    loaded.arm_npu_load.restype = pointer
    loaded.arm_npu_execute.argtypes = [pointer, pointer, pointer, size]
    loaded.arm_npu_reach.argtypes, loaded.arm_npu_reach.restype = [pointer, ctypes.c_int32], size
    loaded.arm_npu_free.argtypes, loaded.arm_npu_free.restype = [pointer], None
    return loaded
