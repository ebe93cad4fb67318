"""Dilation folding: rewrite a dilated 1D convolution to an undilated 2D convolution, similar to space-to-batch.

A PAD before the convolution becomes padding of the convolution.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, trace_back

_KINDS = ("CONV2D", "DEPTHWISE_CONV2D")


def fold_dilation(rescale: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite a 1D convolution with dilation d and its RESCALE to a 2D convolution with dilation 1 and a RESCALE.

    A RESHAPE views the input [N, 1, T, C] as [N, T / d, d, C]. Element q * d + r is in row q and column r. Neighbouring
    kernel elements read elements that are d apart, which are now in adjacent rows of one column. Leading padding by a
    multiple of d becomes whole rows of padding. If T or the padding is not a multiple of d, a PAD extends the input,
    and a SLICE shortens the result. If d = 1, the rewrite only folds a PAD into the convolution.

    Bit-exact: each output is the sum of the same products. Padding is equal to the zero point, so that it adds 0.
    """
    op = rescale.inputs[0].producer
    if op is None or op.kind not in _KINDS:
        return None
    b, (x, pad_before), weight = rewriter.builder, _skip_padding(op), op.inputs[1]
    dilation, kernel = op.attrs["dilation"][1], weight.shape[_height_axis(op) + 1]
    n, _, output_length, _ = op.output.shape
    input_length, channels = x.shape[-2:]
    output_rows = -(-output_length // dilation)
    divides = pad_before % dilation == 0 and input_length % dilation == 0 and pad_before < kernel * dilation
    if not divides:
        pad_after = (output_rows + kernel - 1) * dilation - input_length - pad_before
        if dilation == 1 or pad_after < 0:
            return None
        padding = [(0, 0), (pad_before, pad_after), (0, 0)]
        x, pad_before = b.pad(b.reshape(x, (n, input_length, channels)), padding, op.attrs["input_zp"]), 0
    top = pad_before // dilation
    bottom = output_rows + kernel - 1 - top - x.shape[-2] // dilation
    is_unchanged = dilation == 1 and x.shape[-2:] == op.inputs[0].shape[-2:]
    if not 0 <= bottom < kernel or is_unchanged or weight.data is None:
        return None
    image_size = (x.shape[-2] // dilation, dilation) if dilation > 1 else (1, input_length)
    image = b.reshape(x, (n, *image_size, channels))
    data = np.swapaxes(weight.data, _height_axis(op), _height_axis(op) + 1) if dilation > 1 else weight.data
    pad = [top, bottom, 0, 0] if dilation > 1 else [0, 0, top, bottom]
    attrs = {**op.attrs, "pad": pad, "dilation": [1, 1]}
    inputs = (image, constant(data, weight.dtype), op.inputs[2])
    accumulator = b.emit(op.kind, inputs, op.output.dtype, **attrs)
    result = b.emit("RESCALE", (accumulator,), rescale.output.dtype, **rescale.attrs)
    result = b.reshape(result, (n, 1, output_rows * dilation, op.output.shape[3]))
    return b.slice(result, (0, 0, 0, 0), op.output.shape)


def _height_axis(op: Op) -> int:
    """Return the axis of the kernel height in the weight; the kernel width is the next axis."""
    return 1 if op.kind == "CONV2D" else 0


def _skip_padding(op: Op) -> tuple[Value, int]:
    """Return the input [.., T, C] of the PAD before a convolution, and the leading padding of T.

    If there is no PAD that can be folded, return the input and the leading padding of the convolution itself.
    """
    x, own_padding = op.inputs[0], op.attrs["pad"][2]
    reshape = producer(x, "RESHAPE")
    pad = producer(reshape.inputs[0] if reshape is not None else x, "PAD")
    if pad is None or pad.attrs["pad_const"] != op.attrs["input_zp"] or any(op.attrs["pad"]):
        return x, own_padding
    padding, source = pad.attrs["padding"], pad.inputs[0]
    before_t = len(padding) - 4  # ``padding`` lists before and after of each axis, and T is the last axis but one
    keeps_axes = source.rank > 1 and source.shape[-1] == x.shape[-1] and pad.output.shape[-2] == x.shape[-2]
    if not keeps_axes or any(amount for i, amount in enumerate(padding) if i not in (before_t, before_t + 1)):
        return x, own_padding
    return source, padding[before_t]


def _match_conv1d(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    is_1d = x.shape[1] == 1 and weight.shape[_height_axis(op)] == 1 and x.dtype in (DType.INT8, DType.INT16)
    if not is_1d or max(op.attrs["stride"]) > 1:
        return None
    readers = rewriter.users(op.output) or []
    if [reader.kind for reader in readers] != ["RESCALE"]:
        return None
    _, reshapes_and_pads = trace_back(x, lambda before: before.kind in ("RESHAPE", "PAD"))
    return Region([op, *readers, *reversed(reshapes_and_pads)], (readers,))


FOLDED_DILATION = Alternative("1D convolutions with folded dilation or padding", _KINDS, fold_dilation, _match_conv1d)
