"""Space-to-depth in front of a convolution, folded into its window and stride: no TRANSPOSE.

Examples are PixelUnshuffle, [H, SH, W, SW, C] to [H, W, C, SH, SW], and patch embedding by a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import collect_readers, match_epilogue
from arm_backend_core.alternatives.split_axes import Piece, collect_moves, sort_pieces, split_pieces, trace_pieces
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import rewrite_strided_convolution
from arm_backend_core.tosa.passes.transpose_form import lower_transpose


class _PatchLayout(NamedTuple):
    """How a convolution can read the tensor in front of the data movement.

    Attributes:
        image: shape [N, H, W] of that tensor, in patches.
        leading: number of channel elements in front of all pixels; they are transposed behind the pixels.
        channel_sizes: sizes of the pieces that make up the convolution's input channels.
        row_pieces: indices of the pieces that become rows of the window.
        channel_pieces: indices of the pieces that stay channels, in order.
    """

    image: tuple[int, ...]
    leading: int
    channel_sizes: tuple[int, ...]
    row_pieces: tuple[int, ...]
    channel_pieces: tuple[int, ...]


def read_patches(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold the movement from [H, SH, W, C] to [H, W, SH * C] into a CONV2D.

    Window, stride and padding get SH times the rows.

    Columns that become channels are adjacent to the channels in memory, [W, SW * C], and need no movement. Channels can
    be in any order, as the weights are permuted. Bit-equal: the same products.
    """
    path = collect_moves(op, rewriter)
    plan = _match_patches(path)
    if plan is None:
        return None
    b, (weight, bias), (n, rows, columns) = rewriter.build, op.inputs[1:], plan.image
    assert weight.data is not None
    high, channels = (prod(plan.channel_sizes[i] for i in which) for which in (plan.row_pieces, plan.channel_pieces))
    x = path[0].inputs[0]
    if plan.leading > 1:
        x = b.transpose(b.reshape(x, (1, plan.leading, x.size // plan.leading)), (0, 2, 1))
        assert x.producer is not None
        x = lower_transpose(x.producer, rewriter) or x
    x = b.reshape(x, (n, rows * high, columns, channels))
    count, height, width, _ = weight.shape
    order = (0, 1, *(3 + i for i in plan.row_pieces), 2, *(3 + i for i in plan.channel_pieces))
    moved_weight = weight.data.reshape(count, height, width, *plan.channel_sizes).transpose(order)
    kernel = constant(moved_weight.reshape(count, height * high, width, channels), weight.dtype)
    (stride, across), (top, bottom, *left_right) = op.attrs["stride"], op.attrs["pad"]
    attrs = op.attrs | {"stride": [stride * high, across], "pad": [top * high, bottom * high, *left_right]}
    sums = b.emit("CONV2D", (x, kernel, bias), op.output.dtype, **attrs)
    assert sums.producer is not None
    folded = rewrite_strided_convolution(sums.producer, rewriter)
    if folded is None and stride * high > b.target.hardware.max_stride:
        return None
    return b.reshape(folded or sums, op.output.shape)


def _match_patches(path: Sequence[Op]) -> _PatchLayout | None:
    """Match a convolution with the data movement in front of it; None if the rewrite cannot apply or gains nothing."""
    *moves, conv = path
    if not any(op.kind == "TRANSPOSE" for op in moves) or conv.inputs[1].data is None:
        return None
    pieces = trace_pieces(moves[0].inputs[0].shape, moves)
    parts = split_pieces(pieces, conv.inputs[0].shape) if pieces is not None else None
    if parts is None:
        return None
    *pixels, channels = parts
    pixel_pieces = [piece for part in pixels for piece in part]
    if pixel_pieces != sort_pieces(pixel_pieces):
        return None
    runs = [
        (own, [*run]) for own, run in groupby(sort_pieces([*pixel_pieces, *channels]), lambda piece: piece in channels)
    ]
    front = runs.pop(0)[1] if runs and runs[0][0] else []
    if [own for own, _ in runs] not in ([False, True, False], [False, True, False, True]):
        return None
    above, rows, columns, *inner = (run for _, run in runs)
    kept_channels = [piece for run in (*inner, front) for piece in run]
    if not kept_channels:  # each channel is an image of its own: windows would span all channels
        return None
    image = _image_shape(conv, pixels, above, columns)
    numbers = [tuple(channels.index(piece) for piece in run) for run in (rows, kept_channels)]
    sizes = tuple(piece.size for piece in channels)
    return _PatchLayout(image, prod(piece.size for piece in front), sizes, *numbers) if image is not None else None


def _image_shape(
    conv: Op, pixels: Sequence[list[Piece]], above: list[Piece], columns: list[Piece]
) -> tuple[int, ...] | None:
    """Return [N, H, W] with these rows and columns; for other columns than the convolution's only if it is 1x1."""
    if max(conv.attrs["dilation"]) > 1:
        return None
    if columns == pixels[2]:
        return conv.inputs[0].shape[:3]
    is_pointwise = conv.inputs[1].shape[1:3] == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, *(prod(piece.size for piece in run) for run in (above, columns))) if is_pointwise else None


def _match_region(op: Op, rewriter: Rewriter) -> Region | None:
    path = collect_moves(op, rewriter)
    if _match_patches(path) is None:
        return None
    steps = match_epilogue(op, rewriter)
    return Region([*path, *steps, *collect_readers(steps[-1], rewriter)], ((op,),))


PATCHES = Alternative("space-to-depth by strided convolutions", ("CONV2D",), read_patches, _match_region)
