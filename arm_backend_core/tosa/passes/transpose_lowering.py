"""TRANSPOSE lowering for Ethos-U: replace each TRANSPOSE by the operators that Vela estimates to be fastest.

Vela's estimate of a TRANSPOSE depends on its shape. Vela 5.1 estimates for [1, 3, 224, 224] to NHWC, int8:

* U55-128: 112,896 cycles in rank 4, 56,448 with merged dimensions [3, 50176] (int16: 75,264 and 37,632);
* U85-256: 548,800 in rank 4, more with merged dimensions, 38,318 as a convolution (int16: 548,800 and 38,016).
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
    if target.hardware.is_ethos_u:
        apply_once(graph, target, {"TRANSPOSE": [sink_slice]})


def lower_transposes(graph: Graph, target: Target) -> None:
    """Lower each TRANSPOSE for ``target``. The pass must not run twice: it would lower its own results again."""
    if target.hardware.is_ethos_u:
        apply_once(graph, target, {"TRANSPOSE": [lower_transpose], "MATMUL": [transpose_before_matmul]})


def lower_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a TRANSPOSE by its fastest equivalent on the target; None if the TRANSPOSE itself is fastest."""
    rule = transpose_by_convolution if rewriter.builder.target.hardware.transposes_by_convolution else split_into_swaps
    return rule(op, rewriter)


def sink_slice(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE(SLICE(x)) becomes SLICE(TRANSPOSE(x)) if x is at most 5/4 as large as the result.

    A convolution that reads the SLICE then absorbs it.
    """
    slice_op = producer(op.inputs[0], "SLICE")
    if slice_op is None or slice_op.inputs[0].size > op.output.size * 5 // 4 or not rewriter.has_one_use(op.inputs[0]):
        return None
    perms = op.attrs["perms"]
    transposed = rewriter.builder.transpose(slice_op.inputs[0], perms)
    start, size = ([slice_op.attrs[name][axis] for axis in perms] for name in ("start", "size"))
    return rewriter.builder.slice(transposed, start, size)


def split_into_swaps(op: Op, rewriter: Rewriter) -> Value | None:
    """Decompose a TRANSPOSE into TRANSPOSEs that each swap two groups of dimensions.

    Vela's own decomposition takes five times as many cycles for random shapes, or exceeds limits of the hardware. The
    operand of a MATMUL keeps a single TRANSPOSE, which Vela merges with the TRANSPOSE that it inserts before a MATMUL.
    """
    b, x, perms = rewriter.builder, op.inputs[0], tuple(op.attrs["perms"])
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
    """Rewrite TRANSPOSEs before a MATMUL from rank 3 to rank 4.

    Vela inserts a TRANSPOSE of the second operand of a MATMUL. Vela merges it with a preceding TRANSPOSE of rank 4, but
    not with one of rank 3. Attention with 4 heads on [32, 128] takes 32,752 cycles on U85-256 with rank 3, and 25,968
    with rank 4.
    """
    inputs = list(op.inputs)
    for i, value in enumerate(op.inputs):
        transpose = producer(value, "TRANSPOSE")
        if transpose is not None:
            source, perms = transpose.inputs[0], transpose.attrs["perms"]
            image = rewriter.builder.reshape(source, (1, *source.shape))
            transposed = rewriter.builder.transpose(image, (0, *(axis + 1 for axis in perms)))
            inputs[i] = rewriter.builder.reshape(transposed, value.shape)
    if inputs == op.inputs:
        return None
    return rewriter.builder.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def transpose_by_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a TRANSPOSE from [A, N] to [N, A] by a convolution over the height of an image [A, N / C] of C channels.

    C is the largest of 4, 2 and 1 that divides N. The convolution takes a quarter of a cycle per element for small A.
    The number of its multiplications grows with A * A. A TRANSPOSE is faster if A > 16 or N < 4 * A * A: with
    A = 16 and N = 256 (int8), the TRANSPOSE takes 3,200 cycles and the convolution 5,472. With N = 1024, the
    convolution is faster.
    """
    source = op.inputs[0]
    shape, perms = merge_axes(source.shape, op.attrs["perms"])
    if perms != (1, 0) or source.dtype not in (DType.INT8, DType.INT16):
        return None
    rows, row_length = shape
    if rows > 16 or 4 * rows * rows > row_length:
        return None
    channels = next(n for n in (4, 2, 1) if row_length % n == 0)
    weight = np.zeros((channels, rows, rows, 1, channels))
    for pixel in range(channels):
        weight[pixel, np.arange(rows), np.arange(rows), 0, pixel] = 1
    build = rewriter.builder
    image = build.reshape(source, (1, rows, row_length // channels, channels))
    kernel = weight.reshape(channels * rows, rows, 1, channels)
    return build.reshape(emit_identity_convolution(build, image, kernel), op.output.shape)
