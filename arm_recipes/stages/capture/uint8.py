"""uint8 casts: move casts from and to uint8 past data movement, to the inputs and outputs of the program.

TOSA has no uint8 type. A delegate accepts uint8 only as an input that it casts immediately. After this rewrite, the
data movement that handled uint8 handles the floating-point values instead.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from arm_recipes.stages.capture.data_dependent_shapes import is_elementwise

aten = torch.ops.aten
_CAST_OPS = (aten.to.dtype, aten._to_copy.default)


def move_casts_outward(program: ExportedProgram) -> None:
    """Edit the program in place: casts from uint8 move before data movement, casts to uint8 after it."""
    from arm_backend_core.graph_edits import eliminate_dead_code

    graph = program.graph
    if not any(getattr(node.meta.get("val"), "dtype", None) is torch.uint8 for node in graph.nodes):
        return
    uint8_nodes = [node for node in graph.nodes if _is_uint8_data_movement(node)]
    for check in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(check)  # it asserts the dtypes of the captured program, which change here
    for node in uint8_nodes:
        _swap_with_cast(graph, node)
    data_movement = {node for node in uint8_nodes if _is_uint8_data_movement(node)}
    copies = _copy_as_float(graph, data_movement)
    new_nodes = set(copies.values())
    for node in [node for node in graph.nodes if node not in new_nodes]:
        for source in [source for source in node.all_input_nodes if source in data_movement]:
            dtype = _float_compute_dtype(node)
            if dtype is None:
                continue
            if node.target in _CAST_OPS:
                node.target, node.args, node.kwargs = aten.alias.default, (copies[source, dtype],), {}
            else:
                node.replace_input_with(source, copies[source, dtype])
    _replace_uint8_round_trips(graph)
    eliminate_dead_code(graph)
    program.graph_module.recompile()


def _replace_uint8_round_trips(graph: Graph) -> None:
    """Replace float -> uint8 -> float by float -> int32 -> ``& 255`` -> float, which wraps around like uint8."""
    for node in list(graph.nodes):
        is_float_to_uint8 = (
            node.target in _CAST_OPS and _dtype(node) is torch.uint8 and _is_float_type(_dtype(node.args[0]))
        )
        if is_float_to_uint8 and all(user.target in _CAST_OPS and _float_compute_dtype(user) for user in node.users):
            with graph.inserting_before(node):
                int_cast = graph.call_function(aten.to.dtype, (node.args[0], torch.int32))
            node.target, node.args, node.kwargs = aten.bitwise_and.Scalar, (int_cast, 255), {}
            node.meta["val"] = _empty_like(node, torch.int32)
            int_cast.meta = dict(node.meta)


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_float_type(dtype: torch.dtype) -> bool:
    from arm_backend_core.scalar_kind import ScalarKind, kind_of

    return kind_of(dtype) is ScalarKind.FLOAT


def _float_compute_dtype(node: Node) -> torch.dtype | None:
    """Return the floating-point type of ``node`` if it is a cast or elementwise; None for other types and operators."""
    dtype: torch.dtype | None = getattr(node.meta.get("val"), "dtype", None)
    computes = node.target in _CAST_OPS or is_elementwise(node)
    return dtype if dtype is not None and _is_float_type(dtype) and computes else None


def _is_uint8_data_movement(node: Node) -> bool:
    """Whether ``node`` is data movement of uint8, and neither its operands nor its result are written."""
    from arm_backend_core.nodes import is_written
    from arm_backend_core.ops.catalog import has_shared_qparams

    value, sources = node.meta.get("val"), node.all_input_nodes
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype is not torch.uint8:
        return False
    source_dtypes = {getattr(source.meta.get("val"), "dtype", None) for source in sources}
    return has_shared_qparams(node) and source_dtypes == {torch.uint8} and not any(map(is_written, (node, *sources)))


def _copy_as_float(graph: Graph, data_movement: Container[Node]) -> dict[tuple[Node, torch.dtype], Node]:
    """Copy uint8 data movement for each floating-point type that its consumers compute in, and cast the inputs to it.

    Returns:
        the copies by (original node, floating-point type).
    """
    needed_types: dict[Node, set[torch.dtype]] = {}
    for node in reversed(graph.nodes):
        dtype = _float_compute_dtype(node)
        types = needed_types.get(node, set()) if node in data_movement else set() if dtype is None else {dtype}
        for source in node.all_input_nodes if types else ():
            if node in data_movement or source in data_movement:
                needed_types.setdefault(source, set()).update(types)
    copies: dict[tuple[Node, torch.dtype], Node] = {}
    for node in [node for node in graph.nodes if node in needed_types]:
        for dtype in needed_types[node]:
            with graph.inserting_after(node):
                if node in data_movement:
                    copy = graph.node_copy(node, {x: copies[x, dtype] for x in node.all_input_nodes}.__getitem__)
                else:
                    copy = graph.call_function(aten.to.dtype, (node, dtype))
            copy.meta = {**node.meta, "val": _empty_like(node, dtype)}
            copies[node, dtype] = copy
    return copies


def _swap_with_cast(graph: Graph, node: Node) -> None:
    """Swap data movement with a preceding cast to uint8: move the floating-point values, then cast."""
    from arm_backend_core.nodes import is_written

    casts = node.all_input_nodes
    if len(casts) != 1 or casts[0].target not in _CAST_OPS:
        return
    (float_value,) = casts[0].all_input_nodes
    if not _is_float_type(_dtype(float_value)) or is_written(float_value):
        return
    with graph.inserting_before(node):
        moved_float = graph.node_copy(node, lambda _: float_value)
    moved_float.meta = {**node.meta, "val": _empty_like(node, _dtype(float_value))}
    node.target, node.args, node.kwargs = aten.to.dtype, (moved_float, torch.uint8), {}


def _empty_like(node: Node, dtype: torch.dtype) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return torch.empty_like(value, dtype=dtype)
