"""Observers shared by the methods of a model, so that common tensors have the same scales."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram


#: torchao's ``EdgeOrNode``: a node stands for its result, an edge (source, reader) for an operand of the reader.
EdgeOrNode = Node | tuple[Node, Node]


def share_observers_across_methods(observed: Mapping[str, ObservedProgram], models: Mapping[str, Any]) -> None:
    """Share one observer between all methods for each tensor that they have in common.

    Common tensors are the parameters and buffers that several methods use. If a module runs the same sequence of
    operators in every method that calls it, the operands and results of these operators are common too.
    """
    from arm_backend_core.quantization.graph_observers import merge_observers, set_observer_properties
    from arm_backend_core.quantization.state_observers import unify_state_observers

    unify_state_observers(observed.values())
    modules = {method: _modules_by_path(models[method]) for method in observed}
    sequences = {method: _operator_sequences(model, modules[method]) for method, model in observed.items()}
    positions: dict[Node, Hashable] = {}
    for sequence in sequences.values():
        for module, nodes in sequence.items():
            others = [other[module] for other in sequences.values() if module in other]
            if all(_targets(nodes) == _targets(other) for other in others):
                positions |= {node: (module, index) for index, node in enumerate(nodes)}
    tensor_ids = {node: key for model in observed.values() for node, key in model.tensor_ids.items()}

    def key_of(edge_or_node: EdgeOrNode) -> Hashable:
        source, node = (edge_or_node, None) if isinstance(edge_or_node, Node) else edge_or_node
        observer = observers[edge_or_node]
        if hasattr(observer, "obs_or_fqs"):  # its scale is derived from other observers
            return None
        if source in tensor_ids:
            return "tensor", tensor_ids[source], type(observer), getattr(observer, "ch_axis", None)
        if node is None:
            return ("result", positions[source]) if source in positions else None
        return ("operand", positions[node], node.all_input_nodes.index(source)) if node in positions else None

    observers = {
        edge_or_node: observer for model in observed.values() for edge_or_node, observer in model.observers.items()
    }
    merge_observers([model.observers for model in observed.values()], key_of)
    set_observer_properties(*((model.graph_module, model.observers) for model in observed.values()))


def _modules_by_path(model: Any) -> dict[str, Hashable]:
    """Return {path of a module: its ``id``}; empty for a captured program, which has no module objects."""
    if not isinstance(model, torch.nn.Module):
        return {}
    return {path: id(module) for path, module in model.named_modules(remove_duplicate=False)}


def _operator_sequences(model: ObservedProgram, modules: Mapping[str, Hashable]) -> dict[Hashable, list[Node]]:
    """List each module's operators with float results, by module identity, or by path if the identity is unknown."""
    from arm_backend_core.nodes import is_float, modules_of

    sequences: dict[Hashable, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and is_float(node):
            *_, path = ("", *modules_of(node))
            sequences.setdefault(modules.get(path, path), []).append(node)
    return sequences


def _targets(nodes: list[Node]) -> list[Any]:
    return [node.target for node in nodes]
