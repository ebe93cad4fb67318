"""Constant folding: evaluate nodes that depend only on parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import add_buffer_node
from arm_backend_core.nodes import constant_nodes, evaluate_node
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import Kind


class Constants:
    """The constant nodes of a graph (parameters, buffers, nodes that depend only on these) and their values.

    Attributes:
        module: the module of the graph.
    """

    def __init__(self, module: GraphModule, tensors: Mapping[Node, Tensor] | None = None) -> None:
        """Find the constant nodes.

        Args:
            module: the module of the graph.
            tensors: the values of placeholders that are parameters, buffers or lifted constants.
        """
        self.module = module
        self._values: dict[Node, Tensor] = dict(tensors or {})
        self._nodes = constant_nodes(module.graph, self._values)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def value(self, node: Node) -> Tensor:
        """The value of a constant node. The first call evaluates it; later calls return the cached value."""
        if node.op == "get_attr":
            tensor: Tensor = attrgetter(str(node.target))(self.module)
            return tensor.detach()
        if node not in self._values:
            self._values[node] = evaluate_node(node, self.value)
        return self._values[node]


def fold_constant_weights(module: GraphModule) -> None:
    """Fold weights and biases that the graph computes from parameters, as in weight standardization, into buffers."""
    constants = Constants(module)
    for node in list(module.graph.nodes):
        record = find_record(node)
        if record is None or record.kind is not Kind.CONV:
            continue
        for position in (record.weight, record.bias):
            source: Any = node.args[position] if position < len(node.args) else None
            if isinstance(source, Node) and source.op == "call_function" and source in constants:
                with module.graph.inserting_before(source):
                    folded = add_buffer_node(module, f"{source.name}_value", constants.value(source).clone())
                source.replace_all_uses_with(folded)
