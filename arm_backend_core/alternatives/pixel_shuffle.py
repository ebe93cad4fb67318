"""Pixel shuffle (depth-to-space) without a TRANSPOSE: one convolution for each row phase, and a CONCAT of the results.

A pixel shuffle moves [H, W, C, SH, SW] to [H, SH, W, SW, C] (Shi et al., Real-Time Single Image and Video
Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural Network, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from arm_backend_core.alternatives.axis_factors import (
    MOVEMENT_KINDS,
    collect_data_movement,
    sort_factors,
    trace_axis_factors,
)
from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import (
    ACTIVATIONS,
    apply_epilogue,
    collect_readers,
    match_epilogue,
    select_constant_channels,
    trace_epilogue,
)
from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import emit_identity_convolution

_CHANNEL_AXIS = 3
#: Maximum number of convolutions. Each reads the whole input.
_MAX_CONVOLUTIONS = 16
#: Maximum number of channels. The multiplications per pixel grow with the square of this number.
_MAX_CHANNELS = 512


class _ShuffleLayout(NamedTuple):
    """The convolutions and how their results are assembled.

    The module ``axis_factors`` explains factors of dimensions.

    Attributes:
        image: shape [N, H, W] of each convolution's result.
        channels: output channels that each convolution computes, [convolutions, channels].
        shape: sizes of the factors of the concatenated results. For a pixel shuffle, these are [H, SH, W, SW, C]: SH is
            the number of convolutions, and SW * C the number of channels of each.
        perms: permutation that brings these factors into the order of the original result. For a pixel shuffle, it is
            the identity.
    """

    image: tuple[int, ...]
    channels: Array
    shape: tuple[int, ...]
    perms: tuple[int, ...]


def convolve_channel_subsets(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace the data movement after a CONV2D and its epilogue by convolutions of channel subsets and a CONCAT.

    Channels can be in any order, because the weights are permuted. A pixel shuffle moves the channel factor SH between
    H and W, so each index of SH gets its own convolution. A CONCAT along the columns, [H, SH * W, SW * C], interleaves
    the rows of the results. Vela emits no copy for this CONCAT. Bit-exact: the sums have the same products.

    A 3x3 convolution and a pixel shuffle from 48x48 pixels to 96x96 with 32 channels, int8, read by another
    convolution, take 890 k instead of 5,625 k cycles on U85-256.
    """
    path = trace_epilogue(op, "CONV2D")
    conv, layout = path[0], _match_shuffle(path)
    if layout is None:
        return None
    b, (x, weight, bias), size = rewriter.builder, conv.inputs, conv.output.shape[_CHANNEL_AXIS]
    if layout.image != conv.output.shape[:_CHANNEL_AXIS]:
        x = b.reshape(x, (*layout.image, x.shape[_CHANNEL_AXIS]))
    phases = []
    for channels in layout.channels:
        inputs = (x, select_constant_channels(weight, size, channels), select_constant_channels(bias, size, channels))
        sums = b.emit("CONV2D", inputs, conv.output.dtype, **conv.attrs)
        phases.append(apply_epilogue(sums, [step for step in path[1:] if step.kind not in MOVEMENT_KINDS], channels, b))
    result = b.concat(phases, 2) if len(phases) > 1 else phases[0]
    shape, perms = merge_axes(layout.shape, layout.perms)
    return b.reshape(b.transpose(b.reshape(result, shape), perms), op.output.shape)


def _match_shuffle(path: Sequence[Op]) -> _ShuffleLayout | None:
    """Match a convolution and the data movement after it; None if the rewrite does not apply or gains nothing."""
    conv = path[0]
    factors = trace_axis_factors(conv.output.shape, [step for step in path if step.kind in MOVEMENT_KINDS])
    if factors is None or any(x.data is None for x in conv.inputs[1:]):
        return None
    pixels = [factor for factor in factors if factor.axis != _CHANNEL_AXIS]
    channels = [factor for factor in factors if factor.axis == _CHANNEL_AXIS]
    places = {factor: sum(factors.index(pixel) < i for pixel in pixels) for i, factor in enumerate(factors)}
    between = {places[factor] for factor in channels} - {0, len(pixels)}
    if pixels != sort_factors(pixels) or len(between) > 1:
        return None
    above = between.pop() if between else len(pixels)
    outer = [factor for factor in channels if 0 < places[factor] < len(pixels)]
    last = sorted((factor for factor in channels if factor not in outer), key=lambda factor: places[factor] == 0)
    order, source_order = [*pixels[:above], *outer, *pixels[above:], *last], sort_factors(channels)
    count = prod(factor.size for factor in outer)
    numbers = np.arange(conv.output.shape[_CHANNEL_AXIS]).reshape([factor.size for factor in source_order])
    rows = numbers.transpose([source_order.index(factor) for factor in (*outer, *last)]).reshape(count, -1)
    image: tuple[int, ...] | None = conv.output.shape[:_CHANNEL_AXIS]
    if outer:
        image = _image_shape(conv, [factor.size for factor in pixels], above)
    if image is None or count > _MAX_CONVOLUTIONS or (count == 1 and source_order == last):
        return None
    shape, perms = tuple(factor.size for factor in order), tuple(order.index(factor) for factor in factors)
    return _ShuffleLayout(image, rows, shape, perms)


def _image_shape(conv: Op, pixels: Sequence[int], above: int) -> tuple[int, ...] | None:
    """Return [N, H, W] where W is the product of the pixel factors from index ``above`` on.

    None if W differs from the width of the convolution's result, unless the convolution is 1x1 without padding and
    stride.
    """
    shape, (rows, columns) = conv.output.shape[:_CHANNEL_AXIS], (prod(pixels[:above]), prod(pixels[above:]))
    if shape[2] == columns:
        return shape
    window = conv.inputs[1].shape[1:_CHANNEL_AXIS]
    is_pointwise = window == (1, 1) and not any(conv.attrs["pad"]) and max(conv.attrs["stride"]) == 1
    return (1, rows, columns) if is_pointwise else None


def _match_convolution(op: Op, rewriter: Rewriter) -> Region | None:
    """Match the convolution, its epilogue, the data movement, and an activation after the data movement.

    The rewrite applies this activation to the result of each convolution. Vela then fuses it with the convolution.
    """
    path = match_epilogue(op, rewriter)
    accepted_kinds = {*MOVEMENT_KINDS, *(ACTIVATIONS if path[-1].kind not in ACTIVATIONS else ())}
    while (
        len(path) > 1
        and len(readers := rewriter.users(path[-1].output) or []) == 1
        and readers[0].kind in accepted_kinds
    ):
        path += readers
        accepted_kinds -= set(ACTIVATIONS if path[-1].kind in ACTIVATIONS else ())
    if len(path) == 1 or _match_shuffle(path) is None:
        return None
    return Region([*path, *collect_readers(path[-1], rewriter)], ((path[-1],),))


PIXEL_SHUFFLE = Alternative("pixel shuffles by convolutions", ("CONV2D",), convolve_channel_subsets, _match_convolution)


def shuffle_by_identity_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """Insert an identity convolution before a pixel shuffle and apply ``convolve_channel_subsets`` to both.

    An ADD, a pixel shuffle from 48x48 pixels with 64 channels to 96x96 with 16, int8, and a 3x3 convolution take 186 k
    instead of 2,523 k cycles on U85-256.
    """
    moves = collect_data_movement(op, rewriter)
    x = moves[0].inputs[0]
    image = rewriter.builder.reshape(x, (1, prod(x.shape[:2]), x.shape[2], x.shape[3]))
    eye = np.eye(x.shape[3]).reshape(x.shape[3], 1, 1, x.shape[3])
    value = rewriter.builder.reshape(emit_identity_convolution(rewriter.builder, image, eye), x.shape)
    for step in moves:
        value = rewriter.builder.emit(step.kind, (value, *step.inputs[1:]), x.dtype, **step.attrs)
    return convolve_channel_subsets(value.producer, rewriter) if value.producer is not None else None


def _match_data_movement(op: Op, rewriter: Rewriter) -> Region | None:
    path = [op]
    while len(readers := rewriter.users(path[-1].output) or []) == 1 and readers[0].kind in MOVEMENT_KINDS:
        path += readers
    moves = collect_data_movement(path[-1], rewriter)
    x = moves[0].inputs[0]
    if x.rank != 4 or x.dtype is not DType.INT8 or not 1 < x.shape[3] <= _MAX_CHANNELS:
        return None
    is_channel = [factor.axis == _CHANNEL_AXIS for factor in trace_axis_factors(x.shape, moves) or ()]
    if not any(is_channel[i] and not all(is_channel[:i]) and not all(is_channel[i:]) for i in range(len(is_channel))):
        return None  # no channels move between pixels
    return Region([*moves, *collect_readers(path[-1], rewriter)], ((moves[-1],),))


PIXEL_SHUFFLE_BY_IDENTITY = Alternative(
    "pixel shuffles by an identity convolution", ("TRANSPOSE",), shuffle_by_identity_convolution, _match_data_movement
)
