"""int64 inputs, as token ids are, enter a delegate as int32, and int64 results leave it so: TOSA has no int64."""

from __future__ import annotations

from collections.abc import Set

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
            cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int32})
        cast.meta["val"] = meta.to(torch.int32)
        cast.meta[BOUNDARY] = True
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        names.append(node.name)
    return names


def widen_int64_outputs(program: ExportedProgram) -> list[str]:
    """Have int64 results of the program (indices) computed in int32, and cast them on the CPU.

    Returns:
        Names of the nodes concerned.
    """
    names = []
    output = program.graph_module.graph.output_node()
    for node in output.all_input_nodes:
        meta = node.meta.get("val")
        if node.op != "call_function" or not isinstance(meta, torch.Tensor) or meta.dtype is not torch.int64:
            continue
        with program.graph_module.graph.inserting_before(output):
            cast = program.graph_module.graph.call_function(
                torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int64}
            )
        cast.meta["val"], node.meta["val"] = meta, meta.to(torch.int32)
        cast.meta[BOUNDARY] = True
        output.replace_input_with(node, cast)
        for spec in program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = cast.name
        names.append(node.name)
    return names


def narrow_int64_results(program: ExportedProgram, chosen: Set[Node]) -> None:
    """Tell of int64 results that delegates compute them in int32, and cast them for what reads them on the CPU.

    Args:
        chosen: the nodes that will be delegated.
    """
    graph = program.graph_module.graph
    for node in [n for n in graph.nodes if n in chosen]:
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor) or meta.dtype is not torch.int64:
            continue
        node.meta["val"] = meta.to(torch.int32)
        readers = [user for user in node.users if user not in chosen]
        if not readers:
            continue
        with graph.inserting_after(node):
            cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": torch.int64})
        cast.meta["val"], cast.meta[BOUNDARY] = meta, True
        for user in readers:
            user.replace_input_with(node, cast)


def _last_placeholder(node: Node) -> Node:
    while node.next.op == "placeholder":
        node = node.next
    return node
