"""Control flow outlining: COND_IF and WHILE_LOOP with regions, from SELECTs and loop placeholders.

Lowering emits both branches of a ``torch.cond`` side by side with a SELECT after them, and one iteration of a loop
between placeholders. All earlier steps, from calibration to layout assignment, therefore see one flat graph. A COND_IF
computes what only one branch reads only if that branch is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, extract_subgraph, merge_origins
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import skip_through


def outline_control_flow(graph: Graph, target: Target) -> None:
    """Outline control flow where the target supports it, inner loops and branches first.

    Outlining the outer ones moves the inner ones into their regions.
    """
    if "controlflow" not in target.extensions:
        return
    for loop in dict.fromkeys(op.attrs["loop"] for op in graph.ops if op.kind == "LOOP_OUT"):
        _outline_loop(graph, target, loop)
    for selects in _group_selects(graph):
        _outline_branch(graph, target, selects)
    for op in graph.ops:
        for inner in op.graphs:
            outline_control_flow(inner, target)


def _group_selects(graph: Graph) -> list[list[Op]]:
    """Groups of SELECTs by the same condition of one element, none of which depends on another in its group."""
    groups: dict[Value, list[list[Op]]] = {}
    for op in graph.ops:
        if op.kind == "SELECT" and op.inputs[0].size == 1 and op.inputs[0].data is None:
            condition_groups = groups.setdefault(skip_through(op.inputs[0], "RESHAPE"), [[]])
            if not _dependencies(op.inputs).isdisjoint(condition_groups[-1]):
                condition_groups.append([])
            condition_groups[-1].append(op)
    place = {op: i for i, op in enumerate(graph.ops)}
    return sorted(
        (group for condition_groups in groups.values() for group in condition_groups), key=lambda x: place[x[-1]]
    )


def _dependencies(values: Iterable[Value]) -> set[Op]:
    """All operators that the values depend on."""
    found: set[Op] = set()
    pending = list(values)
    while pending:
        op = pending.pop().producer
        if op is not None and op not in found:
            found.add(op)
            pending += op.inputs
    return found


def _outline_branch(graph: Graph, target: Target, selects: Sequence[Op]) -> None:
    """Replace these SELECTs by one COND_IF; keep them if no operator belongs to one branch only."""
    build = Builder(graph, target)
    build.origins = merge_origins(selects)
    for op in selects:  # SELECT broadcasts, COND_IF does not
        for i in (1, 2):
            sizes = zip(op.output.shape, op.inputs[i].shape, strict=True)
            op.inputs[i] = build.tile(op.inputs[i], [target_size // size for target_size, size in sizes])
    exclusive = _find_exclusive_operators(graph, set(selects))
    if not exclusive:
        return
    results = [[op.inputs[i] for op in selects] for i in (1, 2)]
    captured = _find_captured(exclusive, results[0] + results[1])
    then, other = (_outline_region(graph, target, captured, values) for values in results)
    condition = skip_through(selects[0].inputs[0], "RESHAPE")
    first, *extra = (op.output for op in selects)
    cond_if = Op(
        "COND_IF",
        [condition, *captured],
        first,
        {"then_graph": then, "else_graph": other},
        merge_origins(selects),
        extra,
    )
    _replace_operators(graph, cond_if, {*exclusive, *selects})


def _outline_loop(graph: Graph, target: Target, loop: int) -> None:
    """Replace the placeholders of a loop by a WHILE_LOOP; values that it only reads are carried unchanged."""
    marks = [op for op in graph.ops if op.attrs.get("loop") == loop]
    starts = sorted((op for op in marks if op.kind == "LOOP_IN"), key=lambda op: op.attrs["place"])
    ends = {op.attrs["place"]: op for op in marks if op.kind == "LOOP_OUT"}
    condition, *next_values = next(iter(ends.values())).inputs[: 1 + len(starts)]
    body, changed = dict[Op, None](), {op.output for op in starts}
    needed = _dependencies([condition, *next_values])
    for op in graph.ops:
        if op in needed and op not in starts and not changed.isdisjoint(op.inputs):
            body[op] = None
            changed.update(op.results)
    captured = [x for x in _find_captured(body, [condition, *next_values]) if x not in changed]
    carried = [*(op.output for op in starts), *captured]
    graphs = {
        "cond_graph": _outline_region(graph, target, carried, [condition]),
        "body_graph": _outline_region(graph, target, carried, [*next_values, *captured]),
    }
    results = [Value(x.shape, x.dtype, f"while_{loop}_{i}") for i, x in enumerate(carried)]
    for i, end in ends.items():
        results[i] = end.output
    inputs = [*(op.inputs[0] for op in starts), *captured]
    while_loop = Op("WHILE_LOOP", inputs, results[0], graphs, merge_origins(marks), results[1:])
    _replace_operators(graph, while_loop, {*body, *marks})


def _find_captured(region: Collection[Op], results: Sequence[Value]) -> list[Value]:
    """The values, constants aside, that the region and the results read from outside the region."""
    values = [value for op in region for value in op.inputs] + list(results)
    return list(dict.fromkeys(value for value in values if value.data is None and value.producer not in region))


def _outline_region(graph: Graph, target: Target, inputs: Sequence[Value], results: Sequence[Value]) -> Graph:
    """A graph of its own that computes ``results`` from ``inputs``."""
    place = {op: i for i, op in enumerate(graph.ops)}
    part = extract_subgraph([(value, f"x{i}") for i, value in enumerate(inputs)], results, place.__getitem__)
    make_outputs_distinct(part, target)
    return part


def _replace_operators(graph: Graph, replacement: Op, removed: set[Op]) -> None:
    """Put ``replacement`` in the place of operators that nothing else reads."""
    for value in replacement.results:
        value.producer = replacement
    needed = _dependencies(replacement.inputs)
    after = [op for op in graph.ops if op not in needed and op not in removed]
    graph.ops = [*(op for op in graph.ops if op in needed), replacement, *after]


def _find_exclusive_operators(graph: Graph, selects: set[Op]) -> dict[Op, int]:
    """The operators that only operand 1, or only operand 2, of these SELECTs needs, with that operand's index."""
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
