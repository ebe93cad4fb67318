"""int64 to int32 passes, with the names of ExecuTorch's Arm backend.

The compiler itself computes int64 values in int32 where their range is known to fit, and casts at the delegate's
boundary. These passes are for values whose range only the user knows, and for graphs that need int32 without recipes:

- on ATen operators, ``pass_(program.module()).graph_module`` is an argument of ``prepare_pt2e`` or
  ``torch.export.export``;
- on edge operators, ``EdgeProgramManager.transform([pass_])`` and ``transform_passes=[pass_]`` of
  ``to_edge_transform_and_lower`` change only what stays on the CPU, because delegates exist already.

A pass edits its argument in place and returns it. ``ToDevicePass`` is ExecuTorch's own: apply it between
``convert_pt2e`` and another export, with inputs on that device.
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

from arm_backend_core.aten.int64 import Intervals
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.kinds import INTEGER_OR_BOOL, kind_of
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops.intervals import INT32

__all__ = [
    "ConvertInt64ConstOpsToInt32Pass",
    "ConvertInt64OutputOpsToInt32Pass",
    "InsertInt32CastsAfterInt64PlaceholdersPass",
    "ToDevicePass",
]

aten = torch.ops.aten
_LOGGER = logging.getLogger(__name__)
_CREATORS = (
    *(aten.full.default, aten.arange.default, aten.arange.start, aten.arange.start_step),
    *(aten.eye.default, aten.linspace.default, aten.scalar_tensor.default),
)
_EDGE_CAST = exir_ops.edge.dim_order_ops._to_dim_order_copy.default
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, overload_of(_EDGE_CAST))
_INDICES = (aten.argmax.default, aten.argmin.default)
_MOVES = (
    *(aten.unsqueeze.default, aten.expand.default, aten.view.default),
    *(aten.unsqueeze_copy.default, aten.expand_copy.default, aten.view_copy.default),
)
#: Operators, in place or not, that reject int32 only at run time; other such operators also reject fake tensors.
_INT64_ALONE = ("one_hot", "take", "take_along_dim", "index_copy", "index_fill", "nll_loss", "cross_entropy_loss")
_ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)


class _Pass:
    def __call__(self, graph_module: GraphModule) -> PassResult:
        return self.call(graph_module)

    def call(self, graph_module: GraphModule) -> PassResult:
        raise NotImplementedError


class ConvertInt64ConstOpsToInt32Pass(_Pass):
    """Convert int64 ``full``, ``arange``, ``eye``, ``linspace`` and ``scalar_tensor`` to int32 if all values fit."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Apply the pass. A constant with a value out of range stays int64, and a warning is logged."""
        changed = set()
        for node in graph_module.graph.nodes:
            if overload_of(node.target) not in _CREATORS or _dtype(node) is not torch.int64 or node.all_input_nodes:
                continue
            values = node.target(*node.args, **node.kwargs)
            if not torch.equal(values, values.clamp(*INT32)):
                _LOGGER.warning("%s stays int64: it has values that int32 cannot hold", node.name)
                continue
            node.update_kwarg("dtype", torch.int32)
            _evaluate(node)
            changed.add(node)
        return _finished(graph_module, changed)


class ConvertInt64OutputOpsToInt32Pass(_Pass):
    """Convert operators with int64 results to int32 if the result is known to fit.

    Removes casts from int32 to int64. Other casts to int64 become casts to int32, also for outputs of the program.
    Data movement of the indices of ``argmax`` and ``argmin``, and addition, subtraction and multiplication with
    numbers, are computed in int32 as far as the range fits, and cast back to int64 elsewhere.

    Args:
        on_overflow: what to do if an index may not fit, because the dimension has more than 2**31 - 1 elements:
            "raise" an error, keep int64 and "warn", or keep int64 and "skip" the warning.

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
            if not node.users or (overload not in _CASTS and overload not in _INDICES):
                continue
            if _dtype(node) is not torch.int64:
                continue
            if overload in _INDICES:
                changed |= self._indices(graph_module, node)
            elif _dtype(node.all_input_nodes[0]) is torch.int32:
                changed |= node.users.keys()
                node.replace_all_uses_with(node.all_input_nodes[0])
            else:
                _set_dtype(node, torch.int32)
                _evaluate(node)
                changed.add(node)
        return _finished(graph_module, changed)

    def _indices(self, module: GraphModule, source: Node) -> set[Node]:
        """Compute the consumers of indices in int32 as far as they fit; returns the changed nodes."""
        constants = _numbers(module)
        intervals = Intervals(constants)
        if not intervals.fits_int32(source):
            message = f"{source.name} may give indices that int32 cannot hold: it searches more than 2**31 - 1 elements"
            if self._on_overflow == "raise":
                raise RuntimeError(f"{message}; ConvertInt64OutputOpsToInt32Pass(on_overflow='skip') leaves it int64")
            if self._on_overflow == "warn":
                _LOGGER.warning(message)
            return set()
        reached, readers = _reached(source, constants, intervals)
        if not readers:
            return set()
        users = {node: [user for user in node.users if user not in readers] for node in reached if node is not source}
        narrow = _cast_after(source, torch.int32, readers)
        for constant in constants:
            if _dtype(constant) is torch.int64 and not readers.isdisjoint(constant.users):
                _cast_after(constant, torch.int32, readers)
        for node, others in users.items():
            if others:
                _cast_after(node, torch.int64, others)
        return {narrow, *readers}


class InsertInt32CastsAfterInt64PlaceholdersPass(_Pass):
    """Cast every int64 input and attribute to int32. The values are not checked: the user knows that they fit.

    Operators that need int64 (``one_hot``, ``index_copy``) read a cast back to int64. Operators that write a buffer
    use the buffer itself.
    """

    def call(self, graph_module: GraphModule) -> PassResult:
        """Insert the casts."""
        changed = set()
        for node in list(graph_module.graph.nodes):
            if node.op in ("placeholder", "get_attr") and node.users and _dtype(node) is torch.int64:
                changed.add(_cast_after(node, torch.int32, [user for user in node.users if not _writes(user, node)]))
        return _finished(graph_module, changed | {user for node in changed for user in node.users})


def _reached(source: Node, constants: dict[Node, Tensor], intervals: Intervals) -> tuple[dict[Node, None], set[Node]]:
    """Nodes with int64 values that are computed from ``source`` and fit int32, and their possible int32 consumers."""
    reached, readers = {source: None}, set()
    for node in source.graph.nodes:
        wide = [x for x in node.all_input_nodes if _dtype(x) is torch.int64]
        overload = overload_of(node.target)
        if not reached.keys() & wide or not all(x in reached or x in constants for x in wide):
            continue
        if _dtype(node) is torch.int64:
            if overload in (*_MOVES, *_ARITHMETIC) and intervals.fits_int32(node):
                reached[node] = None
                readers.add(node)
        elif overload in (*_CASTS, *_ARITHMETIC, aten.index.Tensor):
            readers.add(node)
    return reached, readers


def _numbers(module: GraphModule) -> dict[Node, Tensor]:
    """Constants with a single integer. Edge programs have them as inputs whose fake tensors hold the value."""
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


def _writes(user: Node, node: Node) -> bool:
    overload = overload_of(user.target)
    return overload is not None and overload._schema.is_mutable and user.args[0] is node


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


def _cast_after(node: Node, dtype: torch.dtype, readers: Iterable[Node]) -> Node:
    """Insert a cast of ``node`` that ``readers`` read instead; a cast of an input goes after all inputs."""
    place = node.next
    while node.op == "placeholder" and place.op == "placeholder":
        place = place.next
    with node.graph.inserting_before(place):
        cast = _cast(node, dtype)
    for reader in list(node.users):
        if reader in readers and reader is not cast:
            reader.replace_input_with(node, cast)
    return cast


def _cast(node: Node, dtype: torch.dtype) -> Node:
    edge = any(isinstance(other.target, EdgeOpOverload) for other in node.graph.nodes)
    cast = node.graph.call_function(_EDGE_CAST if edge else aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return cast


def _finished(module: GraphModule, changed: set[Node]) -> PassResult:
    """Propagate the dtypes of changed nodes and recompile the graph."""
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
            _evaluate(node)
            if _dtypes(node) != before:
                changed.add(node)
    eliminate_dead_code(module.graph)
    module.recompile()
    return PassResult(module, True)


def _evaluate(node: Node) -> None:
    """Compute the fake result of a node; casts the operands to int64 if the operator rejects int32."""
    overload = overload_of(node.target)
    name = "" if overload is None else overload._schema.name.removeprefix("aten::").rstrip("_")
    if name not in _INT64_ALONE:
        try:
            node.meta["val"] = _fake_result(node)
            return
        except (RuntimeError, IndexError):
            pass
    for source in [x for x in node.all_input_nodes if _dtype(x) is torch.int32]:
        with node.graph.inserting_before(node):
            node.replace_input_with(source, _cast(source, torch.int64))
    node.meta["val"] = _fake_result(node)


def _fake_result(node: Node) -> Any:
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    mode = detect_fake_mode([x.meta.get("val") for x in (node, *node.all_input_nodes)])
    if mode is None:
        return target(*args, **kwargs)
    with mode:
        return target(*args, **kwargs)
