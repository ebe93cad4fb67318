"""Vela workarounds for convolutions: padding, dilation, widened images, and equal weights with different biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value, constant
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.peephole_fusion import has_unit_scale, log2_scale
from arm_backend_core.tosa.passes.peephole_movement import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, has_constant_weights, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, emit_copy, emit_scaled_by_almost_one
from arm_backend_core.tosa.vela_workarounds.narrowing import DATA_MOVEMENT
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround

CONVOLUTIONS = ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")


def _has_padding_only_phase(op: Op, rewriter: Rewriter) -> bool:
    """Match a convolution with dilation above 2 in which some windows read only padding.

    Bug ``padding_only_phase``: Vela emits one operation for each dilation phase, that is, for every d-th row and column
    of the image at dilation d. If a phase has only padding, the register ``IFM_WIDTH0_M1`` (width - 1) is 65535,
    because the width is 0.
    """
    image, padding, pad = op.inputs[0], op.attrs["pad"], producer(op.inputs[0], "PAD")
    if pad is not None and not any(padding):  # Vela folds the PAD into the convolution
        image, padding = pad.inputs[0], pad.attrs["padding"][2:-2]
    return (
        max(op.attrs["dilation"]) > 2 and any(padding) and _has_position_without_input(op, image.shape[1:-1], padding)
    )


def _pad_by_copy(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit an unpadded convolution of a copy of the padded image.

    Without the copy, Vela would fold the PAD into the convolution.
    """
    b, image, attrs = rewriter.builder, op.inputs[0], dict(op.attrs)
    pad = attrs["pad"]
    padding = [(0, 0), *zip(pad[::2], pad[1::2], strict=True), (0, 0)]
    image, attrs["pad"] = b.pad(image, padding, attrs["input_zp"]), [0] * len(pad)
    return b.emit(op.kind, (emit_copy(image, b), *op.inputs[1:]), op.output.dtype, **attrs)


def _has_position_without_input(op: Op, image: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the windows of a result row or column read only padding, in an image smaller than the dilation.

    Args:
        op: the convolution.
        image: height and width of the image without padding.
        padding: padding of the image, in the order of the attribute ``pad``.
    """
    sides = zip(window_axes(op), image, padding[::2], op.output.shape[1:-1], strict=True)
    for axis, size, pad, result_size in sides:
        unpadded_axis = axis._replace(input_size=size, pad_before=pad)
        if size < axis.dilation and not all(map(unpadded_axis.overlaps_input, range(result_size))):
            return True
    return False


def _find_equal_weights(graph: Graph, target: Target) -> list[tuple[Op, int]]:
    """Find convolutions with equal weights and scales but different biases.

    Bug ``equal_weights``: the key of Vela's cache of encoded weights does not contain the bias, so that the second
    convolution gets the bias of the first.

    Returns:
        (convolution, number of columns to append to its weights). Example: four convolutions have equal weights and
        the biases a, b, c, b. The result is [(second, 1), (third, 2), (fourth, 1)].
    """
    users, biases_by_weights, matches = graph.users(), dict[tuple[Any, ...], dict[Any, int]](), []
    for op in graph.ops:
        if op.kind not in ("CONV2D", "DEPTHWISE_CONV2D") or not has_constant_weights(op):
            continue
        _, weight, bias = op.inputs
        match users.get(op.output, ()):
            case [Op(kind="RESCALE", attrs=attrs)] if op.output not in graph.outputs:
                scales = [np.asarray(attrs[name]).tobytes() for name in ("multiplier", "shift")]
            case _:  # Vela fuses a RESCALE only if it is the only reader of the accumulator
                scales = []
        biases = biases_by_weights.setdefault((op.kind, weight.content_key, *scales), {})
        if index := biases.setdefault(bias.content_key, len(biases)):
            matches.append((op, index))
    return matches


def _make_weights_distinct(graph: Graph, target: Target, matches: Sequence[tuple[Op, int]]) -> None:
    """Append columns to the weights, and padding on the right, so that all weights differ.

    The new elements are equal to the weight zero point, so that no result changes.

    Args:
        graph: the graph of the convolutions.
        target: unused.
        matches: (convolution, number of columns to append to its weights).
    """
    for op, columns in matches:
        weight, axis = op.inputs[1], 1 if op.kind == "DEPTHWISE_CONV2D" else 2
        assert weight.data is not None
        zeros = [(0, columns if i == axis else 0) for i in range(4)]
        padded_weight = np.pad(weight.data, zeros, constant_values=op.attrs["weight_zp"])
        op.inputs[1] = constant(padded_weight, weight.dtype)
        *sides, right = op.attrs["pad"]
        op.attrs = {**op.attrs, "pad": [*sides, right + columns * op.attrs["dilation"][1]]}


def _match_unreached_output(op: Op, rewriter: Rewriter) -> tuple[int, ...] | None:
    """Match a TRANSPOSE_CONV2D with result rows or columns that no kernel element contributes to.

    Bug ``unreached_output``: these rows and columns contain only the bias. Vela computes them by separate convolutions
    with equal weights. As in ``equal_weights``, all these convolutions get the bias of the first.

    Returns:
        the number of such rows and columns at each side: (top, bottom, left, right).
    """
    unreached = tuple(max(pad, 0) for pad in op.attrs["out_pad"])
    return unreached if any(unreached) and op.inputs[1].data is not None else None


def _extend_kernel(op: Op, unreached: tuple[int, ...], rewriter: Rewriter) -> Value:
    """Extend the kernel by elements equal to the weight zero point, so that it reaches all result rows and columns."""
    x, weight, bias = op.inputs
    assert weight.data is not None
    zeros = ((0, 0), unreached[:2], unreached[2:], (0, 0))
    out_pad = [min(pad, 0) for pad in op.attrs["out_pad"]]
    extended_weight = rewriter.builder.const(
        np.pad(weight.data, zeros, constant_values=op.attrs["weight_zp"]), weight.dtype
    )
    attrs = {**op.attrs, "out_pad": out_pad}
    return rewriter.builder.emit(op.kind, (x, extended_weight, bias), op.output.dtype, **attrs)


def _becomes_nonzero_padding(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a PAD with 0 precedes an unpadded convolution with ``input_zp`` other than 0.

    Bug ``padded_zero``: Vela folds the PAD into the convolution, which pads with ``input_zp`` and not with 0. A copy of
    the PAD's result prevents this.
    """
    return op.attrs["input_zp"] != 0 and _has_foldable_pad(op, value)


def _has_foldable_pad(op: Op, value: Value) -> bool:
    """Whether Vela folds a PAD with 0 into the unpadded convolution ``op``; RESHAPEs may follow the PAD."""
    source = producer(skip_through(value, "RESHAPE"), "PAD")
    return source is not None and source.attrs["pad_const"] == 0 and not any(op.attrs["pad"])


def _becomes_other_padding(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether a PAD with 0 and a RESHAPE of the image precede a convolution.

    Bug ``padded_images``: Vela folds the PAD into the convolution, as if the RESHAPE only added or removed dimensions
    of size 1 and the tensor were one batch item. A copy of the operand prevents this.
    """
    reshape = producer(value, "RESHAPE")
    if reshape is None or not _has_foldable_pad(op, value):
        return False
    return value.shape[0] > 1 or not equal_without_ones(reshape.inputs[0].shape, value.shape)


def _is_widened_image(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE with scale 1 from int8 to int16 whose only reader is a convolution.

    Bug ``widened_image``: Vela removes the RESCALE, so that a convolution of int8 has a bias of int48, and crashes.
    Data movement and RESCALEs with scale 1 may be before and after the RESCALE. In Vela 5.1, a SLICE after the RESCALE
    prevents the bug.
    """
    if op.output.dtype is not DType.INT16 or log2_scale(op) != 0:
        return False
    source, skipped = trace_back(op.inputs[0], _is_removable)
    if all(value.dtype is not DType.INT8 for value in (source, *(step.output for step in skipped))):
        return False
    keeps_slices = rewriter.builder.target.vela_release == (5, 1)
    reader = rewriter.only_user(op.output)
    while reader is not None and _is_removable(reader) and not (keeps_slices and reader.kind == "SLICE"):
        reader = rewriter.only_user(reader.output)
    return reader is not None and reader.kind in (*CONVOLUTIONS, "TRANSPOSE_CONV2D")


def _is_removable(op: Op) -> bool:
    """Whether Vela may remove ``op``, or fuse it into a convolution that reads its result."""
    return op.kind in DATA_MOVEMENT or has_unit_scale(op)


PADDING_ONLY_PHASE_WORKAROUND = Workaround("padding_only_phase", CONVOLUTIONS, _has_padding_only_phase, _pad_by_copy)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("equal_weights", _find_equal_weights, _make_weights_distinct),
    Workaround("unreached_output", ("TRANSPOSE_CONV2D",), _match_unreached_output, _extend_kernel),
    copy_operands_where("padded_zero", CONVOLUTIONS, _becomes_nonzero_padding),
    copy_operands_where("padded_images", CONVOLUTIONS, _becomes_other_padding, releases=((5, 1),)),
    Workaround("widened_image", ("RESCALE",), _is_widened_image, emit_scaled_by_almost_one),
)
