"""Observers of the tensors of a graph: which tensors share an observer, and which tensor an observer observes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.nodes import TIMESTEP_SLOT, constant_nodes, describe_node
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.quantization.annotator import is_cast_from_integers
from arm_backend_core.quantization.observer import RangeObserver, WeightObserver

#: {node: observer of its result, (source, reader): observer of the operand ``source`` of ``reader``}.
Observers = dict[Node | tuple[Node, Node], Any]


def share_timestep_observers(observers: Observers) -> None:
    """Share one observer between all time steps for each tensor of a recurrent layer."""

    def slot(edge_or_node: Node | tuple[Node, Node]) -> Any:
        source, node = (None, edge_or_node) if isinstance(edge_or_node, Node) else edge_or_node
        operand = None if source is None else node.all_input_nodes.index(source)
        return (node.meta[TIMESTEP_SLOT], operand) if TIMESTEP_SLOT in node.meta else None

    merge_observers([observers], slot)


def merge_observers(observers_by_graph: Sequence[Observers], key_of: Callable[[Node | tuple[Node, Node]], Any]) -> None:
    """Share one observer between tensors with the same key and dtype, within a graph and across graphs (union-find).

    Args:
        key_of: returns the key of a node or of an edge (source, reader); None if its observer is not shared.
    """
    parents, representatives = dict[Any, Any](), dict[Any, Any]()

    def root(observer: Any) -> Any:
        while observer in parents:
            observer = parents[observer]
        return observer

    for edge_or_node, observer in (item for observers in observers_by_graph for item in observers.items()):
        key = key_of(edge_or_node)
        if key is not None:
            first_root, second_root = (
                root(representatives.setdefault((key, getattr(observer, "dtype", None)), observer)),
                root(observer),
            )
            if first_root is not second_root:
                parents[second_root] = first_root
    for observers in observers_by_graph:
        for edge_or_node, observer in observers.items():
            observers[edge_or_node] = root(observer)
            if hasattr(observer, "obs_or_fqs"):
                observer.obs_or_fqs = list(map(root, observer.obs_or_fqs))


def set_observer_properties(*observed_graphs: tuple[GraphModule, Mapping[Node | tuple[Node, Node], Any]]) -> None:
    """Set the attributes ``is_constant``, ``is_integer`` and ``description`` of each ``RangeObserver``.

    The first two are True if they hold for all tensors of the observer. The observer of a weight also gets the biases
    of the layers that read the weight (``register_bias``).

    Args:
        observed_graphs: (module of a graph, its observers) pairs. Graphs may share observers.
    """
    sources: dict[RangeObserver, list[Node]] = {}
    constants = set[Node]()
    for model, observers in observed_graphs:
        constants |= constant_nodes(model.graph)
        for edge_or_node, observer in observers.items():
            if isinstance(observer, RangeObserver):
                sources.setdefault(observer, []).append(
                    edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[0]
                )
    for observer, nodes in sources.items():
        observer.description = describe_node(nodes[0])
        observer.is_constant, observer.is_integer = (
            all(node in constants for node in nodes),
            all(map(is_cast_from_integers, nodes)),
        )
        if isinstance(observer, WeightObserver):
            observer.bias_constraints.clear()
    for model, observers in observed_graphs:
        for node in model.graph.nodes:
            register_bias(model, node, observers)


def register_bias(model: GraphModule, node: Node, observers: Mapping[Node | tuple[Node, Node], Any]) -> None:
    """Register the current bias of a layer with the observer of its weight.

    The bias sets a minimum for the weight's scale (``WeightObserver``). Only a constant bias is registered, and only if
    the layer's input is int8.
    """
    record = find_record(node)
    if record is None or record.kind is not AnnotationKind.CONV or len(node.args) <= record.bias:
        return
    operands: Any = node.args
    bias = operands[record.bias]
    activation, weight = (observers.get((operands[position], node)) for position in (0, record.weight))
    is_int8 = getattr(activation, "dtype", None) is torch.int8 and isinstance(bias, Node) and bias.op == "get_attr"
    if is_int8 and isinstance(weight, WeightObserver) and isinstance(activation, RangeObserver):
        weight.add_bias_constraint(activation, attrgetter(str(bias.target))(model))


def find_observed_weight(
    observers: Mapping[Node | tuple[Node, Node], Any], node: Node
) -> tuple[Node, WeightObserver] | None:
    """Return the weight of a layer and the observer of the weight.

    None if ``node`` is not a layer, if its weight is not constant or has no ``WeightObserver``, or if the output
    channels are not the first dimension of the weight.
    """
    record = find_record(node)
    if record is None or record.kind is not AnnotationKind.CONV or record.weight_axis(node):
        return None
    weight = node.args[record.weight]
    if not isinstance(weight, Node) or weight.op != "get_attr":
        return None
    observer = observers.get((weight, node))
    return (weight, observer) if isinstance(observer, WeightObserver) else None
