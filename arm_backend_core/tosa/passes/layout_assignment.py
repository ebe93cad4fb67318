"""Layout assignment: choose the layout of every value so that TRANSPOSEs move fewer bytes.

Convolutions and pooling require channels last. Most other operators accept any layout (``layout_modes``). A TRANSPOSE
is needed where an operator reads a value in another layout than its producer writes. The cost of a TRANSPOSE is the
size of the value in bytes plus ``_START_COST``, or 1 if only dimensions of size 1 move. The assignment sinks, hoists,
merges and cancels TRANSPOSEs in one step.

Two dynamic programs over the graph, one from the inputs and one from the outputs, compute the cost of each candidate
layout. The costs are exact if the graph is a tree. ``_GraphWriter`` then emits the graph again and chooses the modes
greedily. The new graph is kept only if its ``movement_cost`` is lower. A pipeline that repeats the pass therefore
terminates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from itertools import combinations

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.permutation import Layout, compose, identity, inverse
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Origins, Value
from arm_backend_core.tosa.legality import type_refusal
from arm_backend_core.tosa.passes.layout_modes import (
    LayoutMode,
    is_free_permutation,
    is_layout_flexible,
    modes_with_output,
    permute_attributes,
    permute_shape,
    propagate_layout,
)

Costs = dict[Layout, float]

_INFINITE = float("inf")
#: Cost of a RESHAPE in bytes. It moves no data, but a graph with fewer operators is preferred.
_RESHAPE_COST = 1.0
#: Cost of starting an operation, in bytes that the hardware could move in the same time.
_START_COST = 256.0
#: Maximum number of candidate layouts of one value. Real graphs need two or three.
_MAX_CANDIDATES = 6


def assign_layouts(graph: Graph, target: Target) -> None:
    """Rewrite ``graph`` if this lowers its ``movement_cost``.

    A graph with a cost below ``_START_COST`` has no TRANSPOSE that moves data, and is not rewritten.
    """
    graph.remove_dead()
    before = movement_cost(graph)
    if before < _START_COST:
        return
    costs = _LayoutCosts(graph, target)
    old_ops, old_outputs = graph.ops, list(graph.outputs)
    try:
        _GraphWriter(graph, target, costs).run()
        better = movement_cost(graph) < before
    except Unsupported:  # the target lacks a TRANSPOSE or RESHAPE of some type
        better = False
    if not better:
        graph.ops, graph.outputs = old_ops, old_outputs


def movement_cost(graph: Graph) -> float:
    """Cost that layout assignment minimizes: bytes that TRANSPOSEs move, plus a constant per TRANSPOSE and RESHAPE."""
    total = 0.0
    for op in graph.ops:
        if op.kind == "RESHAPE":
            total += _RESHAPE_COST
        elif op.kind == "TRANSPOSE":
            source = op.inputs[0]
            total += _layout_change_cost(source.shape, source.dtype, identity(source.rank), tuple(op.attrs["perms"]))
    return total


@lru_cache(maxsize=65536)
def _layout_change_cost(shape: tuple[int, ...], dtype: DType, before: Layout, after: Layout) -> float:
    """Cost, in bytes, of changing the layout of one value."""
    if before == after:
        return 0.0
    if is_free_permutation(shape, before, after):
        return _RESHAPE_COST
    elements = 1
    for dim in shape:
        elements *= dim
    return _START_COST + elements * dtype.bytes


class _LayoutCosts:
    """Costs of the candidate layouts of each value, separately for the graph above the value and below it.

    Attributes:
        above: {value: {layout: cost of all layout changes before the value, if it is produced in this layout}}. The
            changes before an operator that is not layout-flexible are not included. Costs are relative to the cheapest
            layout.
        below: {value: {layout: cost of all layout changes after the value, if it is written in this layout}}. The
            changes after a reader that is not layout-flexible are not included. Costs are relative to the cheapest
            layout.
        candidates: {value: its candidate layouts}; the inner dictionaries are ordered sets.
        modes: {operator: its modes with candidate layouts only}.
        can_transpose: {type: whether the target can TRANSPOSE its elements}.
    """

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.outputs = set(graph.outputs)
        self.can_transpose = {dtype: type_refusal(target, "TRANSPOSE", [dtype], dtype) is None for dtype in DType}
        self.candidates: dict[Value, dict[Layout, None]] = {}
        self._collect_candidates()
        self.modes = {op: self._candidate_modes(op) for op in graph.ops}
        self.above: dict[Value, Costs] = {}
        for value in graph.inputs:
            self.above[value] = self._complete_costs(value, {identity(value.rank): 0.0})
        for op in graph.ops:
            self.above[op.output] = self._cost_above(op)
        self.below: dict[Value, Costs] = {}
        self._readers: dict[Value, list[Costs]] = {}
        for op in reversed(graph.ops):
            self.below[op.output] = self._cost_below(op.output)
            self._add_reader_costs(op)

    # -- candidates ------------------------------------------------------------------------------------------

    def _collect_candidates(self) -> None:
        """Collect the layouts that a producer can write or a reader can read."""
        for value in self.graph.inputs:
            self.candidates[value] = {identity(value.rank): None}
        for op in self.graph.ops:
            self.candidates[op.output] = {identity(op.output.rank): None}
        self._propagate_candidates()
        for op in reversed(self.graph.ops):
            for output in list(self.candidates[op.output]) if is_layout_flexible(op) else ():
                for mode in modes_with_output(op, output):
                    for value, layout in zip(op.inputs, mode.inputs, strict=True):
                        self._add_candidate(value, layout)
        self._propagate_candidates()

    def _propagate_candidates(self) -> None:
        for op in self.graph.ops:
            for value in op.inputs if is_layout_flexible(op) else ():
                for layout in list(self.candidates.get(value, ())):
                    result = propagate_layout(op, layout)
                    if result is not None:
                        self._add_candidate(op.output, result)

    def _add_candidate(self, value: Value, layout: Layout) -> None:
        known = self.candidates.get(value)
        if known is not None and len(known) < _MAX_CANDIDATES:
            known[layout] = None

    def _candidate_modes(self, op: Op) -> list[LayoutMode]:
        if not is_layout_flexible(op):
            return modes_with_output(op, identity(op.output.rank))
        flexible_modes = [mode for output in self.candidates[op.output] for mode in modes_with_output(op, output)]
        return [mode for mode in flexible_modes if self._has_candidates(op, mode)]

    def _has_candidates(self, op: Op, mode: LayoutMode) -> bool:
        operands = zip(op.inputs, mode.inputs, strict=True)
        return all(value.data is not None or layout in self.candidates[value] for value, layout in operands)

    # -- costs -----------------------------------------------------------------------------------------------

    def change_cost(self, value: Value, before: Layout, after: Layout) -> float:
        """Cost of changing the layout of ``value``.

        It is 0 for constants, which are permuted at compile time, and infinite if the target cannot TRANSPOSE the type.
        """
        if before == after or value.data is not None:
            return 0.0
        if not self.can_transpose[value.dtype]:
            return _INFINITE
        return _layout_change_cost(value.shape, value.dtype, before, after)

    def _complete_costs(self, value: Value, known: Costs) -> Costs:
        """Extend the ``known`` costs to all candidate layouts by layout changes. The cheapest layout has cost 0."""
        return _subtract_minimum(
            {
                layout: min(cost + self.change_cost(value, source, layout) for source, cost in known.items())
                for layout in self.candidates[value]
            }
        )

    def _cost_above(self, op: Op) -> Costs:
        """Cost of producing the result of ``op`` in each layout."""
        produced: Costs = {}
        for mode in self.modes[op]:
            cost = sum(self._operand_cost(v, p) for v, p in zip(op.inputs, mode.inputs, strict=True))
            produced[mode.output] = min(cost, produced.get(mode.output, _INFINITE))
        if not is_layout_flexible(op):
            produced = {mode.output: 0.0 for mode in self.modes[op]}
        return self._complete_costs(op.output, produced)

    def _operand_cost(self, value: Value, layout: Layout) -> float:
        return 0.0 if value.data is not None else self.above[value][layout]

    def _add_reader_costs(self, op: Op) -> None:
        """Record, for each operand of ``op``, the cost of reading it in each layout.

        The cost of a layout is the minimum over the modes of ``op`` that read the operand in it. The cost of a mode is
        the cost above the other operands. If ``op`` is layout-flexible, the cost below its result is added.
        """
        cost_below = self.below[op.output]
        for i, value in enumerate(op.inputs):
            if value.data is not None:
                continue
            costs: Costs = {}
            for mode in self.modes[op]:
                operands = zip(op.inputs, mode.inputs, strict=True)
                others = sum(self._operand_cost(other, p) for other, p in operands if other is not value)
                cost = others + (cost_below[mode.output] if is_layout_flexible(op) else 0.0)
                costs[mode.inputs[i]] = min(cost, costs.get(mode.inputs[i], _INFINITE))
            self._readers.setdefault(value, []).append(costs)

    def _cost_below(self, value: Value) -> Costs:
        """{layout that the producer of ``value`` writes: total cost of all readers}, relative to the cheapest layout.

        Readers share the result of a layout change. The method enumerates sets of zero, one and two layout changes.
        """
        readers = self._readers.pop(value, [])
        if value in self.outputs:
            readers = [*readers, {identity(value.rank): 0.0}]
        candidates = list(self.candidates[value])
        extra_layouts = [extra for n in range(min(len(readers), 2) + 1) for extra in combinations(candidates, n)]
        reader_cost = cache(partial(_reader_cost, readers))
        costs = {
            written: min(
                self._total_change_cost(value, written, extra) + reader_cost(frozenset((written, *extra)))
                for extra in extra_layouts
            )
            for written in candidates
        }
        return _subtract_minimum(costs)

    def _total_change_cost(self, value: Value, written: Layout, layouts: Sequence[Layout]) -> float:
        """Cost of converting ``value`` from the layout ``written`` to each of ``layouts``."""
        return sum(self.change_cost(value, written, layout) for layout in layouts)


def _reader_cost(readers: Sequence[Costs], available: frozenset[Layout]) -> float:
    """Total cost of the readers if each reads the best of the ``available`` layouts."""
    return sum(min(costs.get(layout, _INFINITE) for layout in available) for costs in readers)


def _subtract_minimum(costs: Costs) -> Costs:
    """Costs relative to the smallest one."""
    minimum = min(costs.values())
    return {layout: cost - minimum if cost < _INFINITE else cost for layout, cost in costs.items()}


class _GraphWriter:
    """Emits the graph again, in execution order. It chooses the cheapest mode of each operator.

    Attributes:
        written: {value of the old graph: {layout: value of the new graph that holds it in this layout}}.
        transpose_origins: {value: origins of a TRANSPOSE of the old graph}. The TRANSPOSE produced the value, or the
            writer has moved it behind the producer of the value. A later layout change of the value gets these origins.
    """

    def __init__(self, graph: Graph, target: Target, costs: _LayoutCosts) -> None:
        self.graph = graph
        self.costs = costs
        self.build = Builder(graph, target)
        self.transpose_origins: dict[Value, Origins] = {}
        self.written: dict[Value, dict[Layout, Value]] = {v: {identity(v.rank): v} for v in graph.inputs}

    def run(self) -> None:
        """Replace the graph's operators and outputs."""
        ops, self.graph.ops = self.graph.ops, []
        for op in ops:
            self.build.origins = op.origins
            if op.kind == "TRANSPOSE":
                inverse_perms = inverse(tuple(op.attrs["perms"]))
                available = self._written_layouts(op.inputs[0])
                self.written[op.output] = {compose(inverse_perms, layout): value for layout, value in available.items()}
                self.transpose_origins[op.output] = op.origins
            else:
                self._write(op, self._choose_mode(op))
        self.graph.outputs = [self._read(value, identity(value.rank)) for value in self.graph.outputs]
        self.graph.remove_dead()

    def _written_layouts(self, value: Value) -> dict[Layout, Value]:
        if value not in self.written:  # a constant
            self.written[value] = {identity(value.rank): value}
        return self.written[value]

    def _choose_mode(self, op: Op) -> LayoutMode:
        """The cheapest mode. On a tie, the mode with the smallest cost of layout changes of the operands."""
        cost_below = self.costs.below[op.output]

        def cost(mode: LayoutMode) -> tuple[float, float]:
            change = sum(self._cheapest_change(v, p) for v, p in dict(zip(op.inputs, mode.inputs, strict=True)).items())
            return change + cost_below[mode.output], change

        return min(self.costs.modes[op], key=cost)

    def _cheapest_change(self, value: Value, layout: Layout) -> float:
        return min(self.costs.change_cost(value, available, layout) for available in self._written_layouts(value))

    def _write(self, op: Op, mode: LayoutMode) -> None:
        inputs = [self._read(v, p) for v, p in zip(op.inputs, mode.inputs, strict=True)]
        shape = permute_shape(op.output.shape, mode.output)
        if op.kind == "RESHAPE":
            result = self.build.reshape(inputs[0], shape)
        else:
            result = self.build.emit(op.kind, inputs, op.output.dtype, **permute_attributes(op, mode))
        self.written[op.output] = {mode.output: result}
        inherited = [self.transpose_origins[value] for value in op.inputs if value in self.transpose_origins]
        if inherited and mode.output != identity(op.output.rank):
            self.transpose_origins[op.output] = inherited[0]

    def _read(self, value: Value, layout: Layout) -> Value:
        """Return ``value`` in this layout. If it is not written yet, convert it from the cheapest written layout."""
        available = self._written_layouts(value)
        if layout not in available:
            source_layout = min(available, key=lambda p: self.costs.change_cost(value, p, layout))
            if is_free_permutation(value.shape, source_layout, layout):
                available[layout] = self.build.reshape(available[source_layout], permute_shape(value.shape, layout))
            else:
                reader_origins, self.build.origins = (
                    self.build.origins,
                    self.transpose_origins.get(value, self.build.origins),
                )
                available[layout] = self.build.transpose(
                    available[source_layout], compose(inverse(source_layout), layout)
                )
                self.build.origins = reader_origins
        return available[layout]
