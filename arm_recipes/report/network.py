"""Layer graph of a delegate: layers of the model as nodes, and the tensors between them as links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.ethosu_origins import main_origin

if TYPE_CHECKING:
    from arm_backend_core.events import BoundaryTensor
    from arm_recipes.report.layers import DelegateTrace, LayerCost


@dataclass
class _Node:
    """A source line of a module; without operators, an input or output of the delegate."""

    module: str
    source: str
    operators: dict[str, None] = field(default_factory=dict)
    tosa: Counter[str] = field(default_factory=Counter)


def build_network(trace: DelegateTrace, costs: Iterable[LayerCost]) -> dict[str, Any] | None:
    """The layer graph, ready for JSON: nodes with their costs, links with their bytes.

    Args:
        trace: the TOSA graph of the delegate.
        costs: costs of its layers, for an Ethos-U.

    Returns:
        the graph; None if TOSA operators contain nested graphs (control flow).
    """
    graph, delegate = trace.graph, trace.record
    if len(graph.operators) != len(delegate.tosa_operators):
        return None
    nodes: dict[tuple[str, str], _Node] = {}
    of: dict[str, tuple[str, str]] = {}
    links: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
    for name, key in zip(graph.inputs, _ends("input", delegate.inputs), strict=True):
        of[name] = key
        nodes[key] = _Node(*key)
    for number, (operator, kind) in enumerate(zip(graph.operators, delegate.tosa_operators, strict=True)):
        origin = main_origin(delegate, number)
        key = (origin.module, origin.source)
        node = nodes.setdefault(key, _Node(*key))
        node.operators.setdefault(origin.operator)
        node.tosa[kind] += 1
        of |= dict.fromkeys(operator.outputs, key)
        for name in operator.inputs:
            if name in of and of[name] != key:
                links[of[name], key] += graph.tensor_bytes.get(name, 0)
    for name, key in zip(graph.outputs, _ends("output", delegate.outputs), strict=True):
        nodes[key] = _Node(*key)
        links[of[name], key] += graph.tensor_bytes.get(name, 0)
    place = {key: index for index, key in enumerate(nodes)}
    by_place: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        by_place.setdefault((cost.module, cost.source), []).append(cost)
    return {
        "name": delegate.name,
        "backend": delegate.backend,
        "nodes": [_node_dict(node, by_place.get(key, [])) for key, node in nodes.items()],
        "links": [[place[a], place[b], max(count, 1)] for (a, b), count in links.items()],
    }


def _ends(side: str, tensors: Iterable[BoundaryTensor]) -> list[tuple[str, str]]:
    """Node keys of the inputs or outputs of a delegate."""
    return [("", f"{side} {i}, {io.dtype}[{', '.join(map(str, io.shape))}]") for i, io in enumerate(tensors)]


def short_source(source: str) -> str:
    """A source line without the path of ``site-packages``, to save space on the page."""
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
