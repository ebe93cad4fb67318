"""Attention heads: avoid the TRANSPOSE that permutes heads and tokens.

``SEPARATE_HEADS`` avoids it before the attention: one convolution computes each head. ``MERGE_HEADS`` avoids it after
the attention: the output projection becomes a convolution over the heads.
"""

from __future__ import annotations

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.convolution_splitting import slice_attributes, slice_convolution
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer


def separate_heads(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a convolution and the TRANSPOSE of its result [1, T, heads, D] by a convolution per head and a CONCAT.

    T is the number of tokens, D the number of channels of a head. If the TRANSPOSE also exchanges T and D, a TRANSPOSE
    of these two dimensions follows the CONCAT. Bit-exact: each convolution has the weights, bias and scales of its
    channels.
    """
    parts = compute_heads(op, rewriter)
    if parts is None:
        return None
    image = rewriter.builder.concat(parts, 1)
    return rewriter.builder.transpose(image, [(0, 2, 1, 3).index(axis) for axis in op.attrs["perms"]])


def compute_heads(op: Op, rewriter: Rewriter) -> list[Value] | None:
    """Compute [1, 1, T, D] for each head by a separate convolution.

    Returns:
        One value per head. None unless ``op`` is a TRANSPOSE that moves the heads before the tokens, and three
        operators with one reader each precede it: a CONV2D with constant weight and bias, its RESCALE, and a RESHAPE
        that splits the channels into heads.
    """
    projection = _match_projection(op, rewriter)
    if projection is None:
        return None
    conv, rescale = projection
    b, (_, rows, heads, size) = rewriter.builder, op.inputs[0].shape
    parts = []
    for head in range(heads):
        spans = [*((0, n) for n in conv.output.shape[:-1]), (head * size, size)]
        accumulator = slice_convolution(conv, spans[-1], rewriter)
        attrs = slice_attributes(rescale, spans)
        part = b.emit("RESCALE", (accumulator,), rescale.output.dtype, **attrs)
        parts.append(b.reshape(part, (1, 1, rows, size)))
    return parts


def _match_projection(op: Op, rewriter: Rewriter) -> tuple[Op, Op] | None:
    """Match the CONV2D and RESCALE before the RESHAPE and TRANSPOSE that split heads."""
    split = producer(op.inputs[0], "RESHAPE")
    rescale = split and producer(split.inputs[0], "RESCALE")
    conv = rescale and producer(rescale.inputs[0], "CONV2D")
    if split is None or rescale is None or conv is None or any(value.data is None for value in conv.inputs[1:]):
        return None
    shape = op.inputs[0].shape
    splits_heads = len(shape) == 4 and shape[0] == 1 and rescale.output.shape == (1, 1, shape[1], shape[2] * shape[3])
    moves_heads = tuple(op.attrs["perms"]) in ((0, 2, 1, 3), (0, 2, 3, 1)) and shape[2] > 1
    single_use = all(rewriter.has_one_use(value) for value in (conv.output, rescale.output, split.output))
    return (conv, rescale) if splits_heads and moves_heads and single_use else None


def _match_head_projection(op: Op, rewriter: Rewriter) -> Region | None:
    projection = _match_projection(op, rewriter)
    if projection is None:
        return None
    readers = collect_neighbors(op, rewriter, ("RESHAPE",), ("RESHAPE", "TRANSPOSE", "MATMUL", "RESCALE"))
    return Region((*projection, *readers), ((op,),))


def merge_heads(op: Op, rewriter: Rewriter) -> Value | None:
    """Merge heads in the output projection: a CONV2D with a (heads x 1) kernel on [1, heads, T, D] needs no TRANSPOSE.

    Bit-exact: the sum over heads * D channels becomes a sum of the same products over heads and D channels.
    """
    x, weight = op.inputs[:2]
    reshape = producer(x, "RESHAPE")
    transpose = reshape and producer(reshape.inputs[0], "TRANSPOSE")
    if transpose is None or weight.data is None or weight.shape[1:3] != (1, 1) or any(op.attrs["pad"]):
        return None
    image = transpose.inputs[0]
    if image.rank != 4 or tuple(transpose.attrs["perms"]) != (0, 2, 1, 3) or image.shape[0] != 1:
        return None
    _, heads, rows, size = image.shape
    if x.shape != (1, 1, rows, heads * size) or heads > rewriter.builder.target.hardware.max_kernel:
        return None
    data = weight.data.reshape(weight.shape[0], heads, 1, size)
    inputs = (image, constant(data, weight.dtype), op.inputs[2])
    attrs = {**op.attrs, "dilation": [1, 1]}  # the dilation of a 1x1 kernel has no effect
    return rewriter.builder.emit("CONV2D", inputs, op.output.dtype, **attrs)


SEPARATE_HEADS = Alternative(
    "attention heads computed separately", ("TRANSPOSE",), separate_heads, _match_head_projection
)
MERGE_HEADS = Alternative(
    "attention heads merged by a convolution",
    ("CONV2D",),
    merge_heads,
    lambda op, rewriter: Region(collect_neighbors(op, rewriter, ("RESHAPE", "TRANSPOSE"), ("RESCALE",)), ((op,),)),
)
