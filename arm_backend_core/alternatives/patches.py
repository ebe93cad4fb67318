"""Pixels that become channels, read where they are by a convolution with a stride: no TRANSPOSE.

What PixelUnshuffle does, [H, SH, W, SW, C] to [H, W, C, SH, SW], and what cuts an image in patches for a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import read_behind, steps_from
from arm_backend_core.alternatives.split_axes import Piece, as_made, moved, moves_to, parted
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import fold_stride
from arm_backend_core.tosa.passes.transpose_form import lower_transpose


class _Plan(NamedTuple):
    """How a convolution reads what is moved in front of it.

    Attributes:
        image: the shape [N, H, W] of what was moved.
        front: elements in front of all pixels, which are channels: moved behind them.
        sizes: the pieces of its channels.
        rows: those of them that are rows.
        channels: those that stay channels, in this order.
    """

    image: tuple[int, ...]
    front: int
    sizes: tuple[int, ...]
    rows: tuple[int, ...]
    channels: tuple[int, ...]


def read_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """CONV2D of [H, W, SH * C] that was [H, SH, W, C], by one with SH times the rows in its window, stride and padding.

    Columns that become channels lie beside them, [W, SW * C], and need not be moved. Channels can be in any order. The
    same products.
    """
    path = moves_to(op, rewriter)
    plan = _plan(path)
    if plan is None:
        return None
    b, (weight, bias), (n, rows, columns) = rewriter.build, op.inputs[1:], plan.image
    assert weight.data is not None
    high, channels = (prod(plan.sizes[i] for i in which) for which in (plan.rows, plan.channels))
    x = path[0].inputs[0]
    if plan.front > 1:
        x = b.transpose(b.reshape(x, (1, plan.front, x.size // plan.front)), (0, 2, 1))
        assert x.producer is not None
        x = lower_transpose(x.producer, rewriter) or x
    x = b.reshape(x, (n, rows * high, columns, channels))
    count, height, width, _ = weight.shape
    order = (0, 1, *(3 + i for i in plan.rows), 2, *(3 + i for i in plan.channels))
    moved_weight = weight.data.reshape(count, height, width, *plan.sizes).transpose(order)
    kernel = constant(moved_weight.reshape(count, height * high, width, channels), weight.dtype)
    (stride, across), (top, bottom, *beside) = op.attrs["stride"], op.attrs["pad"]
    attrs = op.attrs | {"stride": [stride * high, across], "pad": [top * high, bottom * high, *beside]}
    image = op.output.shape[:3] if plan.image == op.inputs[0].shape[:3] else plan.image
    sums = b.emit("CONV2D", (x, kernel, bias), (*image, count), op.output.dtype, **attrs)
    assert sums.producer is not None
    folded = fold_stride(sums.producer, rewriter)
    if folded is None and stride * high > b.target.hardware.max_stride:
        return None
    return b.reshape(folded or sums, op.output.shape)


def _plan(path: Sequence[Op]) -> _Plan | None:
    """For a convolution and what is moved in front of it; None where nothing is gained."""
    *moves, conv = path
    if not any(op.kind == "TRANSPOSE" for op in moves) or conv.inputs[1].data is None:
        return None
    pieces = moved(moves[0].inputs[0].shape, moves)
    parts = parted(pieces, conv.inputs[0].shape) if pieces is not None else None
    if parts is None:
        return None
    *pixels, channels = parts
    together = [piece for part in pixels for piece in part]
    if together != as_made(together):
        return None
    runs = [(own, [*run]) for own, run in groupby(as_made([*together, *channels]), lambda piece: piece in channels)]
    front = runs.pop(0)[1] if runs and runs[0][0] else []
    if [own for own, _ in runs] not in ([False, True, False], [False, True, False, True]):
        return None
    above, rows, columns, *beside = (run for _, run in runs)
    behind = [piece for run in (*beside, front) for piece in run]
    if not behind:  # images of which each channel is one, behind others: windows of all channels
        return None
    image = _image(conv, pixels, above, columns)
    numbers = [tuple(channels.index(piece) for piece in run) for run in (rows, behind)]
    sizes = tuple(piece.size for piece in channels)
    return _Plan(image, prod(piece.size for piece in front), sizes, *numbers) if image is not None else None


def _image(conv: Op, pixels: Sequence[list[Piece]], above: list[Piece], columns: list[Piece]) -> tuple[int, ...] | None:
    """[N, H, W] of which these are the rows and columns; another than the convolution reads for 1x1 alone."""
    if max(conv.attrs["dilation"]) > 1:
        return None
    if columns == pixels[2]:
        return conv.inputs[0].shape[:3]
    plain = conv.inputs[1].shape[1:3] == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, *(prod(piece.size for piece in run) for run in (above, columns))) if plain else None


def _in_front(op: Op, rewriter: Rewriter) -> Region | None:
    path = moves_to(op, rewriter)
    if _plan(path) is None:
        return None
    steps = steps_from(op, rewriter)
    return Region([*path, *steps, *read_behind(steps[-1], rewriter)], ((op,),))


PATCHES = Alternative("convolutions that read pixels as channels", ("CONV2D",), read_pixels, _in_front)
