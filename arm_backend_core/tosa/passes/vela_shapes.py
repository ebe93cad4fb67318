"""Shapes that Vela takes for others where it joins operators or takes them apart (``vela``)."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, producer
from arm_backend_core.tosa.passes.vela_numbers import copied

_Swap = tuple[tuple[int, int, int], tuple[int, int]]
#: Dimensions, counted from the last, that change places in one operation; sizes of 1 stay where Vela makes one.
_NATIVE = ([-3, -2], [-2, -1], [-3, -1])


def _own(shape: Sequence[int]) -> tuple[int, ...]:
    """Without dimensions of size 1 in front."""
    return tuple(shape[next((i for i, size in enumerate(shape) if size > 1), len(shape)) :])


def _before(value: Value) -> Op | None:
    """The operator that a value is from, not a RESCALE."""
    while (op := value.producer) is not None and op.kind == "RESCALE":
        value = op.inputs[0]
    return op


def flat_activation(op: Op, rewriter: Rewriter) -> Value | None:
    """TABLE or CLAMP of several images as of one.

    Where Vela lets the operation before do it, it gives that operation the shape that it had taken this one apart for:
    right for arithmetic of the same shape alone.
    """
    b, x, before = rewriter.build, op.inputs[0], _before(op.inputs[0])
    if before is None or before.kind in (*ELEMENTWISE, "SLICE"):
        return None
    if len(_own(x.shape)) <= 3 or not rewriter.single_use(x):
        return None
    flat = (prod(x.shape[:-2]), *x.shape[-2:])
    return b.reshape(b.emit(op.kind, (b.reshape(x, flat),), flat, op.output.dtype, **op.attrs), x.shape)


def copy_part(op: Op, rewriter: Rewriter) -> Value | None:
    """RESHAPE of a SLICE to more or fewer dimensions: what is computed of it reads the SLICE with both counted in one.

    Of four dimensions and fewer, Vela makes four.
    """
    b, part, whole = rewriter.build, op.inputs[0], _before(op.inputs[0])
    ranks = {max(4, value.rank) for value in (part, op.output)}
    images = len(_own(part.shape)) > 3 and _own(part.shape) == _own(op.output.shape)
    if whole is None or whole.kind != "SLICE" or len(ranks) == 1 or not images:
        return None
    moved = all(reader.kind == "TRANSPOSE" for reader in rewriter.users(op.output) or [op])
    return None if moved else b.reshape(copied(part, b), op.output.shape)


def copy_turned_back(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE of a RESHAPE before a MATMUL or a REDUCE_SUM, which Vela does by a TRANSPOSE that undoes this one.

    It removes both, and the operator before the RESHAPE gets the shape behind it.
    """
    b, x, perms = rewriter.build, op.inputs[0], list(op.attrs["perms"])
    own, last = producer(x, "RESHAPE"), x.rank - 1
    if own is None or _before(own.inputs[0]) is None or perms != [*range(last - 1), last, last - 1]:
        return None
    undone = ("MATMUL" if x.shape[0] == 1 else "") if x.rank == 4 else "REDUCE_SUM" if x.rank == 3 else ""
    if _own(own.inputs[0].shape) == _own(x.shape) or not _feeds(op.output, undone, rewriter):
        return None
    return b.transpose(copied(x, b), perms)


def _feeds(value: Value, kind: str, rewriter: Rewriter) -> bool:
    readers = rewriter.users(value) or []
    through = ("RESHAPE", "RESCALE")
    return any(r.kind == kind or (r.kind in through and _feeds(r.output, kind, rewriter)) for r in readers)


def pad_dilated(op: Op, rewriter: Rewriter) -> Value | None:
    """Dilation by more than the image has rows or columns: of the parts that Vela makes, some have only padding.

    A PAD alone becomes the convolution's own padding.
    """
    b, image, attrs = rewriter.build, op.inputs[0], dict(op.attrs)
    pad, dilation, before = attrs["pad"], attrs["dilation"], producer(op.inputs[0], "PAD")
    inside = before.inputs[0] if before is not None and not any(pad) else image
    small = any(size < step for size, step in zip(inside.shape[1:-1], dilation, strict=True))
    if not small or max(dilation) <= 2 or (inside is image and not any(pad)):
        return None
    if any(pad):
        sides = [(0, 0), *zip(pad[::2], pad[1::2], strict=True), (0, 0)]
        image, attrs["pad"] = b.pad(image, sides, attrs["input_zp"]), [0] * len(pad)
    return b.emit(op.kind, (copied(image, b), *op.inputs[1:]), op.output.shape, op.output.dtype, **attrs)


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "sliced_rank": (copy_part, ("RESHAPE",)),
    "turned_back": (copy_turned_back, ("TRANSPOSE",)),
    "dilated": (pad_dilated, ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")),
    "activation": (flat_activation, ("TABLE", "CLAMP")),
}
