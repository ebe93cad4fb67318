"""Functionalization: replace in-place operators by functional ones, without retracing the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Graph, Node

from arm_backend_core.errors import ModelError
from arm_backend_core.nodes import (
    FEEDS_DROPOUT,
    has_mutable_schema,
    is_in_place_write,
    is_view,
    is_written,
    overload_of,
)
from arm_backend_core.ops.catalog import find_composite

aten = torch.ops.aten
DROPOUT = tuple(
    getattr(aten, kind).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for kind in (name, f"{name}_")
)
_ZEROS_FOR_EMPTY: dict[Any, OpOverload] = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}


def functionalize(graph: Graph, *, write_back: bool = False) -> Node | None:
    """Replace in-place operators (``relu_``) by functional ones (``relu``); edits the graph.

    Later readers of the mutated tensor read the result instead. This is not equivalent if a view that shares the memory
    of the tensor is read later, or if the tensor is a parameter, a buffer or an input (without ``write_back``). If the
    graph has such an operator, or one without a functional overload, none of its in-place operators is replaced.

    Args:
        graph: the graph to edit.
        write_back: True if the graph may mutate inputs and buffers. Each mutated input or buffer is then written once,
            at the end of the program.

    Returns:
        The first operator that mutates shared memory or has no functional overload. None if the graph has no more
        in-place operators, except final writes to attributes and, with ``write_back``, to inputs and buffers.
    """
    _drop_identities(graph)
    _replace_empty_by_zeros(graph)
    _redirect_to_mutated_tensor(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    mutating = [node for node in graph.nodes if has_mutable_schema(node) and not _is_final_write(node, order)]
    for node in mutating:
        if _functional_overload(node) is None or (
            is_in_place_write(node) and _is_aliased(node.args[0], node, order, allow_inputs=write_back)
        ):
            return node
    mutated: dict[Node, Node] = {}
    for node in mutating:
        source, target = cast(Node, node.args[0]), _functional_overload(node)
        assert target is not None
        node.target = target
        later = {user for user in source.users if order[user] > order[node]}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        mutated[node] = mutated.pop(source, source)
    with graph.inserting_before(graph.output_node()):
        for result, source in mutated.items():
            if source.op != "call_function":
                graph.call_function(aten.copy_.default, (source, result)).meta = dict(source.meta)
    return None


def _is_final_write(node: Node, order: dict[Node, int]) -> bool:
    """Whether ``node`` is a ``copy_`` to an attribute that no later node reads, or of an attribute to itself."""
    attribute, value = node.args[:2] if node.target is aten.copy_.default else (None, None)
    if not isinstance(attribute, Node) or attribute.op != "get_attr":
        return False
    return value is attribute or all(order[user] <= order[node] for user in attribute.users)


def functionalize_program(program: ExportedProgram) -> ExportedProgram:
    """Functionalize a program: it then returns the new values of mutated buffers and inputs as further outputs.

    Args:
        program: the program, which may be edited.

    Returns:
        ``program`` itself, or a new program.

    Raises:
        ModelError: PyTorch cannot functionalize it, for example because elements of a mutated tensor overlap in memory.
    """
    if functionalize(program.graph_module.graph) is None:
        return program
    for node in program.graph.find_nodes(op="call_function", target=aten.unfold.default):
        if is_written(node):  # PyTorch would drop the elements that lie in no window
            view = node.meta["val"]
            node.target = aten.as_strided.default
            node.args = (node.args[0], list(view.shape), list(view.stride()), view.storage_offset())
    for node in program.graph.find_nodes(op="call_function", target=aten.multilabel_margin_loss_forward.default):
        # PyTorch's decomposition counts the end of a label list as a class. ``run_decompositions`` cannot override it.
        record = find_composite(node)
        assert record is not None
        node.target = record.decompose
    try:
        with torch.no_grad():  # with gradients, parts of complex tensors cannot be written
            program = program.run_decompositions(undeclared_view_decompositions(program.graph))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"in-place writes cannot be exported: {reason} Write to a copy: x.clone()") from error
    functionalize(program.graph_module.graph)  # some decompositions write in place, for example of lstm_cell
    drop_final_copies(program.graph)
    return program


def drop_final_copies(graph: Graph) -> None:
    """Remove copies of computed values if only the output node reads the copy.

    Such a copy is the new value of a mutated input or buffer.
    """
    for node in [node for node in graph.nodes if overload_of(node.target) is aten.copy.default]:
        result, source = node.meta["val"], node.args[1]
        has_same_type = (result.shape, result.dtype) == (source.meta["val"].shape, source.meta["val"].dtype)
        is_computed = source.op == "call_function" and overload_of(source.target) is not aten.view_copy.default
        if has_same_type and is_computed and all(user.op == "output" for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def undeclared_view_decompositions(graph: Graph) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions of operators whose results alias an operand although their schemas do not declare it.

    Examples: ``meshgrid``, ``type_as``. PyTorch's functionalization trusts the schema, so a write to the operand would
    not reach the result.
    """
    views = {node.target for node in graph.nodes if any(is_view(node, x) for x in node.all_input_nodes)}
    undeclared = {
        target
        for target in views
        if isinstance(target, OpOverload) and not any(result.alias_info for result in target._schema.returns)
    }
    if not undeclared:
        return {}
    table = default_decompositions()
    return {target: table[target] for target in undeclared if target in table}


def _drop_identities(graph: Graph) -> None:
    """Remove operators that return their input itself: ``lift``, ``detach_``, dropout in evaluation mode.

    Neither schema nor trace shows this aliasing reliably.
    """
    for node in list(graph.nodes):
        is_inactive_dropout = node.target in DROPOUT and not node.args[2]
        if is_inactive_dropout and node.args[1]:
            node.args[0].meta[FEEDS_DROPOUT] = True
        if node.target in (aten.lift.default, aten.detach_.default) or is_inactive_dropout:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _replace_empty_by_zeros(graph: Graph) -> None:
    """Replace uninitialized tensors (``empty``) by zeros, so that every export is the same."""
    for node in graph.nodes:
        if node.target in _ZEROS_FOR_EMPTY:
            node.target = _ZEROS_FOR_EMPTY[node.target]
            if node.target is aten.zeros.default:
                node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}


def _redirect_to_mutated_tensor(graph: Graph) -> None:
    """Redirect readers of an in-place operator's result to the tensor that it mutates."""
    for node in [node for node in graph.nodes if has_mutable_schema(node)]:
        if _functional_overload(node) is not None and is_in_place_write(node):
            node.replace_all_uses_with(node.args[0])


def _functional_overload(node: Node) -> OpOverload | None:
    """The functional overload of an in-place operator (``aten.add_.Tensor`` -> ``aten.add.Tensor``), or None."""
    assert isinstance(node.target, OpOverload)
    namespace, name = node.target._schema.name.split("::")
    if not name.endswith("_") or namespace != "aten":
        return None
    packet, types = getattr(torch.ops.aten, name[:-1], None), _argument_types(node.target)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return next((overload for overload in overloads if _argument_types(overload) == types), None)


def _argument_types(overload: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]


def _is_aliased(
    source: object, node: Node, order: dict[Node, int], ignored_view: Node | None = None, *, allow_inputs: bool = False
) -> bool:
    """Whether the memory of ``source`` may be read after ``node`` through another tensor.

    Args:
        source: the mutated operand.
        node: the in-place operator.
        order: index of each node in the program.
        ignored_view: a view of ``source`` whose readers are not checked, because the caller has checked them.
        allow_inputs: if False, an input or buffer of the program is always treated as aliased.
    """
    if not isinstance(source, Node) or not (source.op == "call_function" or allow_inputs):
        return True
    for user in source.users:
        if (
            user is not ignored_view
            and order[user] < order[node]
            and is_view(user, source)
            and _is_read_after(user, node, order)
        ):
            return True
    return any(
        _is_aliased(base, node, order, source) or any(order[user] > order[node] for user in base.users)
        for base in source.all_input_nodes
        if is_view(source, base)
    )


def _is_read_after(view: Node, node: Node, order: dict[Node, int]) -> bool:
    return any(
        order[user] > order[node] or (is_view(user, view) and _is_read_after(user, node, order)) for user in view.users
    )
