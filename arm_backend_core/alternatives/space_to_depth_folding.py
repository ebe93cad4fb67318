"""Space-to-depth folding: fold the TRANSPOSE before a convolution into the kernel and stride of the convolution.

Examples of space-to-depth are PixelUnshuffle, [H, SH, W, SW, C] to [H, W, C, SH, SW], and patch embedding by a linear
layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from arm_backend_core.alternatives.axis_factors import (
    AxisFactor,
    collect_data_movement,
    group_by_dimension,
    sort_factors,
    trace_axis_factors,
)
from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import collect_readers, match_epilogue
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import rewrite_by_space_to_depth_or_im2col
from arm_backend_core.tosa.passes.transpose_lowering import lower_transpose


class _SpaceToDepthLayout(NamedTuple):
    """How a convolution can read the tensor before the data movement.

    The module ``axis_factors`` explains factors of dimensions.

    Attributes:
        image: shape [N, H, W] of the tensor, where H and W count patches.
        leading: product of the sizes of the channel factors that precede all pixel factors in the tensor; 1 if there
            are none. A TRANSPOSE moves these factors after the pixels.
        channel_sizes: sizes of the factors of the convolution's input channels.
        row_factors: indices into ``channel_sizes`` of the factors that become rows of the kernel.
        channel_factors: indices into ``channel_sizes`` of the factors that stay channels, in order.
    """

    image: tuple[int, ...]
    leading: int
    channel_sizes: tuple[int, ...]
    row_factors: tuple[int, ...]
    channel_factors: tuple[int, ...]


def fold_space_to_depth(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold data movement from [H, SH, W, C] to [H, W, SH * C] into a CONV2D.

    The new CONV2D has SH times the kernel height, row stride and row padding. Columns that become channels are adjacent
    to the channels in memory, [W, SW * C], so that they need no data movement. Channels can be in any order, because
    the weights are permuted. Bit-exact: the sums have the same products.
    """
    path = collect_data_movement(op, rewriter)
    layout = _match_space_to_depth(path)
    if layout is None:
        return None
    b, (weight, bias), (n, rows, columns) = rewriter.builder, op.inputs[1:], layout.image
    assert weight.data is not None
    patch_rows, channels = (
        prod(layout.channel_sizes[i] for i in indices) for indices in (layout.row_factors, layout.channel_factors)
    )
    x = path[0].inputs[0]
    if layout.leading > 1:
        x = b.transpose(b.reshape(x, (1, layout.leading, x.size // layout.leading)), (0, 2, 1))
        assert x.producer is not None
        x = lower_transpose(x.producer, rewriter) or x
    x = b.reshape(x, (n, rows * patch_rows, columns, channels))
    count, height, width, _ = weight.shape
    order = (0, 1, *(3 + i for i in layout.row_factors), 2, *(3 + i for i in layout.channel_factors))
    permuted_weight = weight.data.reshape(count, height, width, *layout.channel_sizes).transpose(order)
    kernel = constant(permuted_weight.reshape(count, height * patch_rows, width, channels), weight.dtype)
    (row_stride, column_stride), (top, bottom, *left_right) = op.attrs["stride"], op.attrs["pad"]
    attrs = op.attrs | {
        "stride": [row_stride * patch_rows, column_stride],
        "pad": [top * patch_rows, bottom * patch_rows, *left_right],
    }
    sums = b.emit("CONV2D", (x, kernel, bias), op.output.dtype, **attrs)
    assert sums.producer is not None
    folded = rewrite_by_space_to_depth_or_im2col(sums.producer, rewriter)
    if folded is None and row_stride * patch_rows > b.target.hardware.max_stride:
        return None
    return b.reshape(folded or sums, op.output.shape)


def _match_space_to_depth(path: Sequence[Op]) -> _SpaceToDepthLayout | None:
    """Match a convolution and the data movement before it; None if the rewrite cannot apply or gains nothing."""
    *moves, conv = path
    if not any(op.kind == "TRANSPOSE" for op in moves) or conv.inputs[1].data is None:
        return None
    factors = trace_axis_factors(moves[0].inputs[0].shape, moves)
    parts = group_by_dimension(factors, conv.inputs[0].shape) if factors is not None else None
    if parts is None:
        return None
    *pixels, channels = parts
    pixel_factors = [factor for part in pixels for factor in part]
    if pixel_factors != sort_factors(pixel_factors):
        return None
    by_channel = groupby(sort_factors([*pixel_factors, *channels]), lambda factor: factor in channels)
    runs = [(is_channel, [*run]) for is_channel, run in by_channel]
    leading = runs.pop(0)[1] if runs and runs[0][0] else []
    if [is_channel for is_channel, _ in runs] not in ([False, True, False], [False, True, False, True]):
        return None
    above, rows, columns, *inner = (run for _, run in runs)
    remaining_channels = [factor for run in (*inner, leading) for factor in run]
    if not remaining_channels:  # all input channels would become rows of a kernel with a single channel
        return None
    image = _image_shape(conv, pixels, above, columns)
    indices = [tuple(channels.index(factor) for factor in run) for run in (rows, remaining_channels)]
    sizes = tuple(factor.size for factor in channels)
    return (
        _SpaceToDepthLayout(image, prod(factor.size for factor in leading), sizes, *indices)
        if image is not None
        else None
    )


def _image_shape(
    conv: Op, pixels: Sequence[list[AxisFactor]], above: list[AxisFactor], columns: list[AxisFactor]
) -> tuple[int, ...] | None:
    """Return [N, H, W], where H is the product of the factors ``above``, and W of the factors ``columns``.

    Returns:
        None if the windows of the convolution would cover other pixels than before: it is dilated, or W has other
        factors than the width of its input and it is not a 1x1 convolution without padding and stride.
    """
    if max(conv.attrs["dilation"]) > 1:
        return None
    if columns == pixels[2]:
        return conv.inputs[0].shape[:3]
    is_pointwise = conv.inputs[1].shape[1:3] == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, *(prod(factor.size for factor in run) for run in (above, columns))) if is_pointwise else None


def _match_region(op: Op, rewriter: Rewriter) -> Region | None:
    path = collect_data_movement(op, rewriter)
    if _match_space_to_depth(path) is None:
        return None
    steps = match_epilogue(op, rewriter)
    return Region([*path, *steps, *collect_readers(steps[-1], rewriter)], ((op,),))


SPACE_TO_DEPTH = Alternative("space-to-depth by strided convolutions", ("CONV2D",), fold_space_to_depth, _match_region)
