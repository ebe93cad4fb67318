"""Graph passes that convert int64 values to int32, with the class names of ExecuTorch's Arm backend.

The compiler itself computes int64 values in int32 where their range is known to fit, and casts at the delegate's
boundary. Use these passes for values whose range only the user knows, or to convert a graph without a recipe:

- on ATen operators: give ``pass_(program.module()).graph_module`` to ``prepare_pt2e`` or ``torch.export.export``;
- on edge operators: call ``EdgeProgramManager.transform([pass_])``, or ``to_edge_transform_and_lower`` with
  ``transform_passes=[pass_]``. Only operators on the CPU change, because the delegates are already compiled.

A pass edits its graph module in place and returns it in a ``PassResult``. ``ToDevicePass`` is ExecuTorch's own pass.
Apply ``ToDevicePass`` to the result of ``convert_pt2e``. Then call ``torch.export.export`` with example inputs on the
device of the pass.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Literal

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.passes import ToDevicePass
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import GraphModule, Node, map_arg
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from arm_backend_core.aten.int64_range_analysis import IntervalAnalysis
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops.intervals import INT32
from arm_backend_core.scalar_kind import INTEGER_OR_BOOL, kind_of

__all__ = [
    "ConvertInt64ConstOpsToInt32Pass",
    "ConvertInt64OutputOpsToInt32Pass",
    "InsertInt32CastsAfterInt64PlaceholdersPass",
    "ToDevicePass",
]

aten = torch.ops.aten
_LOGGER = logging.getLogger(__name__)
_CREATION_OPS = (
    *(aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step),
    *(aten.eye.default, aten.linspace.default, aten.scalar_tensor.default),
)
_EDGE_CAST_OP = exir_ops.edge.dim_order_ops._to_dim_order_copy.default
_CAST_OPS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, overload_of(_EDGE_CAST_OP))
_ARG_REDUCTION_OPS = (aten.argmax.default, aten.argmin.default)
_VIEW_OPS = (
    *(aten.unsqueeze.default, aten.expand.default, aten.view.default),
    *(aten.unsqueeze_copy.default, aten.expand_copy.default, aten.view_copy.default),
)
#: Operators that accept int32 fake tensors but reject int32 at run time. Their in-place variants do the same.
_INT64_ONLY_OPS = ("one_hot", "take", "take_along_dim", "index_copy", "index_fill", "nll_loss", "cross_entropy_loss")
_ARITHMETIC_OPS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)


class _GraphModulePass:
    def __call__(self, graph_module: GraphModule) -> PassResult:
        return self.call(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        raise NotImplementedError


class ConvertInt64ConstOpsToInt32Pass(_GraphModulePass):
    """Convert int64 ``full``, ``arange``, ``eye``, ``linspace`` and ``scalar_tensor`` to int32 if all values fit."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Apply the pass. A constant with a value out of range stays int64, and a warning is logged."""
        changed = set()
        for node in graph_module.graph.nodes:
            if overload_of(node.target) not in _CREATION_OPS or _dtype(node) is not torch.int64 or node.all_input_nodes:
                continue
            values = node.target(*node.args, **node.kwargs)
            if not torch.equal(values, values.clamp(*INT32)):
                _LOGGER.warning("%s stays int64: it has values that int32 cannot hold", node.name)
                continue
            node.update_kwarg("dtype", torch.int32)
            _update_fake_result(node)
            changed.add(node)
        return _propagate_and_recompile(graph_module, changed)


class ConvertInt64OutputOpsToInt32Pass(_GraphModulePass):
    """Convert casts to int64, and the indices of ``argmax`` and ``argmin``, to int32.

    Casts: removes casts from int32 to int64. Changes other casts to int64 into casts to int32, without a check whether
    the values fit, even if the result is an output of the program.

    Indices: inserts a cast to int32 if the dimension is small enough for int32. These consumers read the cast:

    - casts, ``index``, and sums, differences and products in floating point;
    - views of the indices, and sums, differences and products of indices with each other or with scalar constants, if
      their results are known to fit int32. These operators are then computed in int32.

    Other consumers read int64 values.

    Args:
        on_overflow: what to do if an index may not fit, because the dimension has more than 2**31 - 1 elements.
            "raise": raise an error. "warn": keep int64 and log a warning. "skip": keep int64 without a warning.

    Raises:
        ValueError: ``on_overflow`` is not one of these values.
    """

    def __init__(self, on_overflow: Literal["raise", "warn", "skip"] = "raise") -> None:
        if on_overflow not in ("raise", "warn", "skip"):
            raise ValueError(f"on_overflow must be 'raise', 'warn' or 'skip'; got {on_overflow!r}")
        self._on_overflow = on_overflow

    def call(self, graph_module: GraphModule) -> PassResult:
        """Apply the pass.

        Raises:
            RuntimeError: an index may not fit, and ``on_overflow`` is "raise".
        """
        changed: set[Node] = set()
        for node in list(graph_module.graph.nodes):
            overload = overload_of(node.target)
            if not node.users or (overload not in _CAST_OPS and overload not in _ARG_REDUCTION_OPS):
                continue
            if _dtype(node) is not torch.int64:
                continue
            if overload in _ARG_REDUCTION_OPS:
                changed |= self._narrow_index_consumers(graph_module, node)
            elif _dtype(node.all_input_nodes[0]) is torch.int32:
                changed |= node.users.keys()
                node.replace_all_uses_with(node.all_input_nodes[0])
            else:
                _set_dtype(node, torch.int32)
                _update_fake_result(node)
                changed.add(node)
        return _propagate_and_recompile(graph_module, changed)

    def _narrow_index_consumers(self, module: GraphModule, source: Node) -> set[Node]:
        """Make the consumers of indices compute in int32, where the values fit. Returns the changed nodes."""
        constants = _scalar_constants(module)
        intervals = IntervalAnalysis(constants)
        if not intervals.fits_int32(source):
            message = f"{source.name} may give indices that int32 cannot hold: it searches more than 2**31 - 1 elements"
            if self._on_overflow == "raise":
                raise RuntimeError(f"{message}; ConvertInt64OutputOpsToInt32Pass(on_overflow='skip') leaves it int64")
            if self._on_overflow == "warn":
                _LOGGER.warning(message)
            return set()
        int64_nodes, consumers = _find_int32_candidates(source, constants, intervals)
        if not consumers:
            return set()
        other_users = {
            node: [user for user in node.users if user not in consumers] for node in int64_nodes if node is not source
        }
        int32_cast = _insert_cast_after(source, torch.int32, consumers)
        for constant in constants:
            if _dtype(constant) is torch.int64 and not consumers.isdisjoint(constant.users):
                _insert_cast_after(constant, torch.int32, consumers)
        for node, int64_users in other_users.items():
            if int64_users:
                _insert_cast_after(node, torch.int64, int64_users)
        return {int32_cast, *consumers}


class InsertInt32CastsAfterInt64PlaceholdersPass(_GraphModulePass):
    """Cast every int64 input and attribute to int32. The values are not checked: the user knows that they fit.

    Operators that need int64, such as ``one_hot``, read a cast back to int64. Operators that write a buffer in place
    still get the int64 buffer.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        """Insert the casts."""
        changed = set()
        for node in list(graph_module.graph.nodes):
            if node.op in ("placeholder", "get_attr") and node.users and _dtype(node) is torch.int64:
                changed.add(
                    _insert_cast_after(
                        node, torch.int32, [user for user in node.users if not _mutates_first_argument(user, node)]
                    )
                )
        return _propagate_and_recompile(graph_module, changed | {user for node in changed for user in node.users})


def _find_int32_candidates(
    source: Node, constants: dict[Node, Tensor], intervals: IntervalAnalysis
) -> tuple[dict[Node, None], set[Node]]:
    """Find int64 nodes that are computed from ``source`` and fit int32, and the consumers that can read int32."""
    int64_nodes, consumers = {source: None}, set()
    for node in source.graph.nodes:
        int64_inputs = [x for x in node.all_input_nodes if _dtype(x) is torch.int64]
        overload = overload_of(node.target)
        if not int64_nodes.keys() & int64_inputs or not all(x in int64_nodes or x in constants for x in int64_inputs):
            continue
        if _dtype(node) is torch.int64:
            if overload in (*_VIEW_OPS, *_ARITHMETIC_OPS) and intervals.fits_int32(node):
                int64_nodes[node] = None
                consumers.add(node)
        elif overload in (*_CAST_OPS, *_ARITHMETIC_OPS, aten.index.Tensor):
            consumers.add(node)
    return int64_nodes, consumers


def _scalar_constants(module: GraphModule) -> dict[Node, Tensor]:
    """Constants with one integer or boolean element.

    In edge programs, constants are inputs whose fake tensors hold the value.
    """
    numbers = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(module)
        else:
            value = getattr(node.meta.get("val"), "constant", None) if node.op == "placeholder" else None
        if isinstance(value, Tensor) and value.numel() == 1 and kind_of(value.dtype) in INTEGER_OR_BOOL:
            numbers[node] = value
    return numbers


# -- editing


def _mutates_first_argument(user: Node, node: Node) -> bool:
    overload = overload_of(user.target)
    return overload is not None and overload._schema.is_mutable and user.args[:1] == (node,)


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _dtypes(node: Node) -> list[torch.dtype | None]:
    """The dtypes of all results of a node."""
    return [getattr(value, "dtype", None) for value in pytree.tree_leaves(node.meta.get("val"))]


def _set_dtype(cast: Node, dtype: torch.dtype) -> None:
    if "dtype" in cast.kwargs:
        cast.update_kwarg("dtype", dtype)
    else:
        cast.update_arg(1, dtype)


def _insert_cast_after(node: Node, dtype: torch.dtype, consumers: Iterable[Node]) -> Node:
    """Insert a cast of ``node`` and connect ``consumers`` to it. The cast of an input goes after all inputs."""
    next_node = node.next
    while node.op == "placeholder" and next_node.op == "placeholder":
        next_node = next_node.next
    with node.graph.inserting_before(next_node):
        cast = _create_cast(node, dtype)
    for consumer in list(node.users):
        if consumer in consumers and consumer is not cast:
            consumer.replace_input_with(node, cast)
    return cast


def _create_cast(node: Node, dtype: torch.dtype) -> Node:
    is_edge_program = any(isinstance(other.target, EdgeOpOverload) for other in node.graph.nodes)
    cast = node.graph.call_function(
        _EDGE_CAST_OP if is_edge_program else aten._to_copy.default, (node,), {"dtype": dtype}
    )
    cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return cast


def _propagate_and_recompile(module: GraphModule, changed: set[Node]) -> PassResult:
    """Propagate the new dtypes to the consumers of changed nodes, and recompile the graph module."""
    if not changed:
        return PassResult(module, False)
    for node in module.graph.nodes:
        if not isinstance(node.target, (OpOverload, EdgeOpOverload)) and node.target is not operator.getitem:
            continue
        reads_changed = not changed.isdisjoint(node.all_input_nodes)
        if reads_changed and node.target is aten._assert_tensor_metadata.default:  # checks the old dtype
            module.graph.erase_node(node)
        elif node in changed or reads_changed:
            before = _dtypes(node)
            _update_fake_result(node)
            if _dtypes(node) != before:
                changed.add(node)
    eliminate_dead_code(module.graph)
    module.recompile()
    return PassResult(module, True)


def _update_fake_result(node: Node) -> None:
    """Compute the fake tensor of a node's result. Casts int32 operands to int64 if the operator rejects int32."""
    overload = overload_of(node.target)
    name = "" if overload is None else overload._schema.name.removeprefix("aten::").rstrip("_")
    if name not in _INT64_ONLY_OPS:
        try:
            node.meta["val"] = _fake_result(node)
            return
        except (RuntimeError, IndexError):
            pass
    for source in [x for x in node.all_input_nodes if _dtype(x) is torch.int32]:
        with node.graph.inserting_before(node):
            node.replace_input_with(source, _create_cast(source, torch.int64))
    node.meta["val"] = _fake_result(node)


def _fake_result(node: Node) -> Any:
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    mode = detect_fake_mode([x.meta.get("val") for x in (node, *node.all_input_nodes)])
    if mode is None:
        return target(*args, **kwargs)
    with mode:
        return target(*args, **kwargs)
