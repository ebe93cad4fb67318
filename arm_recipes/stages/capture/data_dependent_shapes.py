"""Data-dependent shapes: rewrite masked and indexed reads of a captured program to operators with static shapes.

PyTorch gives ``x[mask]`` and ``mask.nonzero()`` a data-dependent size, for every mask. Rewrites:

- a constant mask selects the same elements in each call, so it becomes constant indices;
- a masked write of an elementwise function, ``y[mask] = f(x[mask])``, becomes ``where(mask, f(x), y)``;
- ``x[i]`` with a tensor ``i`` reads its value (``item``) as the offset of a view; it becomes a gather.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_PUTS = (aten.index_put.default, aten.index_put_.default)
_CHECKS = (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default)


def resolve_sizes(program: ExportedProgram) -> None:
    """Apply the rewrites in place; shapes that depend on input values otherwise remain."""
    if any(map(_is_data_dependent, program.graph.find_nodes(op="placeholder"))):
        return
    if _select_to_gather(program.graph):
        _refresh(program.graph)
        program.graph_module.recompile()
    if not any(map(_is_data_dependent, program.graph.nodes)):
        return
    from arm_backend_core.nodes import is_written
    from arm_backend_core.program import constants_of, lift_constants

    known: dict[Node, Any] = {x: value for x, value in constants_of(program).items() if not is_written(x)}
    changed = _fold_constant_masks(program.graph_module, known)
    changed |= _masked_writes_to_where(program.graph)
    if changed:
        lift_constants(program)
        _refresh(program.graph)
        program.graph_module.recompile()


def _is_data_dependent(node: Node) -> bool:
    """Whether a result of ``node`` has a symbolic size."""
    values = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return any(not isinstance(size, int) for x in values for size in x.shape)


# -- scalar indices ---------------------------------------------------------------------------------------------


def _select_to_gather(graph: Graph) -> bool:
    """Replace ``select`` at ``index.item()`` by ``index_select``, unless the view or its base is written."""
    from arm_backend_core.nodes import is_written

    changed = False
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        x, dim, number = cast(tuple[Any, Any, Any], node.args)
        if not isinstance(number, Node) or number.target is not aten.item.default or is_written(node) or is_written(x):
            continue
        index: Any = number.args[0]
        if index.meta["val"].dtype is torch.uint8:  # a mask, to PyTorch
            continue
        with graph.inserting_before(number):  # the index may be written after it
            if index.target not in (aten.argmax.default, aten.argmin.default):  # it may be negative
                wrapped = graph.call_function(aten.add.Tensor, (index, x.meta["val"].shape[dim]))
                negative = graph.call_function(aten.lt.Scalar, (index, 0))
                index = graph.call_function(aten.where.self, (negative, wrapped, index))
            row = graph.call_function(aten.reshape.default, (index, [1]))
        with graph.inserting_before(node):
            chosen = graph.call_function(aten.index_select.default, (x, dim, row))
        node.target, node.args = aten.squeeze.dim, (chosen, dim)
        if not number.users:
            graph.erase_node(number)
        changed = True
    return changed


# -- constant masks ---------------------------------------------------------------------------------------------


def _fold_constant_masks(module: GraphModule, known: dict[Node, Any]) -> bool:
    """Replace constant masks by constant indices."""
    from arm_backend_core.graph_edits import add_buffer_node
    from arm_backend_core.nodes import evaluate_node, is_constant, is_written

    def indices(mask: Tensor) -> list[Node]:
        return [add_buffer_node(module, "_chosen", part) for part in mask.nonzero(as_tuple=True)]

    changed = False
    for node in list(module.graph.nodes):
        if node.op == "call_function" and is_constant(node, known) and not is_written(node):
            known[node] = evaluate_node(node, known.__getitem__)
            if _is_data_dependent(node) and isinstance(known[node], Tensor):
                with module.graph.inserting_before(node):
                    node.replace_all_uses_with(add_buffer_node(module, f"{node.name}_value", known[node]))
                changed = True
        elif node.target is aten.index.Tensor and _is_data_dependent(node):
            with module.graph.inserting_before(node):
                chosen = [indices(known[x]) if _is_mask(x) and x in known else [x] for x in node.args[1]]
            node.args = (node.args[0], [x for parts in chosen for x in parts])
            changed = True
        elif node.target is aten.masked_select.default and node.args[1] in known:
            x, mask = torch.broadcast_tensors(node.args[0].meta["val"], known[node.args[1]])
            with module.graph.inserting_before(node):
                whole = module.graph.call_function(aten.expand.default, (node.args[0], list(x.shape)))
                node.target, node.args = aten.index.Tensor, (whole, indices(mask))
            changed = True
    return changed


def _is_mask(x: Any) -> bool:
    return isinstance(x, Node) and x.meta["val"].dtype is torch.bool


# -- computed masks -----------------------------------------------------------------------------------------------


def _masked_writes_to_where(graph: Graph) -> bool:
    """Rewrite ``y[mask] = f(x[mask])`` to ``where(mask, f(x), y)``, for elementwise functions ``f``."""
    from arm_backend_core.nodes import mutates

    order = {node: place for place, node in enumerate(graph.nodes)}
    writes = [place for node, place in order.items() if mutates(node)]

    def same(one: Node, other: Node) -> bool:
        """Whether two masks are equal: the same expression, and nothing is written between them."""
        begin, end = sorted((order[one], order[other]))
        equal = (one.target, one.args, one.kwargs) == (other.target, other.args, other.kwargs)
        return one is other or (equal and not any(begin < place < end for place in writes))

    changed = False
    for node in list(graph.nodes):
        if node.target not in _PUTS or not _is_data_dependent(node.args[2]) or (len(node.args) > 3 and node.args[3]):
            continue
        target, places, value = node.args[:3]
        *lead, mask = places
        if any(x is not None for x in lead) or not _is_mask(mask):
            continue
        whole = _UnmaskedCopy(graph, target.meta["val"].shape, len(lead), mask, same)
        if not whole.is_computable(value):
            continue
        shape = [1] * len(lead) + list(mask.meta["val"].shape)
        shape += [1] * (target.meta["val"].dim() - len(shape))
        made = whole(value)
        with graph.inserting_before(node):
            wide = graph.call_function(aten.reshape.default, (mask, shape))
            new = graph.call_function(aten.where.self, (wide, made, target))
        for each in (wide, new):
            each.meta = {key: of for key, of in node.meta.items() if key != "val"}
        if node.target is aten.index_put_.default:
            node.target, node.args = aten.copy_.default, (target, new)
        else:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        changed = True
    return changed


class _UnmaskedCopy:
    """Copies a computation on masked elements, ``f(x[mask])``, as a computation on all elements, ``f(x)``.

    Args:
        graph: is edited.
        shape: shape of ``x``.
        lead: number of dimensions before those of the mask.
        mask: the mask.
        same: whether two masks are equal.
    """

    def __init__(
        self, graph: Graph, shape: torch.Size, lead: int, mask: Node, same: Callable[[Node, Node], bool]
    ) -> None:
        self._graph, self._shape, self._lead, self._mask, self._same = graph, shape, lead, mask, same
        #: Number of dimensions after those of the mask, along which other operands may vary.
        self._trailing_rank = len(shape) - lead - mask.meta["val"].dim()
        self._copies: dict[Node, Node] = {}

    def is_computable(self, x: Node) -> bool:
        """Whether ``x`` is an elementwise function of elements that the mask selects."""
        todo, seen = [x], set[Node]()
        while todo:
            node = todo.pop()
            if not _is_data_dependent(node):
                known = node.meta["val"]
                if known.numel() != 1 and known.dim() > self._trailing_rank:
                    return False
                continue
            if node in seen:
                continue
            seen.add(node)
            if self._is_masked_read(node):
                continue
            if not is_elementwise(node):
                return False
            todo += node.all_input_nodes
        return True

    def _is_masked_read(self, node: Node) -> bool:
        if node.target is not aten.index.Tensor:
            return False
        given: Any = node.args
        source, (*lead, mask) = given
        alike = source.meta["val"].shape == self._shape and lead == [None] * self._lead
        return alike and _is_mask(mask) and self._same(mask, self._mask)

    def __call__(self, x: Node) -> Node:
        """Copy the computation of ``x`` for all elements; each node is copied once, before the original."""
        parts = _data_dependent_sources(x)
        for node in [node for node in self._graph.nodes if node in parts and node not in self._copies]:
            with self._graph.inserting_before(node):
                if self._is_masked_read(node):  # clone: the source may be written before the copy is read
                    made = self._graph.call_function(aten.clone.default, (node.args[0],))
                else:
                    made = self._graph.node_copy(node, lambda x: self._copies.get(x, x))
            made.meta = {key: of for key, of in node.meta.items() if key != "val"}
            self._copies[node] = made
        return self._copies[x]


def _data_dependent_sources(x: Node) -> set[Node]:
    """``x`` and its transitive operands with data-dependent sizes."""
    found, todo = {x}, [x]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in found and _is_data_dependent(node):
                found.add(node)
                todo.append(node)
    return found


def is_elementwise(node: Node) -> bool:
    """Whether an operator is elementwise and does not mutate its operands."""
    overload = node.target
    pointwise = isinstance(overload, OpOverload) and torch.Tag.pointwise in overload.tags
    return pointwise and not overload._schema.is_mutable  # type: ignore[union-attr]


# -- shape propagation ------------------------------------------------------------------------------------------


def _refresh(graph: Graph) -> None:
    """Propagate the static shapes, and remove checks of sizes that are now known."""
    from arm_backend_core.graph_edits import eliminate_dead_code

    mode = next((x.meta["val"].fake_mode for x in graph.nodes if hasattr(x.meta.get("val"), "fake_mode")), None)
    for node in reversed(graph.nodes):  # only size checks still read the masked elements
        if node.target in _CHECKS:
            _drop_checks(graph, node)
    eliminate_dead_code(graph)
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or (value is not None and not _has_symbols(value)):
            continue
        target: Any = node.target
        args, kwargs = pytree.tree_map_only(Node, lambda x: x.meta["val"], (node.args, node.kwargs))
        with torch.no_grad(), mode if mode is not None else torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)
        if isinstance(node.meta["val"], (int, bool)):
            node.replace_all_uses_with(node.meta["val"])
            graph.erase_node(node)


def _has_symbols(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    sizes = [size for x in leaves if isinstance(x, Tensor) for size in (*x.shape, *x.stride(), x.storage_offset())]
    return any(isinstance(x, (torch.SymInt, torch.SymBool)) for x in (*leaves, *sizes))


def _drop_checks(graph: Graph, node: Node) -> None:
    asked = node.args[0]
    graph.erase_node(node)
    if isinstance(asked, Node) and asked.target in (operator.ge, operator.le) and not asked.users:
        graph.erase_node(asked)
