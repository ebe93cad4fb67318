"""Dilation folding: 1D convolutions with dilation become 2D convolutions without, and absorb a PAD before them."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, trace_back

_KINDS = ("CONV2D", "DEPTHWISE_CONV2D")


def fold_dilation(rescale: Op, rewriter: Rewriter) -> Value | None:
    """Rewrite a convolution with dilation d on [N, 1, T, C], and its RESCALE, as one on [N, T / d, d, C] without.

    Element q * d + r is in row q, column r, so taps that are d apart are in neighbouring rows of a column, and leading
    padding by a multiple of d is rows of padding. Other lengths are padded, and the result is sliced. With d = 1 only
    the PAD is folded into the convolution. Bit-equal: padding is the zero point, and all other products are the same.
    """
    op = rescale.inputs[0].producer
    if op is None or op.kind not in _KINDS:
        return None
    b, (x, front), weight = rewriter.build, _skip_padding(op), op.inputs[1]
    step, kernel = op.attrs["dilation"][1], weight.shape[_height_axis(op) + 1]
    n, _, length, _ = op.output.shape
    size, channels = x.shape[-2:]
    rows = -(-length // step)  # of results
    aligned = front % step == 0 and size % step == 0 and front < kernel * step
    if not aligned:
        after = (rows + kernel - 1) * step - size - front
        if step == 1 or after < 0:
            return None
        x, front = b.pad(b.reshape(x, (n, size, channels)), [(0, 0), (front, after), (0, 0)], op.attrs["input_zp"]), 0
    top = front // step
    bottom = rows + kernel - 1 - top - x.shape[-2] // step
    if not 0 <= bottom < kernel or (step == 1 and x.shape[-2:] == op.inputs[0].shape[-2:]) or weight.data is None:
        return None
    image = b.reshape(x, (n, x.shape[-2] // step, step, channels) if step > 1 else (n, 1, size, channels))
    data = np.swapaxes(weight.data, _height_axis(op), _height_axis(op) + 1) if step > 1 else weight.data
    pad = [top, bottom, 0, 0] if step > 1 else [0, 0, top, bottom]
    attrs = {**op.attrs, "pad": pad, "dilation": [1, 1]}
    inputs = (image, constant(data, weight.dtype), op.inputs[2])
    total = b.emit(op.kind, inputs, op.output.dtype, **attrs)
    result = b.emit("RESCALE", (total,), rescale.output.dtype, **rescale.attrs)
    result = b.reshape(result, (n, 1, rows * step, op.output.shape[3]))
    return b.slice(result, (0, 0, 0, 0), op.output.shape)


def _height_axis(op: Op) -> int:
    """Return the axis of the weight's height."""
    return 1 if op.kind == "CONV2D" else 0


def _skip_padding(op: Op) -> tuple[Value, int]:
    """Return the input [.., T, C] in front of a PAD, and the padding before T."""
    x, front = op.inputs[0], op.attrs["pad"][2]
    before = producer(x, "RESHAPE")
    pad = producer(before.inputs[0] if before is not None else x, "PAD")
    if pad is None or pad.attrs["pad_const"] != op.attrs["input_zp"] or any(op.attrs["pad"]):
        return x, front
    sides, source = pad.attrs["padding"], pad.inputs[0]
    along = len(sides) - 4
    same = source.rank > 1 and source.shape[-1] == x.shape[-1] and pad.output.shape[-2] == x.shape[-2]
    if not same or any(amount for side, amount in enumerate(sides) if side not in (along, along + 1)):
        return x, front
    return source, sides[along]


def _match_conv1d(op: Op, rewriter: Rewriter) -> Region | None:
    x, weight = op.inputs[:2]
    flat = x.shape[1] == 1 and weight.shape[_height_axis(op)] == 1 and x.dtype in (DType.INT8, DType.INT16)
    if not flat or max(op.attrs["stride"]) > 1:
        return None
    readers = rewriter.users(op.output) or []
    if [reader.kind for reader in readers] != ["RESCALE"]:
        return None
    _, moves = trace_back(x, lambda before: before.kind in ("RESHAPE", "PAD"))
    return Region([op, *readers, *reversed(moves)], (readers,))


DILATION = Alternative("1D convolutions with folded dilation or padding", _KINDS, fold_dilation, _match_conv1d)
