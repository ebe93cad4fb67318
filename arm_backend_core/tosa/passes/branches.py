"""What only one side of a choice reads is computed only if that side is chosen: COND_IF in place of SELECT.

A graph is lowered with both branches of its ``torch.cond`` beside each other and a SELECT behind them, and with one
round of a loop between marks. So everything before this pass, from calibration to layouts, sees one graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, extract_subgraph, merge_origins
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import skip_through


def write_branches(graph: Graph, target: Target) -> None:
    """Where the target has them; inner loops and branches come first and are moved with what they are in."""
    if "controlflow" not in target.extensions:
        return
    for loop in dict.fromkeys(op.attrs["loop"] for op in graph.ops if op.kind == "LOOP_OUT"):
        _loop(graph, target, loop)
    for selects in _groups(graph):
        _branch(graph, target, selects)
    for op in graph.ops:
        for inner in op.graphs:
            write_branches(inner, target)


def _groups(graph: Graph) -> list[list[Op]]:
    """SELECTs by one condition of one element, none of which reads what another one gives."""
    groups: dict[Value, list[list[Op]]] = {}
    for op in graph.ops:
        if op.kind == "SELECT" and op.inputs[0].size == 1 and op.inputs[0].data is None:
            of_condition = groups.setdefault(skip_through(op.inputs[0], "RESHAPE"), [[]])
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
    build.origins = merge_origins(selects)
    for op in selects:  # which broadcasts, and COND_IF does not
        for i in (1, 2):
            sizes = zip(op.output.shape, op.inputs[i].shape, strict=True)
            op.inputs[i] = build.tile(op.inputs[i], [wanted // size for wanted, size in sizes])
    side = _sides(graph, set(selects))
    if not side:
        return
    results = [[op.inputs[i] for op in selects] for i in (1, 2)]
    captured = _captured(side, results[0] + results[1])
    then, other = (_cut(graph, target, captured, values) for values in results)
    condition = skip_through(selects[0].inputs[0], "RESHAPE")
    first, *more = (op.output for op in selects)
    made = Op(
        "COND_IF",
        [condition, *captured],
        first,
        {"then_graph": then, "else_graph": other},
        merge_origins(selects),
        more,
    )
    _put(graph, made, {*side, *selects})


def _loop(graph: Graph, target: Target, loop: int) -> None:
    """A WHILE_LOOP in the place of the marks; what the loop only reads goes round with what it changes."""
    marks = [op for op in graph.ops if op.attrs.get("loop") == loop]
    starts = sorted((op for op in marks if op.kind == "LOOP_IN"), key=lambda op: op.attrs["place"])
    ends = {op.attrs["place"]: op for op in marks if op.kind == "LOOP_OUT"}
    goes_on, *then = next(iter(ends.values())).inputs[: 1 + len(starts)]
    inside, changed = dict[Op, None](), {op.output for op in starts}
    needed = _before([goes_on, *then])
    for op in graph.ops:
        if op in needed and op not in starts and not changed.isdisjoint(op.inputs):
            inside[op] = None
            changed.update(op.results)
    captured = [x for x in _captured(inside, [goes_on, *then]) if x not in changed]
    carried = [*(op.output for op in starts), *captured]
    graphs = {
        "cond_graph": _cut(graph, target, carried, [goes_on]),
        "body_graph": _cut(graph, target, carried, [*then, *captured]),
    }
    results = [Value(x.shape, x.dtype, f"while_{loop}_{i}") for i, x in enumerate(carried)]
    for i, end in ends.items():
        results[i] = end.output
    inputs = [*(op.inputs[0] for op in starts), *captured]
    made = Op("WHILE_LOOP", inputs, results[0], graphs, merge_origins(marks), results[1:])
    _put(graph, made, {*inside, *marks})


def _captured(inside: Collection[Op], results: Sequence[Value]) -> list[Value]:
    """What these operators and results are computed from, constants aside."""
    read = [value for op in inside for value in op.inputs] + list(results)
    return list(dict.fromkeys(value for value in read if value.data is None and value.producer not in inside))


def _cut(graph: Graph, target: Target, inputs: Sequence[Value], results: Sequence[Value]) -> Graph:
    place = {op: i for i, op in enumerate(graph.ops)}
    part = extract_subgraph([(value, f"x{i}") for i, value in enumerate(inputs)], results, place.__getitem__)
    make_outputs_distinct(part, target)
    return part


def _put(graph: Graph, made: Op, gone: set[Op]) -> None:
    """``made`` in the place of operators that nothing else reads."""
    for value in made.results:
        value.producer = made
    needed = _before(made.inputs)
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
