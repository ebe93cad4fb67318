"""Which operator a compiler died on: a tool that crashes does not say."""

from __future__ import annotations

from pathlib import Path

from arm_backend_core.alternatives.choose import extract_region
from arm_backend_core.backends.compile import compile_payload
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.tosa.graph import Graph, Origin
from arm_backend_core.tosa.serialize import serialize


def bisect_failure(graph: Graph, spec: ArmCompileSpec, error: CompileError) -> Origin | None:
    """Compile every operator alone, with the RESCALE behind it; the first that fails alike is the one.

    Only called after a failure that names no operator, so its cost (milliseconds an operator) is not felt otherwise.

    Returns:
        Where the operator comes from; None when each compiles alone.
    """
    users = graph.users()
    for op in graph.ops:
        behind = [user for user in users.get(op.output, []) if user.kind == "RESCALE"][:1]
        try:
            part = extract_region(graph, [op, *behind], users, graph.ops.index)
            compile_payload(spec, serialize(part), delegate="culprit", locate=lambda _: None)
        except CompileError as failed:
            if failed.artifact:
                Path(failed.artifact).unlink(missing_ok=True)
            if failed.reason.split(" while ")[0] == error.reason.split(" while ")[0]:
                return op.origin
    return None
