"""Layer costs on an Ethos-U: Vela's cycle estimates by PyTorch module and source line.

Vela estimates the cost of NPU operations. Each NPU operation is compiled from one or more TOSA operators, and each TOSA
operator has one or more origins in the model. The cost of an NPU operation is divided among the origins in proportion
to the work of its TOSA operators (``arm_backend_core.tosa.graph.Op.work``). Work is the number of multiply-accumulates,
or of elements if there are none. The cycles of all layers add up to Vela's total exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from arm_backend_core.tosa.graph import COPY_OPERATOR
from arm_recipes.runtime.tosa_flatbuffer import read_tosa_graph

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import OperationEstimate, VelaEstimates
    from arm_backend_core.compilation_log import DelegateRecord
    from arm_backend_core.tosa.graph import Origin
    from arm_recipes.runtime.tosa_flatbuffer import TosaGraph

LayerKind = Literal["layer", "boundary", "transpose", "conversion", "rest"]
_Key = TypeVar("_Key")
_Amount = TypeVar("_Amount", int, float)

#: Operators that convert the type or the quantization parameters.
_CONVERSION_PREFIXES = ("quantized_decomposed.", "aten._to_copy", "aten.to.")
#: ATen operators that permute dimensions.
_PERMUTE_OPERATORS = (
    "permute",
    "transpose",
    "movedim",
    "swapaxes",
    "swapdims",
    "moveaxis",
    "t",
    "numpy_T",
    "mT",
    "adjoint",
)
#: TOSA operators that move no data.
_VIEW_OPERATORS = ("IDENTITY", "RESHAPE")


@dataclass(frozen=True)
class LayerCost:
    """Cost estimate of a layer for one inference.

    Vela estimates layers on the NPU; ``arm_backend_core.cortex_m.cost`` estimates layers on the CPU. A layer consists
    of the operations with the same module, source line, kind and reason.

    Attributes:
        method: method of the layer.
        delegate: delegate of the layer; empty on the CPU.
        module: path of the module, as in ``named_modules()``; empty for the top-level model, for the kind "rest"
            and for copies at the boundary.
        source: line of the user's model.
        kind: "layer" for operations of the model. "boundary" changes the dimension order, type or scale of an input or
            output, or copies it. "transpose" changes the dimension order elsewhere, because the model or an operator
            requires it. "conversion" changes the type or scale. "rest" has the cycles of Vela's total that belong to no
            operation, or to an operation without a TOSA operator.
        operators: ATen operators that the layer is compiled from; on the CPU, operators of the lowered program.
        cycles: cycles; on the NPU including memory stalls. All layers of a delegate add up to ``vela.total_cycles``.
        share: fraction of the cycles of all delegates of the method; on the CPU, of the CPU's cycles.
        macs: multiply-accumulates, as the estimate counts them.
        utilization: ``macs`` divided by the maximum number of MACs of the NPU or CPU in these cycles.
        bytes_read: bytes of operands, including weights. Each operation counts an operand once. The bytes come from the
            shapes and types of the tensors, so they include no effects of caches, weight encoding or tiling.
        bytes_written: bytes of results, counted like ``bytes_read``.
        bound: "memory" if most of the cycles belong to operations that wait for memory, otherwise "compute". Always
            "compute" on the CPU.
        reason: why the operations exist, for kinds other than "layer"; for an NPU layer without a module, a note that
            its operations are in the model's own ``forward``; otherwise empty.
        tensors: names of the results in the TOSA graph; on the CPU, names of the nodes.
    """

    method: str
    delegate: str
    module: str
    source: str
    kind: LayerKind
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
        """The module's path; "(model)" for the top-level model, "(Vela)" for the kind "rest"."""
        return self.module or ("(Vela)" if self.kind == "rest" else "(model)")


def iter_npu_layer_costs(profiles: Iterable[DelegateProfile]) -> Iterator[LayerCost]:
    """Yield the layer costs of all Ethos-U delegates of a method, in execution order."""
    estimated = [profile for profile in profiles if profile.record.vela is not None]
    total = sum(profile.vela.total_cycles for profile in estimated)
    for profile in estimated:
        yield from profile.costs(total)


def apportion(amount: _Amount, shares: Mapping[_Key, int]) -> dict[_Key, _Amount]:
    """Divide an amount in proportion to ``shares``, rounded down. The largest share also gets the remainder."""
    total = sum(shares.values())
    parts = {key: amount * share // total for key, share in shares.items()}
    parts[max(shares, key=shares.__getitem__)] += amount - sum(parts.values())
    return parts


class _LayerKey(NamedTuple):
    """Key of a layer: operations with equal keys belong to the same layer."""

    module: str
    source: str
    kind: LayerKind
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


class NpuOperation(NamedTuple):
    """An NPU operation, including the operations that Vela fused into it.

    Attributes:
        rows: rows of the operation in Vela's estimates.
        operators: indices of the TOSA operators that the operation is compiled from.
    """

    rows: Sequence[OperationEstimate]
    operators: frozenset[int]


class DelegateProfile:
    """Cost profile of a delegate: maps Vela's NPU operations to TOSA operators, and TOSA operators to layers.

    The TOSA graph is parsed only once.
    """

    def __init__(self, method: str, record: DelegateRecord) -> None:
        self.method, self.record = method, record

    @cached_property
    def graph(self) -> TosaGraph:
        """The TOSA graph of the delegate."""
        return read_tosa_graph(memoryview(self.record.tosa))

    @cached_property
    def producers(self) -> dict[str, int]:
        """{name of a tensor: index of the TOSA operator that produces this tensor}."""
        return {name: i for i, op in enumerate(self.graph.operators) for name in op.outputs}

    @property
    def vela(self) -> VelaEstimates:
        """Vela's estimates; only Ethos-U delegates have them."""
        assert self.record.vela is not None
        return self.record.vela

    def costs(self, total: int) -> Iterator[LayerCost]:
        """Yield the layer costs of the delegate; ``total``: cycles of all delegates of the method."""
        totals_by_layer: dict[_LayerKey, _LayerTotals] = {}
        counted: set[int] = set()
        for operation in self.npu_operations:
            self._add_costs(operation, counted, totals_by_layer)
            counted |= operation.operators
        unassigned_cycles = self.vela.total_cycles - sum(layer.cycles for layer in self.vela.layers)
        if unassigned_cycles:
            totals_by_layer[_LayerKey("", "", "rest", "in Vela's total, but of no operation")] = _LayerTotals(
                cycles=unassigned_cycles
            )
        macs_per_cycle = int(self.vela.accelerator.rsplit("-", 1)[1])
        for key, totals in totals_by_layer.items():
            yield LayerCost(
                self.method,
                self.record.name,
                key.module,
                key.source,
                key.kind,
                tuple(totals.operators),
                totals.cycles,
                totals.cycles / total if total else 0.0,
                totals.macs,
                totals.macs / (totals.cycles * macs_per_cycle) if totals.cycles else 0.0,
                totals.read,
                totals.written,
                "memory" if 2 * totals.memory_bound_cycles > totals.cycles else "compute",
                key.reason,
                tuple(totals.tensors),
            )

    @cached_property
    def npu_operations(self) -> tuple[NpuOperation, ...]:
        """All NPU operations with their TOSA operators; only Ethos-U delegates have them."""
        return tuple(self._find_operations())

    def _find_operations(self) -> Iterator[NpuOperation]:
        """Assign TOSA operators to each NPU operation.

        Vela's estimates refer to some TOSA operators by index; these operators are called named. An NPU operation gets
        its named operators, and two kinds of unnamed operators: producers of the operands of its named operators, and
        operators on the paths from its named operators to its results. An NPU operation without named operators gets
        the unnamed producers of its results.
        """
        if not self.vela.layers:
            return
        number_of_index = {op.index: i for i, op in enumerate(self.graph.operators)}
        rows: dict[int, list[OperationEstimate]] = {}
        for i, layer in enumerate(self.vela.layers):
            rows.setdefault(i if layer.part_of is None else layer.part_of, []).append(layer)
        all_result_names = {layer.tensor for layer in self.vela.layers}
        all_named = {number_of_index[layer.index] for layer in self.vela.layers if layer.index in number_of_index}
        for layers in rows.values():
            named = {number_of_index[layer.index] for layer in layers if layer.index in number_of_index}
            named_elsewhere, result_names = all_named - named, {layer.tensor for layer in layers}
            producers = self._producers_of(result_names, all_result_names - result_names, named_elsewhere)
            unnamed_inputs = self._producers_of(
                (x for i in named for x in self.graph.operators[i].inputs), all_result_names - result_names, all_named
            )
            fused_successors = {
                i
                for i in producers
                if named
                & self._producers_of(self.graph.operators[i].inputs, all_result_names - result_names, named_elsewhere)
            }
            yield NpuOperation(layers, frozenset(named | unnamed_inputs | fused_successors if named else producers))

    def _producers_of(self, names: Iterable[str], end_tensors: set[str], excluded: set[int]) -> set[int]:
        """Indices of the transitive producers of tensors.

        Args:
            names: names of the tensors.
            end_tensors: tensors whose producers are not included.
            excluded: operators that are not included; their own producers are not searched either.
        """
        producers: set[int] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            i = self.producers.get(name)
            if i is not None and i not in producers and i not in excluded and name not in end_tensors:
                producers.add(i)
                pending += self.graph.operators[i].inputs
        return producers

    def _add_costs(
        self, operation: NpuOperation, counted: set[int], totals_by_layer: dict[_LayerKey, _LayerTotals]
    ) -> None:
        """Add the cost of an NPU operation to the layers of its origins.

        The bytes of operators in ``counted`` are left out, because an earlier NPU operation has included them.
        """
        shares: Counter[_LayerKey] = Counter()
        computing = [i for i in sorted(operation.operators) if self.record.tosa_operators[i] not in _VIEW_OPERATORS]
        for i in computing or sorted(operation.operators):
            for origin, work in self.record.origins[i]:
                key = self._layer_key(i, origin)
                shares[key] += work
                totals_by_layer.setdefault(key, _LayerTotals()).operators.setdefault(origin.operator)
        if not shares:
            first = operation.rows[0]
            shares[
                _LayerKey("", "", "rest", f"Vela names no source of its {first.npu_operator} for '{first.tensor}'")
            ] = 1
        cycles = sum(row.cycles for row in operation.rows)
        is_memory_bound = cycles > sum(row.npu_cycles for row in operation.rows)
        read, written = self._count_bytes(operation.operators - counted)
        macs = sum(row.macs for row in operation.rows)
        for attribute, amount in (("cycles", cycles), ("read", read), ("written", written), ("macs", macs)):
            for key, part in apportion(amount, shares).items():
                totals = totals_by_layer.setdefault(key, _LayerTotals())
                setattr(totals, attribute, getattr(totals, attribute) + part)
                if attribute == "cycles" and is_memory_bound:
                    totals.memory_bound_cycles += part
        for key in shares:
            totals_by_layer[key].tensors |= dict.fromkeys(row.tensor for row in operation.rows)

    def _count_bytes(self, operators: frozenset[int]) -> tuple[int, int]:
        """Bytes of the tensors that enter a set of operators, and bytes of the tensors that leave the set."""
        graph_operators = [self.graph.operators[i] for i in sorted(operators)]
        produced = {name for operator in graph_operators for name in operator.outputs}
        read = {name for operator in graph_operators for name in operator.inputs} - produced
        written = {name for name in produced if self._readers[name] - operators or name in self.graph.outputs}
        tensor_bytes, calls = self.graph.tensor_bytes, self.record.calls  # shape operands are not in tensor_bytes
        return calls * sum(tensor_bytes.get(name, 0) for name in read), calls * sum(
            tensor_bytes[name] for name in written
        )

    @cached_property
    def _readers(self) -> dict[str, set[int]]:
        readers: dict[str, set[int]] = {name: set() for name in self.producers}
        for i, op in enumerate(self.graph.operators):
            for name in op.inputs:
                readers.setdefault(name, set()).add(i)
        return readers

    def main_origin(self, operators: Iterable[int]) -> Origin | None:
        """The origin with the largest share of the work of these TOSA operators; None without operators."""
        weights: Counter[Origin] = Counter()
        for i in operators:
            weights.update(dict(self.record.origins[i]))
        return max(weights, key=weights.__getitem__, default=None)

    # -- classification of operators -----------------------------------------------------------------------------

    def _layer_key(self, i: int, origin: Origin) -> _LayerKey:
        if origin.operator == COPY_OPERATOR:
            return _LayerKey("", "", "boundary", _COPY_REASON)
        operator = origin.operator.removeprefix("aten.").split(".")[0]
        if not origin.is_transpose and not origin.operator.startswith(_CONVERSION_PREFIXES):
            return _LayerKey(origin.module, origin.source, "layer", "" if origin.module else "the model's own forward")
        for side, boundary_operators in (("input", self._input_operators), ("output", self._output_operators)):
            if i in boundary_operators:
                explanation = _LAYOUT_REASONS[side] if origin.is_transpose else _TYPE_REASON
                return _LayerKey(
                    origin.module,
                    origin.source,
                    "boundary",
                    f"{side} '{boundary_operators[i]}' of the delegate {explanation}",
                )
        if not origin.is_transpose:
            return _LayerKey(origin.module, origin.source, "conversion", "adjacent operators differ in scale or type")
        own = f"the model's own {operator}"
        reason = own if operator in _PERMUTE_OPERATORS else f"{operator} uses another dimension order"
        return _LayerKey(origin.module, origin.source, "transpose", reason)

    def _is_movement_or_conversion(self, i: int) -> bool:
        """Whether TOSA operator ``i`` only moves data, or converts the type or the quantization parameters."""
        if self.record.tosa_operators[i] in _VIEW_OPERATORS:
            return True
        return all(o.is_transpose or o.operator.startswith(_CONVERSION_PREFIXES) for o, _ in self.record.origins[i])

    @cached_property
    def _input_operators(self) -> dict[int, str]:
        """{index of a TOSA operator: name of the delegate's input that the operator moves or converts}.

        Between the input and such an operator, all operators move or convert data, too.
        """
        input_of_operator: dict[int, str] = {}
        input_of_tensor = {name: name for name in self.graph.inputs}
        for i, op in enumerate(self.graph.operators):
            sources = {
                input_of_tensor.get(name) for name in op.inputs if name in self.producers or name in self.graph.inputs
            }
            source = sources.pop() if len(sources) == 1 else None
            if source is not None and self._is_movement_or_conversion(i):
                input_of_operator[i] = source
                input_of_tensor |= dict.fromkeys(op.outputs, source)
        return input_of_operator

    @cached_property
    def _output_operators(self) -> dict[int, str]:
        """{index of a TOSA operator: name of the delegate's output that the operator moves or converts}.

        Between such an operator and the output, all operators move or convert data, too.
        """
        output_of_operator: dict[int, str] = {}
        for i, op in reversed(list(enumerate(self.graph.operators))):
            readers = self._readers[op.outputs[0]]
            outputs = [name for name in op.outputs if name in self.graph.outputs] + [
                output_of_operator.get(j, "") for j in readers
            ]
            if outputs and all(outputs) and self._is_movement_or_conversion(i):
                output_of_operator[i] = outputs[0]
        return output_of_operator


#: Texts of ``LayerCost.reason`` for boundary operations. Each text has a reason, a colon and a remedy. Layout and type
#: texts are appended to the name of the input or output.
_LAYOUT_REASONS = {
    "input": "is transposed to NHWC: export(..., channels_last=True) avoids this",
    "output": "is transposed from NHWC: return it in channels-last order to avoid this",
}
_COPY_REASON = "the model returns an input or a constant unchanged: do not return it"
_TYPE_REASON = "changes its type or scale: quantized_io=True, and int32 instead of int64, avoid this"
