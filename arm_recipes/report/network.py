"""The network of a delegate as nodes and links: layers of the model, and the tensors that go from one to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.ethosu_origins import main_origin
from arm_recipes.runtime.tosa_graph import read_graph

if TYPE_CHECKING:
    from arm_backend_core.events import Delegate, Io
    from arm_recipes.report.layers import LayerCost


@dataclass
class _Node:
    """A line of a module; or, without operators, an input or output of the delegate."""

    module: str
    source: str
    operators: dict[str, None] = field(default_factory=dict)
    tosa: Counter[str] = field(default_factory=Counter)


def build_network(delegate: Delegate, costs: Iterable[LayerCost]) -> dict[str, Any] | None:
    """Nodes, with what they cost, and links, with their bytes, ready for JSON; None where operators hold graphs.

    Args:
        costs: layers of this delegate, for an Ethos-U.
    """
    graph = read_graph(memoryview(delegate.tosa))
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
                links[of[name], key] += graph.bytes.get(name, 0)
    for name, key in zip(graph.outputs, _ends("output", delegate.outputs), strict=True):
        nodes[key] = _Node(*key)
        links[of[name], key] += graph.bytes.get(name, 0)
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


def _ends(side: str, tensors: Iterable[Io]) -> list[tuple[str, str]]:
    """Keys of nodes for what enters or leaves a delegate."""
    return [("", f"{side} {i}, {io.dtype}[{', '.join(map(str, io.shape))}]") for i, io in enumerate(tensors)]


def short_source(source: str) -> str:
    """A line of an installed package by its place in that, as a page has no room for where packages are."""
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
