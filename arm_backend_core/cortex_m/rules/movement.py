"""Data movement: operators that copy the operand's integers to another order or shape, without arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import MULTI_RESULT_RULES, KernelContext, rule
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import arguments_of, is_dequantize, is_float, overload_of
from arm_backend_core.permutation import Layout, inverse

aten = torch.ops.aten

#: Number of elements up to which a computed index tensor is always folded to a constant. A larger index is folded only
#: if one of the operands that it is computed from has at least as many elements as the index. Otherwise, the constant
#: would need more flash than any of these operands.
_MAX_FOLDED_INDEX = 1024


def _requantized_operand(cx: KernelContext, argument: Any) -> QuantizedValue:
    """Requantize the operand to the result's quantization parameters."""
    return cx.requantize(cx.operand(argument), cx.result.q)


@rule(aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default)
def permute(cx: KernelContext) -> QuantizedValue:
    """A permutation needs no operator: only the layout of the value changes, until a reader needs another layout."""
    x = _requantized_operand(cx, cx.node.args[0])
    order = list(range(x.rank))
    if cx.node.target is aten.permute.default:
        order = [x.normalize_dim(axis) for axis in arguments_of(cx.node)["dims"]]
    elif cx.node.target is aten.transpose.int:
        first, second = (x.normalize_dim(int(axis)) for axis in cx.node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = second, first
    else:
        order.reverse()
    if x.data is not None:
        return QuantizedValue.from_constant(x.data.transpose(order), x.q)
    new_axis = inverse(tuple(order))
    shape = tuple(x.shape[axis] for axis in order)
    return QuantizedValue(x.q, shape, tuple(new_axis[axis] for axis in x.layout), node=x.node)


@rule(
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims, aten.unsqueeze.default),
)
def reshape(cx: KernelContext) -> QuantizedValue:
    """A view. The layout is kept if no element changes its place."""
    x, shape = _requantized_operand(cx, cx.node.args[0]), tuple(cx.node.meta["val"].shape)
    if x.data is not None:
        return QuantizedValue.from_constant(x.data.reshape(shape), x.q)
    layout = _layout_of_view(x, shape)
    if layout is None:
        return cx.make_result(cx.emit.reshape(cx.emit.materialize(x), shape))
    assert x.node is not None
    return cx.make_result(cx.emit.reshape(x.node, [shape[axis] for axis in layout]), layout)


def _layout_of_view(x: QuantizedValue, shape: tuple[int, ...]) -> Layout | None:
    """The layout of ``x`` after a view as ``shape``; None if the elements would have to be moved.

    They would have to be moved if the view merges dimensions of ``x`` that are not adjacent, in ascending order, in the
    layout of ``x``. Dimensions of size 1 do not matter. Also None if there are no elements.
    """
    groups = _group_dimensions(x.shape, shape)
    if groups is None:
        return None
    stored = [axis for axis in x.layout if x.shape[axis] != 1]
    layout = [axis for axis, size in enumerate(shape) if size == 1]
    while stored:
        old, new = groups.get(stored[0], ([], []))
        if not old or stored[: len(old)] != old:
            return None
        layout += new
        del stored[: len(old)]
    return tuple(layout)


def _group_dimensions(shape: Sequence[int], view: Sequence[int]) -> dict[int, tuple[list[int], list[int]]] | None:
    """Split the dimensions of a shape and of its view into the smallest groups that index the same elements.

    Returns:
        {first dimension of the shape in a group: (dimensions of the shape, dimensions of the view)}, without dimensions
        of size 1. For a shape [2, 3, 4] that is viewed as [6, 4]: {0: ([0, 1], [0]), 2: ([2], [1])}. None if there are
        no elements.
    """
    old, new = ([axis for axis, size in enumerate(sizes) if size != 1] for sizes in (shape, view))
    if 0 in shape:
        return None
    groups: dict[int, tuple[list[int], list[int]]] = {}
    while old:
        parts = [old.pop(0)], [new.pop(0)]
        while True:
            sizes = [math.prod(whole[axis] for axis in part) for whole, part in zip((shape, view), parts, strict=True)]
            if sizes[0] == sizes[1]:
                break
            shorter = int(sizes[0] > sizes[1])
            parts[shorter].append((old, new)[shorter].pop(0))
        groups[parts[0][0]] = parts
    return groups


@rule(aten.contiguous.default, aten.clone.default, aten.alias.default, aten._to_copy.default, aten.detach.default)
def copy(cx: KernelContext) -> QuantizedValue:
    """A copy needs no operator: the result is the operand, requantized if the quantization parameters differ."""
    return _requantized_operand(cx, cx.node.args[0])


@rule(aten.cat.default, aten.concat.default)
def concatenate(cx: KernelContext) -> QuantizedValue:
    """Concatenation, in the layout of the largest operand."""
    arguments = arguments_of(cx.node)
    operands: Any = cx.node.args[0]
    values = [_requantized_operand(cx, operand) for operand in operands if operand.meta["val"].numel()]
    if not values:
        raise Unsupported("no operand has an element")
    largest = max(values, key=lambda value: (value.data is None, math.prod(value.shape)))
    layout, dim = largest.layout, largest.normalize_dim(int(arguments["dim"]))
    tensors = [cx.emit.materialize(value, layout) for value in values]
    return cx.make_result(cx.emit.call(aten.cat.default, tensors, layout.index(dim)), layout)


@rule(aten.slice.Tensor)
def slice_dimension(cx: KernelContext) -> QuantizedValue:
    """A slice along a dimension."""
    arguments = arguments_of(cx.node)
    x = _requantized_operand(cx, cx.node.args[0])
    return _slice(cx, x, int(arguments["dim"]), arguments["start"], arguments["end"], arguments["step"])


def _slice(
    cx: KernelContext, x: QuantizedValue, dim: int, start: int | None, end: int | None, step: int = 1
) -> QuantizedValue:
    """A slice along dimension ``dim``, in the layout of ``x``."""
    stored, axis = cx.emit.materialize(x, x.layout), x.layout.index(x.normalize_dim(dim))
    return cx.make_result(cx.emit.call(aten.slice_copy.Tensor, stored, axis, start, end, step), x.layout)


@rule(aten.select.int)
def select_index(cx: KernelContext) -> QuantizedValue:
    """Select one index along a dimension, which is removed from the result."""
    arguments = arguments_of(cx.node)
    return _select(cx, _requantized_operand(cx, cx.node.args[0]), int(arguments["dim"]), arguments["index"])


def _select(cx: KernelContext, x: QuantizedValue, dim: int, index: int) -> QuantizedValue:
    """Select one index along dimension ``dim``; the result has the layout of ``x`` without this dimension."""
    dim = x.normalize_dim(dim)
    node = cx.emit.call(aten.select_copy.int, cx.emit.materialize(x, x.layout), x.layout.index(dim), index)
    return cx.make_result(node, [axis - (axis > dim) for axis in x.layout if axis != dim])


@rule(
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.tensor_split.sections),
    *(aten.tensor_split.indices, aten.unbind.int),
    table=MULTI_RESULT_RULES,
)
def select_chunk(cx: KernelContext) -> QuantizedValue:
    """One chunk of a tensor that is split along a dimension: a slice, or for ``unbind`` one index."""
    source, index = cx.node.all_input_nodes[0], cast(int, cx.node.args[1])
    x = _requantized_operand(cx, source.args[0])
    dim = x.normalize_dim(int(arguments_of(source)["dim"]))
    if source.target is aten.unbind.int:
        return _select(cx, x, dim, index)
    sizes = [part.shape[dim] for part in source.meta["val"]]
    return _slice(cx, x, dim, sum(sizes[:index]), sum(sizes[: index + 1]))


@rule(aten.topk.default, aten.sort.default, aten.max.dim, aten.min.dim, table=MULTI_RESULT_RULES)
def select_by_order(cx: KernelContext) -> QuantizedValue:
    """Compute ``topk``, ``sort``, ``max`` or ``min`` on int8.

    The int8 operator also computes the indices; their readers are redirected to it.
    """
    source, index = cx.node.all_input_nodes[0], cast(int, cx.node.args[1])
    x = _requantized_operand(cx, source.args[0])
    ordered = cx.emit.call(source.target, cx.emit.materialize(x), *source.args[1:], **source.kwargs)
    for part in list(source.users):
        if part.args[1] != index and part.users:
            part.replace_all_uses_with(cx.emit.select_result(ordered, cast(int, part.args[1])))
    return cx.make_result(cx.emit.select_result(ordered, index))


_EDGE_PADS = {
    getattr(aten, f"{kind}_pad{rank}d").default: mode
    for kind, mode in (("reflection", "reflect"), ("replication", "replicate"))
    for rank in (1, 2, 3)
}


@rule(aten.constant_pad_nd.default, aten.pad.default, *_EDGE_PADS)
def pad(cx: KernelContext) -> QuantizedValue:
    """Padding with elements of the operand, or with a constant, which is quantized to the result's parameters."""
    arguments = arguments_of(cx.node)
    x = _requantized_operand(cx, cx.node.args[0])
    amounts: list[int] = list(arguments["pad" if "pad" in arguments else "padding"])
    mode = _EDGE_PADS.get(overload_of(cx.node.target), arguments.get("mode", "constant"))
    if mode != "constant":
        return _pad_with_elements(cx, x, amounts, mode)
    before, after = [0] * x.rank, [0] * x.rank
    for number in range(len(amounts) // 2):
        before[x.rank - 1 - number], after[x.rank - 1 - number] = amounts[2 * number : 2 * number + 2]
    value = int(x.q.quantize(np.array(float(arguments["value"] or 0.0))))
    low, high = ([sides[axis] for axis in x.layout] for sides in (before, after))
    return cx.make_result(cx.emit.pad(cx.emit.materialize(x, x.layout), low, high, value), x.layout)


def _pad_with_elements(cx: KernelContext, x: QuantizedValue, amounts: list[int], mode: str) -> QuantizedValue:
    """Padding with elements of ``x``: for each padded dimension, an ``index_select`` with a constant index.

    Args:
        cx: the context.
        x: the operand.
        amounts: elements before and after the last dimension, then before and after the second to last, and so on, as
            in ``torch.nn.functional.pad``.
        mode: "reflect", "replicate" or "circular".
    """
    node = cx.emit.materialize(x, x.layout)
    for number, pair in enumerate(zip(amounts[::2], amounts[1::2], strict=True)):
        dim = x.rank - 1 - number
        positions = torch.arange(x.shape[dim], dtype=torch.float64).reshape(1, 1, -1)
        chosen = torch.nn.functional.pad(positions, pair, mode).flatten().to(torch.int64)
        if any(pair):
            index = cx.emit.constant(chosen.numpy(), "index")
            node = cx.emit.call(aten.index_select.default, node, x.layout.index(dim), index)
    return cx.make_result(node, x.layout)


@rule(aten.roll.default)
def roll(cx: KernelContext) -> QuantizedValue:
    """Circular shift along dimensions: the last elements become the first, by two slices and a concatenation."""
    arguments = arguments_of(cx.node)
    x, dims = _requantized_operand(cx, cx.node.args[0]), list(arguments["dims"])
    if dims:
        node, axes = cx.emit.materialize(x, x.layout), [x.layout.index(x.normalize_dim(dim)) for dim in dims]
    else:
        node, axes = cx.emit.reshape(cx.emit.materialize(x), (math.prod(x.shape),)), [0]
    for axis, shift in zip(axes, arguments["shifts"], strict=True):
        size = node.meta["val"].shape[axis]
        if first := -shift % size:
            parts = [cx.emit.call(aten.slice_copy.Tensor, node, axis, *ends, 1) for ends in ((first, size), (0, first))]
            node = cx.emit.call(aten.cat.default, parts, axis)
    if dims:
        return cx.make_result(node, x.layout)
    return cx.make_result(cx.emit.reshape(node, x.shape))


@rule(aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.vec)
def upsample_nearest(cx: KernelContext) -> QuantizedValue:
    """Nearest-neighbour interpolation of an NHWC image: rows and columns are repeated or selected."""
    x = _requantized_operand(cx, cx.node.args[0])
    n, channels, height, width = x.shape
    positions = torch.arange(height * width, dtype=torch.float64).reshape(1, 1, height, width)
    chosen = cx.node.target(positions, *cx.node.args[1:], **cx.node.kwargs)[0, 0].to(torch.int64)  # type: ignore[operator]
    rows, columns = (chosen[:, 0] // width).numpy(), (chosen[0] % width).numpy()
    image = cx.emit.materialize(x, (0, 2, 3, 1))
    factors = len(rows) // height, len(columns) // width
    repeated = (n, height, factors[0], width, factors[1], channels)
    if all(
        np.array_equal(index, np.repeat(np.arange(size), factor))
        for index, size, factor in zip((rows, columns), (height, width), factors, strict=True)
    ):
        node = cx.emit.expand(cx.emit.reshape(image, (n, height, 1, width, 1, channels)), repeated)
        return cx.make_result(cx.emit.reshape(node, (n, len(rows), len(columns), channels)), (0, 2, 3, 1))
    for dim, index in ((1, rows), (2, columns)):
        image = cx.emit.call(aten.index_select.default, image, dim, cx.emit.constant(index, "index"))
    return cx.make_result(image, (0, 2, 3, 1))


@rule(
    *(aten.expand.default, aten.repeat.default, aten.tile.default, aten.flip.default),
    *(aten.stack.default, aten.index.Tensor, aten._unsafe_index.Tensor, aten.gather.default, aten.embedding.default),
    *(aten.index_select.default, aten.amax.default, aten.amin.default),
)
def apply_to_integers(cx: KernelContext) -> QuantizedValue:
    """Other data movement, ``amax`` and ``amin``: call the ATen operator itself on integers.

    Operands are requantized to the parameters of the result.

    Raises:
        Unsupported: a floating-point operand is not quantized to int8.
    """

    def convert(argument: Any) -> Any:
        if not isinstance(argument, Node) or not (is_dequantize(argument) or is_float(argument)):
            return _fold_index(cx, argument)
        return cx.emit.materialize(_requantized_operand(cx, argument))

    arguments = torch.fx.map_arg(cx.node.args, convert)
    options = torch.fx.map_arg(cx.node.kwargs, convert)
    return cx.make_result(cx.emit.call(cx.node.target, *arguments, **options))


def _fold_index(cx: KernelContext, argument: Any) -> Any:
    """Fold an index that is computed from constants to its value, unless the value would need too much flash.

    An index is not folded if it has more than ``_MAX_FOLDED_INDEX`` elements and more than each of its operands, for
    example if it is the ``expand`` of a smaller one.
    """
    data = cx.constant_data(argument)
    if data is None or argument.op != "call_function":
        return argument
    operands = pytree.tree_leaves([source.meta["val"] for source in argument.all_input_nodes])
    largest = max((operand.numel() for operand in operands), default=0)
    return cx.emit.constant(data, "index") if data.size <= max(largest, _MAX_FOLDED_INDEX) else argument
