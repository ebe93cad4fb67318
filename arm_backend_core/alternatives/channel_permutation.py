"""Channel selection and permutation: fold it into the weights of the next convolution, or emit a 1x1 convolution."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value, constant, prod
from arm_backend_core.tosa.operators import INJECTIVE_MOVEMENT, Array
from arm_backend_core.tosa.passes.element_order import source_indices
from arm_backend_core.tosa.passes.rewrite import Rewriter, trace_back
from arm_backend_core.tosa.passes.space_to_depth import emit_identity_convolution

#: Maximum number of channels. The multiplications per pixel grow with the square of this number. The rewrite is never
#: cheaper for more channels.
_MAX_CHANNELS = 2048
#: Maximum number of elements of the source tensor. The position of each element is traced.
_MAX_ELEMENTS = 1 << 22


def select_channels(op: Op, rewriter: Rewriter) -> Value | None:
    """Fold the channel permutation before a CONV2D into its weights, or emit a permutation as a 1x1 convolution.

    If ``op`` is not a CONV2D, it is the last operator of the permutation, and the 1x1 convolution replaces its result.

    Bit-exact: the sums have the same products in another order, and zeros for channels that are not selected.
    """
    is_folded = op.kind == "CONV2D"
    selection = _match_selection(op.inputs[0] if is_folded else op.output)
    if selection is None:
        return None
    x, order = selection
    build = rewriter.builder
    if is_folded:
        data = op.inputs[1].data
        if data is None or data.shape[-1] != len(order):  # the movement also changes the number of pixels
            return None
        weight = np.full((*data.shape[:3], x.shape[-1]), op.attrs["weight_zp"], data.dtype)
        weight[..., order] = data
        image = build.reshape(x, (*op.inputs[0].shape[:3], x.shape[-1]))
        inputs = (image, constant(weight, op.inputs[1].dtype), op.inputs[2])
        return build.emit("CONV2D", inputs, op.output.dtype, **op.attrs)
    weight = np.zeros((len(order), 1, 1, x.shape[-1]))
    weight[np.arange(len(order)), 0, 0, order] = 1
    image = build.reshape(x, (1, *_square_sides(prod(x.shape[:-1])), x.shape[-1]))
    return build.reshape(emit_identity_convolution(build, image, weight), op.output.shape)


def _match_selection(value: Value) -> tuple[Value, Array] | None:
    """Trace ``value`` back through data movement.

    Returns:
        The source, and the source channel of each channel of ``value``. None in these cases: there is no data movement;
        the data movement does not change the channels; different pixels select different channels; a pixel reads
        another pixel; the source is not int8, has fewer than two dimensions, or is too large.
    """
    x, steps = trace_back(value, lambda step: step.kind in INJECTIVE_MOVEMENT)
    if not steps or x.dtype is not DType.INT8 or x.size > _MAX_ELEMENTS or x.rank < 2:
        return None
    pixels, channels = prod(x.shape[:-1]), x.shape[-1]
    if channels > _MAX_CHANNELS or value.size % pixels:
        return None
    indices = source_indices(x, steps)
    sources = indices.reshape(pixels, -1) - np.arange(pixels, dtype=np.int32)[:, None] * channels
    order = sources[0]
    is_equal_in_all_pixels = bool(np.all(sources == order)) and order.min() >= 0 and order.max() < channels
    return (x, order) if is_equal_in_all_pixels and not np.array_equal(np.arange(channels), order) else None


def _square_sides(pixels: int) -> tuple[int, int]:
    """Return height and width of an image with this many pixels, as square as possible."""
    height = next(n for n in range(int(pixels**0.5), 0, -1) if pixels % n == 0)
    return height, pixels // height


def _match_region(op: Op, rewriter: Rewriter) -> Region | None:
    """Match a TRANSPOSE, or a SLICE of one channel, with the adjacent data movement and the convolutions that follow.

    A RESHAPE that splits the channels and a SLICE of one channel together are a strided slice of channels. There are
    three candidates. The first folds the selection into the weights of all convolutions. The second emits a 1x1
    convolution before them. The third replaces ``op`` and the first data movement after ``op`` by a 1x1 convolution
    each.
    """
    is_candidate = op.kind == "TRANSPOSE" or (op.output.shape[-1] == 1 and op.inputs[0].shape[-1] > 1)
    if not is_candidate or _match_selection(op.output) is None:
        return None
    ops = collect_neighbors(op, rewriter, INJECTIVE_MOVEMENT, ())
    ends: list[Op] = []  # data movement without readers, or with readers outside of the region
    conv_inputs: list[Op] = []  # data movement that convolutions read
    all_convs: list[Op] = []
    pending = [op]
    for step in pending:  # the loop appends to ``pending``
        readers = rewriter.users(step.output) or []
        moves = [
            reader
            for reader in readers
            if reader.kind in INJECTIVE_MOVEMENT and _match_selection(reader.output) is not None
        ]
        convs = [reader for reader in readers if reader.kind == "CONV2D" and reader.inputs[0] is step.output]
        pending += moves
        all_convs += convs
        conv_inputs += [step] * bool(convs)
        ends += [step] * (len(readers) > len(moves) + len(convs) or not readers)
        ops += [step, *(reader for conv in convs for reader in collect_neighbors(conv, rewriter, (), ("RESCALE",)))]
    return Region(ops, ([*all_convs, *ends], [*conv_inputs, *ends], pending[:2]))


CHANNEL_PERMUTATION = Alternative(
    "channel permutations by convolutions", ("TRANSPOSE", "SLICE"), select_channels, _match_region
)
