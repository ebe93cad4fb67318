"""Vela workarounds for operators that get a wrong shape when Vela fuses, splits or removes operators (``catalog``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arm_backend_core.targets.transpose_swaps import MAX_EXTENT
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through
from arm_backend_core.tosa.vela_workarounds.arithmetic import emit_copy
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround


def _strip_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` without leading dimensions of size 1."""
    return tuple(shape[next((i for i, size in enumerate(shape) if size > 1), len(shape)) :])


def _is_activation_of_images(op: Op, rewriter: Rewriter) -> bool:
    """TABLE or CLAMP of several images, fused into its producer (``activation``: all NPUs, 5.1).

    Vela splits the activation by images, and then gives its shape to the producer, whose input keeps the whole shape.
    That is correct only for arithmetic of the same shape.
    """
    x, before = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    if before is None or before.kind in (*ELEMENTWISE, "SLICE"):
        return False
    return len(_strip_leading_ones(x.shape)) > 3 and rewriter.single_use(x)


def _flatten_activation(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """The TABLE or CLAMP in rank 3, as one image, which Vela does not split."""
    b, x = rewriter.build, op.inputs[0]
    flat = (prod(x.shape[:-2]), *x.shape[-2:])
    return b.reshape(b.emit(op.kind, (b.reshape(x, flat),), op.output.dtype, **op.attrs), x.shape)


def _is_slice_of_other_rank(op: Op, rewriter: Rewriter, *, single_image: bool = False) -> bool:
    """RESHAPE between different ranks, one above four, of a SLICE (``sliced_rank``: all NPUs, 5.1 and 5.2).

    The reader is split by images. It reads the slice in the rank of the SLICE but counts the image offset in its own
    rank: it reads one image repeatedly, or beyond the tensor. Vela pads lower ranks to four. A copy of the slice has
    its own rank.

    Args:
        single_image: match slices of one image too, if the rank grows (``sliced_growth``: U85, 5.1 and 5.2).
    """
    x, source = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    added_dimensions = max(4, op.output.rank) - max(4, x.rank)
    is_affected = (
        len(_strip_leading_ones(x.shape)) > 3 or (single_image and added_dimensions > 0)
    ) and _strip_leading_ones(x.shape) == _strip_leading_ones(op.output.shape)
    if source is None or source.kind != "SLICE" or not added_dimensions or not is_affected:
        return False
    return any(reader.kind != "TRANSPOSE" for reader in rewriter.users(op.output) or [op])


def _copy_slice(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """RESHAPE of a copy of the slice."""
    return rewriter.build.reshape(emit_copy(op.inputs[0], rewriter.build), op.output.shape)


def _cancels_vela_transpose(op: Op, rewriter: Rewriter, *, is_result: bool) -> bool:
    """TRANSPOSE of the last two dimensions before a MATMUL or REDUCE_SUM that Vela lowers with the inverse TRANSPOSE.

    Vela removes both TRANSPOSEs, and the producer of the RESHAPE before them gets the shape after the RESHAPE
    (``turned_back``: all NPUs, 5.1). A result of the program is lost (``turned_result``: all NPUs, 5.1 and 5.2).

    Args:
        is_result: match if the tensor is a result of the program, or one is a RESHAPE of it; else match all others.
    """
    x, perms = op.inputs[0], list(op.attrs["perms"])
    reshape, last_axis = producer(x, "RESHAPE"), x.rank - 1
    source = reshape.inputs[0] if reshape else x
    is_returned = _is_returned(skip_through(source, "RESHAPE"), rewriter)
    if is_returned != is_result or perms != [*range(last_axis - 1), last_axis, last_axis - 1]:
        return False
    if skip_through(source, "RESCALE").producer is None and not is_returned:
        return False
    is_single_batch = x.shape[0] == 1 if x.rank == 4 else is_returned and source.shape == (1, *x.shape)
    cancelling_kinds = [kind for kind, cancels in (("MATMUL", is_single_batch), ("REDUCE_SUM", x.rank == 3)) if cancels]
    keeps_shape = _strip_leading_ones(source.shape) == _strip_leading_ones(x.shape) and not is_returned
    return not keeps_shape and any(rewriter.feeds(op.output, kind) for kind in cancelling_kinds)


def _is_returned(value: Value, rewriter: Rewriter) -> bool:
    """Whether the program returns the value or a RESHAPE of it.

    A returned program input is read by an IDENTITY, which the pass ``make_outputs_distinct`` inserts.
    """
    readers = rewriter.users(value)
    if readers is None:
        return True
    views = (reader for reader in readers if reader.kind in ("IDENTITY", "RESHAPE"))
    return any(view.kind == "IDENTITY" or _is_returned(view.output, rewriter) for view in views)


def _transpose_copy(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """TRANSPOSE of a copy: Vela does not remove it."""
    return rewriter.build.transpose(emit_copy(op.inputs[0], rewriter.build), op.attrs["perms"])


def _match_high_rank_reverse(op: Op, rewriter: Rewriter) -> tuple[int, int, int] | None:
    """REVERSE of rank 5, or of rank 4 with a dimension of size 1 (``reversed``: U85, 5.1 and 5.2).

    With a TRANSPOSE of other dimensions, it writes beyond the end of the result.

    Returns:
        the shape in rank 3, in which the middle axis is reversed. None if Vela compiles the operator correctly, or if a
            dimension would exceed 65,536.
    """
    shape, axis = op.output.shape, op.attrs["axis"]
    flat = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
    is_supported = len(shape) < 4 or (len(shape) == 4 and 1 not in shape[1:]) or max(flat) > MAX_EXTENT
    return None if is_supported else flat


def _reverse_in_rank_three(op: Op, flat: tuple[int, int, int], rewriter: Rewriter) -> Value:
    """The REVERSE between RESHAPEs to and from rank 3."""
    b = rewriter.build
    return b.reshape(b.reverse(b.reshape(op.inputs[0], flat), 1), op.output.shape)


def _has_padding_only_phase(op: Op, rewriter: Rewriter) -> bool:
    """Padded convolution with dilation over 2 and result positions that see only padding (``dilated``: all, 5.1 and
    5.2).

    Vela makes one operation per dilation phase. Phases that read only padding get ``IFM_WIDTH0_M1`` 65535.
    """
    image, padding, pad = op.inputs[0], op.attrs["pad"], producer(op.inputs[0], "PAD")
    if pad is not None and not any(padding):  # Vela makes it the convolution's own padding
        image, padding = pad.inputs[0], pad.attrs["padding"][2:-2]
    return (
        max(op.attrs["dilation"]) > 2 and any(padding) and _has_position_without_input(op, image.shape[1:-1], padding)
    )


def _pad_dilated(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """The unpadded convolution of a copy of the padded image.

    Without the copy, Vela would make the PAD the convolution's own padding.
    """
    b, image, attrs = rewriter.build, op.inputs[0], dict(op.attrs)
    pad = attrs["pad"]
    padding = [(0, 0), *zip(pad[::2], pad[1::2], strict=True), (0, 0)]
    image, attrs["pad"] = b.pad(image, padding, attrs["input_zp"]), [0] * len(pad)
    return b.emit(op.kind, (emit_copy(image, b), *op.inputs[1:]), op.output.dtype, **attrs)


def _has_position_without_input(op: Op, image: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the image is smaller than the dilation, and some row or column of results has no tap in the image."""
    sides = zip(window_axes(op), image, padding[::2], op.output.shape[1:-1], strict=True)
    for axis, size, pad, results in sides:
        inside = axis._replace(size=size, before=pad)
        if size < axis.dilation and not all(map(inside.overlaps_input, range(results))):
            return True
    return False


#: Has priority over ``sliced``: the copy of the padded image also replaces the SLICE.
DILATED = Workaround("dilated", ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D"), _has_padding_only_phase, _pad_dilated)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("sliced_rank", ("RESHAPE",), _is_slice_of_other_rank, _copy_slice),
    Workaround("turned_result", ("TRANSPOSE",), partial(_cancels_vela_transpose, is_result=True), _transpose_copy),
    Workaround(
        "turned_back",
        ("TRANSPOSE",),
        partial(_cancels_vela_transpose, is_result=False),
        _transpose_copy,
        releases=((5, 1),),
    ),
    Workaround("reversed", ("REVERSE",), _match_high_rank_reverse, _reverse_in_rank_three),
    Workaround("sliced_growth", ("RESHAPE",), partial(_is_slice_of_other_rank, single_image=True), _copy_slice),
    Workaround("activation", ("TABLE", "CLAMP"), _is_activation_of_images, _flatten_activation, True, ((5, 1),)),
)
