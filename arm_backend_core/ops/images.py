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


def as_image(b: Builder, x: Value) -> Value:
    """[N, C], [N, C, L] or [C, H, W] and the like as [N, C, H, W], by adding dimensions of size 1."""
    if x.rank == 4:
        return x
    if x.rank == 3:
        return b.reshape(x, (x.shape[0], x.shape[1], 1, x.shape[2]))
    assert x.rank == 2, x.shape
    return b.reshape(x, (*x.shape, 1, 1))


def pair(values: Sequence[int] | int, spatial: int, neutral: int) -> tuple[int, int]:
    """Two values, height first, of a convolution or pool with ``spatial`` dimensions.

    What has one dimension is an image of height 1, for which ``neutral`` is the value.
    """
    values = [values] if isinstance(values, int) else list(values)
    if len(values) == 1:
        values = values * spatial
    first, second = [neutral, *values][-2:]
    return first, second
