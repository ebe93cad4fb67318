"""The memory that a program needs: computed from the program, measured on this machine, and tried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arm_recipes.firmware.host_run import Case, PoolSizes, run_on_host
from arm_recipes.firmware.layout import kernel_lookup_bytes, method_allocator_bytes
from arm_recipes.runtime.ethosu_payload import EthosUPayload
from arm_recipes.runtime.inspect import Inspection

#: Of the data caches of Cortex-M processors; the backend takes whole ones.
CACHE_LINE = 32


@dataclass(frozen=True)
class MethodPools:
    """What a method needs for itself, in bytes.

    Attributes:
        pool: of the method allocator, on a Cortex-M, whose pointers have 32 bits.
        pool_64: the same on this machine.
        planned: of the first memory of the plan, for tensors.
    """

    name: str
    pool: int
    pool_64: int
    planned: int


@dataclass(frozen=True)
class Pools:
    """What a program needs, in bytes: it runs with exactly these, and not with one less of any.

    Attributes:
        shared: of the memories of the plan from the second on, which methods share.
        temp: of the temp allocator, on a Cortex-M: the largest delegate's scratch memory, or what a kernel takes.
        temp_64: the same on this machine.
        fast_scratch: SRAM of its own, with a ``Dedicated_Sram`` memory mode.
        exact: False where a figure of a Cortex-M could not be computed: it is this machine's then, which is never less.
    """

    methods: tuple[MethodPools, ...]
    shared: tuple[int, ...]
    temp: int
    temp_64: int
    fast_scratch: int
    exact: bool

    def host_sizes(self) -> PoolSizes:
        """The sizes of this machine."""
        methods = tuple((method.name, method.pool_64, method.planned) for method in self.methods)
        return PoolSizes(self.fast_scratch, self.temp_64, self.shared, methods)


def measure_pools(program: bytes, inspection: Inspection, cases: Sequence[Case]) -> Pools:
    """Compute the pools, and compare with what a run takes that has more than enough of all.

    Args:
        inspection: of the program.
        cases: at least one of each method.

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
    enough = PoolSizes(fast, None, shared, tuple((name, None, planned[name][0]) for name in names))
    measured = run_on_host(program, enough, cases)
    exact = all(method_allocator_bytes(plans[name], 64) == measured.pools[name] for name in names)
    methods = []
    for name in names:
        here = measured.pools[name]
        methods.append(
            MethodPools(name, method_allocator_bytes(plans[name], 32) if exact else here, here, planned[name][0])
        )
    lookup = {bits: max(kernel_lookup_bytes(plans[name], bits) for name in names) for bits in (32, 64)}
    # What goes beyond both is a kernel's own, which may hold pointers.
    least = max(scratch, lookup[64])
    kernel = measured.temp if measured.temp > least else 0
    temp = max(scratch, lookup[32], kernel)
    return Pools(tuple(methods), shared, temp, max(least, kernel), fast, exact and not kernel)


def _planned_extents(plan: Any) -> list[int]:
    """Bytes of each memory of the plan that a tensor reaches; the plan itself rounds up."""
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
    """Scratch and fast scratch of the delegates that take most, in whole cache lines."""
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
