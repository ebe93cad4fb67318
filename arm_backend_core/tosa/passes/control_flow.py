"""Control flow outlining: SELECTs become COND_IFs, and loop placeholders become WHILE_LOOPs.

Lowering emits both branches of a ``torch.cond`` and a SELECT of their results. It emits one iteration of a loop between
LOOP_IN and LOOP_OUT placeholders. All earlier steps, from calibration to layout assignment, therefore process one flat
graph. A region is a graph that an operator holds. COND_IF executes only the region of the taken branch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, extract_subgraph, merge_origins
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import skip_through


def outline_control_flow(graph: Graph, target: Target) -> None:
    """Outline control flow if the target supports it.

    Loops are outlined before branches, and inner loops and branches before the ones that contain them. Outlining moves
    inner WHILE_LOOPs and COND_IFs into the region of the outer operator. Then the function calls itself on each
    new region, to outline the SELECTs there.
    """
    if "controlflow" not in target.extensions:
        return
    for loop in dict.fromkeys(op.attrs["loop"] for op in graph.ops if op.kind == "LOOP_OUT"):
        _outline_loop(graph, target, loop)
    for selects in _group_selects(graph):
        _outline_branch(graph, target, selects)
    for op in graph.ops:
        for region in op.regions:
            outline_control_flow(region, target)


def _group_selects(graph: Graph) -> list[list[Op]]:
    """Group the SELECTs that have the same condition of one element and do not depend on each other."""
    groups: dict[Value, list[list[Op]]] = {}
    for op in graph.ops:
        if op.kind == "SELECT" and op.inputs[0].size == 1 and op.inputs[0].data is None:
            condition_groups = groups.setdefault(skip_through(op.inputs[0], "RESHAPE"), [[]])
            if not _dependencies(op.inputs).isdisjoint(condition_groups[-1]):
                condition_groups.append([])
            condition_groups[-1].append(op)
    position = {op: i for i, op in enumerate(graph.ops)}
    return sorted(
        (group for condition_groups in groups.values() for group in condition_groups), key=lambda x: position[x[-1]]
    )


def _dependencies(values: Iterable[Value]) -> set[Op]:
    """All operators that the values depend on, directly or indirectly."""
    dependencies: set[Op] = set()
    pending = list(values)
    while pending:
        op = pending.pop().producer
        if op is not None and op not in dependencies:
            dependencies.add(op)
            pending += op.inputs
    return dependencies


def _outline_branch(graph: Graph, target: Target, selects: Sequence[Op]) -> None:
    """Replace ``selects`` by one COND_IF. Keep them if a COND_IF would skip no operator."""
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
    then_graph, else_graph = (_outline_region(graph, target, captured, values) for values in results)
    condition = skip_through(selects[0].inputs[0], "RESHAPE")
    first, *extra = (op.output for op in selects)
    cond_if = Op(
        "COND_IF",
        [condition, *captured],
        first,
        {"then_graph": then_graph, "else_graph": else_graph},
        merge_origins(selects),
        extra,
    )
    _replace_operators(graph, cond_if, {*exclusive, *selects})


def _outline_loop(graph: Graph, target: Target, loop: int) -> None:
    """Replace the placeholders of a loop by a WHILE_LOOP. Values that the loop only reads are carried unchanged."""
    placeholders = [op for op in graph.ops if op.attrs.get("loop") == loop]
    starts = sorted((op for op in placeholders if op.kind == "LOOP_IN"), key=lambda op: op.attrs["index"])
    ends = {op.attrs["index"]: op for op in placeholders if op.kind == "LOOP_OUT"}
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
    while_loop = Op("WHILE_LOOP", inputs, results[0], graphs, merge_origins(placeholders), results[1:])
    _replace_operators(graph, while_loop, {*body, *placeholders})


def _find_captured(region: Collection[Op], results: Sequence[Value]) -> list[Value]:
    """The values that ``region`` reads or returns (``results``) but does not compute, without constants."""
    values = [value for op in region for value in op.inputs] + list(results)
    return list(dict.fromkeys(value for value in values if value.data is None and value.producer not in region))


def _outline_region(graph: Graph, target: Target, inputs: Sequence[Value], results: Sequence[Value]) -> Graph:
    """Create a region: a separate graph that computes ``results`` from ``inputs``."""
    position = {op: i for i, op in enumerate(graph.ops)}
    region = extract_subgraph([(value, f"x{i}") for i, value in enumerate(inputs)], results, position.__getitem__)
    make_outputs_distinct(region, target)
    return region


def _replace_operators(graph: Graph, replacement: Op, removed: set[Op]) -> None:
    """Insert ``replacement`` into the graph and remove the operators ``removed``, which it replaces."""
    for value in replacement.results:
        value.producer = replacement
    needed = _dependencies(replacement.inputs)
    after = [op for op in graph.ops if op not in needed and op not in removed]
    graph.ops = [*(op for op in graph.ops if op in needed), replacement, *after]


def _find_exclusive_operators(graph: Graph, selects: set[Op]) -> dict[Op, int]:
    """Find the operators that only one branch needs: {operator: 1 (``then_graph``) or 2 (``else_graph``)}.

    The numbers are the operand indices of the branch results in a SELECT.
    """
    users, outputs, branch_of = graph.users(), set(graph.outputs), dict[Op, int]()
    for op in reversed(graph.ops):
        branches: set[int] = {0} if not outputs.isdisjoint(op.results) else set()
        for value in op.results:
            for user in users.get(value, []):
                if user in selects:
                    branches.update(i for i in range(3) if user.inputs[i] is value)
                else:
                    branches.add(branch_of.get(user, 0))
        if branches in ({1}, {2}):
            branch_of[op] = branches.pop()
    return branch_of
