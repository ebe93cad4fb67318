"""In-place operators become functional ones, without tracing the program anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.fx import Graph, Node

from arm_backend_core.errors import ModelError
from arm_backend_core.nodes import changes_memory, is_view, is_written, mutates, overload_of
from arm_backend_core.ops.catalog import find_composite

aten = torch.ops.aten
DROPOUT = tuple(
    getattr(aten, kind).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for kind in (name, f"{name}_")
)
_FILLED: dict[Any, OpOverload] = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}


def functionalize(graph: Graph, *, write_back: bool = False) -> Node | None:
    """Replace ``relu_`` by ``relu`` and so on, in place.

    Later readers of the mutated tensor read the result instead. That is the same program unless something else shares
    the tensor's memory (a view, a parameter, an input); then the graph is left untouched.

    Args:
        write_back: inputs and buffers may be written: they are, once, at the end of the program.

    Returns:
        The first operator that writes what others share; None where the graph is now free of in-place operators, those
        at its end aside.
    """
    _drop_identities(graph)
    _fill(graph)
    _drop_second_names(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    mutating = [node for node in graph.nodes if mutates(node) and not _ends(node, order)]
    for node in mutating:
        if _functional(node) is None or (
            changes_memory(node) and _is_shared(node.args[0], node, order, held=write_back)
        ):
            return node
    written: dict[Node, Node] = {}
    for node in mutating:
        source, target = cast(Node, node.args[0]), _functional(node)
        assert target is not None
        node.target = target
        later = {user for user in source.users if order[user] > order[node]}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)
        written[node] = written.pop(source, source)
    with graph.inserting_before(graph.output_node()):
        for result, source in written.items():
            if source.op != "call_function":
                graph.call_function(aten.copy_.default, (source, result)).meta = dict(source.meta)
    return None


def _ends(node: Node, order: dict[Node, int]) -> bool:
    """Whether ``node`` gives an attribute the value that it keeps until the next call."""
    kept = node.args[0]
    if node.target is not aten.copy_.default or not isinstance(kept, Node):
        return False
    return kept.op == "get_attr" and all(order[user] <= order[node] for user in kept.users)


def functional(program: ExportedProgram) -> ExportedProgram:
    """``program`` itself, edited, or another one, without writes in place; new values of buffers are results.

    Raises:
        ModelError: PyTorch cannot, say because elements of what is written to overlap in memory.
    """
    if functionalize(program.graph_module.graph) is None:
        return program
    for node in program.graph.find_nodes(op="call_function", target=aten.unfold.default):
        if is_written(node):  # PyTorch forgets the elements that are in no window
            view = node.meta["val"]
            node.target = aten.as_strided.default
            node.args = (node.args[0], list(view.shape), list(view.stride()), view.storage_offset())
    for node in program.graph.find_nodes(op="call_function", target=aten.multilabel_margin_loss_forward.default):
        # PyTorch's own decomposition, which no table prevents, counts a list's end as a class
        parts = find_composite(node)
        assert parts is not None
        node.target = parts.decompose
    try:
        with torch.no_grad():  # parts of complex tensors are not written where there are to be gradients
            program = program.run_decompositions(undeclared_views(program.graph))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"writes in place cannot be exported: {reason} Write to a copy: x.clone()") from error
    functionalize(program.graph_module.graph)  # what lstm_cell is decomposed to, say, writes in place again
    drop_final_copies(program.graph)
    return program


def drop_final_copies(graph: Graph) -> None:
    """What is written to an input or buffer leaves the program as it is computed, not as a copy of that."""
    for node in [node for node in graph.nodes if overload_of(node.target) is aten.copy.default]:
        result, source = node.meta["val"], node.args[1]
        same = (result.shape, result.dtype) == (source.meta["val"].shape, source.meta["val"].dtype)
        own = source.op == "call_function" and overload_of(source.target) is not aten.view_copy.default
        if same and own and all(user.op == "output" for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def undeclared_views(graph: Graph) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions of operators whose results share memory with an operand although their schemas deny it.

    ``meshgrid``, ``type_as`` and their kin: PyTorch's own functionalization believes the schema, and a write to the
    operand would not reach the result.
    """
    views = {node.target for node in graph.nodes if any(is_view(node, x) for x in node.all_input_nodes)}
    hidden = {
        target
        for target in views
        if isinstance(target, OpOverload) and not any(result.alias_info for result in target._schema.returns)
    }
    if not hidden:
        return {}
    table = default_decompositions()
    return {target: table[target] for target in hidden if target in table}


def _drop_identities(graph: Graph) -> None:
    """What returns its input itself, which neither schema nor trace shows reliably: ``lift``, ``detach_``, dropout."""
    for node in list(graph.nodes):
        if node.target in (aten.lift.default, aten.detach_.default) or (node.target in DROPOUT and not node.args[2]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _fill(graph: Graph) -> None:
    """What nothing was written to yet is zero, and so the same in every export."""
    for node in graph.nodes:
        if node.target in _FILLED:
            node.target = _FILLED[node.target]
            if node.target is aten.zeros.default:
                node.kwargs = {key: value for key, value in node.kwargs.items() if key != "memory_format"}


def _drop_second_names(graph: Graph) -> None:
    """What is written is read by its own name, not by that of the operator that wrote it and returned it."""
    for node in [node for node in graph.nodes if mutates(node)]:
        if _functional(node) is not None and changes_memory(node):
            node.replace_all_uses_with(node.args[0])


def _functional(node: Node) -> OpOverload | None:
    """``aten.add_.Tensor`` -> ``aten.add.Tensor``."""
    assert isinstance(node.target, OpOverload)
    namespace, name = node.target._schema.name.split("::")
    if not name.endswith("_") or namespace != "aten":
        return None
    packet, types = getattr(torch.ops.aten, name[:-1], None), _types(node.target)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return next((overload for overload in overloads if _types(overload) == types), None)


def _types(overload: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in overload._schema.arguments]


def _is_shared(
    source: object, node: Node, order: dict[Node, int], known_as: Node | None = None, *, held: bool = False
) -> bool:
    """Whether ``source``'s memory may be seen after ``node`` under another name than ``known_as``.

    ``held``: not if the program begins with it, as an input or buffer.
    """
    if not isinstance(source, Node) or not (source.op == "call_function" or held):
        return True
    for user in source.users:
        if (
            user is not known_as
            and order[user] < order[node]
            and is_view(user, source)
            and _read_after(user, node, order)
        ):
            return True
    return any(
        _is_shared(base, node, order, source) or any(order[user] > order[node] for user in base.users)
        for base in source.all_input_nodes
        if is_view(source, base)
    )


def _read_after(view: Node, node: Node, order: dict[Node, int]) -> bool:
    return any(
        order[user] > order[node] or (is_view(user, view) and _read_after(user, node, order)) for user in view.users
    )
