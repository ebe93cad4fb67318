"""Data-dependent shapes: rewrite masked and indexed reads of a captured program to operators with static shapes.

PyTorch gives ``x[mask]`` and ``mask.nonzero()`` a data-dependent size, even if the mask is constant. Rewrites:

- a constant mask selects the same elements in each call, so it becomes constant indices;
- a masked write of an elementwise function, ``y[mask] = f(x[mask])``, becomes ``where(mask, f(x), y)``;
- ``x[i]`` with a tensor ``i`` is traced as a view whose offset is ``i.item()``; it becomes a gather;
- if shapes determine ``i.item()``, it becomes a number: in ``x.split([length])``, ``length`` must be the size of x;
- the result of ``mask.nonzero()`` is copied to row-major order, because PyTorch returns it in column-major order, a dim
  order that the casts of ExecuTorch do not support.
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
_INDEX_PUT_OPS = (aten.index_put.default, aten.index_put_.default)
_SCALAR_READ_OPS = (aten.item.default, aten._local_scalar_dense.default)
_SIZE_CHECK_OPS = (aten._assert_scalar.default, aten.sym_constrain_range_for_size.default)


def make_shapes_static(program: ExportedProgram) -> None:
    """Apply the rewrites in place. Data-dependent shapes that match no rewrite remain.

    A program whose inputs have symbolic sizes is not changed.
    """
    if any(map(_is_data_dependent, program.graph.find_nodes(op="placeholder"))):
        return
    if _fold_determined_scalars(program.graph):
        _propagate_shapes(program.graph)
        program.graph_module.recompile()
    if _select_to_gather(program.graph):
        _propagate_shapes(program.graph)
        program.graph_module.recompile()
    if not any(map(_is_data_dependent, program.graph.nodes)):
        return
    from arm_backend_core.nodes import is_written
    from arm_backend_core.program import constants_of, lift_constants, update_output_names

    constants: dict[Node, Any] = {x: value for x, value in constants_of(program).items() if not is_written(x)}
    changed = _fold_constant_masks(program.graph_module, constants)
    changed |= _masked_writes_to_where(program.graph)
    if changed:
        lift_constants(program)
        update_output_names(program)
        _propagate_shapes(program.graph)
        program.graph_module.recompile()
    if _make_nonzero_contiguous(program.graph):
        update_output_names(program)
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
        if index.meta["val"].dtype is torch.uint8:  # PyTorch treats a uint8 index as a mask
            continue
        with graph.inserting_before(number):  # a later node may mutate the index
            if index.target not in (aten.argmax.default, aten.argmin.default):  # such an index may be negative
                wrapped = graph.call_function(aten.add.Tensor, (index, x.meta["val"].shape[dim]))
                negative = graph.call_function(aten.lt.Scalar, (index, 0))
                index = graph.call_function(aten.where.self, (negative, wrapped, index))
            index_vector = graph.call_function(aten.reshape.default, (index, [1]))
        with graph.inserting_before(node):
            selected = graph.call_function(aten.index_select.default, (x, dim, index_vector))
        node.target, node.args = aten.squeeze.dim, (selected, dim)
        if not number.users:
            graph.erase_node(number)
        changed = True
    return changed


# -- scalars that shapes determine ------------------------------------------------------------------------------


def _fold_determined_scalars(graph: Graph) -> bool:
    """Fold ``item()`` of a tensor to a number if shapes determine it, and fold the numbers that are computed from it.

    PyTorch has derived this number from shapes. For any other number, the model itself would raise an exception.
    """
    changed = False
    for node in list(graph.nodes):
        is_folded = changed and node.op == "call_function" and not isinstance(node.target, OpOverload)
        if node.target in _SCALAR_READ_OPS or is_folded:
            number = _determined_value(node.meta.get("val"))
            if number is not None:
                node.replace_all_uses_with(number)
                graph.erase_node(node)
                changed = True
    return changed


def _determined_value(value: Any) -> int | bool | None:
    """The one value that a symbolic number may have; None if there are several."""
    if isinstance(value, torch.SymInt):
        return value.node.maybe_as_int()
    if isinstance(value, torch.SymBool):
        return value.node.maybe_as_bool()
    return None


# -- constant masks ---------------------------------------------------------------------------------------------


def _fold_constant_masks(module: GraphModule, constants: dict[Node, Any]) -> bool:
    """Replace constant masks by constant indices, and constant tensors of data-dependent size by their values."""
    from arm_backend_core.graph_edits import add_buffer_node
    from arm_backend_core.nodes import evaluate_node, is_constant, is_written

    def add_index_buffers(mask: Tensor) -> list[Node]:
        return [add_buffer_node(module, "_chosen", column) for column in mask.nonzero(as_tuple=True)]

    changed = False
    for node in list(module.graph.nodes):
        if node.op == "call_function" and is_constant(node, constants) and not is_written(node):
            constants[node] = evaluate_node(node, constants.__getitem__)
            if _is_data_dependent(node) and isinstance(constants[node], Tensor):
                with module.graph.inserting_before(node):
                    node.replace_all_uses_with(add_buffer_node(module, f"{node.name}_value", constants[node]))
                changed = True
        elif node.target is aten.index.Tensor and _is_data_dependent(node):
            with module.graph.inserting_before(node):
                index_groups = [
                    add_index_buffers(constants[x]) if _is_mask(x) and x in constants else [x] for x in node.args[1]
                ]
            node.args = (node.args[0], [x for group in index_groups for x in group])
            changed = True
        elif node.target is aten.masked_select.default and node.args[1] in constants:
            x, mask = torch.broadcast_tensors(node.args[0].meta["val"], constants[node.args[1]])
            with module.graph.inserting_before(node):
                expanded = module.graph.call_function(aten.expand.default, (node.args[0], list(x.shape)))
                node.target, node.args = aten.index.Tensor, (expanded, add_index_buffers(mask))
            changed = True
    return changed


def _is_mask(x: Any) -> bool:
    return isinstance(x, Node) and x.meta["val"].dtype is torch.bool


# -- computed masks -----------------------------------------------------------------------------------------------


def _masked_writes_to_where(graph: Graph) -> bool:
    """Rewrite ``y[mask] = f(x[mask])`` to ``where(mask, f(x), y)``, for elementwise functions ``f``."""
    from arm_backend_core.nodes import has_mutable_schema

    order = {node: position for position, node in enumerate(graph.nodes)}
    writes = [position for node, position in order.items() if has_mutable_schema(node)]

    def is_same_mask(one: Node, other: Node) -> bool:
        """Whether two masks are equal: they are the same expression, and no node between them mutates a tensor."""
        begin, end = sorted((order[one], order[other]))
        equal = (one.target, one.args, one.kwargs) == (other.target, other.args, other.kwargs)
        return one is other or (equal and not any(begin < position < end for position in writes))

    changed = False
    for node in list(graph.nodes):
        if (
            node.target not in _INDEX_PUT_OPS
            or not _is_data_dependent(node.args[2])
            or (len(node.args) > 3 and node.args[3])
        ):
            continue
        target, indices, value = node.args[:3]
        *leading, mask = indices
        if any(x is not None for x in leading) or not _is_mask(mask):
            continue
        unmasked_copy = _UnmaskedCopy(graph, target.meta["val"].shape, len(leading), mask, is_same_mask)
        if not unmasked_copy.is_computable(value):
            continue
        shape = [1] * len(leading) + list(mask.meta["val"].shape)
        shape += [1] * (target.meta["val"].dim() - len(shape))
        unmasked_value = unmasked_copy(value)
        with graph.inserting_before(node):
            broadcast_mask = graph.call_function(aten.reshape.default, (mask, shape))
            new = graph.call_function(aten.where.self, (broadcast_mask, unmasked_value, target))
        for each in (broadcast_mask, new):
            each.meta = {key: item for key, item in node.meta.items() if key != "val"}
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
        graph: the graph, which is edited.
        shape: shape of ``x``.
        leading_rank: number of dimensions of ``x`` before the mask's dimensions.
        mask: the mask.
        is_same_mask: whether two masks are equal.
    """

    def __init__(
        self, graph: Graph, shape: torch.Size, leading_rank: int, mask: Node, is_same_mask: Callable[[Node, Node], bool]
    ) -> None:
        self._graph, self._shape = graph, shape
        self._leading_rank, self._mask, self._is_same_mask = leading_rank, mask, is_same_mask
        #: Number of dimensions of ``x`` after the mask's dimensions. Other operands may vary only along these.
        self._trailing_rank = len(shape) - leading_rank - mask.meta["val"].dim()
        self._copies: dict[Node, Node] = {}

    def is_computable(self, x: Node) -> bool:
        """Whether ``x`` is an elementwise function of elements that the mask selects."""
        pending, seen = [x], set[Node]()
        while pending:
            node = pending.pop()
            if not _is_data_dependent(node):
                operand = node.meta["val"]
                if operand.numel() != 1 and operand.dim() > self._trailing_rank:
                    return False
                continue
            if node in seen:
                continue
            seen.add(node)
            if self._is_masked_read(node):
                continue
            if not is_elementwise(node):
                return False
            pending += node.all_input_nodes
        return True

    def _is_masked_read(self, node: Node) -> bool:
        if node.target is not aten.index.Tensor:
            return False
        args: Any = node.args
        source, (*leading, mask) = args
        is_same_shape = source.meta["val"].shape == self._shape and leading == [None] * self._leading_rank
        return is_same_shape and _is_mask(mask) and self._is_same_mask(mask, self._mask)

    def __call__(self, x: Node) -> Node:
        """Copy the computation of ``x`` for all elements. Each node is copied once, in front of the original."""
        sources = _data_dependent_sources(x)
        for node in [node for node in self._graph.nodes if node in sources and node not in self._copies]:
            with self._graph.inserting_before(node):
                if self._is_masked_read(node):  # clone, because a node may mutate the source before the copy is read
                    copy = self._graph.call_function(aten.clone.default, (node.args[0],))
                else:
                    copy = self._graph.node_copy(node, lambda x: self._copies.get(x, x))
            copy.meta = {key: item for key, item in node.meta.items() if key != "val"}
            self._copies[node] = copy
        return self._copies[x]


def _data_dependent_sources(x: Node) -> set[Node]:
    """Return ``x`` and its transitive operands with data-dependent sizes."""
    sources, pending = {x}, [x]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in sources and _is_data_dependent(node):
                sources.add(node)
                pending.append(node)
    return sources


def is_elementwise(node: Node) -> bool:
    """Whether an operator is elementwise and does not mutate its operands."""
    overload = node.target
    pointwise = isinstance(overload, OpOverload) and torch.Tag.pointwise in overload.tags
    return pointwise and not overload._schema.is_mutable  # type: ignore[union-attr]


# -- layout of nonzero --------------------------------------------------------------------------------------------


def _make_nonzero_contiguous(graph: Graph) -> bool:
    """Insert a row-major copy after each ``nonzero`` whose operand has several dimensions. Its users read the copy."""
    changed = False
    for node in graph.find_nodes(op="call_function", target=aten.nonzero.default):
        value = node.meta["val"]
        if value.shape[1] < 2 or not node.users:
            continue
        with graph.inserting_after(node):
            rows = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        node.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)
        rows.meta = {key: item for key, item in node.meta.items() if key != "unbacked_bindings"}
        with value.fake_mode:
            rows.meta["val"] = value.clone(memory_format=torch.contiguous_format)
        changed = True
    return changed


# -- shape propagation ------------------------------------------------------------------------------------------


def _propagate_shapes(graph: Graph) -> None:
    """Propagate the static shapes, and remove all checks of sizes."""
    from arm_backend_core.graph_edits import eliminate_dead_code

    mode = next((x.meta["val"].fake_mode for x in graph.nodes if hasattr(x.meta.get("val"), "fake_mode")), None)
    for node in reversed(graph.nodes):  # after the rewrites, only size checks read the masked elements
        if node.target in _SIZE_CHECK_OPS:
            _erase_size_check(graph, node)
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


def _erase_size_check(graph: Graph, node: Node) -> None:
    condition = node.args[0]
    graph.erase_node(node)
    if isinstance(condition, Node) and condition.target in (operator.ge, operator.le) and not condition.users:
        graph.erase_node(condition)
