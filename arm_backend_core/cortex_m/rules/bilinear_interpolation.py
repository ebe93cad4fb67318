"""Bilinear interpolation: weighted sums of neighbours with exact weights, one axis after the other.

The result is rounded to integers once for each axis. The rounding error of the first axis is at most about half a
quantization step. The weights of the second axis sum to 1, so they do not amplify this error. The second rounding adds
at most half a step. The total error is at most about one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext, Weight, quantize_single_multiplier, rule
from arm_backend_core.cortex_m.rules.convolution import ConvParameters, convolve_image
from arm_backend_core.errors import Unsupported
from arm_backend_core.permutation import Layout

aten = torch.ops.aten
_NHWC: Layout = (0, 2, 3, 1)
#: Largest denominator of the weights, which are int8.
_MAX_DENOMINATOR = 127


@rule(aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default)
def upsample_bilinear(cx: KernelContext) -> QuantizedValue:
    """Bilinear interpolation of [N, C, H, W].

    Raises:
        Unsupported: the weights have no common denominator of up to 127.
    """
    x = cx.operand(cx.node.args[0])
    matrices = [_weights(cx, x, axis) for axis in (2, 3)]
    for axis, matrix in ((3, matrices[1]), (2, matrices[0])):
        if not np.array_equal(matrix, np.eye(len(matrix))):
            x = _interpolate(cx, x, axis, matrix)
    return cx.clamp(cx.requantize(x, cx.result.q))


def _weights(cx: KernelContext, x: QuantizedValue, axis: int) -> Array:
    """Matrix [outputs, inputs] of the interpolation along an axis. Column i is the output for the unit vector i."""
    size, other = x.shape[axis], x.shape[5 - axis]
    shape = (size, 1, size, other) if axis == 2 else (size, 1, other, size)
    units = torch.eye(size, dtype=torch.float64).reshape(size, 1, *((size, 1) if axis == 2 else (1, size)))
    result = cx.node.target(units.expand(shape).contiguous(), *cx.node.args[1:], **cx.node.kwargs)  # type: ignore[operator]
    vectors = result[:, 0, :, 0] if axis == 2 else result[:, 0, 0]
    return vectors.T.numpy()


def _interpolate(cx: KernelContext, x: QuantizedValue, axis: int, matrix: Array) -> QuantizedValue:
    """Interpolate along one axis of [N, C, H, W]. The result has the parameters of ``cx.result``."""
    numerators, denominator = _to_integers(matrix)
    factor = matrix.shape[0] // matrix.shape[1]
    phases = _match_phases(numerators, factor) if matrix.shape[0] == factor * matrix.shape[1] else None
    if phases is not None:
        return _convolve_phases(cx, x, axis, phases, denominator)
    return _multiply(cx, x, axis, numerators, denominator)


def _to_integers(matrix: Array) -> tuple[Array, int]:
    """Numerators and common denominator of the weights.

    The kernels round twice: after the multiplication, and after the shift. This function multiplies the numerators and
    the denominator by the largest integer for which the numerators fit int8, so that the first rounding error is small.
    Without this, an exact result of 1/4 would become 1 instead of 0: the multiplication by 1/2 rounds 0.5 to 1, and the
    shift by one bit rounds 0.5 to 1 again.

    Raises:
        Unsupported: the weights have no common denominator of up to 127.
    """
    for denominator in range(1, _MAX_DENOMINATOR + 1):
        numerators = np.rint(matrix * denominator)
        if np.allclose(numerators, matrix * denominator, rtol=0.0, atol=1e-6):
            factor = int(_MAX_DENOMINATOR // np.abs(numerators).max())
            return (factor * numerators).astype(np.int8), factor * denominator
    raise Unsupported("its weights have no common denominator of up to 127, and the kernels have int8 weights")


def _match_phases(numerators: Array, factor: int) -> Array | None:
    """Match polyphase weights: each input gives ``factor`` outputs, the phases.

    At the edges, the first or last input replaces the missing neighbour.

    Returns:
        [factor, 3]: for each phase, the weights of the previous input, of the input itself and of the next input. None
        if the weights of a phase are not the same for all inputs, or if there are fewer than 3 inputs.
    """
    size = numerators.shape[1]
    padded = np.zeros((size * factor, size + 2), np.int64)
    middle = numerators.astype(np.int64)
    if size < 3:
        return None
    taps = np.stack([middle[factor + phase, 0:3] for phase in range(factor)])
    for position in range(size):
        padded[position * factor : (position + 1) * factor, position : position + 3] = taps
    folded = padded[:, 1:-1].copy()
    folded[:, 0] += padded[:, 0]
    folded[:, -1] += padded[:, -1]
    return taps.astype(np.int8) if np.array_equal(folded, middle) else None


def _convolve_phases(
    cx: KernelContext, x: QuantizedValue, axis: int, phases: Array, denominator: int
) -> QuantizedValue:
    """Compute each phase (every ``len(phases)``-th output) by a depthwise convolution. Interleave the phases."""
    image, at = cx.emit.materialize(x, _NHWC), axis - 1
    padded = _repeat_edges(cx, image, at)
    channels = x.shape[1]
    parts = []
    for taps in phases:
        kernel = np.broadcast_to(taps.reshape((3, 1) if axis == 2 else (1, 3)), (channels, 1, *_kernel_shape(axis)))
        weight = Weight(np.array(kernel), np.asarray(1.0 / denominator))
        conv = ConvParameters([1, 1], (0, 0, 0, 0), [1, 1])
        parts.append(convolve_image(cx, x, padded, weight, None, conv, channels))
    n, height, width, _ = image.meta["val"].shape
    split = [n, height, width, channels]
    split.insert(at + 1, 1)
    joined = cx.emit.call(aten.cat.default, [cx.emit.reshape(part, split) for part in parts], at + 1)
    shape = [n, height, width, channels]
    shape[at] *= len(phases)
    return cx.make_result(cx.emit.reshape(joined, shape), _NHWC)


def _kernel_shape(axis: int) -> tuple[int, int]:
    return (3, 1) if axis == 2 else (1, 3)


def _repeat_edges(cx: KernelContext, image: Node, at: int) -> Node:
    """Pad an NHWC image with copies of its first and last row (``at`` = 1) or column (``at`` = 2)."""
    size = image.meta["val"].shape[at]
    edges = [cx.emit.call(aten.slice_copy.Tensor, image, at, start, start + 1, 1) for start in (0, size - 1)]
    return cx.emit.call(aten.cat.default, [edges[0], image, edges[1]], at)


def _multiply(cx: KernelContext, x: QuantizedValue, axis: int, numerators: Array, denominator: int) -> QuantizedValue:
    """Multiply the elements along ``axis`` by the matrix of weights."""
    kept = tuple(other for other in _NHWC if other != axis)
    layout = (*kept, axis)
    stored = cx.emit.materialize(x, layout)
    shape: list[Any] = list(stored.meta["val"].shape)
    rows = cx.emit.reshape(stored, (1, int(np.prod(shape[:-1])), shape[-1]))
    multiplier, shift = quantize_single_multiplier(x.scale / denominator / float(cx.result.q.scale))
    node = cx.emit.call_kernel(
        "quantized_batch_matmul",
        *(rows, -x.zero_point, cx.emit.constant(numerators[None], "weight"), 0),
        *(cx.result.q.zero_point, multiplier, shift),
    )
    return cx.make_result(cx.emit.reshape(node, (*shape[:-1], len(numerators))), layout)
