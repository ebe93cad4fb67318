"""Vela's estimates for a delegate: cycles, memory use, tensor allocation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryUse:
    """One memory of the system: peak use in bytes, and the accesses of one inference."""

    name: str
    peak_bytes: int
    access_cycles: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class OperationEstimate:
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
        memory_cycles: (name of a memory, cycles of the accesses to it).
        commands: byte offsets of the commands that start it, relative to the first command. The commands after the
            start of the previous operation, for example writes to registers, belong to this operation, too.
        part_of: index in ``VelaEstimates.layers`` of the operation into which Vela fuses this operation, and whose
            cycles include this operation's cycles. None if this operation is not fused.
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

    They equal what Vela's command line prints, with two exceptions. If this project copies weights to SRAM
    (``ethosu_weight_cache``, ``ethosu_prefetch``), the estimates include the copies. If one inference calls the
    delegate several times, cycles, accesses and MACs are sums over all calls (``call_counts``).

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
        placed: the tensors in working memory, with their addresses.
        scratch_bytes: scratch that the firmware must provide, without fast scratch.
        scratch_memory: memory that holds the scratch, "Sram" or "Dram".
        constant_bytes: bytes of the NPU's constants and of the command stream.
        constant_memory: memory that holds the constants: "OffChipFlash", "Dram", or "OnChipFlash", which is SRAM.
        performance: (total cycles, bytes of SRAM) of the program that Vela makes for performance, if the delegate
            contains another program, which needs less RAM. Otherwise None.
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
    layers: tuple[OperationEstimate, ...]
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
        """Whether the program needs more SRAM than ``sram_limit``."""
        return self.sram_limit is not None and self.sram_bytes > self.sram_limit
