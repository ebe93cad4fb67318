"""Sizes of a program's memory pools: computed from the program, checked and completed by a run on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arm_recipes.firmware.host_run import FirmwareTestCase, PoolSizes, run_on_host
from arm_recipes.runtime.ethosu_payload import EthosUPayload, round_to_cache_lines
from arm_recipes.runtime.inspect import Inspection
from arm_recipes.runtime.method_memory import (
    application_bytes,
    kernel_lookup_bytes,
    method_allocator_bytes,
    planned_bytes,
)


@dataclass(frozen=True)
class MethodPools:
    """Memory of one method, in bytes.

    Attributes:
        name: name of the method.
        method_allocator: method allocator on a Cortex-M, with 32-bit pointers.
        method_allocator_64: method allocator on this machine, with 64-bit pointers.
        planned: memory-planned buffer 0. It holds tensors outside the delegates, and with
            ``ProgramPools.shares_scratch`` also the NPU's scratch.
    """

    name: str
    method_allocator: int
    method_allocator_64: int
    planned: int


@dataclass(frozen=True)
class ProgramPools:
    """Memory of a program, in bytes. If ``exact``, the sizes are minimal: with one byte less, the program does not run.

    Attributes:
        methods: memory of each method.
        shared: memory-planned buffers with index 1 and above, which all methods share.
        temp: temp allocator on a Cortex-M. It is the maximum of three sizes: the largest scratch of a delegate outside
            planned memory, the memory for ExecuTorch's kernel look-up, and the temporary memory of a kernel.
        temp_64: temp allocator on this machine.
        fast_scratch: fast scratch of the NPU, in separate SRAM, for the memory mode ``Dedicated_Sram``.
        outputs: memory that the application provides for outputs outside the memory plan; the maximum over the methods.
        shares_scratch: whether the NPU's scratch is in memory-planned buffer 0.
        exact: whether all sizes for Cortex-M could be computed. Otherwise, some are upper bounds: they are measured on
            this machine, which has 64-bit pointers.
    """

    methods: tuple[MethodPools, ...]
    shared: tuple[int, ...]
    temp: int
    temp_64: int
    fast_scratch: int
    outputs: int
    shares_scratch: bool
    exact: bool

    def host_sizes(self) -> PoolSizes:
        """Sizes of the pools on this machine."""
        methods = tuple((method.name, method.method_allocator_64, method.planned) for method in self.methods)
        return PoolSizes(self.fast_scratch, self.temp_64, self.shared, methods)


def measure_pools(
    program: bytes, inspection: Inspection, cases: Sequence[FirmwareTestCase], data_file: bytes | None = None
) -> ProgramPools:
    """Compute the sizes of the pools from the program, and compare them with a run that has unlimited allocators.

    The run also measures the temporary memory of kernels, which the program does not state. If the run uses another
    method allocator size than computed, the measured sizes of the method allocators are returned.

    Args:
        program: bytes of the ``.pte``.
        inspection: description of the program.
        cases: at least one case of each method.
        data_file: bytes of the ``.ptd``; None without one.

    Raises:
        RunError: the program does not run, or this machine has no compiler to build the test run.
    """
    from executorch.exir._serialize._program import deserialize_pte_binary

    program_schema = deserialize_pte_binary(program).program
    plans = {plan.name: plan for plan in program_schema.execution_plan}
    names = [method.name for method in inspection.methods]
    planned, shared = planned_bytes([plans[name] for name in names])
    scratch, fast_scratch = _max_scratch_bytes(inspection)
    unlimited = PoolSizes(fast_scratch, None, shared, tuple((name, None, planned[name]) for name in names))
    measured = run_on_host(program, unlimited, cases, data_file)
    has_data_file = data_file is not None
    exact = all(
        method_allocator_bytes(plans[name], 64, has_data_file) == measured.method_allocator_bytes[name]
        for name in names
    )
    methods = []
    for name in names:
        size_64 = measured.method_allocator_bytes[name]
        size = method_allocator_bytes(plans[name], 32, has_data_file) if exact else size_64
        methods.append(MethodPools(name, size, size_64, planned[name]))
    lookup_bytes = {bits: max(kernel_lookup_bytes(plans[name], bits) for name in names) for bits in (32, 64)}
    # If the run needs more than this minimum, a kernel uses temporary memory. This memory may contain pointers, so its
    # size on a Cortex-M is unknown.
    minimum = max(scratch, lookup_bytes[64])
    kernel_temp = measured.temp if measured.temp > minimum else 0
    temp = max(scratch, lookup_bytes[32], kernel_temp)
    return ProgramPools(
        tuple(methods),
        shared,
        temp,
        max(minimum, kernel_temp),
        fast_scratch,
        outputs=max(application_bytes(plans[name])[1] for name in names),
        shares_scratch=any(delegate.shares_scratch for method in inspection.methods for delegate in method.delegates),
        exact=exact and not kernel_temp,
    )


def _max_scratch_bytes(inspection: Inspection) -> tuple[int, int]:
    """Maximum scratch outside planned memory and maximum fast scratch of the delegates.

    Both are in bytes, rounded up to whole cache lines.
    """
    payloads = [
        (delegate.payload, delegate.shares_scratch)
        for method in inspection.methods
        for delegate in method.delegates
        if isinstance(delegate.payload, EthosUPayload)
    ]
    scratch = _max_rounded_to_cache_lines(payload.scratch_bytes for payload, is_planned in payloads if not is_planned)
    return scratch, _max_rounded_to_cache_lines(payload.fast_scratch_bytes or 0 for payload, _ in payloads)


def _max_rounded_to_cache_lines(byte_counts: Iterable[int]) -> int:
    return round_to_cache_lines(max(byte_counts, default=0))
