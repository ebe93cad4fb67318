"""Delegate payloads: compiled bytes, Vela's estimates, and ExecuTorch's block stream for Ethos-U."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

#: Key of the compile spec that contains a payload's checksum.
CHECKSUM_KEY = "payload_crc32"
#: Keys of the compile specs that contain the checksums of weights and commands outside the payload.
WEIGHTS_CHECKSUM_KEY = "weight_data_crc32"
COMMANDS_CHECKSUM_KEY = "cmd_data_crc32"
#: Key of the compile spec that contains the size of an Ethos-U program's fast scratch. COP1 streams lack this size.
FAST_SCRATCH_KEY = "fast_scratch_size"
#: Keys of the compile specs of an Ethos-U delegate whose scratch is in planned memory.
PLANNED_SCRATCH_ARGUMENT_KEY = "planned_scratch_argument"
PLANNED_SCRATCH_END_KEY = "planned_scratch_end"
PLANNED_SCRATCH_KEYS = (PLANNED_SCRATCH_ARGUMENT_KEY, PLANNED_SCRATCH_END_KEY)
_BLOCK_HEADER = struct.Struct("<16sIB11s")
_ALIGNMENT = 16
_IO_RECORD = struct.Struct("<9i")
#: Vela's address of an unallocated tensor. The stream contains -1.
_UNALLOCATED = (1 << 64) - 1


@dataclass(frozen=True)
class MemoryUse:
    """One memory of the system: peak use in bytes, and the accesses of one inference."""

    name: str
    peak_bytes: int
    access_cycles: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Layer:
    """Vela's estimate for one NPU operation of the command stream.

    Attributes:
        operator: Vela's name of the TOSA operator that it implements, for example ``Conv2D``.
        npu_operator: name of the NPU operation that executes it.
        tensor: name of the result in the flatbuffer.
        index: position of the TOSA operator in the flatbuffer, None if Vela does not report it.
        cycles: estimated cycles including waits for memory.
        npu_cycles: estimated cycles of the NPU alone.
        macs: multiply-accumulates.
        staging_bytes: bytes of the staging memory in use while it runs.
        memory_cycles: cycles per memory, as (name, cycles).
        commands: byte offsets of the commands that start it, relative to the first command. The commands between the
            previous operation's start and its own belong to it too.
        part_of: index of the operation that it is fused into, whose cycles include its own; None if it is not fused.
    """

    operator: str
    npu_operator: str
    tensor: str
    index: int | None
    cycles: int
    npu_cycles: int
    macs: int
    staging_bytes: int
    memory_cycles: tuple[tuple[str, int], ...]
    commands: tuple[int, ...] = ()
    part_of: int | None = None


@dataclass(frozen=True)
class TensorAllocation:
    """A tensor allocated in working memory.

    Attributes:
        name: Vela's name of the tensor.
        memory: name of the memory.
        usage: Vela's category of use.
        start, end: live range in Vela's time steps. Each operation takes two; all operations of a cascade share two.
        address: byte offset in the memory.
        bytes: size.
    """

    name: str
    memory: str
    usage: str
    start: int
    end: int
    address: int
    bytes: int


@dataclass(frozen=True)
class VelaEstimates:
    """Vela's estimates for one delegate, per inference.

    They equal what Vela's command line prints, except for programs in which this project copies weights to SRAM
    (``ethosu_weight_cache``, ``ethosu_prefetch``). Their estimates include the copies.

    Attributes:
        npu_cycles: cycles of the NPU.
        total_cycles: cycles including waits for memory.
        core_clock: Hz, from the system configuration.
        inference_seconds: ``total_cycles / core_clock``.
        sram_bytes, dram_bytes, flash_bytes: peak use of each kind of memory. In a memory mode that keeps everything in
            SRAM, Vela counts the constants as on-chip flash, and so does ``flash_bytes``.
        fast_scratch_bytes: fast scratch that the firmware must provide in Dedicated_Sram memory modes, else 0.
        sram_limit: bytes of SRAM that the memory mode or ``--arena-cache-size`` grants; None without a limit.
        macs: multiply-accumulates.
        weight_bytes, original_weight_bytes: size of the weights after and before encoding for the NPU.
        npu_operators: operations in the command stream.
        memories: estimates per memory of the system.
        layers: estimates per NPU operation, in execution order.
        accelerator, system_config, memory_mode: the configuration that the delegate was compiled for.
        placed: allocation of tensors in working memory.
        scratch_bytes: scratch that the firmware must provide, without fast scratch.
        scratch_memory: memory that holds it, "Sram" or "Dram".
        constant_bytes: constants of the NPU, with the command stream.
        constant_memory: memory that holds them: "OffChipFlash", "Dram", or "OnChipFlash", which is SRAM.
        performance: (total cycles, bytes of SRAM) of the performance program, if this program replaces it because
            it needs less RAM.
    """

    npu_cycles: int
    total_cycles: int
    core_clock: float
    inference_seconds: float
    sram_bytes: int
    dram_bytes: int
    flash_bytes: int
    fast_scratch_bytes: int
    sram_limit: int | None
    macs: int
    weight_bytes: int
    original_weight_bytes: int
    npu_operators: int
    memories: tuple[MemoryUse, ...]
    layers: tuple[Layer, ...]
    accelerator: str
    system_config: str
    memory_mode: str
    placed: tuple[TensorAllocation, ...] = ()
    scratch_bytes: int = 0
    scratch_memory: str = "Sram"
    constant_bytes: int = 0
    constant_memory: str = "OffChipFlash"
    performance: tuple[int, int] | None = None

    @property
    def sram_exceeded(self) -> bool:
        """Whether more SRAM is needed than the memory mode grants."""
        return self.sram_limit is not None and self.sram_bytes > self.sram_limit


@dataclass(frozen=True)
class Payload:
    """A compiled delegate, as stored in the program.

    Attributes:
        data: the delegate's bytes in the ``.pte``.
        vela: Vela's estimates, for Ethos-U.
        artifacts: intermediate files for ``dump_intermediate_artifacts_to``, as name suffix -> content.
    """

    data: bytes
    vela: VelaEstimates | None = None
    artifacts: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))

    def extra_compile_specs(self) -> list[CompileSpec]:
        """Compile specs with data that the payload does not contain, checksum first. Runtimes ignore unknown keys."""
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        specs = [checksum_spec(self.data)]
        if self.vela is not None:
            specs.append(CompileSpec(FAST_SCRATCH_KEY, struct.pack("<I", self.vela.fast_scratch_bytes)))
        return specs


def checksum_spec(data: bytes, key: str = CHECKSUM_KEY) -> CompileSpec:
    """The compile spec with a payload's CRC-32, little endian. This project's runtimes refuse a changed payload."""
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    return CompileSpec(key, zlib.crc32(data).to_bytes(4, "little"))


@dataclass(frozen=True)
class PlannedScratch:
    """The scratch of an Ethos-U delegate in planned memory 1.

    Attributes:
        argument: index of an input, or number of inputs plus index of an output. The memory plan puts this tensor at
            its offset in the scratch, so that its address gives the address of the scratch.
        end: offset of the end of the scratch in the planned memory, in bytes. If the delegate is called several times,
            the end of the last scratch.
    """

    argument: int
    end: int

    def to_compile_specs(self) -> list[CompileSpec]:
        """Encode each number in 4 bytes, little endian.

        Runtimes that do not know these compile specs allocate a scratch, and copy inputs and outputs.
        """
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        numbers = {PLANNED_SCRATCH_ARGUMENT_KEY: self.argument, PLANNED_SCRATCH_END_KEY: self.end}
        return [CompileSpec(key, number.to_bytes(4, "little")) for key, number in numbers.items()]

    @classmethod
    def from_compile_specs(cls, specs: Mapping[str, bytes]) -> PlannedScratch | None:
        """Decode the compile specs of a delegate; None unless they contain both numbers."""
        values = [specs.get(key) for key in PLANNED_SCRATCH_KEYS]
        numbers = [int.from_bytes(value, "little") for value in values if value is not None]
        return cls(*numbers) if len(numbers) == len(values) else None


def pack_block_stream(blocks: Sequence[tuple[str, bytes]], external: Sequence[str] = ()) -> bytes:
    """Serialize blocks to ExecuTorch's container for a compiled Ethos-U program.

    Layout of a block: name (16 bytes, zero padded), length of the data (uint32), external flag (uint8), 11 reserved
    bytes, data padded to 16 bytes. If the external flag is 1, the data are a key of the program's named data.

    Args:
        blocks: (name, data).
        external: names of the blocks with the external flag.
    """
    parts = []
    for name, data in blocks:
        parts += [
            _BLOCK_HEADER.pack(name.encode("ascii"), len(data), name in external, bytes(11)),
            data,
            bytes(-len(data) % _ALIGNMENT),
        ]
    return b"".join(parts)


def pack_io_block(tensors: Sequence[tuple[Sequence[int], int, int, int]]) -> bytes:
    """Serialize the ``inputs`` or ``outputs`` block. All fields are int32.

    Layout: number of tensors, then for each tensor its shape (6), element size, offset and region.

    Args:
        tensors: (shape of rank 6, bytes per element, address, region).
    """
    records = [
        _IO_RECORD.pack(*shape, size, -1 if address == _UNALLOCATED else address, region)
        for shape, size, address, region in tensors
    ]
    return struct.pack("<i", len(tensors)) + b"".join(records)
