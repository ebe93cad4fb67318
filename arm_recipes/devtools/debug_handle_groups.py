"""Debug handle groups: map the operators of a delegate to nodes of the captured program.

An event has a list of debug handles, and each handle belongs to a node. ExecuTorch's Inspector compares the value of
the event with the value of the node that has the last handle of the list. It merges events whose lists overlap, and
compares only one of them. So each handle must belong to one event. This module therefore partitions the nodes of a
delegate into groups. Each group has one node whose value an operator of the delegate computes, and this node comes
last. Each other node belongs to the group of the first such node that depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.nodes import first_result, is_dequantize, is_quantize
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind
from arm_recipes._internal.conversions import dtype_name
from arm_recipes.runtime.tosa_flatbuffer import TosaOperator

#: TOSA operators that only change the shape or the order of the axes of their operand, or copy it. Operators that move
#: data otherwise (SLICE, CONCAT, PAD, REVERSE, TILE, GATHER) are not listed.
_LAYOUT_OPERATORS = ("RESHAPE", "TRANSPOSE", "IDENTITY")
#: ``{dtype in PyTorch: dtype of the same value in the TOSA graph}``. Only dtypes that NumPy supports are listed.
_TOSA_DTYPE_OF = {name: name for name in ("bool", "int8", "int16", "int32", "float16", "float32")}
_TOSA_DTYPE_OF |= {"int64": "int32", "float64": "float32"}


@dataclass(frozen=True)
class DebugHandleGroup:
    """A node of the captured program whose value an operator computes, and the nodes that are grouped with it.

    Attributes:
        operator_index: index of the TOSA operator that computes the value: the delegate debug identifier of events.
        handles: debug handles of the nodes in the group. The handle of ``node`` comes last. Quantize and dequantize
            nodes that no operator was lowered from are excluded, because they would hide the other nodes of the group
            in the Inspector.
        node: name of the node.
        scale, zero_point: quantization parameters of the operator's result: the value of ``node`` is
            ``(result - zero_point) * scale``. None if the value of ``node`` is the result itself.
    """

    operator_index: int
    handles: tuple[int, ...]
    node: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class _ComputedValue:
    """A node whose value an operator computes.

    Attributes:
        node: the node.
        equivalents: ``node``, the nodes that are fused with it, and their quantize and dequantize nodes: the operator
            computes one value for all of them.
        dtype: dtype of the operator's result.
        scale, zero_point: as in ``DebugHandleGroup``.
    """

    node: Node
    equivalents: tuple[Node, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


def group_debug_handles(
    program: ExportedProgram,
    members: Collection[int],
    kinds: Sequence[str],
    handles: Sequence[tuple[int, ...]],
    operators: Sequence[TosaOperator],
    available: Collection[int],
) -> list[DebugHandleGroup]:
    """Group the debug handles of a delegate, in program order.

    Args:
        program: the captured program, a result of ``with_debug_handles``.
        members: debug handles of the nodes in the delegate.
        kinds: names of the delegate's TOSA operators, such as ``CONV2D``.
        handles: debug handles of the nodes that each TOSA operator was lowered from.
        operators: the TOSA operators.
        available: indices of the operators whose results can be read.
    """
    nodes = [node for node in program.graph.nodes if node.meta.get("debug_handle") in members]
    operators_of_node: dict[int, list[int]] = {}
    for operator_index, last_node in enumerate(_last_node_of_operators(nodes, handles, operators)):
        operators_of_node.setdefault(last_node, []).append(operator_index)
    sources = _movement_sources(kinds, operators)
    operator_index_of: dict[Node, int] = {}
    selected: dict[Node, _ComputedValue] = {}
    for node in nodes:
        value = None if node in selected else _find_value(node, set(nodes), operators_of_node)
        operator_indices = operators_of_node.get(_debug_handle(node), [])
        while value is not None and operator_indices and kinds[operator_indices[-1]] in _LAYOUT_OPERATORS:
            if _matches_result(value, operators[operator_indices[-1]]) and (
                kinds[sources[operator_indices[-1]]] not in _LAYOUT_OPERATORS or _is_data_movement(node)
            ):
                break
            # Skip an operator that copies the value for another consumer, or that converts an input to another layout.
            operator_indices.pop()
        if value is None or not operator_indices or not _matches_result(value, operators[operator_indices[-1]]):
            continue
        same_source = [other for other in available if sources[other] == sources[operator_indices[-1]]]
        index = operator_indices[-1] if operator_indices[-1] in available else max(same_source, default=None)
        if index is None or index in operator_index_of.values():
            continue
        operator_index_of[value.node] = index
        selected |= dict.fromkeys(value.equivalents, value)
    computed = {handle for own in handles for handle in own}
    hidden = {
        node for node in nodes if (is_quantize(node) or is_dequantize(node)) and _debug_handle(node) not in computed
    }
    return _assign_nodes(nodes, selected, operator_index_of, hidden)


def _last_node_of_operators(
    nodes: Sequence[Node], handles: Sequence[tuple[int, ...]], operators: Sequence[TosaOperator]
) -> Iterator[int]:
    """Yield, for each operator, the debug handle of the last node that it computes; 0 if there is none.

    Compiler passes move arithmetic forward, for example a MUL past a RESHAPE. The later operator then computes the
    values of both nodes, and no operator computes the value of the earlier node alone.
    """
    # {debug handle of a node: debug handles of the nodes that depend on it}. The values are bit sets for speed: a graph
    # may have thousands of nodes.
    dependents: dict[int, int] = {}
    for node in reversed(nodes):
        users = [_debug_handle(user) for user in node.users if "debug_handle" in user.meta]
        dependents[_debug_handle(node)] = _bitwise_union(1 << user | dependents.get(user, 0) for user in users)
    reached: dict[str, int] = {}  # {tensor: bit set of the nodes that its computation includes}
    for own, operator in zip(handles, operators, strict=True):
        before = _bitwise_union(reached.get(name, 0) for name in operator.inputs)
        last = max(own, default=0)
        yield max(last, (before & dependents.get(last, 0)).bit_length() - 1)
        reached[operator.result.name] = before | _bitwise_union(1 << handle for handle in own)


def _bitwise_union(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


def _assign_nodes(
    nodes: Sequence[Node],
    selected: Mapping[Node, _ComputedValue],
    operator_index_of: Mapping[Node, int],
    hidden: Collection[Node],
) -> list[DebugHandleGroup]:
    """Assign each node to the first selected value that depends on it, and return the groups.

    A node on which no selected value depends is in no group. A ``hidden`` node is in a group only as its last node.
    """
    order = {node: index for index, node in enumerate(nodes)}
    value_of_node: dict[Node, _ComputedValue] = {}
    for node in reversed(nodes):
        values_of_users = [value_of_node[user] for user in node.users if user in value_of_node]
        if node in selected:
            value_of_node[node] = selected[node]
        elif values_of_users:
            value_of_node[node] = min(values_of_users, key=lambda value: order[value.node])
    members: dict[Node, list[int]] = {}
    for node in nodes:
        if node in value_of_node and node is not value_of_node[node].node and node not in hidden:
            members.setdefault(value_of_node[node].node, []).append(_debug_handle(node))
    values = {value.node: value for value in selected.values()}
    return [
        DebugHandleGroup(
            operator_index_of[node],
            (*members.get(node, ()), _debug_handle(node)),
            node.name,
            values[node].scale,
            values[node].zero_point,
        )
        for node in nodes
        if node in operator_index_of
    ]


def _movement_sources(kinds: Sequence[str], operators: Sequence[TosaOperator]) -> list[int]:
    """Return, for each operator, the index of the operator that computed its elements.

    RESHAPE, TRANSPOSE and IDENTITY are skipped, because they only move the elements of their operand. Other data
    movement, such as SLICE, CONCAT and PAD, is not skipped.
    """
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    sources: list[int] = []
    for index, (kind, operator) in enumerate(zip(kinds, operators, strict=True)):
        source = number.get(operator.inputs[0]) if kind in _LAYOUT_OPERATORS else None
        sources.append(index if source is None else sources[source])
    return sources


def _find_value(node: Node, delegate_nodes: set[Node], computed: Collection[int]) -> _ComputedValue | None:
    """Find the value that the last operator of ``node`` computes: the node's value, or its quantized value.

    Later nodes may be fused into ``node`` and have no operators of their own. The operator then computes the quantized
    value of the last of these nodes.
    """
    equivalents = [node]
    while not is_quantize(node) and not _is_quantized_by_readers(node):
        next_node = next(iter(node.users)) if len(node.users) == 1 else None
        if (
            next_node is None
            or next_node not in delegate_nodes
            or _debug_handle(next_node) in computed
            or is_dequantize(next_node)
        ):
            return _unquantized_value(equivalents[0])
        equivalents.append(node := next_node)  # a node that is fused into the previous one
    quantizes = [node] if is_quantize(node) else [user for user in node.users if user in delegate_nodes]
    if not quantizes:
        return _unquantized_value(equivalents[0])
    scale, zero_point, _, _, dtype = quantizes[0].args[1:6]
    if not isinstance(scale, float) or not isinstance(zero_point, int):
        return None
    dequantizes = [
        user for quantize in quantizes for user in quantize.users if user in delegate_nodes and is_dequantize(user)
    ]
    name = dtype_name(dtype)
    all_equivalents = tuple(dict.fromkeys((*equivalents, *quantizes, *dequantizes)))
    # Without a dequantize node inside the delegate, the delegate returns integers, and the CPU dequantizes them.
    return (
        _ComputedValue(dequantizes[-1], all_equivalents, name, scale, zero_point)
        if dequantizes
        else _ComputedValue(quantizes[-1], all_equivalents, name)
    )


def _unquantized_value(node: Node) -> _ComputedValue | None:
    example = node.meta.get("val")
    if not isinstance(example, torch.Tensor):
        return None
    name = _TOSA_DTYPE_OF.get(dtype_name(example.dtype))
    return None if name is None else _ComputedValue(node, (node,), name)


def _is_quantized_by_readers(node: Node) -> bool:
    """Whether every user of ``node`` quantizes it, all with the same parameters."""
    users = list(node.users)
    return bool(users) and all(is_quantize(user) and user.args[1:] == users[0].args[1:] for user in users)


def _is_data_movement(node: Node) -> bool:
    """Whether a node may be pure data movement."""
    record = find_record(node)
    return record is None or record.kind is AnnotationKind.SHARED


def _matches_result(value: _ComputedValue, operator: TosaOperator) -> bool:
    result = first_result(value.node)
    size = -1 if result is None else result.numel()
    return operator.result.dtype == value.dtype and math.prod(operator.result.shape) == size


def _debug_handle(node: Node) -> int:
    handle: int = node.meta["debug_handle"]
    return handle


def map_operators_to_handles(
    groups: Iterable[DebugHandleGroup], handles: Sequence[tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """Return ``{operator index: debug handles of its group}``; an operator without a group has no handles."""
    group_of = {handle: group.handles for group in groups for handle in group.handles}
    mapped = {number: group_of.get(max(own, default=0), ()) for number, own in enumerate(handles)}
    return mapped | {group.operator_index: group.handles for group in groups}
