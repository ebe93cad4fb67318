"""Which operations of a delegate give the value of an operator of the captured program, and what else belongs to it.

ExecuTorch's Inspector compares the value of an event with that of the last debug handle that the event has, and wants
every handle to belong to one event alone. So the operators inside of a delegate are divided: each belongs to the first
one behind it whose value an operation of the delegate gives.
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

#: TOSA operators that give what they read, in another order or shape.
_MOVES = ("RESHAPE", "TRANSPOSE", "IDENTITY")
#: Types that NumPy has, by PyTorch's names: as TOSA computes them.
_TYPES = {name: name for name in ("bool", "int8", "int16", "int32", "float16", "float32")}
_TYPES |= {"int64": "int32", "float64": "float32"}


@dataclass(frozen=True)
class Layer:
    """What an operation computes of the captured program.

    Attributes:
        operation: its number, the delegate debug identifier: the TOSA operator that the delegate was compiled from.
        handles: debug handles of what is computed since the layers before; the last one is that of ``node``. Quantize
            and dequantize operators that nothing computes have no part in it, they would hide the others.
        node: whose value it is.
        scale, zero_point: the value is ``(integer - zero_point) * scale``; None where it is what the operation gives.
    """

    operation: int
    handles: tuple[int, ...]
    node: str
    scale: float | None = None
    zero_point: int | None = None


@dataclass(frozen=True)
class _Value:
    """A node whose value an operation gives, with those that have the same one."""

    node: Node
    same: tuple[Node, ...]
    dtype: str
    scale: float | None = None
    zero_point: int | None = None


def layers(
    program: ExportedProgram,
    members: Collection[int],
    kinds: Sequence[str],
    handles: Sequence[tuple[int, ...]],
    operators: Sequence[TosaOperator],
    given: Collection[int],
) -> list[Layer]:
    """The layers of a delegate, in the order of the program.

    Args:
        program: from ``numbered``.
        members: debug handles of what the delegate computes.
        kinds, handles, operators: its TOSA operators, what each is and the handles that it was made for.
        given: numbers of those whose results can be had.
    """
    nodes = [node for node in program.graph.nodes if node.meta.get("debug_handle") in members]
    made: dict[int, list[int]] = {}
    for number, found in enumerate(_latest(nodes, handles, operators)):
        made.setdefault(found, []).append(number)
    moved = _moved(kinds, operators)
    places: dict[Node, int] = {}
    chosen: dict[Node, _Value] = {}
    for node in nodes:
        value = None if node in chosen else _value(node, set(nodes), made)
        numbers = made.get(_handle(node), [])
        while value is not None and numbers and kinds[numbers[-1]] in _MOVES:
            if _fits(value, operators[numbers[-1]]) and (kinds[moved[numbers[-1]]] not in _MOVES or _may_move(node)):
                break
            numbers.pop()  # for another reader, or an input as it is computed with
        if value is None or not numbers or not _fits(value, operators[numbers[-1]]):
            continue
        alike = [other for other in given if moved[other] == moved[numbers[-1]]]
        place = numbers[-1] if numbers[-1] in given else max(alike, default=None)
        if place is None or place in places.values():
            continue
        places[value.node] = place
        chosen |= dict.fromkeys(value.same, value)
    written = {handle for found in handles for handle in found}
    hidden = {node for node in nodes if (is_quantize(node) or is_dequantize(node)) and _handle(node) not in written}
    return _divided(nodes, chosen, places, hidden)


def _latest(
    nodes: Sequence[Node], handles: Sequence[tuple[int, ...]], operators: Sequence[TosaOperator]
) -> Iterator[int]:
    """For each operator the last node that it is a part of; 0 for none.

    Passes move arithmetic forward, a MUL past a RESHAPE: what follows gives the result of both, and its own node's not.
    """
    behind: dict[int, int] = {}  # by node those that depend on it, as bits: a graph may have thousands
    for node in reversed(nodes):
        users = [_handle(user) for user in node.users if "debug_handle" in user.meta]
        behind[_handle(node)] = _union(1 << user | behind.get(user, 0) for user in users)
    reached: dict[str, int] = {}  # by tensor all nodes that it is made for
    for own, operator in zip(handles, operators, strict=True):
        before = _union(reached.get(name, 0) for name in operator.inputs)
        last = max(own, default=0)
        yield max(last, (before & behind.get(last, 0)).bit_length() - 1)
        reached[operator.result.name] = before | _union(1 << handle for handle in own)


def _union(bits: Iterable[int]) -> int:
    return reduce(or_, bits, 0)


def _divided(
    nodes: Sequence[Node], chosen: Mapping[Node, _Value], places: Mapping[Node, int], hidden: Collection[Node]
) -> list[Layer]:
    """All nodes but the ``hidden`` go to the first value that follows from them."""
    order = {node: index for index, node in enumerate(nodes)}
    owner: dict[Node, _Value] = {}
    for node in reversed(nodes):
        readers = [owner[user] for user in node.users if user in owner]
        if node in chosen:
            owner[node] = chosen[node]
        elif readers:
            owner[node] = min(readers, key=lambda value: order[value.node])
    found: dict[Node, list[int]] = {}
    for node in nodes:
        if node in owner and node is not owner[node].node and node not in hidden:
            found.setdefault(owner[node].node, []).append(_handle(node))
    values = {value.node: value for value in chosen.values()}
    return [
        Layer(
            places[node], (*found.get(node, ()), _handle(node)), node.name, values[node].scale, values[node].zero_point
        )
        for node in nodes
        if node in places
    ]


def _moved(kinds: Sequence[str], operators: Sequence[TosaOperator]) -> list[int]:
    """For each operator the one whose elements it gives, behind those that only move them."""
    number = {operator.result.name: index for index, operator in enumerate(operators)}
    found: list[int] = []
    for index, (kind, operator) in enumerate(zip(kinds, operators, strict=True)):
        source = number.get(operator.inputs[0]) if kind in _MOVES else None
        found.append(index if source is None else found[source])
    return found


def _value(node: Node, inside: set[Node], computed: Collection[int]) -> _Value | None:
    """What the last operation made for ``node`` gives: its value, or that value quantized."""
    same = [node]
    while not is_quantize(node) and not _quantized(node):
        following = next(iter(node.users)) if len(node.users) == 1 else None
        if following is None or following not in inside or _handle(following) in computed or is_dequantize(following):
            return _plain(same[0])
        same.append(node := following)  # an operator that is part of the one before
    quantizes = [node] if is_quantize(node) else [user for user in node.users if user in inside]
    if not quantizes:
        return _plain(same[0])
    scale, zero_point, _, _, dtype = quantizes[0].args[1:6]
    if not isinstance(scale, float) or not isinstance(zero_point, int):
        return None
    reals = [user for quantize in quantizes for user in quantize.users if user in inside and is_dequantize(user)]
    name = str(dtype).removeprefix("torch.")
    everything = tuple(dict.fromkeys((*same, *quantizes, *reals)))
    # The integers themselves where they leave the delegate: it is the CPU that makes real numbers of them.
    return _Value(reals[-1], everything, name, scale, zero_point) if reals else _Value(quantizes[-1], everything, name)


def _plain(node: Node) -> _Value | None:
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor):
        return None
    name = _TYPES.get(str(made.dtype).removeprefix("torch."))
    return None if name is None else _Value(node, (node,), name)


def _quantized(node: Node) -> bool:
    """Whether all that reads ``node`` quantizes it, by the same parameters."""
    users = list(node.users)
    return bool(users) and all(is_quantize(user) and user.args[1:] == users[0].args[1:] for user in users)


def _may_move(node: Node) -> bool:
    """Whether a node may give what it reads, in another order or shape."""
    record = find_record(node)
    return record is None or record.kind is Kind.SHARED


def _fits(value: _Value, operator: TosaOperator) -> bool:
    made = first_result(value.node)
    size = -1 if made is None else made.numel()
    return operator.result.dtype == value.dtype and math.prod(operator.result.shape) == size


def _handle(node: Node) -> int:
    handle: int = node.meta["debug_handle"]
    return handle


def handle_map(found: Iterable[Layer], handles: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Debug handles by operation, as events have them: those of the whole layer that an operation is a part of."""
    layer_of = {handle: layer.handles for layer in found for handle in layer.handles}
    mapped = {number: layer_of.get(max(own, default=0), ()) for number, own in enumerate(handles)}
    return mapped | {layer.operation: layer.handles for layer in found}
