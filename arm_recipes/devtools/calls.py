"""The delegates of a method, in the order in which the runtime calls them, with what the Inspector is told of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executorch.exir.delegate import executorch_call_delegate

from arm_recipes.devtools.layers import Layer, find_layers, map_handles
from arm_recipes.devtools.reading import read_results, read_tosa_results
from arm_recipes.runtime.tosa_graph import TosaOperator, read_graph

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram
    from torch.fx import Graph

    from arm_backend_core.events import Delegate
    from arm_recipes.devtools.reading import Results
    from arm_recipes.runtime.plugin import Execution


@dataclass(frozen=True)
class Call:
    """A call of a delegate of ours.

    Attributes:
        instruction: its number in the method.
        all_handles: debug handles of all that it computes, its outputs last and in order: so the Inspector takes them.
        record: what the compiler tells of the delegate.
        operators: of its TOSA graph; none where that holds graphs itself.
        layers: values that its operations give.
        handles: debug handles by operation.
        results: what the operations of the layers gave in the run that was looked at.
    """

    instruction: int
    all_handles: tuple[int, ...]
    record: Delegate
    operators: tuple[TosaOperator, ...]
    layers: tuple[Layer, ...]
    handles: dict[int, tuple[int, ...]]
    results: Mapping[int, Results]


def collect_calls(
    manager: ExecutorchProgramManager, method: str, program: ExportedProgram, executions: Sequence[Execution]
) -> list[Call]:
    """The calls of a method.

    Args:
        program: what was lowered, from ``numbered``.
        executions: of one run of the method. Which results can be seen does not depend on its inputs.
    """
    module = manager.exported_program(method).graph_module
    found = []
    left = list(executions)
    for node in module.graph.find_nodes(op="call_function", target=executorch_call_delegate):
        lowered = getattr(module, node.args[0].target)
        record: Delegate | None = (lowered.meta or {}).get("arm_delegate")
        if record is None:  # another backend's
            continue
        execution = left.pop(0)
        made = read_graph(memoryview(record.tosa)).operators
        whole = _all_handles(lowered.original_module.graph)
        kinds, handles = record.tosa_operators[: len(made)], record.handles[: len(made)]
        results = read_results(execution, record, made)
        values = find_layers(program, whole, kinds, handles, made, results)
        results |= read_tosa_results(execution, made, [layer.operation for layer in values])
        mapped = map_handles(values, handles)
        found.append(Call(node.meta["debug_handle"], whole, record, made, tuple(values), mapped, results))
    return found


def _all_handles(graph: Graph) -> tuple[int, ...]:
    nodes = [*graph.nodes, *graph.output_node().all_input_nodes]
    handles = [node.meta["debug_handle"] for node in nodes if "debug_handle" in node.meta]
    return tuple(dict.fromkeys(reversed(handles)))[::-1]
