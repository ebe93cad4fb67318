"""Transposed convolution (deconvolution) as sub-pixel convolution: one CONV2D for each phase of the row stride.

The output channels of each CONV2D contain all phases of the column stride (depth-to-space, polyphase decomposition).
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.alternatives.conv_epilogue import (
    apply_epilogue,
    collect_readers,
    match_epilogue,
    select_constant_channels,
    trace_epilogue,
)
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter

_AXES = (0, 1)  # height, width


def convolve_stride_phases(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a TRANSPOSE_CONV2D and its epilogue by CONV2Ds, which need no zeros between input elements.

    Source: Shi et al., Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional
    Neural Network, 2016. Along an axis, y[q * s + r - p] = sum over j of x[q - j] * w[j * s + r], for stride s, phase
    0 <= r < s and p cropped leading rows. For each phase r, this is a convolution with the kernel elements j in
    descending order. Each phase has Q rows, W columns and C channels; the strides are SH and SW. The SW column phases
    are channels of one convolution, because they are adjacent in memory. A CONCAT along the width puts the SH rows of
    each q one after another in memory, [Q, SH * W, SW * C], so that a RESHAPE gives the interleaved rows. Bit-exact:
    the sums have the same products, and zeros if a phase has fewer kernel elements.

    From 64x64 pixels with 32 channels to 128x128 with 16, int8, if the result is an output of the program and therefore
    not in NHCWB16: 135 k instead of 956 k cycles on U55-128, 133 k instead of 1,053 k on U85-256. If the row phases
    were concatenated as images, Vela would copy each of them: 596 k cycles on U55-128, 328 k on U85-256.
    """
    conv, *steps = trace_epilogue(op, "TRANSPOSE_CONV2D")
    b, (x, weight, bias) = rewriter.builder, conv.inputs
    if weight.data is None or bias.data is None:
        return None
    strides, size = conv.attrs["stride"], conv.output.shape
    crop = [-conv.attrs["out_pad"][2 * axis] for axis in _AXES]
    first = [crop[axis] // strides[axis] for axis in _AXES]  # q of the first output element
    end = [-(-(crop[axis] + size[1 + axis]) // strides[axis]) for axis in _AXES]
    taps = [-(-weight.shape[1 + axis] // strides[axis]) for axis in _AXES]
    pad = [amount for i in _AXES for amount in (taps[i] - 1 - first[i], end[i] - x.shape[1 + i])]
    if min(pad) < 0:
        return None
    zero_points = conv.attrs["input_zp"], conv.attrs["weight_zp"]
    channels = np.tile(np.arange(size[3]), strides[1])
    repeats, phases = select_constant_channels(bias, size[3], channels), []
    for kernel in _phase_kernels(weight.data, strides, taps, zero_points[1]):
        sums = b.conv2d(x, constant(kernel, weight.dtype), repeats, pad=pad, zps=zero_points)
        phases.append(apply_epilogue(sums, steps, channels, b))
    n, rows, columns, _ = phases[0].shape
    value = b.reshape(b.concat(phases, 2), (n, rows * strides[0], columns * strides[1], size[3]))
    return b.slice(value, (0, *(crop[axis] - first[axis] * strides[axis] for axis in _AXES), 0), size)


def _phase_kernels(weight: Array, strides: list[int], taps: list[int], zero_point: int) -> Array:
    """Rearrange [OC, KH, KW, IC] to [SH, SW * OC, JH, JW, IC], with the kernel of each phase in reverse order.

    JH and JW are the height and width of the kernel of a phase.
    """
    padded_sizes = [taps[axis] * strides[axis] for axis in _AXES]
    padding = [(0, padded_sizes[axis] - weight.shape[1 + axis]) for axis in _AXES]
    padded = np.pad(weight, ((0, 0), *padding, (0, 0)), constant_values=zero_point)
    channels, inputs = weight.shape[0], weight.shape[3]
    split = padded.reshape(channels, taps[0], strides[0], taps[1], strides[1], inputs)[:, ::-1, :, ::-1]
    return np.ascontiguousarray(split.transpose(2, 4, 0, 1, 3, 5)).reshape(strides[0], -1, *taps, inputs)


def _match_region(op: Op, rewriter: Rewriter) -> Region | None:
    steps = match_epilogue(op, rewriter)
    if max(op.attrs["stride"]) == 1 or len(steps) == 1:
        return None
    return Region([*steps, *collect_readers(steps[-1], rewriter)], ((steps[-1],),))


SUB_PIXEL_CONVOLUTION = Alternative(
    "transposed convolutions as sub-pixel convolutions", ("TRANSPOSE_CONV2D",), convolve_stride_phases, _match_region
)
