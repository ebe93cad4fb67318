"""TRANSPOSE lowering for Ethos-U: each TRANSPOSE in the form that Vela estimates to be fastest on the target.

Vela's estimate of a TRANSPOSE depends on how it is written. Measured with Vela 5.1 on [1, 3, 224, 224] to NHWC, int8:

* U55-128: 112,896 cycles as written, 56,448 on merged dimensions [3, 50176] (int16: 75,264 and 37,632);
* U85-256: 548,800 as written and worse on merged dimensions; 38,318 as a convolution (int16: 548,800 and 38,016).
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.targets.target import Target
from arm_backend_core.targets.transpose_swaps import MAX_EXTENT, is_supported_by_vela, plan_swaps
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer, skip_through
from arm_backend_core.tosa.passes.space_to_depth import emit_identity_convolution
from arm_backend_core.tosa.vela_workarounds.copies import emit_copy


def sink_slices(graph: Graph, target: Target) -> None:
    """Move SLICEs behind TRANSPOSEs, next to the convolutions that read them."""
    if target.hardware.npu:
        apply_once(graph, target, {"TRANSPOSE": [sink_slice]})


def lower_transposes(graph: Graph, target: Target) -> None:
    """Lower each TRANSPOSE for ``target``; run it once, because it does not recognize its own results."""
    if target.hardware.npu:
        apply_once(graph, target, {"TRANSPOSE": [lower_transpose], "MATMUL": [transpose_before_matmul]})


def lower_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """A TRANSPOSE in the fastest form for the target; None if it has that form already."""
    rule = transpose_by_convolution if rewriter.build.target.hardware.transposes_by_convolution else split_into_swaps
    return rule(op, rewriter)


def sink_slice(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE(SLICE(x)) becomes SLICE(TRANSPOSE(x)) if the SLICE removes little: a convolution reads a SLICE for
    free.
    """
    slice_op = producer(op.inputs[0], "SLICE")
    if slice_op is None or slice_op.inputs[0].size > op.output.size * 5 // 4 or not rewriter.has_one_use(op.inputs[0]):
        return None
    perms = op.attrs["perms"]
    whole = rewriter.build.transpose(slice_op.inputs[0], perms)
    start, size = ([slice_op.attrs[name][axis] for axis in perms] for name in ("start", "size"))
    return rewriter.build.slice(whole, start, size)


def split_into_swaps(op: Op, rewriter: Rewriter) -> Value | None:
    """A sequence of TRANSPOSEs that each swap two neighbouring groups of dimensions.

    Vela's own decomposition is slower, five times in random shapes, or exceeds the limits of the hardware. The operand
    of a MATMUL keeps a single TRANSPOSE, which Vela merges with its own.
    """
    b, x, perms = rewriter.build, op.inputs[0], tuple(op.attrs["perms"])
    sizes, order = merge_axes(x.shape, perms)
    source = skip_through(x, "RESHAPE").shape
    path = plan_swaps(x.shape, perms, x.dtype, source)
    if path is None:
        x, path = emit_copy(x, b), plan_swaps(x.shape, perms, x.dtype, x.shape)
    elif rewriter.feeds(op.output, "MATMUL", ("RESHAPE",)) and max(sizes) <= MAX_EXTENT:
        if x.rank <= 4 and is_supported_by_vela(x.shape, perms, x.dtype, source):
            return None
        rank_four = (1, *sizes), (0, *(axis + 1 for axis in order))
        path = (rank_four,) if len(sizes) == 3 and is_supported_by_vela(*rank_four, x.dtype, source) else path
    if path is None or (x is op.inputs[0] and path == ((x.shape, perms),)):
        return None
    value = x
    for shape, axes in path:
        value = b.transpose(b.reshape(value, shape), axes)
    return b.reshape(value, op.output.shape)


def transpose_before_matmul(op: Op, rewriter: Rewriter) -> Value | None:
    """Transpose the operands of a MATMUL in rank 4.

    Vela transposes the second operand itself. It merges that with a preceding TRANSPOSE, but not with one of rank 3.
    Measured on attention with 4 heads and 32 rows of 128: 32,752 cycles in rank 3, 25,968 in rank 4 on U85-256.
    """
    inputs = list(op.inputs)
    for i, value in enumerate(op.inputs):
        transpose = producer(value, "TRANSPOSE")
        if transpose is not None:
            source, perms = transpose.inputs[0], transpose.attrs["perms"]
            image = rewriter.build.reshape(source, (1, *source.shape))
            moved = rewriter.build.transpose(image, (0, *(axis + 1 for axis in perms)))
            inputs[i] = rewriter.build.reshape(moved, value.shape)
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def transpose_by_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """[A, N] to [N, A] as a convolution over the height of an image [A, N / 4] of 4 channels.

    It costs a quarter of a cycle per element while A is small; the multiplications grow with A * A. TRANSPOSE is faster
    for few or many rows: measured for A = 16 with N = 256 (int8: 5,472 cycles for the convolution against 3,200), but
    not with N = 1024.
    """
    source = op.inputs[0]
    shape, perms = merge_axes(source.shape, op.attrs["perms"])
    if perms != (1, 0) or source.dtype not in (DType.INT8, DType.INT16):
        return None
    rows, length = shape
    if rows > 16 or 4 * rows * rows > length:
        return None
    channels = next(n for n in (4, 2, 1) if length % n == 0)
    weight = np.zeros((channels, rows, rows, 1, channels))
    for pixel in range(channels):
        weight[pixel, np.arange(rows), np.arange(rows), 0, pixel] = 1
    build = rewriter.build
    image = build.reshape(source, (1, rows, length // channels, channels))
    kernel = weight.reshape(channels * rows, rows, 1, channels)
    return build.reshape(emit_identity_convolution(build, image, kernel), op.output.shape)
