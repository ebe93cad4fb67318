"""Concatenations of tensors whose scales are far apart: none of them is left a few steps of another's.

The quantizer gives the operands of a concatenation and its result one scale, so that joining them costs nothing. An
operand may be much finer than that: a detector computes boxes, in pixels, of its scores, and joins both. Calibration
shows which operands these are.

- One that something else reads as well is rescaled where it is joined, and read as it is elsewhere.
- Where the model returns the concatenation, it is int16, as results are float in the end, and its operands stay as fine
  as they are.
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

from arm_backend_core.nodes import TIMESTEP_SLOT, is_float
from arm_backend_core.ops.catalog import find, is_data_movement
from arm_backend_core.quantization import get_symmetric_a16w8_quantization_config
from arm_backend_core.quantization.annotator import ANNOTATION, connect_observers
from arm_backend_core.quantization.graph_interpreter import readers_through
from arm_backend_core.quantization.observer import RangeObserver


class ObservedModel(Protocol):
    """What is read and changed of a program with observers (``quantization.ptq.Observed``)."""

    model: GraphModule
    observers: dict[Any, Any]
    watchers: list[tuple[Node, Callable[[Tensor], Any]]]

    @property
    def graph(self) -> Graph:
        """The annotated graph."""


#: How much coarser a scale may be: it takes two bits.
_MAX_SCALE_RATIO = 4.0
#: The result of a node, or the operand that it is for a reader.
Place = Node | tuple[Node, Node]


Pair = tuple[Place, Node]


@dataclass(frozen=True)
class _Group:
    """Tensors that the quantizer gives one scale.

    Attributes:
        observer: observes them all.
        pairs: operands, each with what joins it; those that are of one scale or all apart are together.
        returned: concatenations that the model returns.
    """

    observer: RangeObserver
    places: Sequence[Place]
    pairs: Sequence[Sequence[Pair]]
    returned: Collection[Node]


class ConcatScales:
    """Concatenations of a program; operands that may be apart from them observe by themselves until ``apply``.

    Args:
        model: has seen no sample yet. Its observers are changed.
        apart: whether there shall be any.
        wide: whether what the model returns may be int16.
    """

    def __init__(self, model: ObservedModel, *, apart: bool, wide: bool) -> None:
        self._model, self._wide, self._groups = model, wide, list[_Group]()
        if not apart:
            return
        self._specs: dict[Place, Any] = prepare._get_edge_or_node_to_qspec(model.model)
        places: dict[Any, list[Place]] = {}
        for place, observer in model.observers.items():
            places.setdefault(observer, []).append(place)
        for observer in dict.fromkeys(
            model.observers.get(node) for node in model.graph.nodes if _is_concatenation(node)
        ):
            if isinstance(observer, RangeObserver):
                self._split_group(observer, places[observer])
        if self._groups:
            self._connect_observers()

    def _split_group(self, whole: RangeObserver, places: list[Place]) -> None:
        """Beside the one observer, one for each tensor that is read elsewhere, with what is moved of it."""
        if any(TIMESTEP_SLOT in _source(place).meta for place in places):
            return  # the steps of a recurrent layer have their parameters in common
        same = _find_shared_scales(places, self._specs)
        operands = [place for place in places if isinstance(place, tuple) and _is_concatenation(place[1])]
        placed = {same[place] for place in places}
        read = placed & {same[node] for node in map(_source, places) if _has_computing_reader(node)}
        may_be = self._wide and whole.dtype is torch.int8
        returned = {join for _, join in operands if may_be and _is_returned(join)}
        ends = {same[join] for join in returned}
        own = placed - ends  # what has parameters only where it is joined has none that could be finer
        moved = [x for x in operands if same[x[0]] not in (own if x[1] in returned else read)]
        for source, join in moved:
            same.union(source, join)
        apart = [(source, join) for source, join in operands if same[source] != same[join]]
        if not apart:
            return
        tensors: dict[Any, list[Place]] = {}
        for place in places:
            tensors.setdefault(same[place], []).append(place)
        for alike in tensors.values():
            spec = next(self._specs[place] for place in alike if not _is_shared(self._specs[place]))
            observer = prepare._create_obs_or_fq_from_qspec(spec, {}, is_qat=False)
            self._model.observers |= dict.fromkeys(alike, observer)
        pairs: dict[Any, list[Pair]] = {}
        for source, join in apart:
            together = same[join] if join in returned else (source, join)
            pairs.setdefault(together, []).append((tensors[same[source]][0], join))
        ordered = sorted(pairs.values(), key=lambda found: found[0][1] in returned)
        self._groups.append(_Group(whole, places, ordered, returned))
        self._model.watchers += [(node, whole) for node in dict.fromkeys(map(_source, places))]

    def apply(self, decided: Sequence[bool] | None = None) -> list[bool]:
        """After the samples: operands whose scales are alike have that of the concatenation.

        Args:
            decided: what this gave for the same operators, whatever is seen here.

        Returns:
            Of operands that might, whether they have.
        """
        found = list[bool]()
        for group in self._groups:
            self._merge_similar(group, found, decided)
        if self._groups:
            self._connect_observers()
        return found

    def _merge_similar(self, group: _Group, found: list[bool], decided: Sequence[bool] | None) -> None:
        observers, wide = self._model.observers, set[Any]()
        same = UnionFind(dict.fromkeys(observers[place] for place in group.places))
        scales = {one: 2 * (float(one.calculate_qparams()[0]),) for one in same}
        for pairs in group.pairs:
            tensors = [observers[place] for pair in pairs for place in pair]
            least, most = (end(scales[same[one]][side] for one in tensors) for side, end in enumerate((min, max)))
            found.append(most <= _MAX_SCALE_RATIO * least if decided is None else decided[len(found)])
            if found[-1]:
                same.union(*tensors)
                scales[same[tensors[0]]] = least, most
            elif pairs[0][1] in group.returned:
                wide.add(observers[pairs[0][1]])
        alike: dict[Any, list[RangeObserver]] = {}
        for one in list(same):
            alike.setdefault(same[one], []).append(one)
        for every in alike.values():
            one = group.observer if len(alike) == 1 else _pool_observers(every)
            one = one if wide.isdisjoint(every) else _to_int16(one)
            observers |= {place: one for place in group.places if observers[place] in every}

    def _connect_observers(self) -> None:
        """Biases and weights follow from the observers of what they are multiplied with and added to."""
        observers = self._model.observers
        for place, spec in self._specs.items():
            if isinstance(spec, DerivedQuantizationSpec):
                observers[place].obs_or_fqs = [observers[source] for source in spec.derived_from]
        connect_observers((self._model.model, observers))


def _find_shared_scales(places: Iterable[Place], specs: Mapping[Place, Any]) -> UnionFind:
    """Which of these places must have parameters in common, if no operand has those of a concatenation."""
    same = UnionFind(places)
    for place in list(same):
        if isinstance(place, tuple) and _is_concatenation(place[1]):
            same.union(place, place[1])
            continue
        if isinstance(place, tuple):
            same.union(place, place[0])
        if _is_shared(specs[place]):
            same.union(place, specs[place].edge_or_node)
    return same


def _pool_observers(observers: Sequence[RangeObserver]) -> RangeObserver:
    """The first one, as if it had seen what all of them saw."""
    first, every = observers[0], [observer._statistics for observer in observers]
    low, high, stride = min(x.low for x in every), max(x.high for x in every), max(x.stride for x in every)
    values = [torch.cat(x.values)[:: stride // x.stride] for x in every if x.values]
    first._statistics = type(every[0])(low, high, sum(x.count for x in every), values, sum(map(len, values)), stride)
    return first


def _to_int16(observer: RangeObserver) -> RangeObserver:
    """For int16, having seen the same."""
    spec = get_symmetric_a16w8_quantization_config().activation
    wide: RangeObserver = prepare._create_obs_or_fq_from_qspec(spec, {}, is_qat=False)
    wide._statistics = observer._statistics
    return wide


def _is_concatenation(node: Node) -> bool:
    """Whether it moves several tensors into one."""
    return is_data_movement(node) and sum(map(is_float, node.all_input_nodes)) > 1


def _has_computing_reader(node: Node) -> bool:
    """Whether something reads its values, and not only moves them."""
    return any(user.op == "output" or (find(user) is not None and not is_data_movement(user)) for user in node.users)


def _is_returned(node: Node) -> bool:
    """Whether the model returns it, or what is moved of it, as float, and nothing else reads it."""
    readers = list(readers_through(node, is_data_movement))
    ends = [reader for reader in readers if not is_data_movement(reader) or not reader.users]
    return bool(readers) and all(end.op == "output" and not end.meta.get(ANNOTATION) for end in ends)


def _source(place: Place) -> Node:
    return place if isinstance(place, Node) else place[0]


def _is_shared(spec: Any) -> bool:
    return isinstance(spec, SharedQuantizationSpec)
