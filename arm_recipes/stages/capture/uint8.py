"""uint8 casts: move casts from and to uint8 past data movement, to the inputs and outputs of the program.

TOSA supports uint8 only at the inputs and outputs of a graph. So data movement computes on floating point instead.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from arm_recipes.stages.capture.data_dependent_shapes import is_elementwise

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default)


def move_casts_outward(program: ExportedProgram) -> None:
    """Edit the program in place: casts from uint8 move before data movement, casts to uint8 after it."""
    from arm_backend_core.graph_edits import eliminate_dead_code

    graph = program.graph
    if not any(getattr(node.meta.get("val"), "dtype", None) is torch.uint8 for node in graph.nodes):
        return
    found = [node for node in graph.nodes if _moves_bytes(node)]
    for check in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(check)  # checks dtypes of the trace
    for node in found:
        _cast_later(graph, node)
    moves = {node for node in found if _moves_bytes(node)}
    made = _copy_as_real(graph, moves)
    new = set(made.values())
    for node in [node for node in graph.nodes if node not in new]:
        for source in [source for source in node.all_input_nodes if source in moves]:
            dtype = _real_type(node)
            if dtype is None:
                continue
            if node.target in _CASTS:
                node.target, node.args, node.kwargs = aten.alias.default, (made[source, dtype],), {}
            else:
                node.replace_input_with(source, made[source, dtype])
    _round(graph)
    eliminate_dead_code(graph)
    program.graph_module.recompile()


def _round(graph: Graph) -> None:
    """Replace float -> uint8 -> float by float -> int32 -> ``& 255`` -> float."""
    for node in list(graph.nodes):
        made = node.target in _CASTS and _dtype(node) is torch.uint8 and _is_real(_dtype(node.args[0]))
        if made and all(user.target in _CASTS and _real_type(user) for user in node.users):
            with graph.inserting_before(node):
                whole = graph.call_function(aten.to.dtype, (node.args[0], torch.int32))
            node.target, node.args, node.kwargs = aten.bitwise_and.Scalar, (whole, 255), {}
            node.meta["val"] = _like(node, torch.int32)
            whole.meta = dict(node.meta)


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_real(dtype: torch.dtype) -> bool:
    from arm_backend_core.kinds import ScalarKind, kind_of

    return kind_of(dtype) is ScalarKind.FLOAT


def _real_type(node: Node) -> torch.dtype | None:
    """The floating-point type of ``node`` if it casts uint8 to it or computes with uint8 operands; else None."""
    dtype: torch.dtype | None = getattr(node.meta.get("val"), "dtype", None)
    computes = node.target in _CASTS or is_elementwise(node)
    return dtype if dtype is not None and _is_real(dtype) and computes else None


def _moves_bytes(node: Node) -> bool:
    """Whether ``node`` is data movement of uint8, and neither its operands nor its result are written."""
    from arm_backend_core.nodes import is_written
    from arm_backend_core.ops.catalog import is_data_movement

    value, sources = node.meta.get("val"), node.all_input_nodes
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.uint8:
        return False
    kinds = {getattr(source.meta.get("val"), "dtype", None) for source in sources}
    return is_data_movement(node) and kinds == {torch.uint8} and not any(map(is_written, (node, *sources)))


def _copy_as_real(graph: Graph, moves: Container[Node]) -> dict[tuple[Node, torch.dtype], Node]:
    """Copy data movement of uint8 for each floating-point type that consumers need, with casts before it.

    Returns:
        (node, type) -> copy.
    """
    wanted: dict[Node, set[torch.dtype]] = {}
    for node in reversed(graph.nodes):
        dtype = _real_type(node)
        asked = wanted.get(node, set()) if node in moves else set() if dtype is None else {dtype}
        for source in node.all_input_nodes if asked else ():
            if node in moves or source in moves:
                wanted.setdefault(source, set()).update(asked)
    made: dict[tuple[Node, torch.dtype], Node] = {}
    for node in [node for node in graph.nodes if node in wanted]:
        for dtype in wanted[node]:
            with graph.inserting_after(node):
                if node in moves:
                    real = graph.node_copy(node, {x: made[x, dtype] for x in node.all_input_nodes}.__getitem__)
                else:
                    real = graph.call_function(aten.to.dtype, (node, dtype))
            real.meta = {**node.meta, "val": _like(node, dtype)}
            made[node, dtype] = real
    return made


def _cast_later(graph: Graph, node: Node) -> None:
    """Swap data movement with the cast to uint8 before it: move the floating-point values, then cast."""
    from arm_backend_core.nodes import is_written

    casts = node.all_input_nodes
    if len(casts) != 1 or casts[0].target not in _CASTS:
        return
    (real,) = casts[0].all_input_nodes
    if not _is_real(_dtype(real)) or is_written(real):
        return
    with graph.inserting_before(node):
        moved = graph.node_copy(node, lambda _: real)
    moved.meta = {**node.meta, "val": _like(node, _dtype(real))}
    node.target, node.args, node.kwargs = aten.to.dtype, (moved, torch.uint8), {}


def _like(node: Node, dtype: torch.dtype) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return torch.empty_like(value, dtype=dtype)
