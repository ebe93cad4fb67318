"""Search for the failing operator: compile each operator of a graph alone, in order, after the whole graph failed.

A tool that crashes does not name the operator.
"""

from __future__ import annotations

from pathlib import Path

from arm_backend_core.alternatives.choose import extract_region
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.tosa.graph import Graph, Origin
from arm_backend_core.tosa.serialize import serialize


def bisect_failure(graph: Graph, spec: ArmCompileSpec, error: CompileError) -> Origin | None:
    """Compile each operator in a separate graph and find the first that fails with the same error.

    The graph of an operator also contains one RESCALE that reads its result, if there is any. Callers search only after
    a failure that names no operator. The search takes milliseconds per operator.

    Args:
        graph: the graph that failed.
        spec: compile spec of that graph.
        error: the compiler's error. Errors are equal if their reasons are equal up to " while ".

    Returns:
        The origin of the operator. None if no single operator causes this error, or if that operator has no origin.
    """
    users = graph.users()
    for op in graph.ops:
        rescales = [user for user in users.get(op.output, []) if user.kind == "RESCALE"][:1]
        try:
            subgraph = extract_region(graph, [op, *rescales], users, graph.ops.index)
            flatbuffer = serialize(subgraph, target=spec.target)
            compile_payload(spec, flatbuffer, delegate="bisection", find_operator=lambda _: None, graph=subgraph)
        except CompileError as failure:
            if failure.artifact:
                Path(failure.artifact).unlink(missing_ok=True)
            if failure.reason.split(" while ")[0] == error.reason.split(" while ")[0]:
                return op.origin
    return None
