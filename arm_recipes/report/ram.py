"""RAM that a board needs for a program, by part: memory that the NPU and ExecuTorch's runtime use.

The sum equals the size of the firmware's memory pools and output buffers (``firmware/memory_pools.py``), with three
exceptions. The sum lacks the temporary memory of CPU kernels, because its size is known only after a run. In addition,
the sum includes constants that the memory mode places in RAM, and inputs that the memory plan does not place
(``plan_inputs=False``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.rendering import Renderable, Section, format_bytes, to_jsonable
from arm_recipes.recipe.options import parse_bytes
from arm_recipes.runtime.ethosu_payload import round_to_cache_lines

if TYPE_CHECKING:
    from executorch.exir.schema import ExecutionPlan
    from executorch.export import ExportRecipe

    from arm_backend_core.backends.vela_estimates import VelaEstimates
    from arm_backend_core.compilation_log import DelegateRecord

#: {Vela's name of a memory: kind of RAM}. Memories that are not RAM are missing. "OnChipFlash" is Vela's name of the
#: SRAM that holds constants.
_RAM = {"Sram": "SRAM", "OnChipFlash": "SRAM", "Dram": "DRAM"}
_SCRATCH, _TENSORS = "NPU scratch", "inputs, outputs and CPU tensors"
_APPLICATION = "inputs and outputs of the application"
_SHARED = "NPU scratch with inputs, outputs and CPU tensors"


@dataclass(frozen=True)
class RamPart:
    """A part of the RAM.

    Attributes:
        name: content of the part, for example "NPU scratch".
        bytes: size.
        memory: "SRAM", "DRAM", or the name of a memory of the option ``memory`` in upper case.
    """

    name: str
    bytes: int
    memory: str

    def __str__(self) -> str:
        return f"{format_bytes(self.bytes)} {self.name}"


@dataclass(frozen=True, repr=False)
class Ram(Renderable):
    """The RAM that a board needs for a program.

    Attributes:
        npu: parts that the delegates need. If the memory plan places the NPU's scratch, the part of
            the scratch also contains the planned tensors of the CPU.
        cpu: parts that ExecuTorch's runtime and the application need.
        ram_reduction: if a program with less RAM was chosen (to fit a limit, or with ``optimise="ram"``), a phrase that
            compares its cycles and SRAM with those of the program compiled for performance; otherwise empty.
    """

    npu: tuple[RamPart, ...]
    cpu: tuple[RamPart, ...]
    ram_reduction: str = ""

    @property
    def parts(self) -> tuple[RamPart, ...]:
        """All parts."""
        return (*self.npu, *self.cpu)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def sram_bytes(self) -> int:
        """Bytes of the parts in SRAM, which ``sram_budget`` limits."""
        return sum(part.bytes for part in self.parts if part.memory == "SRAM")

    @property
    def npu_sram_bytes(self) -> int:
        """Bytes of the parts in ``npu`` that are in SRAM. The scratch may include planned tensors of the CPU."""
        return sum(part.bytes for part in self.npu if part.memory == "SRAM")

    @property
    def dram_bytes(self) -> int:
        """Bytes of the parts in DRAM."""
        return self.bytes_by_memory.get("DRAM", 0)

    @property
    def bytes_by_memory(self) -> dict[str, int]:
        """{memory: bytes of its parts}. ``RamPart.memory`` describes the keys."""
        return sum_by_memory(self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The parts and their sums, ready for JSON."""
        sums = {"total_bytes": self.total_bytes, "sram_bytes": self.sram_bytes, "dram_bytes": self.dram_bytes}
        memories = {"memories": self.bytes_by_memory, "ram_reduction": self.ram_reduction}
        return {"parts": [to_jsonable(part) for part in self.parts], **sums, **memories}

    def sections(self) -> Iterator[Section]:
        """The table of the parts."""
        rows: list[tuple[str, ...]] = [(part.name, format_bytes(part.bytes), part.memory) for part in self.parts]
        reason = f"; {self.ram_reduction}" if self.ram_reduction else ""
        yield f"RAM that a board needs: {format_bytes(self.total_bytes)}{reason}", rows
        if len(self.bytes_by_memory) > 1:
            yield "RAM by memory", [(name, format_bytes(count)) for name, count in self.bytes_by_memory.items()]

    def __str__(self) -> str:
        return f"{format_bytes(self.total_bytes)} = {' + '.join(map(str, self.parts))}"


def sum_by_memory(parts: Sequence[RamPart]) -> dict[str, int]:
    """Compute {memory: bytes of its parts}."""
    return {name: sum(x.bytes for x in parts if x.memory == name) for name in dict.fromkeys(x.memory for x in parts)}


def npu_ram_parts(estimates: Sequence[VelaEstimates], *, is_planned: bool = False) -> tuple[RamPart, ...]:
    """The parts of the RAM that the delegates of a program need. The delegates run in sequence and share one scratch.

    Args:
        estimates: Vela's estimates of the delegates. Without delegates, there are no parts.
        is_planned: whether the scratch is in planned memory. If it is, the result has no part for the scratch, because
            the size of the planned memory includes it.
    """
    if not estimates:
        return ()
    scratch = 0 if is_planned else round_to_cache_lines(max(vela.scratch_bytes for vela in estimates))
    fast = round_to_cache_lines(max(vela.fast_scratch_bytes for vela in estimates))
    constants = sum(vela.constant_bytes for vela in estimates)
    memory = estimates[0].constant_memory
    parts = [
        RamPart(_SCRATCH, scratch, _RAM[estimates[0].scratch_memory]),
        RamPart("NPU fast scratch", fast, "SRAM"),
        RamPart("NPU constants", constants if memory in _RAM else 0, _RAM.get(memory, "")),
    ]
    return tuple(part for part in parts if part.bytes)


def compute_ram(
    delegates: Mapping[str, Sequence[DelegateRecord]],
    execution_plans: Sequence[ExecutionPlan],
    recipe: ExportRecipe,
    *,
    on_cortex_m: bool = False,
) -> Ram | None:
    """Compute the RAM of a program on a Cortex-M from its memory plans and Vela's estimates.

    Returns None if the program has no Ethos-U delegates and ``on_cortex_m`` is False.

    Args:
        delegates: {name of a method: its delegates}, without constant methods.
        execution_plans: plans of all methods of the program.
        recipe: the recipe, whose option ``memory`` names the planned memories.
        on_cortex_m: whether the CPU of the recipe is a Cortex-M, with or without an NPU. The scratch of the Cortex-M's
            kernels is in the plans.
    """
    estimates = [delegate.vela for each in delegates.values() for delegate in each if delegate.vela is not None]
    if not estimates and not on_cortex_m:
        return None
    # These modules import PyTorch, which a worker of a sweep does not need.
    from arm_recipes.recipe.recipe import ArmRecipe
    from arm_recipes.runtime.method_memory import (
        application_bytes,
        kernel_lookup_bytes,
        method_allocator_bytes,
        planned_bytes,
        planned_scratches,
    )

    plans = [plan for plan in execution_plans if plan.name in delegates]
    is_planned = any(any(planned_scratches(plan)) for plan in plans)
    npu = npu_ram_parts(estimates, is_planned=is_planned)
    # Assume that the CPU's tensors are in the same memory as the NPU's scratch. If the memory mode places activations
    # in DRAM, this memory is DRAM.
    memory = _RAM[estimates[0].scratch_memory] if estimates else "SRAM"
    planned, shared = planned_bytes(plans)
    # The temp allocator has two uses at different times: the look-up of kernels while a method is loaded, and the NPU's
    # scratch while the method runs. Only the larger of the two sizes counts.
    lookup = max(kernel_lookup_bytes(plan, 32) for plan in plans) - sum(p.bytes for p in npu if p.name == _SCRATCH)
    has_data_file = any(delegate.external_blocks for each in delegates.values() for delegate in each)
    loaded = sum(method_allocator_bytes(plan, 32, has_data_file) for plan in plans)
    budgets = (recipe.options.get("memory") if isinstance(recipe, ArmRecipe) else None) or {}
    memories = [name.upper() for name in budgets] or [memory] * (1 + len(shared))
    sizes = (sum(planned.values()), *shared)
    tensors = [RamPart(_TENSORS, size, name) for size, name in zip(sizes, memories, strict=False)]
    if is_planned:
        npu, tensors = (RamPart(_SHARED, sum(sizes), memory), *npu), []
    elif not budgets:
        tensors = [RamPart(_TENSORS, sum(sizes), memory)]
    own_io = max(sum(application_bytes(plan)) for plan in plans)
    tensors.append(RamPart(_APPLICATION, own_io, memory))
    runtime = RamPart("runtime", loaded + max(lookup, 0), memory)
    used = sum_by_memory((*npu, *tensors))
    # The runtime's allocations may be in any memory. Assume the first one with enough room.
    for name, budget in budgets.items():
        if budget is None or used.get(name.upper(), 0) + runtime.bytes <= parse_bytes(budget):
            runtime = replace(runtime, memory=name.upper())
            break
    return Ram(npu, tuple(part for part in (*tensors, runtime) if part.bytes), _describe_ram_reduction(estimates))


def _describe_ram_reduction(estimates: Sequence[VelaEstimates]) -> str:
    """Compare delegates that were chosen for less RAM with the same ones compiled for performance: cycles and SRAM.

    Empty if no delegate was chosen for less RAM.
    """
    if not any(vela.performance for vela in estimates):
        return ""
    now = [_cycles_and_sram(vela) for vela in estimates]
    before = [vela.performance or _cycles_and_sram(vela) for vela in estimates]
    sram = [format_bytes(max(size for _, size in each)) for each in (now, before)]
    cycles = [sum(count for count, _ in each) for each in (now, before)]
    return (
        f"compiled for less RAM: {cycles[0]:,} cycles instead of {cycles[1]:,}, SRAM of the NPU {sram[0]} instead "
        f"of {sram[1]}"
    )


def _cycles_and_sram(vela: VelaEstimates) -> tuple[int, int]:
    return vela.total_cycles, vela.sram_bytes
