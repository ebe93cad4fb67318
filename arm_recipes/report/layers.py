"""Layer costs on an Ethos-U: Vela's cycle estimates by PyTorch module and source line.

Vela estimates NPU operations. Each is compiled from one or more TOSA operators, and each TOSA operator has one or more
origins in the model. The cost of an operation is divided among the origins in proportion to the work of the operators
(``arm_backend_core.tosa.graph.Op.work``): multiply-accumulates, or elements if there are none. The cycles of all layers
add up to Vela's total exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from arm_backend_core.tosa.graph import COPY_OPERATOR
from arm_recipes.runtime.tosa_graph import read_graph

if TYPE_CHECKING:
    from arm_backend_core.backends.payload import Layer, VelaEstimates
    from arm_backend_core.events import Delegate
    from arm_backend_core.tosa.graph import Origin
    from arm_recipes.runtime.tosa_graph import TosaGraph

Kind = Literal["layer", "boundary", "transpose", "conversion", "rest"]
_Key = TypeVar("_Key")

#: Operators that convert the type or the quantization parameters.
_CONVERSIONS = ("quantized_decomposed.", "aten._to_copy", "aten.to.")
#: ATen operators that permute dimensions.
_PERMUTES = ("permute", "transpose", "movedim", "swapaxes", "swapdims", "moveaxis", "t", "numpy_T", "mT", "adjoint")
#: TOSA operators that move no data.
_VIEWS = ("IDENTITY", "RESHAPE")


@dataclass(frozen=True)
class LayerCost:
    """Vela's cost estimate of a layer for one inference. A layer is a source line of a module, or inserted operations.

    Attributes:
        method: method of the layer.
        delegate: delegate of the layer.
        module: path of the module, as in ``named_modules()``; empty for the model itself.
        source: line of the user's model.
        kind: "layer" for operations of the model. For inserted operations: "boundary" changes the dimension order or
            type of an input or output, "transpose" changes the dimension order inside, "conversion" changes the type.
            "rest" are cycles of Vela's total that belong to no operation.
        operators: ATen operators that the layer is compiled from.
        cycles: cycles including memory stalls; all layers of a delegate add up to ``vela.total_cycles``.
        share: fraction of the cycles of the method.
        macs: multiply-accumulates, as Vela counts them.
        utilization: ``macs`` divided by the MACs that the NPU could do in these cycles.
        bytes_read: bytes of operands, including weights, each operation's counted once. Taken from the TOSA graph:
            it includes no effect of caches, weight encoding or tiling.
        bytes_written: bytes of results, counted like ``bytes_read``.
        bound: "memory" if most of the cycles belong to operations that wait for memory, else "compute".
        reason: why the layer exists, if ``kind`` is not "layer" or ``module`` is empty.
        tensors: names of the results in the TOSA graph.
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
        """The module's path, or a placeholder for the model or Vela."""
        return self.module or ("(Vela)" if self.kind == "rest" else "(model)")


def method_layers(traces: Iterable[DelegateTrace]) -> Iterator[LayerCost]:
    """Layer costs of all Ethos-U delegates of a method, in execution order."""
    estimated = [trace for trace in traces if trace.record.vela is not None]
    total = sum(trace.vela.total_cycles for trace in estimated)
    for trace in estimated:
        yield from trace.costs(total)


def apportion(amount: int, shares: Mapping[_Key, int]) -> dict[_Key, int]:
    """Divide an integer in proportion to ``shares``; the largest share takes the remainder, so the sum is exact."""
    total = sum(shares.values())
    parts = {key: amount * share // total for key, share in shares.items()}
    parts[max(shares, key=shares.__getitem__)] += amount - sum(parts.values())
    return parts


class _RowKey(NamedTuple):
    """Key of a layer: operations with equal keys are one layer."""

    module: str
    source: str
    kind: Kind
    reason: str


@dataclass
class _LayerTotals:
    """Running totals of a layer."""

    operators: dict[str, None] = field(default_factory=dict)
    tensors: dict[str, None] = field(default_factory=dict)
    cycles: int = 0
    memory_bound_cycles: int = 0
    macs: int = 0
    read: int = 0
    written: int = 0


class Unit(NamedTuple):
    """An NPU operation with the operations fused into it.

    Attributes:
        rows: Vela's rows of the operation.
        operators: indices of its TOSA operators.
    """

    rows: Sequence[Layer]
    operators: frozenset[int]


class DelegateTrace:
    """Maps Vela's operations of a delegate to TOSA operators, and these to the model. Parses the TOSA graph once."""

    def __init__(self, method: str, record: Delegate) -> None:
        self.method, self.record = method, record

    @cached_property
    def graph(self) -> TosaGraph:
        """The TOSA graph of the delegate."""
        return read_graph(memoryview(self.record.tosa))

    @cached_property
    def producers(self) -> dict[str, int]:
        """Tensor -> index of the TOSA operator that produces it."""
        return {name: i for i, op in enumerate(self.graph.operators) for name in op.outputs}

    @property
    def vela(self) -> VelaEstimates:
        """Vela's estimates; only for Ethos-U delegates."""
        assert self.record.vela is not None
        return self.record.vela

    def costs(self, total: int) -> Iterator[LayerCost]:
        """The layer costs of the delegate; ``total`` is the cycle count of the method."""
        sums: dict[_RowKey, _LayerTotals] = {}
        seen: set[int] = set()
        for unit in self.units:
            self._add(unit, seen, sums)
            seen |= unit.operators
        rest = self.vela.total_cycles - sum(layer.cycles for layer in self.vela.layers)
        if rest:
            sums[_RowKey("", "", "rest", "in Vela's total, but of no operation")] = _LayerTotals(cycles=rest)
        in_a_cycle = int(self.vela.accelerator.rsplit("-", 1)[1])
        for place, totals in sums.items():
            yield LayerCost(
                self.method,
                self.record.name,
                place.module,
                place.source,
                place.kind,
                tuple(totals.operators),
                totals.cycles,
                totals.cycles / total if total else 0.0,
                totals.macs,
                totals.macs / (totals.cycles * in_a_cycle) if totals.cycles else 0.0,
                totals.read,
                totals.written,
                "memory" if 2 * totals.memory_bound_cycles > totals.cycles else "compute",
                place.reason,
                tuple(totals.tensors),
            )

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The NPU operations, each with its TOSA operators; only for Ethos-U delegates."""
        return tuple(self._find_units())

    def _find_units(self) -> Iterator[Unit]:
        if not self.vela.layers:
            return
        number = {op.index: i for i, op in enumerate(self.graph.operators)}
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
        """Transitive producers of these values; stops at the tensors ``ends`` and at the operators ``barred``."""
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
        """Divide the cost of a unit among its origins; the bytes of operators in ``seen`` are counted already."""
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
                totals = sums.setdefault(place, _LayerTotals())
                setattr(totals, attribute, getattr(totals, attribute) + part)
                if attribute == "cycles" and waits:
                    totals.memory_bound_cycles += part
        for place in shares:
            sums[place].tensors |= dict.fromkeys(row.tensor for row in unit.rows)

    def _bytes(self, operators: frozenset[int]) -> tuple[int, int]:
        """Bytes that these operators read from other operators, and bytes that they write for others."""
        ops = [self.graph.operators[i] for i in sorted(operators)]
        made = {name for op in ops for name in op.outputs}
        read = {name for op in ops for name in op.inputs} - made
        written = {name for name in made if self._readers[name] - operators or name in self.graph.outputs}
        count, calls = self.graph.tensor_bytes, self.record.calls  # shape operands have no bytes
        return calls * sum(count.get(name, 0) for name in read), calls * sum(count[name] for name in written)

    @cached_property
    def _readers(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {name: set() for name in self.producers}
        for i, op in enumerate(self.graph.operators):
            for name in op.inputs:
                found.setdefault(name, set()).add(i)
        return found

    def main_origin(self, operators: Iterable[int]) -> Origin | None:
        """The origin with most of the work of these TOSA operators."""
        weights: Counter[Origin] = Counter()
        for i in operators:
            weights.update(dict(self.record.origins[i]))
        return max(weights, key=weights.__getitem__, default=None)

    # -- classification of operators -----------------------------------------------------------------------------

    def _row_key(self, i: int, origin: Origin) -> _RowKey:
        if origin.operator == COPY_OPERATOR:
            return _RowKey("", "", "boundary", _COPIED)
        operator = origin.operator.removeprefix("aten.").split(".")[0]
        if not origin.moves and not origin.operator.startswith(_CONVERSIONS):
            return _RowKey(origin.module, origin.source, "layer", "" if origin.module else "the model's own forward")
        for side, border in (("input", self._input_operators), ("output", self._output_operators)):
            if i in border:
                what = _ORDERS[side] if origin.moves else _TYPE
                return _RowKey(origin.module, origin.source, "boundary", f"{side} '{border[i]}' of the delegate {what}")
        if not origin.moves:
            return _RowKey(origin.module, origin.source, "conversion", "adjacent operators differ in scale or type")
        own = f"the model's own {operator}"
        reason = own if operator in _PERMUTES else f"{operator} uses another dimension order"
        return _RowKey(origin.module, origin.source, "transpose", reason)

    def _is_data_movement(self, i: int) -> bool:
        if self.record.tosa_operators[i] in _VIEWS:
            return True
        return all(o.moves or o.operator.startswith(_CONVERSIONS) for o, _ in self.record.origins[i])

    @cached_property
    def _input_operators(self) -> dict[int, str]:
        """Index -> input, for data movement and conversions between an input and the first computing operator."""
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
        """Index -> output, for data movement and conversions between the last computing operator and an output."""
        found: dict[int, str] = {}
        for i, op in reversed(list(enumerate(self.graph.operators))):
            after = self._readers[op.outputs[0]]
            outputs = [name for name in op.outputs if name in self.graph.outputs] + [found.get(j, "") for j in after]
            if outputs and all(outputs) and self._is_data_movement(i):
                found[i] = outputs[0]
        return found


#: Reasons of boundary operations, with a remedy.
_ORDERS = {
    "input": "is transposed to NHWC: export(..., channels_last=True) avoids this",
    "output": "is transposed from NHWC: return it in channels-last order to avoid this",
}
_COPIED = "the model returns an input or a constant unchanged: do not return it"
_TYPE = "changes its type or scale: quantized_io=True, and int32 instead of int64, avoid this"
