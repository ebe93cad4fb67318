"""int64 inputs, as token ids are, enter a delegate as int32: TOSA has no int64."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

#: Marks a cast that only brings a tensor across a delegate's boundary.
BOUNDARY = "arm_boundary"


def narrow_int64_inputs(program: ExportedProgram) -> list[str]:
    """Cast every int64 user input to int32 once, on the CPU, and read the cast instead.

    Returns:
        Names of the inputs concerned. Values beyond int32 would wrap around; indices never are.
    """
    names = []
    users = set(program.graph_signature.user_inputs)
    graph = program.graph_module.graph
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in users]:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor) or meta.dtype is not torch.int64 or not node.users:
            continue
        with graph.inserting_after(_last_placeholder(node)):
            cast = graph.call_function(
                torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int32}
            )
        cast.meta["val"] = meta.to(torch.int32)
        cast.meta[BOUNDARY] = True
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        names.append(node.name)
    return names


def _last_placeholder(node: Node) -> Node:
    while node.next.op == "placeholder":
        node = node.next
    return node
