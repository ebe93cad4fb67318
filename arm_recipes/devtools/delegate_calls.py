"""Delegate calls of a method, in execution order, with debug information for ExecuTorch's Inspector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executorch.exir.delegate import executorch_call_delegate

from arm_backend_core.compilation_log import delegate_record
from arm_recipes.devtools.debug_handle_groups import DebugHandleGroup, group_debug_handles, map_operators_to_handles
from arm_recipes.devtools.delegate_results import compute_tosa_results, trace_operator_results
from arm_recipes.runtime.tosa_flatbuffer import TosaOperator, read_tosa_graph

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.devtools.delegate_results import CandidateArrays
    from arm_recipes.runtime.host_backends import DelegateExecution


@dataclass(frozen=True)
class DelegateCall:
    """A call of a delegate of this compiler, with its debug information.

    Attributes:
        instruction: index of the instruction in the method.
        all_handles: debug handles of all nodes in the delegate. The Inspector requires that the handles of the outputs
            come last and in order.
        record: the compiler's record of the delegate.
        operators: operators of the delegate's TOSA graph; empty if the graph contains nested graphs.
        groups: groups of nodes of the captured program. A TOSA operator of the delegate computes the value of the last
            node of a group.
        handles: ``{index of a TOSA operator: debug handles of its group}``. The handles of an operator without a group
            are empty.
        results: ``{index of a TOSA operator: candidate arrays for its result}`` in one run of the method.
    """

    instruction: int
    all_handles: tuple[int, ...]
    record: DelegateRecord
    operators: tuple[TosaOperator, ...]
    groups: tuple[DebugHandleGroup, ...]
    handles: dict[int, tuple[int, ...]]
    results: Mapping[int, CandidateArrays]


def collect_delegate_calls(
    manager: ExecutorchProgramManager, method: str, program: ExportedProgram, executions: Sequence[DelegateExecution]
) -> list[DelegateCall]:
    """Collect the delegate calls of a method.

    Args:
        manager: the exported program.
        method: name of the method.
        program: the captured program, a result of ``with_debug_handles``.
        executions: the delegates' executions in one run of the method. The inputs of that run affect the values in
            ``DelegateCall.results`` only: the groups depend on which results are available, not on their values.
    """
    module = manager.exported_program(method).graph_module
    delegate_calls = []
    remaining = list(executions)
    for node in module.graph.find_nodes(op="call_function", target=executorch_call_delegate):
        lowered = getattr(module, node.args[0].target)
        record = delegate_record(lowered)
        if record is None:  # a delegate of another backend
            continue
        execution = remaining.pop(0)
        operators = read_tosa_graph(memoryview(record.tosa)).operators
        all_handles = _list_debug_handles(lowered.original_module.graph)
        kinds, handles = record.tosa_operators[: len(operators)], record.handles[: len(operators)]
        results = trace_operator_results(execution, record, operators)
        groups = group_debug_handles(program, all_handles, kinds, handles, operators, results)
        results |= compute_tosa_results(execution, operators, [group.operator_index for group in groups])
        handle_map = map_operators_to_handles(groups, handles)
        delegate_calls.append(
            DelegateCall(node.meta["debug_handle"], all_handles, record, operators, tuple(groups), handle_map, results)
        )
    return delegate_calls


def _list_debug_handles(graph: Graph) -> tuple[int, ...]:
    nodes = [*graph.nodes, *graph.output_node().all_input_nodes]
    handles = [node.meta["debug_handle"] for node in nodes if "debug_handle" in node.meta]
    return tuple(dict.fromkeys(reversed(handles)))[::-1]
