"""Data movement operators: reshape, permute, slice, concatenate, pad, flip and others that do not change elements.

One rule lowers each operator on floating-point, integer and quantized tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch

from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import is_random
from arm_backend_core.ops import intervals
from arm_backend_core.ops.indexing import gather_constant_indices, strided_slice
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
_SHARED: dict[str, Any] = {"kind": AnnotationKind.SHARED}


@op(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    **_SHARED,
)
def reshape(cx: Context, x: Operand, *_: Any, **__: Any) -> Value:
    """RESHAPE to the result's shape, which is read from the node metadata instead of the arguments."""
    return cx.b.reshape(x.value, cx.shape)


@op(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_.default,
    aten.detach_copy.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.positive.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    **_SHARED,
)
def identity(cx: Context, x: Operand, *args: Any, **_: Any) -> Value:
    """Operators that return their operand: copies, memory formats, and dropout in eval mode."""
    if is_random(cx.node):
        raise Unsupported(
            "dropout in training mode; call model.eval() before exporting, and give F.dropout training=self.training"
        )
    return x.value


def _normalize_axis(cx: Context, dim: int, rank: int) -> int:
    """Convert ``dim`` to a non-negative axis; 0 for a rank-0 tensor."""
    return dim % rank if rank else 0


@op(aten.permute.default, aten.permute_copy.default, **_SHARED)
def permute(cx: Context, x: Operand, dims: Sequence[int]) -> Value:
    """Permute the dimensions by TRANSPOSE; ``dims`` may be negative."""
    return cx.b.transpose(x.value, [_normalize_axis(cx, dim, x.rank) for dim in dims])


@op(aten.transpose.int, aten.transpose_copy.int, **_SHARED)
def transpose(cx: Context, x: Operand, first: int, second: int) -> Value:
    """Swap two dimensions."""
    source_axis = {_normalize_axis(cx, first, x.rank): second, _normalize_axis(cx, second, x.rank): first}
    return cx.b.transpose(x.value, [_normalize_axis(cx, source_axis.get(axis, axis), x.rank) for axis in range(x.rank)])


@op(aten.t.default, aten.t_copy.default, aten.numpy_T.default, **_SHARED)
def t(cx: Context, x: Operand) -> Value:
    """Reverse the order of the dimensions."""
    return cx.b.transpose(x.value, list(range(x.rank))[::-1])


@op(aten.expand.default, aten.expand_copy.default, aten.expand_as.default, **_SHARED)
def expand(cx: Context, x: Operand, *_: Any, **__: Any) -> Value:
    """Repeat dimensions of size 1."""
    return cx.b.expand(x.value, cx.shape)


@op(aten.repeat.default, **_SHARED)
def repeat(cx: Context, x: Operand, repeats: Sequence[int]) -> Value:
    """Repeat by TILE. If ``repeats`` has more elements than x has dimensions, x gets leading dimensions of size 1."""
    return cx.b.tile(cx.b.reshape(x.value, (1,) * (len(repeats) - x.rank) + x.shape), repeats)


def _requantize_to_first(cx: Context, tensors: Sequence[Operand]) -> list[Value]:
    """Requantize all operands to the parameters of the first operand, which are also the result's parameters.

    If the operands are not quantized, cast them to the type of the result.
    """
    first = tensors[0].q
    if any((x.q is None) != (first is None) for x in tensors):
        raise Unsupported("some of its operands are quantized and others are not; annotate all (set_global)")
    return [cx.b.cast(x.value, cx.dtype) if first is None else cx.requantize(x, first) for x in tensors]


@op(aten.cat.default, aten.concat.default, aten.concatenate.default, **_SHARED)
def cat(cx: Context, tensors: Sequence[Operand], dim: int = 0) -> Value:
    """Concatenate by CONCAT. Empty one-dimensional tensors, which PyTorch allows, are skipped."""
    tensors = [x for x in tensors if x.value.size or x.rank > 1]
    return cx.b.concat(_requantize_to_first(cx, tensors), _normalize_axis(cx, dim, tensors[0].rank))


@op(aten.stack.default, **_SHARED)
def stack(cx: Context, tensors: Sequence[Operand], dim: int = 0) -> Value:
    """Stack by CONCAT along a new dimension."""
    axis = _normalize_axis(cx, dim, tensors[0].rank + 1)
    shape = (*tensors[0].shape[:axis], 1, *tensors[0].shape[axis:])
    return cx.b.concat([cx.b.reshape(value, shape) for value in _requantize_to_first(cx, tensors)], axis)


@op(aten.slice.Tensor, aten.slice_copy.Tensor, **_SHARED)
def slice_(
    cx: Context, x: Operand, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """x[start:end:step] along one dimension."""
    axis = _normalize_axis(cx, dim, x.rank)
    return strided_slice(cx.b, x.value, axis, range(*slice(start, end, step).indices(x.shape[axis])))


@op(aten.roll.default, **_SHARED)
def roll(cx: Context, x: Operand, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    """torch.roll: rotate each dimension by its shift; without ``dims``, rotate the flattened tensor."""
    value = x.value if dims else cx.b.reshape(x.value, (x.value.size,))
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        axis = _normalize_axis(cx, dim, value.rank)
        value = gather_constant_indices(cx.b, value, axis, torch.arange(value.shape[axis]).roll(shift).tolist())
    return cx.b.reshape(value, cx.shape)


@op(aten.select.int, aten.select_copy.int, **_SHARED)
def select(cx: Context, x: Operand, dim: int, index: int) -> Value:
    """x[index] along one dimension, which is removed."""
    axis = _normalize_axis(cx, dim, x.rank)
    return cx.b.reshape(cx.b.narrow(x.value, axis, index % x.shape[axis], 1), cx.shape)


@op(
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.split_copy.Tensor,
    aten.chunk.default,
    aten.unbind.int,
    aten.unbind_copy.int,
    **_SHARED,
)
def split(cx: Context, x: Operand, *args: Any, **kwargs: Any) -> list[Value]:
    """Split along one dimension by SLICEs, whose sizes the node metadata gives. unbind also removes the dimension."""
    shapes = [tuple(value.shape) for value in cx.node.meta["val"]]
    removes_dim = len(shapes[0]) < x.rank
    dim = kwargs.get("dim", (args[0] if args else 0) if removes_dim else (args[1] if len(args) > 1 else 0))
    axis = _normalize_axis(cx, dim, x.rank)
    sizes = [1 if removes_dim else shape[axis] for shape in shapes]
    slices = [cx.b.narrow(x.value, axis, end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [cx.b.reshape(piece, shape) for piece, shape in zip(slices, shapes, strict=True)]


@op(aten.constant_pad_nd.default, interval=intervals.padding, **_SHARED)
def constant_pad(cx: Context, x: Operand, pad: Sequence[int], value: float = 0) -> Value:
    """Pad by PAD with a constant. ``pad`` is (before, after) for the last dimension, then the one before it, and so on.

    Negative values crop.
    """
    pairs = [(0, 0)] * (x.rank - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    sizes = [size + min(before, 0) + min(after, 0) for size, (before, after) in zip(x.shape, pairs, strict=True)]
    cropped = cx.b.slice(x.value, [max(-before, 0) for before, _ in pairs], sizes)
    fill = value if x.q is None else int(x.q.quantize(torch.tensor(float(value)).double().numpy()))
    return cx.b.pad(cropped, [(max(before, 0), max(after, 0)) for before, after in pairs], fill)


#: {padding mode: function (i, size, uncropped)}. The function returns the index in [0, size) of the element that is
#: copied to index i. i is negative in the padding before the dimension, and at least ``size`` after it. ``uncropped``
#: is the range of indices that negative padding does not remove.
_PADDING_INDEX: dict[str, Callable[[int, int, range], int]] = {
    "reflect": lambda i, size, uncropped: size - 1 - abs(size - 1 - abs(i)),
    "replicate": lambda i, size, uncropped: min(max(i, 0), size - 1),
    "circular": lambda i, size, uncropped: uncropped[(i - uncropped.start) % len(uncropped)],
}


@op(aten.pad.default, interval=intervals.padding, **_SHARED)
def pad(cx: Context, x: Operand, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Value:
    """torch.nn.functional.pad. Modes other than "constant" gather elements of the tensor."""
    if mode == "constant":
        return constant_pad.lower(cx, x, pad, 0 if value is None else value)
    result = x.value
    for i in range(len(pad) // 2):
        axis = x.rank - 1 - i
        size, (before, after) = x.shape[axis], pad[2 * i : 2 * i + 2]
        uncropped = range(size)[max(-before, 0) : size - max(-after, 0)]
        result = gather_constant_indices(
            cx.b, result, axis, [_PADDING_INDEX[mode](j, size, uncropped) for j in range(-before, size + after)]
        )
    return result


@op(
    *(getattr(aten, f"{kind}_pad{rank}d").default for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    **_SHARED,
)
def edge_pad(cx: Context, x: Operand, padding: Sequence[int]) -> Value:
    """Reflection and replication padding of one, two or three dimensions; ``F.pad`` calls these operators."""
    mode = "reflect" if "reflection" in str(cx.node.target) else "replicate"
    return cast(Value, pad.lower(cx, x, padding, mode))


@op(aten.flip.default, **_SHARED)
def flip(cx: Context, x: Operand, dims: Sequence[int]) -> Value:
    """Reverse the order of elements along each dimension of ``dims`` by REVERSE."""
    value = x.value
    for dim in dims if x.rank else ():
        value = cx.b.reverse(value, dim % x.rank)
    return value
