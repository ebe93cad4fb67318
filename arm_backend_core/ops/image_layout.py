"""Conversion between image layouts: PyTorch uses [N, C, H, W], TOSA uses [N, H, W, C]."""

from __future__ import annotations

from collections.abc import Sequence

from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value


def to_nhwc(b: Builder, x: Value) -> Value:
    """[N, C, H, W] -> [N, H, W, C]."""
    return b.transpose(x, (0, 2, 3, 1))


def to_nchw(b: Builder, x: Value) -> Value:
    """[N, H, W, C] -> [N, C, H, W]."""
    return b.transpose(x, (0, 3, 1, 2))


def to_nhwc_image(b: Builder, x: Value, rank: int) -> Value:
    """Convert [(N,) C], [(N,) C, L] or [(N,) C, H, W] to [N, H, W, C]; ``rank`` is the rank with N."""
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
