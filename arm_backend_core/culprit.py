"""Which operator a compiler died on: a tool that crashes does not say."""

from __future__ import annotations

from pathlib import Path

from arm_backend_core.backends.compile import compile_payload
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.tosa.graph import Graph, Op, Origin, cut
from arm_backend_core.tosa.serialize import serialize


def culprit(graph: Graph, spec: ArmCompileSpec, error: CompileError) -> Origin | None:
    """Compile every operator alone, with the RESCALE behind it; the first that fails alike is the one.

    Only called after a failure that names no operator, so its cost (milliseconds an operator) is not felt otherwise.

    Returns:
        Where the operator comes from; None when each compiles alone.
    """
    users = graph.users()
    for op in graph.ops:
        behind = [user for user in users.get(op.output, []) if user.kind == "RESCALE"][:1]
        try:
            compile_payload(spec, serialize(_alone([op, *behind])), delegate="culprit", locate=lambda _: None)
        except CompileError as alone:
            if alone.artifact:
                Path(alone.artifact).unlink(missing_ok=True)
            if alone.reason.split(" while ")[0] == error.reason.split(" while ")[0]:
                return op.origin
    return None


def _alone(ops: list[Op]) -> Graph:
    """A graph of copies of ``ops``, which feed each other; what else they read becomes an input."""
    made = {op.output for op in ops}
    read = dict.fromkeys(value for op in ops for value in op.inputs if value.data is None and value not in made)
    return cut([(value, f"input_{i}") for i, value in enumerate(read)], [ops[-1].output], ops.index)
