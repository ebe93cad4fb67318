"""Where TRANSPOSEs stand: the layout of every value is chosen so that the fewest bytes are moved.

Convolutions and pooling want channels last; most other operators do not care (``layout_modes``). Each value gets
a layout. A TRANSPOSE is needed where an operator reads a value in another layout than it was written in,
and costs the value's bytes. So TRANSPOSEs sink, rise, merge and cancel at once.

The choice is made by two dynamic programs over the graph, one from the inputs and one from the outputs,
which are exact on trees; a last walk decides with the layouts that are there. The result replaces the graph
only if it moves fewer bytes, so repeating the pass comes to an end.
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
from arm_backend_core.tosa.legality import refusal
from arm_backend_core.tosa.passes.layout_modes import Mode, attributes, flexible, forward, modes, moves_nothing, stored

Costs = dict[Layout, float]

_INFINITE = float("inf")
#: A RESHAPE moves nothing, and yet one operator less is better.
_RESHAPE_COST = 1.0
#: Bytes that any hardware could have moved in the time that it takes to start one more operator.
_START_COST = 256.0
#: Layouts that one value is considered in; real graphs need two or three.
_CANDIDATES = 6


def choose_layouts(graph: Graph, target: Target) -> None:
    """Rewrite ``graph`` with the TRANSPOSEs where they move the fewest bytes."""
    graph.remove_dead()
    before = movement_cost(graph)
    if before < _START_COST:
        return
    assignment = _Assignment(graph, target)
    old_ops, old_outputs = graph.ops, list(graph.outputs)
    try:
        _Rebuild(graph, target, assignment).run()
        better = movement_cost(graph) < before
    except Unsupported:  # the target lacks a TRANSPOSE or RESHAPE of some type
        better = False
    if not better:
        graph.ops, graph.outputs = old_ops, old_outputs


def movement_cost(graph: Graph) -> float:
    """Bytes that TRANSPOSEs move, with a little for each TRANSPOSE and RESHAPE: what the layouts minimise."""
    total = 0.0
    for op in graph.ops:
        if op.kind == "RESHAPE":
            total += _RESHAPE_COST
        elif op.kind == "TRANSPOSE":
            source = op.inputs[0]
            total += _cost(source.shape, source.dtype, identity(source.rank), tuple(op.attrs["perms"]))
    return total


@lru_cache(maxsize=65536)
def _cost(shape: tuple[int, ...], dtype: DType, before: Layout, after: Layout) -> float:
    """Cost of changing the layout of one value."""
    if before == after:
        return 0.0
    if moves_nothing(shape, before, after):
        return _RESHAPE_COST
    size = 1
    for n in shape:
        size *= n
    return _START_COST + size * dtype.bytes


class _Assignment:
    """Costs of every layout of every value, looking up and down from it."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.outputs = set(graph.outputs)
        self.movable = {dtype: refusal(target, "TRANSPOSE", [dtype], dtype) is None for dtype in DType}
        self.candidates: dict[Value, dict[Layout, None]] = {}
        self._collect_candidates()
        self.modes = {op: self._modes(op) for op in graph.ops}
        self.up: dict[Value, Costs] = {}
        for value in graph.inputs:
            self.up[value] = self._spread(value, {identity(value.rank): 0.0})
        for op in graph.ops:
            self.up[op.output] = self._up(op)
        self.down: dict[Value, Costs] = {}
        self._readers: dict[Value, list[Costs]] = {}
        for op in reversed(graph.ops):
            self.down[op.output] = self._down(op.output)
            self._offer(op)

    # -- candidates ------------------------------------------------------------------------------------------

    def _collect_candidates(self) -> None:
        """Layouts that any producer offers or any reader wants."""
        for value in self.graph.inputs:
            self.candidates[value] = {identity(value.rank): None}
        for op in self.graph.ops:
            self.candidates[op.output] = {identity(op.output.rank): None}
        self._candidates_down()
        for op in reversed(self.graph.ops):
            for output in list(self.candidates[op.output]) if flexible(op) else ():
                for mode in modes(op, output):
                    for value, layout in zip(op.inputs, mode.inputs, strict=True):
                        self._add(value, layout)
        self._candidates_down()

    def _candidates_down(self) -> None:
        for op in self.graph.ops:
            for value in op.inputs if flexible(op) else ():
                for layout in list(self.candidates.get(value, ())):
                    result = forward(op, layout)
                    if result is not None:
                        self._add(op.output, result)

    def _add(self, value: Value, layout: Layout) -> None:
        known = self.candidates.get(value)
        if known is not None and len(known) < _CANDIDATES:
            known[layout] = None

    def _modes(self, op: Op) -> list[Mode]:
        if not flexible(op):
            return modes(op, identity(op.output.rank))
        found = [mode for output in self.candidates[op.output] for mode in modes(op, output)]
        return [mode for mode in found if self._considered(op, mode)]

    def _considered(self, op: Op, mode: Mode) -> bool:
        operands = zip(op.inputs, mode.inputs, strict=True)
        return all(value.data is not None or layout in self.candidates[value] for value, layout in operands)

    # -- costs -----------------------------------------------------------------------------------------------

    def cost(self, value: Value, before: Layout, after: Layout) -> float:
        """Cost of having ``value`` in another layout; constants are permuted now."""
        if before == after or value.data is not None:
            return 0.0
        return _cost(value.shape, value.dtype, before, after) if self.movable[value.dtype] else _INFINITE

    def _spread(self, value: Value, made: Costs) -> Costs:
        """Cost of every candidate, from those that are made and a change of layout; the cheapest is 0."""
        return _relative(
            {
                layout: min(cost + self.cost(value, source, layout) for source, cost in made.items())
                for layout in self.candidates[value]
            }
        )

    def _up(self, op: Op) -> Costs:
        """What it takes to have the result in each layout."""
        made: Costs = {}
        for mode in self.modes[op]:
            cost = sum(self._up_operand(v, p) for v, p in zip(op.inputs, mode.inputs, strict=True))
            made[mode.output] = min(cost, made.get(mode.output, _INFINITE))
        if not flexible(op):
            made = {mode.output: 0.0 for mode in self.modes[op]}
        return self._spread(op.output, made)

    def _up_operand(self, value: Value, layout: Layout) -> float:
        return 0.0 if value.data is not None else self.up[value][layout]

    def _offer(self, op: Op) -> None:
        """Tell each operand what this reader makes of its layouts."""
        down = self.down[op.output]
        for i, value in enumerate(op.inputs):
            if value.data is not None:
                continue
            costs: Costs = {}
            for mode in self.modes[op]:
                operands = zip(op.inputs, mode.inputs, strict=True)
                others = sum(self._up_operand(other, p) for other, p in operands if other is not value)
                cost = others + (down[mode.output] if flexible(op) else 0.0)
                costs[mode.inputs[i]] = min(cost, costs.get(mode.inputs[i], _INFINITE))
            self._readers.setdefault(value, []).append(costs)

    def _down(self, value: Value) -> Costs:
        """What all readers cost together when the value is written in each layout.

        Readers share a changed layout, so the changes are chosen first: none, one or two of them.
        """
        readers = self._readers.pop(value, [])
        if value in self.outputs:
            readers = [*readers, {identity(value.rank): 0.0}]
        candidates = list(self.candidates[value])
        changes = [made for n in range(min(len(readers), 2) + 1) for made in combinations(candidates, n)]
        reading = cache(partial(_reading, readers))
        costs = {
            written: min(
                self._changing(value, written, made) + reading(frozenset((written, *made))) for made in changes
            )
            for written in candidates
        }
        return _relative(costs)

    def _changing(self, value: Value, written: Layout, made: Sequence[Layout]) -> float:
        """Cost of having ``value`` in these layouts too."""
        return sum(self.cost(value, written, layout) for layout in made)


def _reading(readers: Sequence[Costs], there: frozenset[Layout]) -> float:
    """What readers cost when each takes the best of the layouts that are there."""
    return sum(min(costs.get(layout, _INFINITE) for layout in there) for costs in readers)


def _relative(costs: Costs) -> Costs:
    """Costs above the least one."""
    least = min(costs.values())
    return {layout: cost - least if cost < _INFINITE else cost for layout, cost in costs.items()}


class _Rebuild:
    """Writes the graph again, each operator in the mode that is cheapest given what is stored already."""

    def __init__(self, graph: Graph, target: Target, assignment: _Assignment) -> None:
        self.graph = graph
        self.assignment = assignment
        self.build = Builder(graph, target)
        self.wanted: dict[Value, Origins] = {}  # of the TRANSPOSEs that a value is behind
        self.stored: dict[Value, dict[Layout, Value]] = {v: {identity(v.rank): v} for v in graph.inputs}

    def run(self) -> None:
        """Replace the graph's operators and outputs."""
        ops, self.graph.ops = self.graph.ops, []
        for op in ops:
            self.build.origins = op.origins
            if op.kind == "TRANSPOSE":
                undo = inverse(tuple(op.attrs["perms"]))
                there = self._layouts(op.inputs[0])
                self.stored[op.output] = {compose(undo, layout): value for layout, value in there.items()}
                self.wanted[op.output] = op.origins
            else:
                self._write(op, self._choose(op))
        self.graph.outputs = [self._read(value, identity(value.rank)) for value in self.graph.outputs]
        self.graph.remove_dead()

    def _layouts(self, value: Value) -> dict[Layout, Value]:
        if value not in self.stored:  # a constant
            self.stored[value] = {identity(value.rank): value}
        return self.stored[value]

    def _choose(self, op: Op) -> Mode:
        """The cheapest mode; among equals the one that changes no layout yet."""
        down = self.assignment.down[op.output]

        def cost(mode: Mode) -> tuple[float, float]:
            now = sum(self._change(v, p) for v, p in dict(zip(op.inputs, mode.inputs, strict=True)).items())
            return now + down[mode.output], now

        return min(self.assignment.modes[op], key=cost)

    def _change(self, value: Value, layout: Layout) -> float:
        return min(self.assignment.cost(value, there, layout) for there in self._layouts(value))

    def _write(self, op: Op, mode: Mode) -> None:
        inputs = [self._read(v, p) for v, p in zip(op.inputs, mode.inputs, strict=True)]
        shape = stored(op.output.shape, mode.output)
        if op.kind == "RESHAPE":
            result = self.build.reshape(inputs[0], shape)
        else:
            result = self.build.emit(op.kind, inputs, shape, op.output.dtype, **attributes(op, mode))
        self.stored[op.output] = {mode.output: result}
        wanted = [self.wanted[value] for value in op.inputs if value in self.wanted]
        if wanted and mode.output != identity(op.output.rank):
            self.wanted[op.output] = wanted[0]

    def _read(self, value: Value, layout: Layout) -> Value:
        """``value`` in this layout, changed from the cheapest one that is stored."""
        there = self._layouts(value)
        if layout not in there:
            nearest = min(there, key=lambda p: self.assignment.cost(value, p, layout))
            if moves_nothing(value.shape, nearest, layout):
                there[layout] = self.build.reshape(there[nearest], stored(value.shape, layout))
            else:
                reader, self.build.origins = self.build.origins, self.wanted.get(value, self.build.origins)
                there[layout] = self.build.transpose(there[nearest], compose(inverse(nearest), layout))
                self.build.origins = reader
        return there[layout]
