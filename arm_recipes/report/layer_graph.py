"""Layer graph of a delegate: the nodes are layers of the model, and the links are tensors between layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.command_origins import main_origin

if TYPE_CHECKING:
    from arm_backend_core.compilation_log import BoundaryTensor
    from arm_recipes.report.npu_layer_costs import DelegateProfile, LayerCost


@dataclass
class _Node:
    """A node of the graph: a layer (one source line of one module), or an input or output of the delegate.

    Attributes:
        module: path of the module; empty for an input or output.
        source: source line of the layer; for an input or output, its index, dtype and shape.
        operators: names of the layer's ATen operators, as keys in program order; empty for an input or output.
        tosa: {TOSA operator: number of its occurrences in the layer}.
    """

    module: str
    source: str
    operators: dict[str, None] = field(default_factory=dict)
    tosa: Counter[str] = field(default_factory=Counter)


def build_layer_graph(profile: DelegateProfile, costs: Iterable[LayerCost]) -> dict[str, Any] | None:
    """Build the layer graph, ready for JSON: nodes with their costs, links with their bytes.

    Args:
        profile: cost profile of the delegate, with its TOSA graph.
        costs: costs of the delegate's layers; empty for targets other than Ethos-U.

    Returns:
        The graph; None if TOSA operators contain nested graphs (control flow).
    """
    graph, delegate = profile.graph, profile.record
    if len(graph.operators) != len(delegate.tosa_operators):
        return None
    nodes: dict[tuple[str, str], _Node] = {}
    key_of_tensor: dict[str, tuple[str, str]] = {}
    links: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
    for name, key in zip(graph.inputs, _boundary_keys("input", delegate.inputs), strict=True):
        key_of_tensor[name] = key
        nodes[key] = _Node(*key)
    for number, (operator, kind) in enumerate(zip(graph.operators, delegate.tosa_operators, strict=True)):
        origin = main_origin(delegate, number)
        key = (origin.module, origin.source)
        node = nodes.setdefault(key, _Node(*key))
        node.operators.setdefault(origin.operator)
        node.tosa[kind] += 1
        key_of_tensor |= dict.fromkeys(operator.outputs, key)
        for name in operator.inputs:
            if name in key_of_tensor and key_of_tensor[name] != key:
                links[key_of_tensor[name], key] += graph.tensor_bytes.get(name, 0)
    for name, key in zip(graph.outputs, _boundary_keys("output", delegate.outputs), strict=True):
        nodes[key] = _Node(*key)
        links[key_of_tensor[name], key] += graph.tensor_bytes.get(name, 0)
    index_of_key = {key: index for index, key in enumerate(nodes)}
    costs_by_key: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        costs_by_key.setdefault((cost.module, cost.source), []).append(cost)
    # The width of a link on the page is its number of bytes. A link without bytes, such as a shape operand, gets 1, so
    # that it is visible.
    return {
        "name": delegate.name,
        "backend": delegate.backend,
        "nodes": [_node_dict(node, costs_by_key.get(key, [])) for key, node in nodes.items()],
        "links": [[index_of_key[a], index_of_key[b], max(count, 1)] for (a, b), count in links.items()],
    }


def _boundary_keys(side: str, tensors: Iterable[BoundaryTensor]) -> list[tuple[str, str]]:
    """Keys (module, source) of the nodes for the inputs or outputs of a delegate; ``side``: "input" or "output"."""
    return [("", f"{side} {i}, {io.dtype}[{', '.join(map(str, io.shape))}]") for i, io in enumerate(tensors)]


def short_source(source: str) -> str:
    """Shorten a source line: remove the path up to ``site-packages``, to save space on the page."""
    return source.rpartition("/site-packages/")[2]


def _node_dict(node: _Node, costs: Iterable[LayerCost]) -> dict[str, Any]:
    costs = list(costs)
    return {
        "module": node.module,
        "source": short_source(node.source),
        "operators": list(node.operators),
        "tosa": [f"{count} x {kind}" if count > 1 else kind for kind, count in node.tosa.items()],
        "cycles": sum(cost.cycles for cost in costs) if costs else None,
        "share": sum(cost.share for cost in costs),
        "macs": sum(cost.macs for cost in costs),
        "read": sum(cost.bytes_read for cost in costs),
        "written": sum(cost.bytes_written for cost in costs),
    }
