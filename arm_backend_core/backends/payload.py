"""Delegate payloads: compiled bytes, their compile specs, and ExecuTorch's block stream for Ethos-U."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from arm_backend_core.backends.vela_estimates import VelaEstimates

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
#: Vela's address of an unallocated tensor. The payload contains -1 instead.
_UNALLOCATED = (1 << 64) - 1


@dataclass(frozen=True)
class Payload:
    """A compiled delegate, as stored in the program.

    Attributes:
        data: the delegate's bytes in the ``.pte``.
        vela: Vela's estimates, for Ethos-U.
        artifacts: intermediate files for ``dump_intermediate_artifacts_to``, {suffix of the file name: content}.
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
    """The scratch of an Ethos-U delegate in the planned memory with ``mem_id`` 1.

    Attributes:
        argument: index of an input or output of the delegate, in a list of all inputs and then all outputs. The memory
            plan puts this tensor into the scratch, at the offset that Vela chose. The runtime computes the address of
            the scratch from the tensor's address.
        end: offset of the end of the scratch in the planned memory, in bytes. If the delegate is called several times,
            each call has its own scratch, and ``end`` is the largest of the calls' ends.
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
        """Decode the compile specs of a delegate; None if either number is missing."""
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
        tensors: (shape of rank 6, element size in bytes, offset in the region, region). Vela's offset 2^64 - 1 (not
            allocated) is written as -1.
    """
    records = [
        _IO_RECORD.pack(*shape, size, -1 if offset == _UNALLOCATED else offset, region)
        for shape, size, offset, region in tensors
    ]
    return struct.pack("<i", len(tensors)) + b"".join(records)
