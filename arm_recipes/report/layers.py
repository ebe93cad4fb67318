"""What each layer of the model costs on an Ethos-U: Vela's cycles by PyTorch module and line.

Vela estimates operations, and each is compiled from one or more TOSA operators. The shares of what it costs are those
of the work that these operators do for each origin (``arm_backend_core.tosa.graph.Op.work``): multiply-accumulates, or
elements where nothing is multiplied. So the cycles of all layers are Vela's total, to the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from arm_backend_core.tosa.graph import COPY
from arm_recipes.runtime.tosa_graph import read_graph

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Layer, VelaFigures
    from arm_backend_core.events import Delegate
    from arm_backend_core.tosa.graph import Origin
    from arm_recipes.runtime.tosa_graph import TosaGraph

Kind = Literal["layer", "boundary", "transpose", "conversion", "rest"]
_Key = TypeVar("_Key")

#: Operators that name another type, or other parameters, for what there is.
_CONVERSIONS = ("quantized_decomposed.", "aten._to_copy", "aten.to.")
#: Operators of a model that say in which order the dimensions are.
_PERMUTES = ("permute", "transpose", "movedim", "swapaxes", "swapdims", "moveaxis", "t", "numpy_T", "mT", "adjoint")
#: TOSA operators that move nothing.
_VIEWS = ("IDENTITY", "RESHAPE")


@dataclass(frozen=True)
class LayerCost:
    """What Vela expects of a layer in one inference: of a module's line, or of what is put in between.

    Attributes:
        method, delegate: that it is in.
        module: of the model, as ``named_modules()`` has it: empty where the model itself computes.
        source: line of the user's model.
        kind: "layer" is what the model computes. What is put in is told apart: "boundary" changes order or type of an
            input or output, "transpose" changes the order inside, "conversion" the type. "rest" is what Vela counts in
            its total and for no operation.
        operators: ATen operators that it is compiled from.
        cycles: with waits for memory; all layers of a delegate add up to ``vela.total_cycles``.
        share: of the cycles of its method.
        macs: multiply-accumulates, as Vela counts them.
        utilization: ``macs`` in relation to what the NPU could do in these cycles.
        bytes_read, bytes_written: operands, weights among them, and results, each operation's once. From the TOSA
            graph: what a cache saves, weights' encoding saves and tiles cost is not in it.
        bound: whether more of the cycles are of operations that wait for memory ("memory") or not ("compute").
        reason: why it is there, where ``kind`` is not "layer" or no module is named.
        tensors: results, by their names in the TOSA graph.
    """

    method: str
    delegate: str
    module: str
    source: str
    kind: Kind
    operators: tuple[str, ...]
    cycles: int
    share: float
    macs: int
    utilization: float
    bytes_read: int
    bytes_written: int
    bound: Literal["memory", "compute"]
    reason: str = ""
    tensors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The module, or what stands for it."""
        return self.module or ("(Vela)" if self.kind == "rest" else "(model)")


def method_layers(method: str, delegates: Iterable[Delegate]) -> tuple[LayerCost, ...]:
    """Layers of all Ethos-U delegates of a method, in the order in which they run."""
    known = [DelegateTrace(method, delegate) for delegate in delegates if delegate.vela is not None]
    total = sum(traced.vela.total_cycles for traced in known)
    return tuple(cost for traced in known for cost in traced.costs(total))


def apportion(amount: int, shares: Mapping[_Key, int]) -> dict[_Key, int]:
    """A number as whole parts in the relation of ``shares``, which adds up to it again; the largest takes the rest."""
    total = sum(shares.values())
    parts = {key: amount * share // total for key, share in shares.items()}
    parts[max(shares, key=shares.__getitem__)] += amount - sum(parts.values())
    return parts


class _RowKey(NamedTuple):
    """What makes a row: everything of one place is one layer."""

    module: str
    source: str
    kind: Kind
    reason: str


@dataclass
class _LayerTotals:
    """What is known of a layer so far."""

    operators: dict[str, None] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)
    cycles: int = 0
    memory_bound_cycles: int = 0
    macs: int = 0
    read: int = 0
    written: int = 0


class Unit(NamedTuple):
    """An operation with those that it does on its way: Vela's rows, and the TOSA operators by number."""

    rows: Sequence[Layer]
    operators: frozenset[int]


class DelegateTrace:
    """A delegate with what ties Vela's operations to its TOSA operators, and these to the model."""

    def __init__(self, method: str, record: Delegate) -> None:
        self.method, self.record = method, record

    @cached_property
    def graph(self) -> TosaGraph:
        """What was compiled."""
        return read_graph(memoryview(self.record.tosa))

    @cached_property
    def producers(self) -> dict[str, int]:
        """The number of the TOSA operator that makes each tensor."""
        return {name: i for i, op in enumerate(self.graph.operators) for name in op.outputs}

    @property
    def vela(self) -> VelaFigures:
        """Of a delegate for an Ethos-U."""
        assert self.record.vela is not None
        return self.record.vela

    def costs(self, total: int) -> Iterator[LayerCost]:
        """``total``: cycles of the method."""
        sums: dict[_RowKey, _LayerTotals] = {}
        seen: set[int] = set()
        for unit in self.units():
            self._add(unit, seen, sums)
            seen |= unit.operators
        rest = self.vela.total_cycles - sum(layer.cycles for layer in self.vela.layers)
        if rest:
            sums[_RowKey("", "", "rest", "Vela counts them in the total, and for no operation")] = _LayerTotals(
                cycles=rest
            )
        in_a_cycle = int(self.vela.accelerator.rsplit("-", 1)[1])
        for place, told in sums.items():
            yield LayerCost(
                self.method,
                self.record.name,
                place.module,
                place.source,
                place.kind,
                tuple(told.operators),
                told.cycles,
                told.cycles / total if total else 0.0,
                told.macs,
                told.macs / (told.cycles * in_a_cycle) if told.cycles else 0.0,
                told.read,
                told.written,
                "memory" if 2 * told.memory_bound_cycles > told.cycles else "compute",
                place.reason,
                tuple(told.tensors),
            )

    def units(self) -> Iterator[Unit]:
        """What runs as one operation, with the TOSA operators that it does."""
        if not self.vela.layers:
            return
        number = {op.place: i for i, op in enumerate(self.graph.operators)}
        rows: dict[int, list[Layer]] = {}
        for i, layer in enumerate(self.vela.layers):
            rows.setdefault(i if layer.part_of is None else layer.part_of, []).append(layer)
        results = {layer.tensor for layer in self.vela.layers}
        owned = {number[layer.index] for layer in self.vela.layers if layer.index in number}
        for layers in rows.values():
            own = {number[layer.index] for layer in layers if layer.index in number}
            others, inner = owned - own, {layer.tensor for layer in layers}
            behind = self._producers_of(inner, results - inner, others)
            before = self._producers_of(
                (x for i in own for x in self.graph.operators[i].inputs), results - inner, owned
            )
            after = {
                i for i in behind if own & self._producers_of(self.graph.operators[i].inputs, results - inner, others)
            }
            yield Unit(layers, frozenset(own | before | after if own else behind))

    def _producers_of(self, values: Iterable[str], ends: set[str], barred: set[int]) -> set[int]:
        """Operators that make these values, and what they read, as far as tensors ``ends`` and operators ``barred``."""
        found: set[int] = set()
        waiting = list(values)
        while waiting:
            name = waiting.pop()
            i = self.producers.get(name)
            if i is not None and i not in found and i not in barred and name not in ends:
                found.add(i)
                waiting += self.graph.operators[i].inputs
        return found

    def _add(self, unit: Unit, seen: set[int], sums: dict[_RowKey, _LayerTotals]) -> None:
        """Divide what a unit costs among the places that it comes from; bytes of operators that are ``seen`` are."""
        shares: Counter[_RowKey] = Counter()
        moving = [i for i in sorted(unit.operators) if self.record.tosa_operators[i] not in _VIEWS]
        for i in moving or sorted(unit.operators):
            for origin, work in self.record.origins[i]:
                place = self._row_key(i, origin)
                shares[place] += work
                sums.setdefault(place, _LayerTotals()).operators.setdefault(origin.operator)
        if not shares:
            first = unit.rows[0]
            shares[
                _RowKey("", "", "rest", f"Vela names no source of its {first.npu_operator} for '{first.tensor}'")
            ] = 1
        cycles = sum(row.cycles for row in unit.rows)
        waits = cycles > sum(row.npu_cycles for row in unit.rows)
        read, written = self._bytes(unit.operators - seen)
        macs = sum(row.macs for row in unit.rows)
        for attribute, amount in (("cycles", cycles), ("read", read), ("written", written), ("macs", macs)):
            for place, part in apportion(amount, shares).items():
                told = sums.setdefault(place, _LayerTotals())
                setattr(told, attribute, getattr(told, attribute) + part)
                if attribute == "cycles" and waits:
                    told.memory_bound_cycles += part
        for place in shares:
            sums[place].tensors |= dict.fromkeys(row.tensor for row in unit.rows)

    def _bytes(self, operators: frozenset[int]) -> tuple[int, int]:
        """Of the tensors that these operators read of others, and of those that others read."""
        ops = [self.graph.operators[i] for i in sorted(operators)]
        made = {name for op in ops for name in op.outputs}
        read = {name for op in ops for name in op.inputs} - made
        written = {name for name in made if self._readers[name] - operators or name in self.graph.outputs}
        count, calls = self.graph.bytes, self.record.calls  # shapes are no tensors
        return calls * sum(count.get(name, 0) for name in read), calls * sum(count[name] for name in written)

    @cached_property
    def _readers(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {name: set() for name in self.producers}
        for i, op in enumerate(self.graph.operators):
            for name in op.inputs:
                found.setdefault(name, set()).add(i)
        return found

    def main_origin(self, operators: Iterable[int]) -> Origin | None:
        """Where most of the work of these TOSA operators comes from."""
        weights: Counter[Origin] = Counter()
        for i in operators:
            weights.update(dict(self.record.origins[i]))
        return max(weights, key=weights.__getitem__, default=None)

    # -- what an operator is there for ---------------------------------------------------------------------------

    def _row_key(self, i: int, origin: Origin) -> _RowKey:
        if origin.operator == COPY:
            return _RowKey("", "", "boundary", _COPIED)
        operator = origin.operator.removeprefix("aten.").split(".")[0]
        if not origin.moves and not origin.operator.startswith(_CONVERSIONS):
            return _RowKey(origin.module, origin.source, "layer", "" if origin.module else "the model's own forward")
        for side, border in (("input", self._input_operators), ("output", self._output_operators)):
            if i in border:
                what = _ORDERS[side] if origin.moves else _TYPE
                return _RowKey(origin.module, origin.source, "boundary", f"{side} '{border[i]}' of the delegate {what}")
        if not origin.moves:
            return _RowKey(origin.module, origin.source, "conversion", "two operators have other scales or types")
        own = f"the model's own {operator}"
        reason = own if operator in _PERMUTES else f"{operator} takes or gives another order of dimensions"
        return _RowKey(origin.module, origin.source, "transpose", reason)

    def _is_data_movement(self, i: int) -> bool:
        if self.record.tosa_operators[i] in _VIEWS:
            return True
        return all(o.moves or o.operator.startswith(_CONVERSIONS) for o, _ in self.record.origins[i])

    @cached_property
    def _input_operators(self) -> dict[int, str]:
        """Operators between the inputs and what computes first, with the input."""
        found: dict[int, str] = {}
        of = {name: name for name in self.graph.inputs}
        for i, op in enumerate(self.graph.operators):
            sources = {of.get(name) for name in op.inputs if name in self.producers or name in self.graph.inputs}
            source = sources.pop() if len(sources) == 1 else None
            if source is not None and self._is_data_movement(i):
                found[i] = source
                of |= dict.fromkeys(op.outputs, source)
        return found

    @cached_property
    def _output_operators(self) -> dict[int, str]:
        """Operators between what computes last and the outputs, with the output."""
        found: dict[int, str] = {}
        for i, op in reversed(list(enumerate(self.graph.operators))):
            after = self._readers[op.outputs[0]]
            outputs = [name for name in op.outputs if name in self.graph.outputs] + [found.get(j, "") for j in after]
            if outputs and all(outputs) and self._is_data_movement(i):
                found[i] = outputs[0]
        return found


#: How to avoid what changes the order of dimensions, and the type, of an input or output.
_ORDERS = {
    "input": "lies in memory in another order than it is computed with: export(..., channels_last=True) saves this",
    "output": "is computed with the channels last: to return it permuted to that order saves this",
}
_COPIED = "an input or a constant is returned as it is: leave it out of what the model returns"
_TYPE = "changes its type or scale: quantized_io=True, and int32 in place of int64, save this"
