"""Hand-written command streams, register by register, for tests of the meaning of single register values."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from arm_recipes.runtime.ethosu_payload import SCRATCH, WEIGHTS, EthosUTensor
from tests.runtime.ethosu_emulator import Emulator, Payload

Array = np.ndarray[Any, Any]

#: Configuration words by NPU: product and binary logarithm of MACs, as Vela writes them.
NPUS = {"ethos-u55-128": 0x00001807, "ethos-u65-256": 0x10003008, "ethos-u85-256": 0x20000118}
CONV, POOL, ELEMENTWISE, DMA_START, DMA_WAIT = 2, 5, 6, 16, 17
MAX, AVERAGE = 0, 1
MUL, ADD, SUB, LRELU, SHR = 0, 1, 2, 5, 8
#: OFM_PRECISION: the bit for one scale of all channels; the position of the rounding mode on U55 and U65.
GLOBAL_SCALE, ROUNDING_AT = 1 << 8, 14
#: Register numbers. The bases of three more tiles follow a base. Strides are those of columns, rows and bricks.
_IFM = {"base": 0, "strides": 4, "sizes": 266, "region": 271, "zero_point": 265, "precision": 261, "bytes_at": 2}
_IFM2 = {"base": 128, "strides": 132, "sizes": 394, "region": 399, "zero_point": 393, "precision": 389, "bytes_at": 2}
_OFM = {"base": 16, "strides": 20, "sizes": 282, "region": 287, "zero_point": 280, "precision": 276, "bytes_at": 1}
_IFM_DEPTH, _OFM_SHAPE, _OFM_BLOCK = 260, (274, 273, 275), (278, 277, 279)
OFM_SCALE, IFM_SCALES, IFM2_BROADCAST, ACTIVATION, ACTIVATION_MIN, ACTIVATION_MAX = 36, (37, 38), 384, 293, 294, 295
_KERNEL_WIDTH, _KERNEL_HEIGHT, _KERNEL_STRIDE, PAD_TOP, PAD_RIGHT = 288, 289, 290, 256, 258
_DMA_REGIONS, _DMA_ADDRESSES, _DMA_LENGTH = (304, 305), (48, 49), 50
#: The region bit of a DMA that selects the NPU's memory for tables; the address of that memory on U55-128 (24 KiB).
TABLES, TABLE_ADDRESS = 1 << 8, 0x5800


class CommandStreamBuilder:
    """Builds a command stream."""

    def __init__(self, npu: str) -> None:
        self.npu, self._words = npu, list[int]()

    @property
    def is_u85(self) -> bool:
        """Whether the NPU is a U85."""
        return "u85" in self.npu

    def set(self, register: int, value: int) -> None:
        """Set a 16-bit register."""
        self._words.append(register | (value & 0xFFFF) << 16)

    def set_word(self, register: int, value: int, parameter: int = 0) -> None:
        """Set a 32-bit register and its 16-bit parameter."""
        self._words += [0x4000 | register | parameter << 16, value & 0xFFFFFFFF]

    def set_scale(self, multiplier: int, shift: int) -> None:
        """Set the output scale."""
        self.set_word(OFM_SCALE, multiplier, shift)

    def start(self, operation: int, parameter: int = 0) -> None:
        """Start an operation."""
        self._words.append(operation | parameter << 16)

    def copy(self, source: tuple[int, int], target: tuple[int, int], length: int, *, waits: bool = True) -> None:
        """Start a DMA from one (region, address) to another; if ``waits``, wait for its end."""
        for register, address_register, (region, address) in zip(
            _DMA_REGIONS, _DMA_ADDRESSES, (source, target), strict=True
        ):
            self.set(register, region)
            self.set_word(address_register, address)
        self.set_word(_DMA_LENGTH, length)
        self.start(DMA_START)
        if waits:
            self.start(DMA_WAIT)

    def ifm(self, address: int, array: Array, zero_point: int = 0) -> None:
        """Set the first operand: an array of rows, columns, channels."""
        self.set(_IFM_DEPTH, array.shape[2] - 1)
        self._set_feature_map(_IFM, address, array, zero_point)

    def ifm2(self, address: int, array: Array, zero_point: int = 0) -> None:
        """Set the second operand, without broadcast."""
        self.set(IFM2_BROADCAST, 0)
        self._set_feature_map(_IFM2, address, array, zero_point)

    def ofm(self, address: int, array: Array, zero_point: int = 0, flags: int = 0) -> None:
        """Set the result's shape and type; ``flags`` are further bits of its precision register. Values are ignored."""
        for registers in (_OFM_SHAPE, _OFM_BLOCK):
            for register, extent in zip(registers, array.shape, strict=True):
                self.set(register, extent - 1)
        self._set_feature_map(_OFM, address, array, zero_point, flags)
        info = np.iinfo(array.dtype)
        limits = (info.min, info.max) if info.bits <= 16 else (-(2**15), 2**15 - 1)
        if self.is_u85:
            self.set(ACTIVATION, 0 if info.bits <= 16 else 1 << 12)
        else:
            self.set(ACTIVATION, 0)
        self.set(ACTIVATION_MIN, limits[0])
        self.set(ACTIVATION_MAX, limits[1])

    def kernel(self, height: int, width: int, top: int = 0, right: int = 0) -> None:
        """Set the size of a pool's window, with padding at the top and at the right."""
        for register, value in ((_KERNEL_HEIGHT, height - 1), (_KERNEL_WIDTH, width - 1), (_KERNEL_STRIDE, 0)):
            self.set(register, value)
        self.set(PAD_TOP, top)
        self.set(PAD_RIGHT, right)

    def _set_feature_map(
        self, registers: dict[str, int], address: int, array: Array, zero_point: int, flags: int = 0
    ) -> None:
        height, width, depth = array.shape
        size = array.dtype.itemsize
        self.set(registers["region"], SCRATCH)
        self.set_word(registers["base"], address)
        for place, stride in enumerate((depth * size, width * depth * size, 0)):
            self.set_word(registers["strides"] + place, stride)
        for place, extent in enumerate((width, height, height)):
            self.set(registers["sizes"] + place, extent - 1)
        signed = int(array.dtype.kind == "i")
        self.set(registers["precision"], signed | int(math.log2(size)) << registers["bytes_at"] | flags)
        self.set(registers["zero_point"], zero_point)

    @property
    def stream(self) -> bytes:
        """Return the whole stream, with header and stop command."""
        words = [*self._words, 0xFFFF0000]
        tag = 2 | (len(words) >> 16) << 8 | (len(words) & 0xFFFF) << 16
        return b"COP1" + struct.pack(f"<{7 + len(words)}I", 0x00100001, NPUS[self.npu], 0, 5, 5, 5, tag, *words)


def execute(
    emulator: Emulator,
    commands: CommandStreamBuilder,
    inputs: Sequence[tuple[int, Array]],
    output: tuple[int, Array],
    weights: Array,
) -> Array:
    """Execute a stream and return the output from scratch. Inputs and output are (address, array) in scratch."""
    scratch = max(address + array.nbytes for address, array in (*inputs, output))
    places = [EthosUTensor((1,), 1, address, SCRATCH) for address, _ in (*inputs, output)]
    payload = Payload(commands.stream, weights.tobytes(), scratch, tuple(places[:-1]), tuple(places[-1:]))
    _, result = output
    return emulator.run(payload, [array for _, array in inputs], [(result.dtype.name, result.shape)])[0]


def elementwise(
    emulator: Emulator,
    npu: str,
    mode: int,
    operands: Sequence[Array],
    result: type[np.signedinteger[Any]],
    *,
    scale: tuple[int, int] | None = (1, 0),
    zero_point: int = 0,
    rounding: int = 0,
    activation: int | None = None,
) -> list[int]:
    """Execute an elementwise operation on one or two operands of one row.

    Args:
        scale: multiplier and shift of the output; None clears the bit for a scale of all channels.
        rounding: rounding mode of U55 and U65.
        activation: value of the ACTIVATION register.
    """
    commands, arrays = CommandStreamBuilder(npu), [operand.reshape(1, 1, -1) for operand in operands]
    places = [256 * index for index in range(len(arrays) + 1)]
    output = np.zeros(arrays[0].shape, result)
    flags = rounding << ROUNDING_AT if not commands.is_u85 else 0
    commands.ofm(places[-1], output, zero_point, flags | (GLOBAL_SCALE if scale is not None else 0))
    if activation is not None:
        commands.set(ACTIVATION, activation)
    if scale is not None:
        commands.set_scale(*scale)
    commands.ifm(places[0], arrays[0])
    if len(arrays) > 1:
        commands.ifm2(places[1], arrays[1])
        for register in IFM_SCALES:
            commands.set_word(register, 1)
    commands.start(ELEMENTWISE, mode)
    inputs = list(zip(places, arrays, strict=False))
    values = execute(emulator, commands, inputs, (places[-1], output), np.zeros(16, np.uint8))
    return [int(value) for value in values.ravel()]


def pool(
    emulator: Emulator,
    npu: str,
    mode: int,
    image: Array,
    *,
    kernel: tuple[int, int] = (1, 1),
    right: int = 0,
    scale: tuple[int, int] | None = (1, 0),
    activation: int | None = None,
) -> list[int]:
    """Execute a pool of [rows, columns, channels] with ``right`` columns of padding; otherwise as ``elementwise``."""
    commands = CommandStreamBuilder(npu)
    height, width, depth = image.shape
    output = np.zeros((height - kernel[0] + 1, width + right - kernel[1] + 1, depth), image.dtype)
    at = (image.nbytes + 15) // 16 * 16
    commands.ofm(at, output, 0, GLOBAL_SCALE if scale is not None else 0)
    if activation is not None:
        commands.set(ACTIVATION, activation)
    if scale is not None:
        commands.set_scale(*scale)
    commands.ifm(0, image)
    commands.kernel(*kernel, right=right)
    commands.start(POOL, mode)
    values = execute(emulator, commands, [(0, image)], (at, output), np.zeros(16, np.uint8))
    return [int(value) for value in values.ravel()]


def copy_by_dma(emulator: Emulator, npu: str, data: Array) -> list[int]:
    """Copy one row from the constants to scratch by a DMA, and return it."""
    commands = CommandStreamBuilder(npu)
    commands.copy((WEIGHTS, 0), (SCRATCH, 0), data.nbytes)
    return [int(value) for value in execute(emulator, commands, [], (0, np.zeros(data.shape, data.dtype)), data)]
