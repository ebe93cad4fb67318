"""Banked memory planning: place the tensors outside delegates in several memories, which may have budgets.

ExecuTorch's memory planning numbers the memories from 1. The application gives the runtime one buffer for each memory.
ExecuTorch's algorithm ``BankedGreedy`` places large tensors first, each in the first memory that has room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.errors import BudgetError, ExportError
from arm_recipes._internal.rendering import as_text
from arm_recipes.recipe.options import parse_bytes
from arm_recipes.report.ram import npu_ram_parts, sum_by_memory

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from executorch.exir.memory_planning import MemoryAlgoResult
    from executorch.exir.tensor import TensorSpec
    from torch.export.graph_signature import ExportGraphSignature
    from torch.fx import GraphModule

#: Size of a memory without a budget: larger than any address space of a microcontroller.
_UNLIMITED: Final = 1 << 40
_REMEDIES: Final = (
    "quantized_io=True: no float copies of inputs and outputs beside their int8 ones",
    'optimise="size", or another memory_mode: the NPU then leaves more of this memory',
)


@dataclass(frozen=True)
class BankedMemoryPlanner:
    """Memory planning algorithm for ExecuTorch: places the tensors outside delegates in several memories.

    Args:
        budgets: (name, budget in bytes) of each memory, the fastest first: ``(("sram", 262144), ("dram", None))``. A
            budget of None is unlimited. The budget of a memory called "sram" or "dram" also covers the NPU's scratch
            and constants in that memory.
    """

    budgets: tuple[tuple[str, int | None], ...]

    @property
    def __name__(self) -> str:
        """Name in ExecuTorch's log."""
        return "banked_memory_planner"

    @classmethod
    def from_option(cls, memory: Mapping[str, Any]) -> BankedMemoryPlanner:
        """Create the algorithm from the recipe option ``memory``."""
        return cls(tuple((name, None if size is None else parse_bytes(size)) for name, size in memory.items()))

    def __call__(
        self,
        alignment: int,
        specs: Sequence[TensorSpec],
        graph_module: GraphModule,
        graph_signature: ExportGraphSignature | None = None,
        extra_padding: int = 0,
    ) -> MemoryAlgoResult:
        """Plan one method. The parameters are those of ExecuTorch's memory planning algorithms.

        Raises:
            BudgetError: a memory is too small for the NPU's scratch and constants, or no memory has room for a tensor.
        """
        from executorch.exir.banked_memory_planning import Bank, BankedGreedy, BankPlacementError, TargetMemoryMap

        forget_earlier_plan(specs)
        reserved = _npu_bytes(graph_module)
        banks = []
        for number, (name, budget) in enumerate(self.budgets, 1):
            used = reserved.get(name.upper(), 0)
            if budget is not None and used > budget:
                raise BudgetError(_describe_excess(name, used, budget, f"the NPU alone needs {used:,} B"))
            if budget is None or used < budget:
                banks.append(Bank(name, (_UNLIMITED if budget is None else budget) - used, number))
        try:
            return BankedGreedy(TargetMemoryMap(banks))(alignment, specs, graph_module, graph_signature, extra_padding)
        except (BankPlacementError, ValueError) as error:  # ValueError: no memory has room beside the NPU's part
            raise BudgetError(self._describe_overflow(specs, reserved)) from error

    def _describe_overflow(self, specs: Sequence[TensorSpec], reserved: Mapping[str, int]) -> str:
        rows: list[tuple[str, ...]] = []
        for name, budget in self.budgets:
            used = reserved.get(name.upper(), 0)
            available = "no limit" if budget is None else f"{budget - used:,} B available of {budget:,} B"
            rows.append((name, available, f"{used:,} B are the NPU's" if used else ""))
        largest = sorted(specs, key=lambda spec: -spec.allocated_memory)[:5]
        tensors: list[tuple[str, ...]] = [
            (f"{spec.allocated_memory:,} B", dtype_name(spec.dtype), str(list(spec.shape))) for spec in largest
        ]
        names = ", ".join(name for name, _ in self.budgets)
        needed = sum(spec.allocated_memory for spec in specs)
        return f"memory: {names} cannot hold the inputs, outputs and CPU tensors, up to {needed:,} B\n" + as_text(
            [
                ("Memories:", rows),
                ("Largest tensors:", tensors),
                ("To fit:", [("a larger budget, or one more memory",), *((text,) for text in _REMEDIES)]),
            ]
        )


def forget_earlier_plan(specs: Sequence[TensorSpec]) -> None:
    """Reset the ``mem_id`` that an earlier plan assigned.

    A ``mem_id`` without ``mem_offset`` was set by a pass and stays.

    A second ``to_executorch`` of one manager creates new specs, except for the outputs of delegates. ExecuTorch's
    algorithms would keep these outputs in the memories of the first plan.
    """
    for spec in specs:
        if spec.mem_offset is not None:
            spec.mem_id = None


def check_memory_budgets(planner: BankedMemoryPlanner, used: Mapping[str, int]) -> None:
    """Check the memory use of an emitted program against the budgets.

    Args:
        planner: the planner of the program, which holds the budgets.
        used: bytes that the program needs in each memory, from ``Ram.bytes_by_memory``: ``{"SRAM": 40960}``.

    Raises:
        BudgetError: a memory exceeds its budget.
    """
    for name, budget in planner.budgets:
        needed = used.get(name.upper(), 0)
        if budget is not None and needed > budget:
            raise BudgetError(_describe_excess(name, needed, budget, "with the NPU's part and ExecuTorch's runtime"))


def _describe_excess(name: str, needed: int, budget: int, detail: str) -> str:
    rows: list[tuple[str, ...]] = [(f"a larger budget for {name}",), *((text,) for text in _REMEDIES)]
    summary = f"memory: {name!r} needs {needed:,} B and has {budget:,} B, {needed - budget:,} B too few ({detail})"
    return f"{summary}\n{as_text([('To fit:', rows)])}"


def _npu_bytes(graph_module: GraphModule) -> dict[str, int]:
    """Return the bytes that the NPU's delegates of a method need in each memory: ``{"SRAM": 40960}``."""
    from arm_backend_core.compilation_log import delegate_record
    from arm_backend_core.program import lowered_modules

    records = [delegate_record(module) for module in lowered_modules(graph_module)]
    estimates = [record.vela for record in records if record is not None and record.vela is not None]
    return sum_by_memory(npu_ram_parts(estimates))


def reject_several_methods(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: refuse programs with several methods.

    All methods share every planned memory except the first, so one method would overwrite the tensors of another.

    Raises:
        ExportError: the program has several methods.
    """
    if len(manager.methods) > 1:
        raise ExportError(
            f"memory: the program has the methods {', '.join(sorted(manager.methods))}, and all methods share the "
            "planned memories after the first, so one method would overwrite the tensors of another. Export one "
            "method, or omit memory="
        )
    return []


def reject_mutated_inputs(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass for ``plan_inputs=False``: refuse models that write to an input.

    The application provides the memory of the inputs. The new value of a written input is an output at the address of
    the input, without separate planned memory. ExecuTorch's Python binding sets a new address for this output, and
    thereby for the input, before the program reads the input. The program would then read the wrong memory.

    Raises:
        ExportError: a model writes to an input.
    """
    for method in sorted(manager.methods):
        mutated = manager.exported_program(method).graph_signature.user_inputs_to_mutate.values()
        if mutated:
            names = " and ".join(f"'{name}'" for name in sorted(set(mutated)))
            raise ExportError(
                f"plan_inputs=False: the model of '{method}' writes to its input {names}, whose memory belongs to the "
                "application. Omit plan_inputs=False, or change the model so that it computes a new tensor and returns "
                "it: y = x + 1 instead of x.add_(1)"
            )
    return []


def planning_pass(algorithm: Callable[..., MemoryAlgoResult], *, plan_inputs: bool, plan_outputs: bool) -> Any:
    """Create ExecuTorch's memory planning pass with an algorithm.

    Args:
        algorithm: plans a method.
        plan_inputs, plan_outputs: whether the plan places the inputs and outputs of the program. Otherwise the
            application provides their memory.
    """
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite
    from executorch.exir.passes import MemoryPlanningPass

    return MemoryPlanningPass(
        memory_planning_algo=MemoryPlanningAlgorithmSuite([algorithm]),
        allow_lifetime_and_storage_overlap=True,  # Vela may overlap a delegate's input and output, see shared_scratch
        alloc_graph_input=plan_inputs,
        alloc_graph_output=plan_outputs,
    )
