"""Describes Ethos-U payloads with the C++ reader that the device backends use, ``runtime/payload``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from arm_recipes.runtime.errors import PayloadError

_MESSAGE_BYTES = 512


@dataclass(frozen=True)
class EthosUTensor:
    """Where the command stream reads or writes a tensor.

    Attributes:
        shape: six dimensions. Vela joins and splits dimensions, so only their product is the program's.
        element_size: bytes of an element.
        offset: bytes into the region; -1 if the tensor has no place.
        region: number of the base address.
    """

    shape: tuple[int, ...]
    element_size: int
    offset: int
    region: int

    def __str__(self) -> str:
        first = next((index for index, count in enumerate(self.shape) if count != 1), len(self.shape) - 1)
        where = f"byte {self.offset:,} of region {self.region}" if self.offset >= 0 else "no place"
        return f"[{', '.join(map(str, self.shape[first:]))}] x {self.element_size} B, {where}"


@dataclass(frozen=True)
class EthosUPayload:
    """A compiled program for an Ethos-U.

    Attributes:
        product: 55, 65 or 85.
        macs: multiply-accumulates a cycle.
        stream: what the driver is given: ``COP1``, or ``COP2`` for Direct Drive.
        scratch_bytes: memory that the backend must provide while it runs.
    """

    product: int
    macs: int
    stream: str
    command_bytes: int
    weight_bytes: int
    scratch_bytes: int
    inputs: tuple[EthosUTensor, ...]
    outputs: tuple[EthosUTensor, ...]


class _Tensor(ctypes.Structure):
    """``arm_payload_tensor`` of ``payload_abi.h``."""

    _fields_ = (
        ("shape", ctypes.c_int32 * 6),
        ("element_size", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("region", ctypes.c_int32),
    )


class _Info(ctypes.Structure):
    """``arm_payload_info`` of ``payload_abi.h``."""

    _fields_ = (
        ("command_offset", ctypes.c_uint64),
        ("command_size", ctypes.c_uint64),
        ("weight_offset", ctypes.c_uint64),
        ("weight_size", ctypes.c_uint64),
        ("scratch_size", ctypes.c_uint64),
        ("input_count", ctypes.c_uint32),
        ("output_count", ctypes.c_uint32),
        ("product", ctypes.c_uint32),
        ("macs", ctypes.c_uint32),
        ("stream_kind", ctypes.c_uint32),
    )


def read_payload(data: bytes | memoryview) -> EthosUPayload:
    """Read and validate a payload.

    Raises:
        PayloadError: it is truncated or damaged; the message says where.
        RuntimeUnavailable: the reader cannot be built here.
    """
    import numpy as np

    from arm_recipes.runtime.plugin import payload_library

    library = payload_library()
    # NumPy gives the address of read-only memory, which ctypes refuses to.
    array = np.frombuffer(data, np.uint8)
    place = ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(array.size)
    info, message = _Info(), ctypes.create_string_buffer(_MESSAGE_BYTES)
    if library.arm_payload_read(*place, ctypes.byref(info), message, ctypes.c_uint64(_MESSAGE_BYTES)) != 0:
        raise PayloadError(message.value.decode(errors="replace"))

    def tensors(side: int, count: int) -> tuple[EthosUTensor, ...]:
        return tuple(_tensor(library, place, side, index) for index in range(count))

    return EthosUPayload(
        product=info.product,
        macs=info.macs,
        stream=f"COP{info.stream_kind}",
        command_bytes=info.command_size,
        weight_bytes=info.weight_size,
        scratch_bytes=info.scratch_size,
        inputs=tensors(0, info.input_count),
        outputs=tensors(1, info.output_count),
    )


def _tensor(
    library: ctypes.CDLL, place: tuple[ctypes.c_void_p, ctypes.c_uint64], side: int, index: int
) -> EthosUTensor:
    tensor = _Tensor()
    if library.arm_payload_tensor_at(*place, ctypes.c_int32(side), ctypes.c_uint32(index), ctypes.byref(tensor)) != 0:
        raise PayloadError(f"{('input', 'output')[side]} {index} cannot be read")
    return EthosUTensor(tuple(tensor.shape), tensor.element_size, tensor.offset, tensor.region)
