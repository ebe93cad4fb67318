"""Memory pools of a program: sizes computed from the program and verified by a run on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes.firmware.host_run import Case, PoolSizes, run_on_host
from arm_recipes.firmware.layout import kernel_lookup_bytes, method_allocator_bytes
from arm_recipes.runtime.ethosu_payload import EthosUPayload
from arm_recipes.runtime.inspect import Inspection

#: Cache line of Cortex-M processors in bytes; the backend uses whole lines.
CACHE_LINE = 32


@dataclass(frozen=True)
class MethodPools:
    """Memory of one method, in bytes.

    Attributes:
        name: of the method.
        pool: method allocator on a Cortex-M, which has 32-bit pointers.
        pool_64: method allocator on this machine.
        planned: first planned memory, for tensors.
    """

    name: str
    pool: int
    pool_64: int
    planned: int


@dataclass(frozen=True)
class Pools:
    """Memory of a program, in bytes. The sizes are minimal: the program does not run with one byte less.

    Attributes:
        methods: memory of each method.
        shared: planned memories from the second on, which methods share.
        temp: temp allocator on a Cortex-M: scratch of the largest delegate, or what a kernel needs.
        temp_64: temp allocator on this machine.
        fast_scratch: separate SRAM, with the memory mode ``Dedicated_Sram``.
        exact: False if a size for Cortex-M could not be computed. It is then the size of this machine, an upper bound.
    """

    methods: tuple[MethodPools, ...]
    shared: tuple[int, ...]
    temp: int
    temp_64: int
    fast_scratch: int
    exact: bool

    def host_sizes(self) -> PoolSizes:
        """Sizes on this machine."""
        methods = tuple((method.name, method.pool_64, method.planned) for method in self.methods)
        return PoolSizes(self.fast_scratch, self.temp_64, self.shared, methods)


def measure_pools(program: bytes, inspection: Inspection, cases: Sequence[Case]) -> Pools:
    """Compute the sizes of the pools, and compare them with a run in unlimited pools.

    Args:
        program: bytes of the ``.pte``.
        inspection: description of the program.
        cases: at least one case of each method.

    Raises:
        RunError: the program does not run.
    """
    from executorch.exir._serialize._program import deserialize_pte_binary

    schema = deserialize_pte_binary(program).program
    plans = {plan.name: plan for plan in schema.execution_plan}
    names = [method.name for method in inspection.methods]
    planned = {name: _planned_extents(plans[name]) for name in names}
    memories = max(map(len, planned.values()))
    shared = tuple(max(sizes[at] for sizes in planned.values() if at < len(sizes)) for at in range(1, memories))
    scratch, fast = _scratch_sizes(inspection)
    unlimited = PoolSizes(fast, None, shared, tuple((name, None, planned[name][0]) for name in names))
    measured = run_on_host(program, unlimited, cases)
    exact = all(method_allocator_bytes(plans[name], 64) == measured.pools[name] for name in names)
    methods = []
    for name in names:
        size_64 = measured.pools[name]
        methods.append(
            MethodPools(name, method_allocator_bytes(plans[name], 32) if exact else size_64, size_64, planned[name][0])
        )
    lookup = {bits: max(kernel_lookup_bytes(plans[name], bits) for name in names) for bits in (32, 64)}
    # The rest is temporary memory of a kernel; it may contain pointers, so its size on a Cortex-M is unknown.
    minimum = max(scratch, lookup[64])
    kernel = measured.temp if measured.temp > minimum else 0
    temp = max(scratch, lookup[32], kernel)
    return Pools(tuple(methods), shared, temp, max(minimum, kernel), fast, exact and not kernel)


def _planned_extents(plan: Any) -> list[int]:
    """Used bytes of each planned memory, up to the end of the last tensor; the plan itself rounds up."""
    ends = [0] * max(len(plan.non_const_buffer_sizes) - 1, 1)
    for value in plan.values:
        place = getattr(value.val, "allocation_info", None)
        if place is None:
            continue
        count = math.prod(value.val.sizes) * _element_size(value.val.scalar_type)
        start = place.memory_offset_low + (place.memory_offset_high << 32)
        ends[place.memory_id - 1] = max(ends[place.memory_id - 1], start + count)
    return ends


def _element_size(scalar_type: Any) -> int:
    from executorch.exir.tensor import get_scalar_type

    size: int = get_scalar_type(scalar_type).itemsize
    return size


def _scratch_sizes(inspection: Inspection) -> tuple[int, int]:
    """Largest scratch and fast scratch of all delegates, rounded up to cache lines."""
    payloads = [
        delegate.payload
        for method in inspection.methods
        for delegate in method.delegates
        if isinstance(delegate.payload, EthosUPayload)
    ]
    scratch = _round_to_cache_lines(payload.scratch_bytes for payload in payloads)
    return scratch, _round_to_cache_lines(payload.fast_scratch_bytes or 0 for payload in payloads)


def _round_to_cache_lines(counts: Iterable[int]) -> int:
    return -(-max(counts, default=0) // CACHE_LINE) * CACHE_LINE
