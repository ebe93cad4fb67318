"""Operator selection and partitioning: choose the nodes that the target runs and group them into delegates."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import compilation_log
from arm_backend_core.errors import Fault, ModelError, Unsupported
from arm_backend_core.insert_delegates import Partition
from arm_backend_core.lowering.fx_to_tosa import Lowering
from arm_backend_core.nodes import (
    DELEGATE_LOOP,
    describe_node,
    is_dequantize,
    is_quantize,
    operator_name,
    overload_of,
    set_refusal_reason,
    source_location,
)
from arm_backend_core.ops.loop_markers import LOOP_IN, LOOP_OUT
from arm_backend_core.ops.operands import Operand
from arm_backend_core.program import constants_of
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Value, extract_subgraph

Predicate = Callable[[Node], bool]
#: If a program mutates at least ``_MIN_BUFFERS_TO_SPLIT`` buffers, its NPU delegates have at most
#: ``_MAX_NODES_PER_DELEGATE`` nodes, not counting the copies that ``_sink_into_consumers`` adds. See
#: ``_split_large_partitions``.
_MIN_BUFFERS_TO_SPLIT, _MAX_NODES_PER_DELEGATE = 12, 300


@dataclass(frozen=True)
class Selection:
    """The result of operator selection for a program.

    Attributes:
        program: the program.
        lowering: the program, lowered to TOSA. It contains all operators except those that ``select_operators`` refused
            before lowering: operators that ``keep_on_cpu`` selects, and quantize nodes of inputs.
        operators: operators of the program, in program order.
        refusals: {refused operator, which stays on the CPU: the reason}. An operator that computes a constant for the
            CPU only is neither refused nor delegated.
        partition_ids: {delegated node: number of its partition}. Numbers increase in topological order.
    """

    program: ExportedProgram
    lowering: Lowering
    operators: list[Node]
    refusals: dict[Node, Unsupported]
    partition_ids: dict[Node, int]

    def refused_operators(self) -> list[compilation_log.RefusedOperator]:
        """The operators on the CPU, for the report.

        Quantize, dequantize and ``getitem`` nodes, and loops that call a delegate, are left out.
        """
        return [
            compilation_log.RefusedOperator(
                node.name, operator_name(node), refusal.reason, source_location(node), isinstance(refusal, Fault)
            )
            for node, refusal in self.refusals.items()
            if not (is_quantize(node) or is_dequantize(node) or DELEGATE_LOOP in node.meta)
            and node.target is not operator.getitem  # it belongs to the operator of which it selects a result
        ]

    def partitions(self, name: str = "arm") -> list[Partition]:
        """The partitions in topological order. Their names are ``name`` and a number, for example "arm_0"."""
        groups: dict[int, list[Node]] = {}
        position = {node: index for index, node in enumerate(self.program.graph.nodes)}
        for node in position:
            if node in self.partition_ids:
                groups.setdefault(self.partition_ids[node], []).append(node)
        constants, sort_key = constants_of(self.program), position.__getitem__
        nodes_by_partition = [groups[partition_id] for partition_id in sorted(groups)]
        readable = {value: (-1, node) for node, value in self.lowering.graph_inputs().items()}
        for i, nodes in enumerate(nodes_by_partition):
            for node in nodes:
                if not self.lowering.is_internal(node):
                    readable.setdefault(_lowered_value(self.lowering, node), (i, node))
        partitions: list[Partition] = []
        indirect_reads: set[Node] = set()  # of later partitions, so the loop runs from last to first
        for i, nodes in reversed(list(enumerate(nodes_by_partition))):
            partition = Partition.from_nodes(f"{name}_{i}", nodes, constants, sort_key)
            outputs = {*partition.outputs, *indirect_reads}
            partition = replace(partition, outputs=[node for node in nodes if node in outputs])
            earlier = {value: node for value, (index, node) in readable.items() if index < i}
            if indirect := self._find_indirect_inputs(partition, earlier):
                extended = Partition.from_nodes(partition.name, nodes, constants, sort_key, indirect)
                partition = replace(partition, inputs=extended.inputs)
            partitions.append(partition)
            indirect_reads |= indirect
        return partitions[::-1]

    def _find_indirect_inputs(self, partition: Partition, readable: Mapping[Value, Node]) -> set[Node]:
        """Find nodes outside of ``partition`` that its TOSA graph reads, although none of its fx nodes reads them.

        A lowering rule may read values that its operands are computed from. A division, for example, reads the int8
        tensor that its divisor is computed from, and another delegate may compute this tensor.

        Args:
            partition: the partition, without indirect inputs.
            readable: {value: its node}: the graph inputs, and the values that earlier partitions can return.
        """
        visited = {self.lowering.boundary_value(node)[0] for node in partition.inputs}
        indirect: set[Node] = set()
        pending = [_lowered_value(self.lowering, node) for node in partition.outputs]
        while pending:
            value = pending.pop()
            if value in visited or value.data is not None:
                continue
            visited.add(value)
            if value in readable:
                indirect.add(readable[value])
            elif value.producer is not None:
                pending += value.producer.inputs
        return indirect

    def graphs(self, partitions: Iterable[Partition]) -> Iterable[Graph]:
        """Extract the TOSA graph of each partition; inputs and outputs have the partition's order."""
        position = {op: index for index, op in enumerate(self.lowering.graph.ops)}
        for partition in partitions:
            inputs = [(self.lowering.boundary_value(node)[0], node.name) for node in partition.inputs]
            outputs = [_lowered_value(self.lowering, node) for node in partition.outputs]
            yield extract_subgraph(inputs, outputs, position.__getitem__)


def select_operators(program: ExportedProgram, target: Target, keep_on_cpu: Sequence[Predicate]) -> Selection:
    """Select the nodes that ``target`` runs, by lowering the program, and assign them to delegates.

    Args:
        program: the program, functional and decomposed. The function edits it: a node that several delegates must
            compute is copied for each of them.
        target: the target to lower for.
        keep_on_cpu: predicates; a node for which any of them is true stays on the CPU.

    Raises:
        ModelError: a ``while_loop`` does not lie in one delegate, or a block-scaled layer would stay on the CPU.
    """
    operators = [node for node in program.graph.nodes if node.op == "call_function"]
    constants = constants_of(program)
    inputs = set(program.graph.find_nodes(op="placeholder")) - set(constants)
    refusals: dict[Node, Unsupported] = {}
    for node in operators:
        if any(keep(node) for keep in keep_on_cpu):
            refusals[node] = Unsupported("kept on the CPU as asked")
        elif is_quantize(node) and node.args[0] in inputs:
            refusals[node] = Unsupported("it quantizes a model input")
    initial_refusals, lowering = dict(refusals), Lowering(target, constants)
    lowering.run(operators, refusals)
    while True:  # terminates: every round excludes a node or adds a float node; usually there is one round
        refusals |= {node: result for node, result in lowering.results.items() if isinstance(result, Unsupported)}
        unmaterializable = _find_unmaterializable(operators, lowering, refusals)
        if not unmaterializable:
            _check_loops(operators, refusals, target)
            _check_custom_operators(refusals, target)
            partition_ids = assign_partition_ids(operators, set(operators) - refusals.keys())
            if target.hardware.is_ethos_u:
                partition_ids = _split_large_partitions(partition_ids, len(program.graph_signature.buffers_to_mutate))
            _sink_into_consumers(partition_ids, operators, lowering)
            return Selection(program, lowering, operators, refusals, partition_ids)
        new_float_nodes = {
            node for node in unmaterializable if target.has_fp_profile and not is_dequantize(node)
        } - lowering.float_nodes
        # With the FP profile, elementwise functions and data movement are lowered again, in floating point, if an
        # unquantized CPU operator or an output reads their result.
        if new_float_nodes:
            refusals, lowering = (
                dict(initial_refusals),
                Lowering(target, constants, lowering.float_nodes | new_float_nodes),
            )
            lowering.run(operators, refusals)
        else:
            refusals |= unmaterializable
            lowering.exclude(operators, refusals)


def _check_loops(operators: Sequence[Node], refusals: dict[Node, Unsupported], target: Target) -> None:
    """Check that every ``while_loop`` lies entirely in one delegate, because ExecuTorch cannot emit it for the CPU.

    Raises:
        ModelError: a ``while_loop`` does not lie in one delegate.
    """
    partition_ids = assign_partition_ids(operators, set(operators) - refusals.keys())
    for last, loop_out in enumerate(operators):
        starts = cast(list[Node], loop_out.args[2]) if loop_out.target is LOOP_OUT else []
        loop_nodes = operators[operators.index(starts[0]) : last + 1] if starts else []
        reasons = [f"{operator_name(node)}: {refusals[node].reason}" for node in loop_nodes if node in refusals]
        if reasons or len({partition_ids[node] for node in (*starts, *loop_nodes[-1:])}) > 1:
            cause = reasons[0] if reasons else "the CPU computes some of its operands"
            advice = 'a constant trip count, export the body as a separate method, or set extensions=["cf"] for TOSA'
            problem = f"a while_loop cannot be exported for {target.name}, and ExecuTorch has none for the CPU"
            raise ModelError(f"{problem}. {cause.rstrip('.')}. Use {advice}")


def _check_custom_operators(refusals: dict[Node, Unsupported], target: Target) -> None:
    """Check that no custom operator of this project, except loop markers, stays on the CPU, which has no kernel for it.

    Raises:
        ModelError: such an operator stays on the CPU.
    """
    for node, refusal in refusals.items():
        overload = overload_of(node.target)
        if overload is not None and overload.namespace == LOOP_OUT.namespace and overload not in (LOOP_IN, LOOP_OUT):
            problem = (
                f"{describe_node(node)} cannot be exported for {target.name}: {refusal.reason}. The CPU has no kernel"
            )
            raise ModelError(f"{problem} for block-scaled layers. Export for TOSA_FP with extensions=['mxfp']")


def _find_unmaterializable(
    operators: Sequence[Node], lowering: Lowering, refusals: dict[Node, Unsupported]
) -> dict[Node, Unsupported]:
    """Find nodes whose result is read outside of delegates but cannot leave one (see ``Lowering.is_internal``).

    Such results are quantized integers, lists of tensors, and elementwise functions whose table is not emitted yet.
    """
    unmaterializable: dict[Node, Unsupported] = {}
    for node in reversed(operators):
        if node in refusals or not lowering.is_internal(node):
            continue
        reader = next(
            (user for user in node.users if user.op == "output" or user in refusals or user in unmaterializable), None
        )
        if reader is not None and reader.op != "output":
            unmaterializable[node] = Unsupported(
                f"its result is read unquantized by '{reader.name}', which stays on the CPU"
            )
        elif reader is not None or not node.users:
            unmaterializable[node] = Unsupported("its result leaves the program without being quantized")
    return unmaterializable


def assign_partition_ids(operators: Iterable[Node], chosen: set[Node]) -> dict[Node, int]:
    """Group the chosen nodes into few convex partitions. No path leaves a convex partition and enters it again.

    Each node gets a level. Along a path from the program's inputs, the level starts at 0, rises by 1 where the path
    leaves a delegate, and rises by 1 where it enters the next delegate. Nodes before the first delegate and inside it
    have level 0. The level of a node is the maximum over all paths to it. A path that leaves the delegate of a level
    can only enter delegates of higher levels, so the chosen nodes of a level form a convex partition.

    Returns:
        The level of each chosen node, which is its partition id.
    """
    level: dict[Node, int] = {}  # even: in a delegate (0: also before the first delegate); odd: on the CPU after one
    for node in operators:
        is_chosen = node in chosen
        depths = [0]
        for source in node.all_input_nodes:
            crosses = source in level and (source in chosen) != is_chosen
            depths.append(level.get(source, 0) + (crosses and level[source] % 2 != (not is_chosen)))
        level[node] = max(depths)
    return {node: depth for node, depth in level.items() if node in chosen}


def _split_large_partitions(partition_ids: dict[Node, int], mutated_buffer_count: int) -> dict[Node, int]:
    """Split partitions for which Vela's memory allocation would take minutes.

    The buffers of a decoder with many layers are live from the first operation to the last. Vela's address search has
    at least 5000 rounds, and each visits all pairs of live tensors.

    Args:
        partition_ids: the partition of each delegated node, in program order.
        mutated_buffer_count: number of buffers that the program mutates.
    """
    if mutated_buffer_count < _MIN_BUFFERS_TO_SPLIT:
        return partition_ids
    numbered = enumerate(partition_ids.items())
    return {
        node: partition_id * len(partition_ids) + index // _MAX_NODES_PER_DELEGATE
        for index, (node, partition_id) in numbered
    }


def _sink_into_consumers(partition_ids: dict[Node, int], operators: Sequence[Node], lowering: Lowering) -> None:
    """Move nodes whose result cannot leave a delegate to the partition of their readers.

    These nodes are constants and nodes for which ``Lowering.is_internal`` is true. When the readers of a constant were
    lowered, they used its value, so their delegate must contain the constant. A node with readers in several
    partitions, or also on the CPU, is copied, so that each of them has its own. A constant that only the CPU reads is
    removed from its partition.
    """
    chosen = set(partition_ids)
    constant = set(lowering.constants)
    constant |= {node for node in chosen if is_quantize(node) and _lowered_value(lowering, node).data is not None}
    for node in reversed(operators):
        if node not in chosen or not (node in constant or lowering.is_internal(node)):
            continue
        readers: dict[int | None, list[Node]] = {}  # {partition, or None for the CPU: readers}
        for user in node.users:
            readers.setdefault(partition_ids.get(user), []).append(user)
        reader_partitions = sorted(partition_id for partition_id in readers if partition_id is not None)
        if not reader_partitions:
            set_refusal_reason(node, "it computes a constant that only the CPU reads")
            del partition_ids[node]
            continue
        partition_ids[node] = reader_partitions[0]
        for partition_id in [*reader_partitions[1:], *([None] if None in readers else [])]:
            with node.graph.inserting_after(node):
                copy = node.graph.node_copy(node)
            lowering.results[copy] = lowering.results[node]
            for user in readers[partition_id]:
                user.replace_input_with(node, copy)
            if partition_id is not None:
                partition_ids[copy] = partition_id


def _lowered_value(lowering: Lowering, node: Node) -> Value:
    result = lowering.results[node]
    assert isinstance(result, Operand), node
    return result.value
