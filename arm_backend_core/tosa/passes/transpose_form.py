"""Ethos-U: every TRANSPOSE in the form that its hardware is fastest at.

Vela's estimate of a TRANSPOSE depends on how it is written. Measured with Vela 5.1 on [1, 3, 224, 224] to NHWC, int8:

* U55-128: 112,896 cycles as written, 56,448 on merged dimensions [3, 50176] (int16: 75,264 and 37,632);
* U85-256: 548,800 as written and worse on merged dimensions; 38,318 as a convolution (int16: 548,800 and 38,016).
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.permutation import merge_axes
from arm_backend_core.targets.target import Target
from arm_backend_core.targets.transpose_swaps import LONGEST, is_supported_by_vela, steps
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer, skip_through
from arm_backend_core.tosa.passes.space_to_depth import identity_convolution
from arm_backend_core.tosa.vela_workarounds.arithmetic import copied


def slice_after_transposes(graph: Graph, target: Target) -> None:
    """Let SLICEs stand before the convolutions that read them."""
    if target.hardware.npu:
        apply_once(graph, target, {"TRANSPOSE": [slice_later]})


def choose_transpose_forms(graph: Graph, target: Target) -> None:
    """Rewrite TRANSPOSEs for ``target``; each once, so this is not for repeating."""
    if target.hardware.npu:
        apply_once(graph, target, {"TRANSPOSE": [fastest], "MATMUL": [transpose_before_matmul]})


def fastest(op: Op, rewriter: Rewriter) -> Value | None:
    """A TRANSPOSE in the form of the target's hardware; None where that is the one it has."""
    form = as_convolution if rewriter.build.target.hardware.transposes_by_convolution else in_steps
    return form(op, rewriter)


def slice_later(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE(SLICE(x)) as SLICE(TRANSPOSE(x)), where little is cut: a convolution reads a SLICE at no cost."""
    cut = producer(op.inputs[0], "SLICE")
    if cut is None or cut.inputs[0].size > op.output.size * 5 // 4 or not rewriter.single_use(op.inputs[0]):
        return None
    perms = op.attrs["perms"]
    whole = rewriter.build.transpose(cut.inputs[0], perms)
    start, size = ([cut.attrs[name][axis] for axis in perms] for name in ("start", "size"))
    return rewriter.build.slice(whole, start, size)


def in_steps(op: Op, rewriter: Rewriter) -> Value | None:
    """One exchange at a time: Vela's own steps are slower, by five in random shapes, or beyond the hardware.

    What a MATMUL reads stays one TRANSPOSE, which Vela merges with its own.
    """
    b, x, perms = rewriter.build, op.inputs[0], tuple(op.attrs["perms"])
    sizes, order = merge_axes(x.shape, perms)
    source = skip_through(x, "RESHAPE").shape
    path = steps(x.shape, perms, x.dtype, source)
    if path is None:
        x, path = copied(x, b), steps(x.shape, perms, x.dtype, x.shape)
    elif rewriter.feeds(op.output, "MATMUL", ("RESHAPE",)) and max(sizes) <= LONGEST:
        if x.rank <= 4 and is_supported_by_vela(x.shape, perms, x.dtype, source):
            return None
        whole = (1, *sizes), (0, *(axis + 1 for axis in order))
        path = (whole,) if len(sizes) == 3 and is_supported_by_vela(*whole, x.dtype, source) else path
    if path is None or (x is op.inputs[0] and path == ((x.shape, perms),)):
        return None
    value = x
    for shape, axes in path:
        value = b.transpose(b.reshape(value, shape), axes)
    return b.reshape(value, op.output.shape)


def transpose_before_matmul(op: Op, rewriter: Rewriter) -> Value | None:
    """Operands of MATMUL are transposed in four dimensions.

    Vela transposes the second operand itself and merges that with a TRANSPOSE before it, but not one of three
    dimensions. Measured on attention with 4 heads and 32 rows of 128: 32,752 against 25,968 cycles on U85-256.
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
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def as_convolution(op: Op, rewriter: Rewriter) -> Value | None:
    """[A, N] to [N, A] as a convolution over the height of an image [A, N / 4] of 4 channels.

    It costs a quarter of a cycle an element while A is small; the multiplications grow with A * A. TRANSPOSE is the
    better one on few or many rows: measured for A = 16 with N = 256 (int8: 5,472 against 3,200) but not N = 1024.
    """
    source = op.inputs[0]
    shape, perms = merge_axes(source.shape, op.attrs["perms"])
    if perms != (1, 0) or source.dtype not in (DType.INT8, DType.INT16):
        return None
    rows, length = shape
    if rows > 16 or 4 * rows * rows > length:
        return None
    together = next(n for n in (4, 2, 1) if length % n == 0)
    weight = np.zeros((together, rows, rows, 1, together))
    for pixel in range(together):
        weight[pixel, np.arange(rows), np.arange(rows), 0, pixel] = 1
    build = rewriter.build
    image = build.reshape(source, (1, rows, length // together, together))
    kernel = weight.reshape(together * rows, rows, 1, together)
    return build.reshape(identity_convolution(build, image, kernel), op.output.shape)
