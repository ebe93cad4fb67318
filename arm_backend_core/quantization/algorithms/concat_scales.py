"""Concatenation scales: keep separate scales for operands of a concatenation that have very different ranges.

The quantizer gives the operands and the result of a concatenation one scale, so that concatenating costs nothing. An
operand with a much smaller range then has only a few levels. Example: a detector concatenates scores and boxes in
pixels. Calibration shows which operands are affected.

- An operand that other operators also read keeps its own scale and is rescaled for the concatenation only.
- A concatenation that the model returns becomes int16, and its operands keep their own scales. int16 costs nothing
  here, because results are converted to float anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from networkx.utils import UnionFind
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e import prepare
from torchao.quantization.pt2e.quantizer import DerivedQuantizationSpec, SharedQuantizationSpec

from arm_backend_core.nodes import TIMESTEP_SLOT, is_float, readers_through
from arm_backend_core.ops.catalog import find_record, has_shared_qparams
from arm_backend_core.quantization import get_symmetric_a16w8_quantization_config
from arm_backend_core.quantization.annotator import ANNOTATION
from arm_backend_core.quantization.graph_observers import set_observer_properties
from arm_backend_core.quantization.observer import RangeObserver


class ObservedModel(Protocol):
    """The part of ``quantization.ptq.ObservedProgram`` that this algorithm reads and changes."""

    graph_module: GraphModule
    observers: dict[Any, Any]
    value_hooks: list[tuple[Node, Callable[[Tensor], Any]]]

    @property
    def graph(self) -> Graph:
        """The annotated graph."""


#: Maximum ratio of the scales of two operands that share a scale. At a ratio of 4, the operand with the smaller range
#: loses two bits.
_MAX_SCALE_RATIO = 4.0
#: torchao's ``EdgeOrNode``: a node stands for its result, an edge (source, reader) for an operand of the reader.
EdgeOrNode = Node | tuple[Node, Node]


#: An operand of a concatenation, and the concatenation.
ConcatOperand = tuple[EdgeOrNode, Node]


@dataclass(frozen=True)
class _Group:
    """Tensors to which the quantizer gives one scale.

    Attributes:
        observer: the observer that they share.
        edges_or_nodes: nodes and edges that the observer is assigned to.
        pairs: lists of (operand, concatenation). ``apply`` makes one decision for each list: its operands share the
            scale of the concatenation, or keep their own scales.
        returned: concatenations that the model returns.
    """

    observer: RangeObserver
    edges_or_nodes: Sequence[EdgeOrNode]
    pairs: Sequence[Sequence[ConcatOperand]]
    returned: Collection[Node]


class ConcatScales:
    """Decides for each operand of a concatenation whether it keeps its own scale.

    Operands that may keep their own scale have their own observers until ``apply``.

    Args:
        model: not calibrated yet. Its observers are replaced.
        separate: whether operands may keep their own scales; if False, ``apply`` changes nothing.
        int16_outputs: whether results of the model may become int16.
    """

    def __init__(self, model: ObservedModel, *, separate: bool, int16_outputs: bool) -> None:
        self._model, self._int16_outputs, self._groups = model, int16_outputs, list[_Group]()
        if not separate:
            return
        self._specs: dict[EdgeOrNode, Any] = prepare._get_edge_or_node_to_qspec(model.graph_module)
        edges_or_nodes: dict[Any, list[EdgeOrNode]] = {}
        for edge_or_node, observer in model.observers.items():
            edges_or_nodes.setdefault(observer, []).append(edge_or_node)
        for observer in dict.fromkeys(
            model.observers.get(node) for node in model.graph.nodes if _is_concatenation(node)
        ):
            if isinstance(observer, RangeObserver):
                self._split_group(observer, edges_or_nodes[observer])
        if self._groups:
            self._connect_observers()

    def _split_group(self, common: RangeObserver, edges_or_nodes: list[EdgeOrNode]) -> None:
        """Split the tensors of one observer: each tensor that may keep its own scale gets a new observer.

        The results of data movement from such a tensor get the same new observer.
        """
        if any(TIMESTEP_SLOT in _source(edge_or_node).meta for edge_or_node in edges_or_nodes):
            return  # time steps of a recurrent layer share parameters
        shared_scales = _find_shared_scales(edges_or_nodes, self._specs)
        operands = [
            edge_or_node
            for edge_or_node in edges_or_nodes
            if isinstance(edge_or_node, tuple) and _is_concatenation(edge_or_node[1])
        ]
        roots = {shared_scales[edge_or_node] for edge_or_node in edges_or_nodes}
        computed_roots = roots & {
            shared_scales[node] for node in map(_source, edges_or_nodes) if _has_computing_reader(node)
        }
        may_be_int16 = self._int16_outputs and common.dtype is torch.int8
        returned = {concat for _, concat in operands if may_be_int16 and _is_returned(concat)}
        returned_roots = {shared_scales[concat] for concat in returned}
        separable_roots = roots - returned_roots
        # If only concatenations read an operand, a separate scale gains nothing, unless the concatenation becomes
        # int16.
        merged = [
            x for x in operands if shared_scales[x[0]] not in (separable_roots if x[1] in returned else computed_roots)
        ]
        for source, concat in merged:
            shared_scales.union(source, concat)
        separate = [(source, concat) for source, concat in operands if shared_scales[source] != shared_scales[concat]]
        if not separate:
            return
        members_by_root: dict[Any, list[EdgeOrNode]] = {}
        for edge_or_node in edges_or_nodes:
            members_by_root.setdefault(shared_scales[edge_or_node], []).append(edge_or_node)
        for shared in members_by_root.values():
            spec = next(
                self._specs[edge_or_node] for edge_or_node in shared if not _is_shared(self._specs[edge_or_node])
            )
            observer = prepare._create_obs_or_fq_from_qspec(spec, {}, is_qat=False)
            self._model.observers |= dict.fromkeys(shared, observer)
        pairs: dict[Any, list[ConcatOperand]] = {}
        for source, concat in separate:
            key = shared_scales[concat] if concat in returned else (source, concat)
            pairs.setdefault(key, []).append((members_by_root[shared_scales[source]][0], concat))
        ordered = sorted(pairs.values(), key=lambda group: group[0][1] in returned)
        self._groups.append(_Group(common, edges_or_nodes, ordered, returned))
        self._model.value_hooks += [(node, common) for node in dict.fromkeys(map(_source, edges_or_nodes))]

    def apply(self, earlier: Sequence[bool] | None = None) -> list[bool]:
        """After calibration, let operands share the scale of the concatenation where their scales are similar.

        Args:
            earlier: decisions that an earlier call returned for the same operators; they are used again. None: decide
                by the calibrated statistics.

        Returns:
            For each list in ``_Group.pairs``, whether its operands share the scale of the concatenation.
        """
        decisions = list[bool]()
        for group in self._groups:
            self._merge_similar(group, decisions, earlier)
        if self._groups:
            self._connect_observers()
        return decisions

    def _merge_similar(self, group: _Group, decisions: list[bool], earlier: Sequence[bool] | None) -> None:
        """Merge the pairs of a group whose scales are similar. Append the decisions to ``decisions``."""
        observers, int16 = self._model.observers, set[Any]()
        merged_observers = UnionFind(dict.fromkeys(observers[edge_or_node] for edge_or_node in group.edges_or_nodes))
        scales = {observer: 2 * (float(observer.calculate_qparams()[0]),) for observer in merged_observers}
        for pairs in group.pairs:
            tensors = [observers[edge_or_node] for pair in pairs for edge_or_node in pair]
            min_scale, max_scale = (
                extremum(scales[merged_observers[observer]][index] for observer in tensors)
                for index, extremum in enumerate((min, max))
            )
            decisions.append(max_scale <= _MAX_SCALE_RATIO * min_scale if earlier is None else earlier[len(decisions)])
            if decisions[-1]:
                merged_observers.union(*tensors)
                scales[merged_observers[tensors[0]]] = min_scale, max_scale
            elif pairs[0][1] in group.returned:
                int16.add(observers[pairs[0][1]])
        merged: dict[Any, list[RangeObserver]] = {}
        for observer in list(merged_observers):
            merged.setdefault(merged_observers[observer], []).append(observer)
        for members in merged.values():
            observer = group.observer if len(merged) == 1 else _pool_observers(members)
            observer = observer if int16.isdisjoint(members) else _to_int16(observer)
            observers |= {
                edge_or_node: observer for edge_or_node in group.edges_or_nodes if observers[edge_or_node] in members
            }

    def _connect_observers(self) -> None:
        """Connect derived observers of biases, and observers of weights, to the new observers."""
        observers = self._model.observers
        for edge_or_node, spec in self._specs.items():
            if isinstance(spec, DerivedQuantizationSpec):
                observers[edge_or_node].obs_or_fqs = [observers[source] for source in spec.derived_from]
        set_observer_properties((self._model.graph_module, observers))


def _find_shared_scales(edges_or_nodes: Iterable[EdgeOrNode], specs: Mapping[EdgeOrNode, Any]) -> UnionFind:
    """Group the nodes and edges that must share a scale if each operand of a concatenation keeps its own scale."""
    shared_scales = UnionFind(edges_or_nodes)
    for edge_or_node in list(shared_scales):
        if isinstance(edge_or_node, tuple) and _is_concatenation(edge_or_node[1]):
            shared_scales.union(edge_or_node, edge_or_node[1])
            continue
        if isinstance(edge_or_node, tuple):
            shared_scales.union(edge_or_node, edge_or_node[0])
        if _is_shared(specs[edge_or_node]):
            shared_scales.union(edge_or_node, specs[edge_or_node].edge_or_node)
    return shared_scales


def _pool_observers(observers: Sequence[RangeObserver]) -> RangeObserver:
    """Merge the statistics of all observers into the first one and return it."""
    first, statistics = observers[0], [observer._statistics for observer in observers]
    low, high, stride = (
        min(x.low for x in statistics),
        max(x.high for x in statistics),
        max(x.stride for x in statistics),
    )
    values = [torch.cat(x.values)[:: stride // x.stride] for x in statistics if x.values]
    first._statistics = type(statistics[0])(
        *(low, high, sum(x.count for x in statistics), values, sum(map(len, values)), stride),
        is_integer=all(x.is_integer for x in statistics if x.count),
    )
    return first


def _to_int16(observer: RangeObserver) -> RangeObserver:
    """Make an int16 observer with the same statistics."""
    spec = get_symmetric_a16w8_quantization_config().activation
    int16: RangeObserver = prepare._create_obs_or_fq_from_qspec(spec, {}, is_qat=False)
    int16._statistics = observer._statistics
    return int16


def _is_concatenation(node: Node) -> bool:
    """Whether the node moves several float tensors into one."""
    return has_shared_qparams(node) and sum(map(is_float, node.all_input_nodes)) > 1


def _has_computing_reader(node: Node) -> bool:
    """Whether an operator computes with the node's values, or the model returns them."""
    return any(
        user.op == "output" or (find_record(user) is not None and not has_shared_qparams(user)) for user in node.users
    )


def _is_returned(node: Node) -> bool:
    """Whether only the output node reads the node, directly or through data movement, and returns it as float."""
    readers = list(readers_through(node, has_shared_qparams))
    ends = [reader for reader in readers if not has_shared_qparams(reader) or not reader.users]
    return bool(readers) and all(end.op == "output" and not end.meta.get(ANNOTATION) for end in ends)


def _source(edge_or_node: EdgeOrNode) -> Node:
    return edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[0]


def _is_shared(spec: Any) -> bool:
    return isinstance(spec, SharedQuantizationSpec)
