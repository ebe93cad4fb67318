"""Shapes that Vela takes for others where it joins operators or takes them apart (``vela``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arm_backend_core.targets.transpose_swaps import LONGEST
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.operators.windows import window_axes
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through
from arm_backend_core.tosa.vela_workarounds.arithmetic import copied
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround


def _own(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of size 1 in front."""
    return tuple(shape[next((i for i, size in enumerate(shape) if size > 1), len(shape)) :])


def _is_activation_of_images(op: Op, rewriter: Rewriter) -> bool:
    """TABLE or CLAMP of several images.

    Where Vela lets the operation before do it, it gives that operation the shape that it had taken this one apart for:
    right for arithmetic of the same shape alone.
    """
    x, before = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    if before is None or before.kind in (*ELEMENTWISE, "SLICE"):
        return False
    return len(_own(x.shape)) > 3 and rewriter.single_use(x)


def _flat_activation(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """As of one image."""
    b, x = rewriter.build, op.inputs[0]
    flat = (prod(x.shape[:-2]), *x.shape[-2:])
    return b.reshape(b.emit(op.kind, (b.reshape(x, flat),), flat, op.output.dtype, **op.attrs), x.shape)


def _is_part_of_other_rank(op: Op, rewriter: Rewriter, *, of_one: bool = False) -> bool:
    """RESHAPE of a SLICE to more or fewer dimensions: what is computed of it reads the SLICE with both counted in one.

    Of four dimensions and fewer, Vela makes four. ``of_one``: of one image too, to more dimensions.
    """
    part, whole = op.inputs[0], skip_through(op.inputs[0], "RESCALE").producer
    more = max(4, op.output.rank) - max(4, part.rank)
    images = (len(_own(part.shape)) > 3 or (of_one and more > 0)) and _own(part.shape) == _own(op.output.shape)
    if whole is None or whole.kind != "SLICE" or not more or not images:
        return False
    return any(reader.kind != "TRANSPOSE" for reader in rewriter.users(op.output) or [op])


def _copy_part(op: Op, found: bool, rewriter: Rewriter) -> Value:
    return rewriter.build.reshape(copied(op.inputs[0], rewriter.build), op.output.shape)


def _is_turned_back(op: Op, rewriter: Rewriter, *, result: bool) -> bool:
    """TRANSPOSE before a MATMUL or a REDUCE_SUM, which Vela does by a TRANSPOSE that undoes this one.

    It removes both. The operator before gets the shape behind a RESHAPE.

    Args:
        result: of a ``result`` of the program or what it returns a RESHAPE of, which is lost; else of any other.
    """
    x, perms = op.inputs[0], list(op.attrs["perms"])
    own, last = producer(x, "RESHAPE"), x.rank - 1
    source = own.inputs[0] if own else x
    returned = _is_returned(skip_through(source, "RESHAPE"), rewriter)
    if returned != result or perms != [*range(last - 1), last, last - 1]:
        return False
    if skip_through(source, "RESCALE").producer is None and not returned:
        return False
    alone = x.shape[0] == 1 if x.rank == 4 else returned and source.shape == (1, *x.shape)
    undone = [kind for kind, does in (("MATMUL", alone), ("REDUCE_SUM", x.rank == 3)) if does]
    same = _own(source.shape) == _own(x.shape) and not returned
    return not same and any(rewriter.feeds(op.output, kind) for kind in undone)


def _is_returned(value: Value, rewriter: Rewriter) -> bool:
    """Whether the program returns the value or a RESHAPE of it; an input as an IDENTITY, as the last pass has it."""
    readers = rewriter.users(value)
    if readers is None:
        return True
    views = (reader for reader in readers if reader.kind in ("IDENTITY", "RESHAPE"))
    return any(view.kind == "IDENTITY" or _is_returned(view.output, rewriter) for view in views)


def _copy_turned_back(op: Op, found: bool, rewriter: Rewriter) -> Value:
    return rewriter.build.transpose(copied(op.inputs[0], rewriter.build), op.attrs["perms"])


def _flat_reversed(op: Op, rewriter: Rewriter) -> tuple[int, int, int] | None:
    """The three dimensions of a REVERSE of more, which Vela writes beyond the result with a TRANSPOSE in others."""
    shape, axis = op.output.shape, op.attrs["axis"]
    flat = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
    reached = len(shape) < 4 or (len(shape) == 4 and 1 not in shape[1:]) or max(flat) > LONGEST
    return None if reached else flat


def _reverse_in_three(op: Op, flat: tuple[int, int, int], rewriter: Rewriter) -> Value:
    b = rewriter.build
    return b.reshape(b.reverse(b.reshape(op.inputs[0], flat), 1), op.output.shape)


def _is_dilated_beyond(op: Op, rewriter: Rewriter) -> bool:
    """Dilation by more than the image has rows or columns: of the parts that Vela makes, some have only padding."""
    inside, padding, before = op.inputs[0], op.attrs["pad"], producer(op.inputs[0], "PAD")
    if before is not None and not any(padding):  # which becomes the convolution's own padding
        inside, padding = before.inputs[0], before.attrs["padding"][2:-2]
    return max(op.attrs["dilation"]) > 2 and any(padding) and _has_empty_part(op, inside.shape[1:-1], padding)


def _pad_dilated(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """Behind PAD and a copy, as a PAD alone becomes the convolution's own padding."""
    b, image, attrs = rewriter.build, op.inputs[0], dict(op.attrs)
    pad = attrs["pad"]
    sides = [(0, 0), *zip(pad[::2], pad[1::2], strict=True), (0, 0)]
    image, attrs["pad"] = b.pad(image, sides, attrs["input_zp"]), [0] * len(pad)
    return b.emit(op.kind, (copied(image, b), *op.inputs[1:]), op.output.shape, op.output.dtype, **attrs)


def _has_empty_part(op: Op, image: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the image is smaller than a step between taps, and some row or column of results has no tap in it."""
    sides = zip(window_axes(op), image, padding[::2], op.output.shape[1:-1], strict=True)
    for axis, size, pad, results in sides:
        inside = axis._replace(size=size, before=pad)
        if size < axis.dilation and not all(map(inside.overlaps_input, range(results))):
            return True
    return False


#: Before ``sliced``, as its copy is one of the SLICE too.
DILATED = Workaround("dilated", ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D"), _is_dilated_beyond, _pad_dilated)
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("sliced_rank", ("RESHAPE",), _is_part_of_other_rank, _copy_part),
    Workaround("turned_result", ("TRANSPOSE",), partial(_is_turned_back, result=True), _copy_turned_back),
    Workaround(
        "turned_back", ("TRANSPOSE",), partial(_is_turned_back, result=False), _copy_turned_back, releases=((5, 1),)
    ),
    Workaround("reversed", ("REVERSE",), _flat_reversed, _reverse_in_three),
    Workaround("sliced_growth", ("RESHAPE",), partial(_is_part_of_other_rank, of_one=True), _copy_part),
    Workaround("activation", ("TABLE", "CLAMP"), _is_activation_of_images, _flat_activation, True, ((5, 1),)),
)
