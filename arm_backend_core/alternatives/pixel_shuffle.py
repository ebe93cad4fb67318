"""Pixel shuffle (depth-to-space) without a TRANSPOSE: one convolution for each row phase writes its pixels in place.

A pixel shuffle moves [H, W, C, SH, SW] to [H, SH, W, SW, C] (Shi et al., Real-Time Single Image and Video
Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import (
    ACTIVATIONS,
    apply_epilogue,
    collect_readers,
    match_epilogue,
    select_constant_channels,
    trace_epilogue,
)
from arm_backend_core.alternatives.split_axes import MOVEMENT_KINDS, collect_moves, sort_pieces, trace_pieces
from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import emit_identity_convolution

_CHANNEL_AXIS = 3
#: Maximum number of convolutions; each reads the whole input.
_MAX_CONVOLUTIONS = 16
#: Maximum number of channels; multiplications for each pixel grow with its square.
_MAX_CHANNELS = 512


class _ShuffleLayout(NamedTuple):
    """The convolutions and how their results are assembled.

    Attributes:
        image: shape [N, H, W] of each convolution's result.
        channels: output channels that each convolution computes, [convolutions, channels].
        shape: shape of the concatenated results: outer pixels, convolutions, inner pixels, channels.
        perms: permutation of the remaining TRANSPOSE.
    """

    image: tuple[int, ...]
    channels: Array
    shape: tuple[int, ...]
    perms: tuple[int, ...]


def write_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace the data movement behind a CONV2D and its epilogue by convolutions of channel subsets and a CONCAT.

    Channels can be in any order, as the weights are permuted. Each channel index in front of pixels (SH of a pixel
    shuffle) gets its own convolution. Concatenated along the columns, [H, SH * W, SW * C], which Vela does without a
    copy, the results are rows of their own. Bit-equal: the same products.

    48x48 pixels with 32 channels to 96x96 with 32, int8, by a 3x3 convolution, read by another one: 890 k instead of
    5,625 k cycles on U85-256.
    """
    path = trace_epilogue(op, "CONV2D")
    conv, plan = path[0], _match_shuffle(path)
    if plan is None:
        return None
    b, (x, weight, bias), size = rewriter.build, conv.inputs, conv.output.shape[_CHANNEL_AXIS]
    if plan.image != conv.output.shape[:_CHANNEL_AXIS]:
        x = b.reshape(x, (*plan.image, x.shape[_CHANNEL_AXIS]))
    phases = []
    for channels in plan.channels:
        inputs = (x, select_constant_channels(weight, size, channels), select_constant_channels(bias, size, channels))
        sums = b.emit("CONV2D", inputs, conv.output.dtype, **conv.attrs)
        phases.append(apply_epilogue(sums, [step for step in path[1:] if step.kind not in MOVEMENT_KINDS], channels, b))
    result = b.concat(phases, 2) if len(phases) > 1 else phases[0]
    shape, perms = merge_axes(plan.shape, plan.perms)
    return b.reshape(b.transpose(b.reshape(result, shape), perms), op.output.shape)


def _match_shuffle(path: Sequence[Op]) -> _ShuffleLayout | None:
    """Match a convolution with what follows it; None if the rewrite does not apply or gains nothing."""
    conv = path[0]
    pieces = trace_pieces(conv.output.shape, [step for step in path if step.kind in MOVEMENT_KINDS])
    if pieces is None or any(x.data is None for x in conv.inputs[1:]):
        return None
    pixels, channels = ([piece for piece in pieces if (piece.axis == _CHANNEL_AXIS) == own] for own in (False, True))
    places = {piece: sum(pieces.index(pixel) < i for pixel in pixels) for i, piece in enumerate(pieces)}
    between = {places[piece] for piece in channels} - {0, len(pixels)}
    if pixels != sort_pieces(pixels) or len(between) > 1:
        return None
    above = between.pop() if between else len(pixels)
    outer = [piece for piece in channels if 0 < places[piece] < len(pixels)]
    last = sorted((piece for piece in channels if piece not in outer), key=lambda piece: places[piece] == 0)
    order, source_order = [*pixels[:above], *outer, *pixels[above:], *last], sort_pieces(channels)
    count = prod(piece.size for piece in outer)
    numbers = np.arange(conv.output.shape[_CHANNEL_AXIS]).reshape([piece.size for piece in source_order])
    rows = numbers.transpose([source_order.index(piece) for piece in (*outer, *last)]).reshape(count, -1)
    image = _image_shape(conv, [piece.size for piece in pixels], above) if outer else conv.output.shape[:_CHANNEL_AXIS]
    if image is None or count > _MAX_CONVOLUTIONS or (count == 1 and source_order == last):
        return None
    shape, perms = tuple(piece.size for piece in order), tuple(order.index(piece) for piece in pieces)
    return _ShuffleLayout(image, rows, shape, perms)


def _image_shape(conv: Op, pixels: Sequence[int], above: int) -> tuple[int, ...] | None:
    """Return [N, H, W] with W the pixels from piece ``above`` on; other than the convolution's only if it is 1x1."""
    shape, (rows, columns) = conv.output.shape[:_CHANNEL_AXIS], (prod(pixels[:above]), prod(pixels[above:]))
    if shape[2] == columns:
        return shape
    window = conv.inputs[1].shape[1:_CHANNEL_AXIS]
    is_pointwise = window == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, rows, columns) if is_pointwise else None


def _match_convolution(op: Op, rewriter: Rewriter) -> Region | None:
    """Match the region, including an activation behind the data movement, which Vela fuses with each convolution."""
    path = match_epilogue(op, rewriter)
    wanted = {*MOVEMENT_KINDS, *(ACTIVATIONS if path[-1].kind not in ACTIVATIONS else ())}
    while len(path) > 1 and len(readers := rewriter.users(path[-1].output) or []) == 1 and readers[0].kind in wanted:
        path += readers
        wanted -= set(ACTIVATIONS if path[-1].kind in ACTIVATIONS else ())
    if len(path) == 1 or _match_shuffle(path) is None:
        return None
    return Region([*path, *collect_readers(path[-1], rewriter)], ((path[-1],),))


SHUFFLES = Alternative("pixel shuffles by convolutions", ("CONV2D",), write_pixels, _match_convolution)


def write_moved_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """Apply ``write_pixels`` to a pixel shuffle that no convolution precedes, behind an identity convolution.

    48x48 pixels with 64 channels, int8, written by an ADD, to 96x96 with 16, including the ADD and a following 3x3
    convolution: 186 k instead of 2,523 k cycles on U85-256.
    """
    moves = collect_moves(op, rewriter)
    x = moves[0].inputs[0]
    image = rewriter.build.reshape(x, (1, prod(x.shape[:2]), x.shape[2], x.shape[3]))
    eye = np.eye(x.shape[3]).reshape(x.shape[3], 1, 1, x.shape[3])
    value = rewriter.build.reshape(emit_identity_convolution(rewriter.build, image, eye), x.shape)
    for step in moves:
        value = rewriter.build.emit(step.kind, (value, *step.inputs[1:]), x.dtype, **step.attrs)
    return write_pixels(value.producer, rewriter) if value.producer is not None else None


def _match_movement(op: Op, rewriter: Rewriter) -> Region | None:
    path = [op]
    while len(readers := rewriter.users(path[-1].output) or []) == 1 and readers[0].kind in MOVEMENT_KINDS:
        path += readers
    moves = collect_moves(path[-1], rewriter)
    x = moves[0].inputs[0]
    if x.rank != 4 or x.dtype is not DType.INT8 or not 1 < x.shape[3] <= _MAX_CHANNELS:
        return None
    own = [piece.axis == _CHANNEL_AXIS for piece in trace_pieces(x.shape, moves) or ()]
    if not any(own[i] and not all(own[:i]) and not all(own[i:]) for i in range(len(own))):
        return None  # no channels move between pixels
    return Region([*moves, *collect_readers(path[-1], rewriter)], ((moves[-1],),))


MOVED_PIXELS = Alternative(
    "pixel shuffles by an identity convolution", ("TRANSPOSE",), write_moved_pixels, _match_movement
)
