"""Conversion between image layouts: PyTorch uses [N, C, H, W], TOSA uses [N, H, W, C]."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.operators import OPERATORS

_NHWC_TO_NCHW = (0, 3, 1, 2)
#: Kinds of TOSA operators that keep the layout of an image, in addition to elementwise ones.
_LAYOUT_PRESERVING_KINDS = frozenset({"CONCAT", "PAD", "SLICE"})
#: ``is_stored_as_nhwc`` follows at most this many operators from an image back to the operator that computes it.
_MAX_STEPS = 32


def to_nhwc(b: Builder, x: Value) -> Value:
    """Transpose an image from [N, C, H, W] to [N, H, W, C]."""
    return b.transpose(x, (0, 2, 3, 1))


def to_nchw(b: Builder, x: Value) -> Value:
    """Transpose an image from [N, H, W, C] to [N, C, H, W]."""
    return b.transpose(x, _NHWC_TO_NCHW)


def is_stored_as_nhwc(x: Value) -> bool:
    """Whether ``x`` [N, C, H, W] is stored as [N, H, W, C], because a convolution, pooling or resize computes it.

    Elementwise operators, concatenations, slices, padding, and a RESHAPE followed by its inverse may be between this
    operator and ``x``.
    """
    for _ in range(_MAX_STEPS):
        op = x.producer
        if op is None or x.rank != len(_NHWC_TO_NCHW):
            return False
        if op.kind == "TRANSPOSE":
            return tuple(op.attrs["perms"]) == _NHWC_TO_NCHW
        if op.kind == "RESHAPE" and (inner := op.inputs[0].producer) is not None and inner.kind == "RESHAPE":
            op = inner  # a RESHAPE and its inverse
        operands = [operand for operand in op.inputs if operand.data is None and operand.rank == x.rank]
        is_view = op.kind == "RESHAPE" and op.inputs[0].shape == x.shape
        if not (is_view or OPERATORS[op.kind].is_elementwise or op.kind in _LAYOUT_PRESERVING_KINDS) or not operands:
            return False
        x = operands[0]
    return False


def to_nhwc_image(b: Builder, x: Value, rank: int) -> Value:
    """Convert [(N,) C], [(N,) C, L] or [(N,) C, H, W] to [N, H, W, C]. ``rank`` includes N, even if x has no N."""
    n, c, *spatial = (*(1,) * (rank - x.rank), *x.shape)
    return to_nhwc(b, b.reshape(x, (n, c, *[1, 1, *spatial][-2:])))


def to_height_width(values: Sequence[int] | int, spatial: int, default_height: int) -> tuple[int, int]:
    """Expand a parameter of a convolution or pooling with ``spatial`` dimensions to (height, width).

    A one-dimensional operator is computed on images of height 1, so its height parameter is ``default_height``.
    """
    values = [values] if isinstance(values, int) else list(values)
    if len(values) == 1:
        values = values * spatial
    first, second = [default_height, *values][-2:]
    return first, second
