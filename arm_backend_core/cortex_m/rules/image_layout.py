"""Images: operands and results of 1D and 2D operators as [N, H, W, C]."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext
from arm_backend_core.permutation import Layout


def to_height_width(values: Any, spatial: int, default: int) -> list[int]:
    """(height, width) of a parameter; ``default`` is the height of a 1D operator."""
    values = [values] if isinstance(values, int) else list(values)
    values = values * spatial if len(values) == 1 else values
    return [default, *values][-2:]


def spatial_pair(shape: Any, spatial: int) -> list[int]:
    """(height, width) of a shape [(N,) C, (H,) W]; the height is 1 if there is one spatial dimension."""
    return [1, *shape[-spatial:]][-2:]


def _channels_last(rank: int, spatial: int) -> Layout:
    """The layout [(N,) (H,) W, C] of [(N,) C, (H,) W]."""
    channel = rank - spatial - 1
    return (*range(channel), *range(channel + 1, rank), channel)


def to_nhwc_image(cx: KernelContext, x: QuantizedValue, spatial: int) -> Node:
    """[(N,) C, (H,) W] as an image. ``spatial`` is the number of spatial dimensions: 1 or 2."""
    channel = x.rank - spatial - 1
    batch = x.shape[0] if channel else 1
    shape = (batch, *spatial_pair(x.shape, spatial), x.shape[channel])
    return cx.emit.reshape(cx.emit.materialize(x, _channels_last(x.rank, spatial)), shape)


def from_nhwc_image(cx: KernelContext, node: Node, spatial: int) -> QuantizedValue:
    """The result [(N,) C, (H,) W] of ``cx.node``, from an image."""
    shape = cx.node.meta["val"].shape
    layout = _channels_last(len(shape), spatial)
    return cx.make_result(cx.emit.reshape(node, [shape[axis] for axis in layout]), layout)
