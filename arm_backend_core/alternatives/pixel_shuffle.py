"""Channels that become pixels, written where they belong by convolutions of their own: no TRANSPOSE.

A pixel shuffle's is [H, W, C, SH, SW] to [H, SH, W, SW, C] (Shi et al., Real-Time Single Image and Video
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
    done_to,
    read_behind,
    selected_channels,
    steps_from,
    steps_to,
)
from arm_backend_core.alternatives.split_axes import MOVES, as_made, moved, moves_to
from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import identity_convolution

_CHANNELS = 3
#: Convolutions that one becomes at most: each reads the whole input.
_MOST = 16
#: Channels of what is moved: multiplications for each pixel grow with their square.
_WIDEST = 512


class _Plan(NamedTuple):
    """What to convolve and how to put it together.

    Attributes:
        image: the shape [N, H, W] of what each convolution writes.
        channels: those that each of them writes, [convolutions, channels].
        shape: what they are together: pixels above, convolutions, pixels below, channels.
        perms: the TRANSPOSE of it that is left.
    """

    image: tuple[int, ...]
    channels: Array
    shape: tuple[int, ...]
    perms: tuple[int, ...]


def write_pixels(op: Op, rewriter: Rewriter) -> Value | None:
    """What is moved behind CONV2D and what scales its result, with the channels that stand together as pixels.

    Channels can be in any order. Those that come in front of pixels, SH for a pixel shuffle, are a convolution each:
    as columns behind the others of the same row, which Vela does not copy, [H, SH * W, SW * C], they are rows of
    their own. The same products.

    48x48 pixels of 32 channels to 96x96 of 32, int8, by a convolution of 3x3, read by another one: 890 k cycles for
    5,625 k on U85-256.
    """
    path = steps_to(op, "CONV2D")
    conv, plan = path[0], _plan(path)
    if plan is None:
        return None
    b, (x, weight, bias), size = rewriter.build, conv.inputs, conv.output.shape[_CHANNELS]
    if plan.image != conv.output.shape[:_CHANNELS]:
        x = b.reshape(x, (*plan.image, x.shape[_CHANNELS]))
    phases = []
    for channels in plan.channels:
        inputs = (x, selected_channels(weight, size, channels), selected_channels(bias, size, channels))
        sums = b.emit("CONV2D", inputs, (*plan.image, len(channels)), conv.output.dtype, **conv.attrs)
        phases.append(done_to(sums, [step for step in path[1:] if step.kind not in MOVES], channels, b))
    whole = b.concat(phases, 2) if len(phases) > 1 else phases[0]
    shape, perms = merge_axes(plan.shape, plan.perms)
    return b.reshape(b.transpose(b.reshape(whole, shape), perms), op.output.shape)


def _plan(path: Sequence[Op]) -> _Plan | None:
    """For a convolution and what follows it; None where nothing is gained."""
    conv = path[0]
    pieces = moved(conv.output.shape, [step for step in path if step.kind in MOVES])
    if pieces is None or any(x.data is None for x in conv.inputs[1:]):
        return None
    pixels, channels = ([piece for piece in pieces if (piece.axis == _CHANNELS) == own] for own in (False, True))
    places = {piece: sum(pieces.index(pixel) < i for pixel in pixels) for i, piece in enumerate(pieces)}
    between = {places[piece] for piece in channels} - {0, len(pixels)}
    if pixels != as_made(pixels) or len(between) > 1:
        return None
    above = between.pop() if between else len(pixels)
    apart = [piece for piece in channels if 0 < places[piece] < len(pixels)]
    last = sorted((piece for piece in channels if piece not in apart), key=lambda piece: places[piece] == 0)
    order, made = [*pixels[:above], *apart, *pixels[above:], *last], as_made(channels)
    count = prod(piece.size for piece in apart)
    numbers = np.arange(conv.output.shape[_CHANNELS]).reshape([piece.size for piece in made])
    rows = numbers.transpose([made.index(piece) for piece in (*apart, *last)]).reshape(count, -1)
    image = _image(conv, [piece.size for piece in pixels], above) if apart else conv.output.shape[:_CHANNELS]
    if image is None or count > _MOST or (count == 1 and made == last):
        return None
    shape, perms = tuple(piece.size for piece in order), tuple(order.index(piece) for piece in pieces)
    return _Plan(image, rows, shape, perms)


def _image(conv: Op, pixels: Sequence[int], above: int) -> tuple[int, ...] | None:
    """[N, H, W] of which W are the pixels from the piece ``above`` on; another than the convolution's for 1x1 alone."""
    shape, (rows, columns) = conv.output.shape[:_CHANNELS], (prod(pixels[:above]), prod(pixels[above:]))
    if shape[2] == columns:
        return shape
    window = conv.inputs[1].shape[1:_CHANNELS]
    plain = window == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, rows, columns) if plain else None


def _behind_convolution(op: Op, rewriter: Rewriter) -> Region | None:
    """With an activation behind what is moved, too, which Vela does with each convolution."""
    path = steps_from(op, rewriter)
    wanted = {*MOVES, *(ACTIVATIONS if path[-1].kind not in ACTIVATIONS else ())}
    while len(path) > 1 and len(readers := rewriter.users(path[-1].output) or []) == 1 and readers[0].kind in wanted:
        path += readers
        wanted -= set(ACTIVATIONS if path[-1].kind in ACTIVATIONS else ())
    if len(path) == 1 or _plan(path) is None:
        return None
    return Region([*path, *read_behind(path[-1], rewriter)], ((path[-1],),))


SHUFFLES = Alternative("convolutions that write channels as pixels", ("CONV2D",), write_pixels, _behind_convolution)


def write_moved(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSEs of what no convolution makes, by ``write_pixels`` of a convolution that leaves everything as it is.

    48x48 pixels of 64 channels, int8, that an ADD wrote, to 96x96 of 16, with that and a convolution of 3x3 behind it:
    186 k cycles for 2,523 k on U85-256.
    """
    moves = moves_to(op, rewriter)
    x = moves[0].inputs[0]
    image = rewriter.build.reshape(x, (1, prod(x.shape[:2]), x.shape[2], x.shape[3]))
    eye = np.eye(x.shape[3]).reshape(x.shape[3], 1, 1, x.shape[3])
    value = rewriter.build.reshape(identity_convolution(rewriter.build, image, eye), x.shape)
    for step in moves:
        value = rewriter.build.emit(step.kind, (value, *step.inputs[1:]), step.output.shape, x.dtype, **step.attrs)
    return write_pixels(value.producer, rewriter) if value.producer is not None else None


def _of_others(op: Op, rewriter: Rewriter) -> Region | None:
    path = [op]
    while len(readers := rewriter.users(path[-1].output) or []) == 1 and readers[0].kind in MOVES:
        path += readers
    moves = moves_to(path[-1], rewriter)
    x = moves[0].inputs[0]
    if x.rank != 4 or x.dtype is not DType.INT8 or not 1 < x.shape[3] <= _WIDEST:
        return None
    own = [piece.axis == _CHANNELS for piece in moved(x.shape, moves) or ()]
    if not any(own[i] and not all(own[:i]) and not all(own[i:]) for i in range(len(own))):
        return None  # no channels between pixels
    return Region([*moves, *read_behind(path[-1], rewriter)], ((moves[-1],),))


MOVED = Alternative("channels written as pixels by a convolution", ("TRANSPOSE",), write_moved, _of_others)
