"""Channels in another order, or some of them, by the convolution that reads them or one of 1x1."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.alternatives.split_axes import places
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant, prod
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.space_to_depth import identity_convolution

#: What only moves elements, of one operand.
_MOVING = ("RESHAPE", "REVERSE", "SLICE", "TRANSPOSE")
#: Multiplications for each pixel grow with the square of the channels; more are never cheaper.
_MOST_CHANNELS = 2048
#: Elements of which it is looked up where they come from.
_MOST_ELEMENTS = 1 << 22


def take_channels(op: Op, rewriter: Rewriter) -> Value | None:
    """A convolution of moved channels reads them where they were, with its weights moved; or a new one moves them.

    Its sum has the same products in another order, and zeros for channels that were not taken: the same integer.
    """
    folded = op.kind == "CONV2D"
    found = _channels(op.inputs[0] if folded else op.output)
    if found is None:
        return None
    x, order = found
    build = rewriter.build
    if folded:
        data = op.inputs[1].data
        if data is None or data.shape[-1] != len(order):  # pixels become others on the way
            return None
        weight = np.full((*data.shape[:3], x.shape[-1]), op.attrs["weight_zp"], data.dtype)
        weight[..., order] = data
        image = build.reshape(x, (*op.inputs[0].shape[:3], x.shape[-1]))
        inputs = (image, constant(weight, op.inputs[1].dtype), op.inputs[2])
        return build.emit("CONV2D", inputs, op.output.shape, op.output.dtype, **op.attrs)
    weight = np.zeros((len(order), 1, 1, x.shape[-1]))
    weight[np.arange(len(order)), 0, 0, order] = 1
    image = build.reshape(x, (1, *_sides(prod(x.shape[:-1])), x.shape[-1]))
    return build.reshape(identity_convolution(build, image, weight), op.output.shape)


def _channels(value: Value) -> tuple[Value, Array] | None:
    """What ``value`` was before it was moved, and which of its channels each of ``value``'s is, in all pixels."""
    steps: list[Op] = []
    x = value
    while (step := x.producer) is not None and step.kind in _MOVING:
        steps.append(step)
        x = step.inputs[0]
    if not steps or x.dtype is not DType.INT8 or x.size > _MOST_ELEMENTS or x.rank < 2:
        return None
    pixels, channels = prod(x.shape[:-1]), x.shape[-1]
    if channels > _MOST_CHANNELS or value.size % pixels:
        return None
    indices = places(x, steps[::-1])
    sources = indices.reshape(pixels, -1) - np.arange(pixels, dtype=np.int32)[:, None] * channels
    order = sources[0]
    same = bool(np.all(sources == order)) and order.min() >= 0 and order.max() < channels
    return (x, order) if same and not np.array_equal(np.arange(channels), order) else None


def _sides(pixels: int) -> tuple[int, int]:
    """Height and width of an image of so many: as square as can be."""
    height = next(n for n in range(int(pixels**0.5), 0, -1) if pixels % n == 0)
    return height, pixels // height


def _moved(op: Op, rewriter: Rewriter) -> Region | None:
    """A TRANSPOSE, or SLICE of every so many channels, with what moves its result on and the convolutions behind."""
    strided = op.kind == "TRANSPOSE" or (op.output.shape[-1] == 1 and op.inputs[0].shape[-1] > 1)
    if not strided or _channels(op.output) is None:
        return None
    ops = around(op, rewriter, _MOVING, ())
    ends: list[Op] = []  # what is read by others than convolutions
    feeding: list[Op] = []  # what is read by convolutions
    folding: list[Op] = []  # these
    waiting = [op]
    for step in waiting:  # grows
        readers = rewriter.users(step.output) or []
        on = [reader for reader in readers if reader.kind in _MOVING and _channels(reader.output) is not None]
        convs = [reader for reader in readers if reader.kind == "CONV2D" and reader.inputs[0] is step.output]
        waiting += on
        folding += convs
        feeding += [step] * bool(convs)
        ends += [step] * (len(readers) > len(on) + len(convs) or not readers)
        ops += [step, *(behind for conv in convs for behind in around(conv, rewriter, (), ("RESCALE",)))]
    return Region(ops, ([*folding, *ends], [*feeding, *ends], waiting[:2]))


CHANNELS = Alternative("moves of channels by convolutions", ("TRANSPOSE", "SLICE"), take_channels, _moved)
