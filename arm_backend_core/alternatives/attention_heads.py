"""Attention's heads without a TRANSPOSE: written apart by convolutions, and read together by one."""

from __future__ import annotations

from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer
from arm_backend_core.tosa.passes.split import slice_attributes, slice_convolution


def separate_heads(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE of [1, T, heads, D], which a convolution of 1x1 made: one for each head, one behind the other.

    Each has the weights, bias and scales of its channels, so each result is the one that it was.
    """
    parts = heads_of(op, rewriter)
    if parts is None:
        return None
    image = rewriter.build.concat(parts, 1)
    return rewriter.build.transpose(image, [(0, 2, 1, 3).index(axis) for axis in op.attrs["perms"]])


def heads_of(op: Op, rewriter: Rewriter) -> list[Value] | None:
    """[1, 1, T, D] of each head, computed apart; None where no convolution made what the TRANSPOSE takes apart."""
    made = _linear(op, rewriter)
    if made is None:
        return None
    conv, rescale = made
    b, (_, rows, heads, size) = rewriter.build, op.inputs[0].shape
    parts = []
    for head in range(heads):
        spans = [*((0, n) for n in conv.output.shape[:-1]), (head * size, size)]
        total = slice_convolution(conv, spans[-1], rewriter)
        attrs = slice_attributes(rescale, spans)
        part = b.emit("RESCALE", (total,), total.shape, rescale.output.dtype, **attrs)
        parts.append(b.reshape(part, (1, 1, rows, size)))
    return parts


def _linear(op: Op, rewriter: Rewriter) -> tuple[Op, Op] | None:
    """CONV2D and RESCALE that made what the TRANSPOSE takes apart."""
    split = producer(op.inputs[0], "RESHAPE")
    rescale = split and producer(split.inputs[0], "RESCALE")
    conv = rescale and producer(rescale.inputs[0], "CONV2D")
    if split is None or rescale is None or conv is None or any(value.data is None for value in conv.inputs[1:]):
        return None
    shape = op.inputs[0].shape
    kept = len(shape) == 4 and shape[0] == 1 and rescale.output.shape == (1, 1, shape[1], shape[2] * shape[3])
    moved = tuple(op.attrs["perms"]) in ((0, 2, 1, 3), (0, 2, 3, 1)) and shape[2] > 1
    alone = all(rewriter.single_use(value) for value in (conv.output, rescale.output, split.output))
    return (conv, rescale) if kept and moved and alone else None


def _written(op: Op, rewriter: Rewriter) -> Region | None:
    made = _linear(op, rewriter)
    if made is None:
        return None
    behind = around(op, rewriter, ("RESHAPE",), ("RESHAPE", "TRANSPOSE", "MATMUL", "RESCALE"))
    return Region((*made, *behind), ((op,),))


def join_heads(op: Op, rewriter: Rewriter) -> Value | None:
    """A convolution of 1x1 on [1, T, heads * D], behind the TRANSPOSE of [1, heads, T, D]: its window is the heads.

    The sum over channels is one over heads and channels: the same products.
    """
    x, weight = op.inputs[:2]
    flat = producer(x, "RESHAPE")
    moved = flat and producer(flat.inputs[0], "TRANSPOSE")
    if moved is None or weight.data is None or weight.shape[1:3] != (1, 1) or any(op.attrs["pad"]):
        return None
    image = moved.inputs[0]
    if image.rank != 4 or tuple(moved.attrs["perms"]) != (0, 2, 1, 3) or image.shape[0] != 1:
        return None
    _, heads, rows, size = image.shape
    if x.shape != (1, 1, rows, heads * size) or heads > rewriter.build.target.hardware.max_kernel:
        return None
    data = weight.data.reshape(weight.shape[0], heads, 1, size)
    inputs = (image, constant(data, weight.dtype), op.inputs[2])
    return rewriter.build.emit("CONV2D", inputs, op.output.shape, op.output.dtype, **op.attrs)


SEPARATE = Alternative("heads computed apart", ("TRANSPOSE",), separate_heads, _written)
JOIN = Alternative(
    "heads joined by a convolution",
    ("CONV2D",),
    join_heads,
    lambda op, rewriter: Region(around(op, rewriter, ("RESHAPE", "TRANSPOSE"), ("RESCALE",)), ((op,),)),
)
