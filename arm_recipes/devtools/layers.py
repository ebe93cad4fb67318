"""Layer matching: map the operations of a delegate to nodes of the captured program.

ExecuTorch's Inspector compares the value of an event with the node of the event's last debug handle, and requires that
each handle belongs to exactly one event. The nodes of a delegate are therefore partitioned: each node belongs to the
first node after it whose value an operation of the delegate computes.
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
from arm_backend_core.ops.registry import Kind
from arm_recipes.runtime.tosa_graph import TosaOperator

#: TOSA operators that only move data.
_MOVEMENT = ("RESHAPE", "TRANSPOSE", "IDENTITY")
#: PyTorch's dtype -> the dtype in which TOSA computes it; only dtypes that NumPy has.
_TYPES = {name: name for name in ("bool", "int8", "int16", "int32", "float16", "float32")}
_TYPES |= {"int64": "int32", "float64": "float32"}


@dataclass(frozen=True)
class Layer:
    """A node of the captured program whose value an operation computes, with the nodes that belong to it.

    Attributes:
        operation: index of the TOSA operator that the delegate was compiled from; the delegate debug identifier.
        handles: debug handles of the nodes since the previous layers; the last one is the handle of ``node``. Quantize
            and dequantize nodes that no operation computes are left out, because they would hide the other nodes.
        node: name of the node.
        scale, zero_point: the node's value is ``(integer - zero_point) * scale``; None if it is the operation's result.
    """

    operation: int
    handles: tuple[int, ...]
    node: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class _Value:
    """A node whose value an operation computes, with the nodes of the same value (``equivalents``)."""

    node: Node
    equivalents: tuple[Node, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


def find_layers(
    program: ExportedProgram,
    members: Collection[int],
    kinds: Sequence[str],
    handles: Sequence[tuple[int, ...]],
    operators: Sequence[TosaOperator],
    available: Collection[int],
) -> list[Layer]:
    """Find the layers of a delegate, in program order.

    Args:
        program: the captured program, from ``with_debug_handles``.
        members: debug handles of the nodes in the delegate.
        kinds: kinds of the delegate's TOSA operators.
        handles: debug handles of the nodes that each TOSA operator was lowered from.
        operators: the TOSA operators.
        available: indices of operators whose results are available.
    """
    nodes = [node for node in program.graph.nodes if node.meta.get("debug_handle") in members]
    numbers_of: dict[int, list[int]] = {}
    for number, last in enumerate(_last_nodes(nodes, handles, operators)):
        numbers_of.setdefault(last, []).append(number)
    sources = _movement_sources(kinds, operators)
    operation_of: dict[Node, int] = {}
    selected: dict[Node, _Value] = {}
    for node in nodes:
        value = None if node in selected else _find_value(node, set(nodes), numbers_of)
        numbers = numbers_of.get(_handle(node), [])
        while value is not None and numbers and kinds[numbers[-1]] in _MOVEMENT:
            if _fits(value, operators[numbers[-1]]) and (
                kinds[sources[numbers[-1]]] not in _MOVEMENT or _is_movement(node)
            ):
                break
            numbers.pop()  # a copy for another reader, or an input in its computation layout
        if value is None or not numbers or not _fits(value, operators[numbers[-1]]):
            continue
        same_source = [other for other in available if sources[other] == sources[numbers[-1]]]
        operation = numbers[-1] if numbers[-1] in available else max(same_source, default=None)
        if operation is None or operation in operation_of.values():
            continue
        operation_of[value.node] = operation
        selected |= dict.fromkeys(value.equivalents, value)
    computed = {handle for own in handles for handle in own}
    hidden = {node for node in nodes if (is_quantize(node) or is_dequantize(node)) and _handle(node) not in computed}
    return _assign_nodes(nodes, selected, operation_of, hidden)


def _last_nodes(
    nodes: Sequence[Node], handles: Sequence[tuple[int, ...]], operators: Sequence[TosaOperator]
) -> Iterator[int]:
    """Debug handle of the last node that each operator belongs to; 0 for none.

    Passes move arithmetic forward, for example a MUL past a RESHAPE. The later operator then computes the result of
    both nodes, and no operator computes that of the earlier node alone.
    """
    # Node -> bit set of the nodes that depend on it. Bit sets, because a graph may have thousands of nodes.
    dependents: dict[int, int] = {}
    for node in reversed(nodes):
        users = [_handle(user) for user in node.users if "debug_handle" in user.meta]
        dependents[_handle(node)] = _union(1 << user | dependents.get(user, 0) for user in users)
    reached: dict[str, int] = {}  # tensor -> bit set of the nodes that it was computed for
    for own, operator in zip(handles, operators, strict=True):
        before = _union(reached.get(name, 0) for name in operator.inputs)
        last = max(own, default=0)
        yield max(last, (before & dependents.get(last, 0)).bit_length() - 1)
        reached[operator.result.name] = before | _union(1 << handle for handle in own)


def _union(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


def _assign_nodes(
    nodes: Sequence[Node], selected: Mapping[Node, _Value], operation_of: Mapping[Node, int], hidden: Collection[Node]
) -> list[Layer]:
    """Assign each node, except ``hidden`` ones, to the first selected value that depends on it."""
    order = {node: index for index, node in enumerate(nodes)}
    owner: dict[Node, _Value] = {}
    for node in reversed(nodes):
        readers = [owner[user] for user in node.users if user in owner]
        if node in selected:
            owner[node] = selected[node]
        elif readers:
            owner[node] = min(readers, key=lambda value: order[value.node])
    members: dict[Node, list[int]] = {}
    for node in nodes:
        if node in owner and node is not owner[node].node and node not in hidden:
            members.setdefault(owner[node].node, []).append(_handle(node))
    values = {value.node: value for value in selected.values()}
    return [
        Layer(
            operation_of[node],
            (*members.get(node, ()), _handle(node)),
            node.name,
            values[node].scale,
            values[node].zero_point,
        )
        for node in nodes
        if node in operation_of
    ]


def _movement_sources(kinds: Sequence[str], operators: Sequence[TosaOperator]) -> list[int]:
    """For each operator, the operator that computed its elements, skipping data movement."""
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    sources: list[int] = []
    for index, (kind, operator) in enumerate(zip(kinds, operators, strict=True)):
        source = number.get(operator.inputs[0]) if kind in _MOVEMENT else None
        sources.append(index if source is None else sources[source])
    return sources


def _find_value(node: Node, inside: set[Node], computed: Collection[int]) -> _Value | None:
    """The value that the last operation of ``node`` computes: the node's value, or its quantized value."""
    equivalents = [node]
    while not is_quantize(node) and not _is_quantized_by_readers(node):
        following = next(iter(node.users)) if len(node.users) == 1 else None
        if following is None or following not in inside or _handle(following) in computed or is_dequantize(following):
            return _unquantized_value(equivalents[0])
        equivalents.append(node := following)  # a node that was fused into the previous one
    quantizes = [node] if is_quantize(node) else [user for user in node.users if user in inside]
    if not quantizes:
        return _unquantized_value(equivalents[0])
    scale, zero_point, _, _, dtype = quantizes[0].args[1:6]
    if not isinstance(scale, float) or not isinstance(zero_point, int):
        return None
    dequantizes = [user for quantize in quantizes for user in quantize.users if user in inside and is_dequantize(user)]
    name = str(dtype).removeprefix("torch.")
    everything = tuple(dict.fromkeys((*equivalents, *quantizes, *dequantizes)))
    # Without a dequantize node, the integers leave the delegate, and the CPU dequantizes them.
    return (
        _Value(dequantizes[-1], everything, name, scale, zero_point)
        if dequantizes
        else _Value(quantizes[-1], everything, name)
    )


def _unquantized_value(node: Node) -> _Value | None:
    example = node.meta.get("val")
    if not isinstance(example, torch.Tensor):
        return None
    name = _TYPES.get(str(example.dtype).removeprefix("torch."))
    return None if name is None else _Value(node, (node,), name)


def _is_quantized_by_readers(node: Node) -> bool:
    """Whether every user of ``node`` quantizes it, with the same parameters."""
    users = list(node.users)
    return bool(users) and all(is_quantize(user) and user.args[1:] == users[0].args[1:] for user in users)


def _is_movement(node: Node) -> bool:
    """Whether a node may be pure data movement."""
    record = find_record(node)
    return record is None or record.kind is Kind.SHARED


def _fits(value: _Value, operator: TosaOperator) -> bool:
    result = first_result(value.node)
    size = -1 if result is None else result.numel()
    return operator.result.dtype == value.dtype and math.prod(operator.result.shape) == size


def _handle(node: Node) -> int:
    handle: int = node.meta["debug_handle"]
    return handle


def map_handles(layers: Iterable[Layer], handles: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Debug handles of each operation's events: the handles of the layer that the operation belongs to."""
    layer_of = {handle: layer.handles for layer in layers for handle in layer.handles}
    mapped = {number: layer_of.get(max(own, default=0), ()) for number, own in enumerate(handles)}
    return mapped | {layer.operation: layer.handles for layer in layers}
