"""What only one side of a choice reads is computed only if that side is chosen: COND_IF in place of SELECT.

A graph is lowered with both branches of its ``torch.cond`` beside each other and a SELECT behind them. So everything
before this pass, from calibration to layouts, sees one graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, cut
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import past


def write_branches(graph: Graph, target: Target) -> None:
    """Where the target has them; inner branches come first and are moved with what they are in."""
    for selects in _groups(graph) if "controlflow" in target.extensions else ():
        _branch(graph, target, selects)


def _groups(graph: Graph) -> list[list[Op]]:
    """SELECTs by one condition of one element, none of which reads what another one gives."""
    groups: dict[Value, list[list[Op]]] = {}
    for op in graph.ops:
        if op.kind == "SELECT" and op.inputs[0].size == 1 and op.inputs[0].data is None:
            of_condition = groups.setdefault(past(op.inputs[0], "RESHAPE"), [[]])
            if not _before(op.inputs).isdisjoint(of_condition[-1]):
                of_condition.append([])
            of_condition[-1].append(op)
    place = {op: i for i, op in enumerate(graph.ops)}
    return sorted((group for of_condition in groups.values() for group in of_condition), key=lambda x: place[x[-1]])


def _before(values: Iterable[Value]) -> set[Op]:
    """All operators that the values depend on."""
    found: set[Op] = set()
    pending = list(values)
    while pending:
        op = pending.pop().producer
        if op is not None and op not in found:
            found.add(op)
            pending += op.inputs
    return found


def _branch(graph: Graph, target: Target, selects: Sequence[Op]) -> None:
    """One COND_IF for these SELECTs; they stay where there is nothing that it could skip."""
    build = Builder(graph, target)
    for op in selects:  # which broadcasts, and COND_IF does not
        for i in (1, 2):
            sizes = zip(op.output.shape, op.inputs[i].shape, strict=True)
            op.inputs[i] = build.tile(op.inputs[i], [wanted // size for wanted, size in sizes])
    side = _sides(graph, set(selects))
    if not side:
        return
    results = [[op.inputs[i] for op in selects] for i in (1, 2)]
    read = [value for op in side for value in op.inputs] + results[0] + results[1]
    captured = list(dict.fromkeys(value for value in read if value.data is None and value.producer not in side))
    condition, place = past(selects[0].inputs[0], "RESHAPE"), {op: i for i, op in enumerate(graph.ops)}
    names = [(value, f"x{i}") for i, value in enumerate(captured)]
    branches = [cut(names, values, place.__getitem__) for values in results]
    for branch in branches:
        make_outputs_distinct(branch, target)
    attrs = dict(zip(("then_graph", "else_graph"), branches, strict=True))
    first, *more = (op.output for op in selects)
    made = Op("COND_IF", [condition, *captured], first, attrs, selects[-1].origin, more)
    for value in made.results:
        value.producer = made
    needed = _before(made.inputs)
    gone = {*side, *selects}
    after = [op for op in graph.ops if op not in needed and op not in gone]
    graph.ops = [*(op for op in graph.ops if op in needed), made, *after]


def _sides(graph: Graph, selects: set[Op]) -> dict[Op, int]:
    """The operators that only operand 1, or only operand 2, of these SELECTs needs."""
    users, outputs, side = graph.users(), set(graph.outputs), dict[Op, int]()
    for op in reversed(graph.ops):
        sides: set[int] = {0} if not outputs.isdisjoint(op.results) else set()
        for value in op.results:
            for user in users.get(value, []):
                places = [i for i in range(3) if user.inputs[i] is value] if user in selects else [side.get(user, 0)]
                sides.update(places)
        if sides in ({1}, {2}):
            side[op] = sides.pop()
    return side
