"""PyTorch keeps images as [N, C, H, W], TOSA as [N, H, W, C]."""

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
    """[(N,) C], [(N,) C, L] or [(N,) C, H, W], of so many dimensions with N, as [N, H, W, C]."""
    n, c, *spatial = (*(1,) * (rank - x.rank), *x.shape)
    return to_nhwc(b, b.reshape(x, (n, c, *[1, 1, *spatial][-2:])))


def height_width(values: Sequence[int] | int, spatial: int, neutral: int) -> tuple[int, int]:
    """Two values, height first, of a convolution or pool with ``spatial`` dimensions.

    What has one dimension is an image of height 1, for which ``neutral`` is the value.
    """
    values = [values] if isinstance(values, int) else list(values)
    if len(values) == 1:
        values = values * spatial
    first, second = [neutral, *values][-2:]
    return first, second
