"""Shapes that Vela takes for others where it joins operators or takes them apart (``vela``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arm_backend_core.targets.exchanges import LONGEST
from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, past, producer
from arm_backend_core.tosa.passes.vela_numbers import copied


def _own(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of size 1 in front."""
    return tuple(shape[next((i for i, size in enumerate(shape) if size > 1), len(shape)) :])


def flat_activation(op: Op, rewriter: Rewriter) -> Value | None:
    """TABLE or CLAMP of several images as of one.

    Where Vela lets the operation before do it, it gives that operation the shape that it had taken this one apart for:
    right for arithmetic of the same shape alone.
    """
    b, x, before = rewriter.build, op.inputs[0], past(op.inputs[0], "RESCALE").producer
    if before is None or before.kind in (*ELEMENTWISE, "SLICE"):
        return None
    if len(_own(x.shape)) <= 3 or not rewriter.single_use(x):
        return None
    flat = (prod(x.shape[:-2]), *x.shape[-2:])
    return b.reshape(b.emit(op.kind, (b.reshape(x, flat),), flat, op.output.dtype, **op.attrs), x.shape)


def copy_part(op: Op, rewriter: Rewriter, *, of_one: bool = False) -> Value | None:
    """RESHAPE of a SLICE to more or fewer dimensions: what is computed of it reads the SLICE with both counted in one.

    Of four dimensions and fewer, Vela makes four. ``of_one``: of one image too, to more dimensions.
    """
    b, part, whole = rewriter.build, op.inputs[0], past(op.inputs[0], "RESCALE").producer
    more = max(4, op.output.rank) - max(4, part.rank)
    images = (len(_own(part.shape)) > 3 or (of_one and more > 0)) and _own(part.shape) == _own(op.output.shape)
    if whole is None or whole.kind != "SLICE" or not more or not images:
        return None
    moved = all(reader.kind == "TRANSPOSE" for reader in rewriter.users(op.output) or [op])
    return None if moved else b.reshape(copied(part, b), op.output.shape)


def copy_turned_back(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE before a MATMUL or a REDUCE_SUM, which Vela does by a TRANSPOSE that undoes this one.

    It removes both; the operator before gets the shape behind a RESHAPE, and what the program returns of it is lost.
    """
    b, x, perms = rewriter.build, op.inputs[0], list(op.attrs["perms"])
    own, last = producer(x, "RESHAPE"), x.rank - 1
    source = own.inputs[0] if own else x
    readers = [rewriter.users(value) for value in (x, source)]
    returned = any(read is None or any(reader.kind == "IDENTITY" for reader in read) for read in readers)
    if (past(source, "RESCALE").producer is None and not returned) or perms != [*range(last - 1), last, last - 1]:
        return None
    alone = x.shape[0] == 1 if x.rank == 4 else returned and source.shape == (1, *x.shape)
    undone = [kind for kind, does in (("MATMUL", alone), ("REDUCE_SUM", x.rank == 3)) if does]
    same = _own(source.shape) == _own(x.shape) and not returned
    if same or not any(rewriter.feeds(op.output, kind) for kind in undone):
        return None
    return b.transpose(copied(x, b), perms)


def reverse_in_three(op: Op, rewriter: Rewriter) -> Value | None:
    """REVERSE in three dimensions: Vela writes it beyond the result with a TRANSPOSE that sees others."""
    b, shape, axis = rewriter.build, op.output.shape, op.attrs["axis"]
    flat = (prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))
    if len(shape) < 4 or (len(shape) == 4 and 1 not in shape[1:]) or max(flat) > LONGEST:
        return None
    return b.reshape(b.reverse(b.reshape(op.inputs[0], flat), 1), shape)


def pad_dilated(op: Op, rewriter: Rewriter) -> Value | None:
    """Dilation by more than the image has rows or columns: of the parts that Vela makes, some have only padding.

    A PAD alone becomes the convolution's own padding.
    """
    b, image, attrs = rewriter.build, op.inputs[0], dict(op.attrs)
    pad, before = attrs["pad"], producer(op.inputs[0], "PAD")
    inside, padding = image, pad
    if before is not None and not any(pad):
        inside, padding = before.inputs[0], before.attrs["padding"][2:-2]
    if max(attrs["dilation"]) <= 2 or not any(padding) or not _has_empty_part(op, inside.shape[1:-1], padding):
        return None
    sides = [(0, 0), *zip(pad[::2], pad[1::2], strict=True), (0, 0)]
    image, attrs["pad"] = b.pad(image, sides, attrs["input_zp"]), [0] * len(pad)
    return b.emit(op.kind, (copied(image, b), *op.inputs[1:]), op.output.shape, op.output.dtype, **attrs)


def _has_empty_part(op: Op, image: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the image is smaller than a step between taps, and some row or column of results has no tap in it."""
    kernel = op.inputs[1].shape[:2] if op.kind == "DEPTHWISE_CONV2D" else op.inputs[1].shape[1:-1]
    sides = zip(
        image, padding[::2], kernel, op.output.shape[1:-1], op.attrs["stride"], op.attrs["dilation"], strict=True
    )
    for size, pad, taps, results, stride, step in sides:
        starts = range(-pad, results * stride - pad, stride)
        if size < step and any(all(not 0 <= at + i * step < size for i in range(taps)) for at in starts):
            return True
    return False


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "sliced_rank": (copy_part, ("RESHAPE",)),
    "sliced_growth": (partial(copy_part, of_one=True), ("RESHAPE",)),
    "reversed": (reverse_in_three, ("REVERSE",)),
    "turned_back": (copy_turned_back, ("TRANSPOSE",)),
    "dilated": (pad_dilated, ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")),
}
#: For what stands there behind all others.
LAST: dict[str, tuple[Rule, tuple[str, ...]]] = {"activation": (flat_activation, ("TABLE", "CLAMP"))}
