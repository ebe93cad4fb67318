"""Emitter: inserts kernel calls, data movement and constants into the graph of a program."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node

from arm_backend_core.cortex_m.catalog import find_kernel
from arm_backend_core.cortex_m.custom_ops import kernel_operator
from arm_backend_core.cortex_m.kernels.movement import MAX_RANK, is_padded_as_channels_last
from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.errors import Unsupported
from arm_backend_core.graph_edits import add_buffer_node
from arm_backend_core.permutation import Layout, compose, identity, inverse, merge_axes
from arm_backend_core.targets.cortex_m import Isa

aten = torch.ops.aten


class KernelLimitation(Unsupported):
    """With these arguments, CMSIS-NN's kernel would fail, compute wrong results or write outside its result."""


class Emitter:
    """Inserts nodes before the node that is being lowered.

    Args:
        module: module of the program's graph. Constants become its buffers.
        isa: instruction set of the kernels.
    """

    def __init__(self, module: GraphModule, isa: Isa) -> None:
        self._module, self._isa = module, isa
        self._constants: dict[tuple[Any, ...], Node] = {}
        self._materialized: dict[tuple[Node, Layout], Node] = {}
        self._position: Node | None = None
        self._meta: dict[str, Any] = {}

    def set_insertion_point(self, position: Node, origin: Node) -> None:
        """Insert the next nodes before ``position``. They get the trace metadata of ``origin``."""
        self._position, self._meta = position, {key: value for key, value in origin.meta.items() if key != "val"}

    def call_kernel(self, name: str, *arguments: Any) -> Node:
        """Call a kernel; ``arguments`` are the arguments of its schema without the scratch tensors. The result is int8.

        Raises:
            KernelLimitation: CMSIS-NN's kernel cannot compute these arguments (``Kernel.find_limitation``).
        """
        limitation = self._find_limitation(name, arguments)
        if limitation is not None:
            raise KernelLimitation(limitation)
        return self.call(kernel_operator(name), *arguments)

    def _find_limitation(self, name: str, arguments: tuple[Any, ...]) -> str | None:
        shapes = torch.fx.map_arg(arguments, lambda x: tuple(x.meta["val"].shape))
        return find_kernel(name).find_limitation(self._isa, *shapes)

    def call(self, target: Any, *arguments: Any, **options: Any) -> Node:
        """Call an operator; shapes and types of its results are inferred."""
        position = self._position
        assert position is not None
        with position.graph.inserting_before(position):
            node = position.graph.call_function(target, arguments, options)
        node.meta = dict(self._meta)
        values = torch.fx.map_arg(arguments, lambda x: x.meta["val"])
        meta = torch.utils._pytree.tree_map_only(torch.Tensor, _to_meta, values)
        result = target(*meta, **options)
        like = next(x for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
        node.meta["val"] = torch.utils._pytree.tree_map(lambda x: like.new_empty(x.shape, dtype=x.dtype), result)
        return node

    def select_result(self, node: Node, index: int) -> Node:
        """Select result ``index`` of ``node``, an operator with several results."""
        assert self._position is not None
        with self._position.graph.inserting_before(self._position):
            result = node.graph.call_function(operator.getitem, (node, index))
        result.meta = {**node.meta, "val": node.meta["val"][index]}
        return result

    def constant(self, data: Array, name: str) -> Node:
        """A constant tensor. Equal constants share one buffer."""
        array = np.array(data, order="C")  # not ascontiguousarray, which keeps strides of 0 in dimensions of size 1
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            position = self._position
            assert position is not None
            first = next(node for node in position.graph.nodes if node.op != "placeholder")
            with position.graph.inserting_before(first):
                node = add_buffer_node(self._module, f"cortex_m_{name}", torch.from_numpy(array))
            node.meta["val"] = position.meta["val"].new_empty(array.shape, dtype=torch.from_numpy(array).dtype)
            self._constants[key] = node
        return self._constants[key]

    def materialize(self, value: QuantizedValue, layout: Layout | None = None) -> Node:
        """The tensor of ``value``, with its dimensions in the order ``layout`` (default: the program's).

        A tensor is transposed to each order only once.
        """
        layout = identity(value.rank) if layout is None else layout
        if value.data is not None:
            return self.constant(value.data.transpose(layout), "operand")
        assert value.node is not None
        if layout == value.layout:
            return value.node
        order = compose(inverse(value.layout), layout)
        key = (value.node, order)  # not the value: values of other shapes may have the same node
        if key not in self._materialized:
            self._materialized[key] = self.transpose(value.node, order)
        return self._materialized[key]

    def transpose(self, node: Node, order: Layout) -> Node:
        """Transpose a tensor: dimension i of the result is dimension ``order[i]`` of ``node``.

        The result is a view if only dimensions of size 1 change their order.
        """
        shape = tuple(node.meta["val"].shape)
        target = tuple(shape[axis] for axis in order)
        merged_shape, merged_order = merge_axes(shape, order)
        if merged_order == identity(len(merged_order)):
            return self.reshape(node, target)
        if self._find_transpose_limitation(merged_shape, merged_order) and len(merged_shape) == 2:
            # Transpose a tensor of rank 3 instead: the kernel's code for rank 3 does not limit the sizes.
            merged_shape, merged_order = (1, *merged_shape), (0, 2, 1)
        merged, axes = self.reshape(node, merged_shape), list(merged_order)
        if self._find_transpose_limitation(merged_shape, merged_order) is None:
            moved = self.call_kernel("transpose", merged, axes)
        else:
            moved = self.call(aten.permute_copy.default, merged, axes)
        return self.reshape(moved, target)

    def _find_transpose_limitation(self, shape: Sequence[int], order: Layout) -> str | None:
        return find_kernel("transpose").find_limitation(self._isa, shape, order)

    def reshape(self, node: Node, shape: Sequence[int]) -> Node:
        """A view with another shape; no operator if the shape is equal."""
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        return self.call(aten.view_copy.default, node, list(shape))

    def pad(self, node: Node, before: Sequence[int], after: Sequence[int], value: int) -> Node:
        """Pad dimensions with the integer ``value``. Negative amounts crop."""
        node = self._crop(node, [-min(x, 0) for x in before], [-min(x, 0) for x in after])
        before, after = ([max(x, 0) for x in amounts] for amounts in (before, after))
        padded = [axis for axis in range(len(before)) if before[axis] or after[axis]]
        if not padded:
            return node
        shape = tuple(node.meta["val"].shape)
        result = [low + size + high for low, size, high in zip(before, shape, after, strict=True)]
        # A dimension without padding is merged with the dimension before it. The kernel supports at most four
        # dimensions, and must not mistake the merged shape for an image in channels_last memory format. If the merged
        # shape is unsuitable, a separate call pads the last padded dimension.
        starts = sorted({0, *padded})
        groups = [shape[start:end] for start, end in zip(starts, [*starts[1:], len(shape)], strict=True)]
        merged = [math.prod(sizes) for sizes in groups]
        if len(merged) > MAX_RANK or is_padded_as_channels_last(merged):
            last = padded[-1]
            node = self.pad(node, _only(before, last), _only(after, last), value)
            return self.pad(node, _except(before, last), _except(after, last), value)
        missing = [0] * (MAX_RANK - len(merged))
        pads = [
            missing + [amounts[start] * math.prod(sizes[1:]) for start, sizes in zip(starts, groups, strict=True)]
            for amounts in (before, after)
        ]
        return self.reshape(self.call_kernel("pad", self.reshape(node, merged), *pads, value), result)

    def _crop(self, node: Node, before: Sequence[int], after: Sequence[int]) -> Node:
        for axis, (low, high) in enumerate(zip(before, after, strict=True)):
            if low or high:
                end = node.meta["val"].shape[axis] - high
                node = self.call(aten.slice_copy.Tensor, node, axis, low, end, 1)
        return node

    def expand(self, node: Node, shape: Sequence[int]) -> Node:
        """Repeat dimensions of size 1 to ``shape``; no operator if the shape is equal."""
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        return self.call(aten.expand_copy.default, node, list(shape))


def _only(amounts: Sequence[int], axis: int) -> list[int]:
    return [amount if index == axis else 0 for index, amount in enumerate(amounts)]


def _except(amounts: Sequence[int], axis: int) -> list[int]:
    return [0 if index == axis else amount for index, amount in enumerate(amounts)]


def _to_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")
