"""Channels-last images: operands and results of 1D and 2D operators as [N, H, W, C], of 3D ones as [N, D, H, W, C]."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from arm_backend_core.cortex_m.quantized_value import QuantizedValue
from arm_backend_core.cortex_m.rules.context import KernelContext
from arm_backend_core.permutation import Layout


def to_height_width(values: Any, spatial: int, default: int) -> list[int]:
    """(height, width) of a parameter such as the stride; ``default`` is the height if the operator is 1D."""
    return [default, *read_sizes(values, spatial)][-2:]


def read_sizes(values: Any, spatial: int) -> list[int]:
    """A parameter such as the stride, as a list of ``spatial`` numbers. A single number applies to all dimensions."""
    values = [values] if isinstance(values, int) else list(values)
    return values * spatial if len(values) == 1 else values


def spatial_pair(shape: Any, spatial: int) -> list[int]:
    """(height, width) of a shape [(N,) C, (H,) W]; the height is 1 if the shape has no H."""
    return [1, *shape[-spatial:]][-2:]


def _channels_last(rank: int, spatial: int) -> Layout:
    """Channels-last layout of a tensor [(N,) C, (D,) (H,) W]: the dimensions in the order (N,) (D,) (H,) W, C."""
    channel = rank - spatial - 1
    return (*range(channel), *range(channel + 1, rank), channel)


def to_nhwc_image(cx: KernelContext, x: QuantizedValue, spatial: int) -> Node:
    """Convert x [(N,) C, (D,) (H,) W] to a channels-last image. ``spatial`` (1 to 3) counts D, H and W."""
    channel = x.rank - spatial - 1
    batch = x.shape[0] if channel else 1
    sizes = spatial_pair(x.shape, spatial) if spatial < 3 else x.shape[-spatial:]
    shape = (batch, *sizes, x.shape[channel])
    return cx.emit.reshape(cx.emit.materialize(x, _channels_last(x.rank, spatial)), shape)


def from_nhwc_image(cx: KernelContext, node: Node, spatial: int) -> QuantizedValue:
    """Convert an image to the result [(N,) C, (D,) (H,) W] of ``cx.node``. In a 3D image, N and D may be merged."""
    return from_nhwc_image_in_layout(cx, node, _channels_last(cx.node.meta["val"].dim(), spatial))


def to_pooling_nhwc_image(cx: KernelContext, x: QuantizedValue, spatial: int) -> tuple[Node, Layout]:
    """Convert x [(N,) C, (H,) W] to an NHWC image for a pooling, which computes each plane [H, W] independently.

    If H and W are adjacent in the layout of ``x``, no element moves. The dimensions before H become the image's batch,
    and the dimensions after W become its channels. Otherwise, ``x`` is converted to channels-last. It is also converted
    to channels-last if all channels of ``x`` would become part of the batch, because the kernels are vectorized along
    the channels.

    Returns:
        The image, and the layout for ``from_nhwc_image_in_layout``.
    """
    axes, first = tuple(range(x.rank - spatial, x.rank)), x.layout.index(x.rank - spatial)
    before, behind = x.layout[:first], x.layout[first + spatial :]
    batch, channels = (math.prod(x.shape[axis] for axis in part) for part in (before, behind))
    has_channels_in_batch = channels == 1 < x.shape[x.rank - spatial - 1]
    if x.layout[first : first + spatial] != axes or has_channels_in_batch:
        return to_nhwc_image(cx, x, spatial), _channels_last(x.rank, spatial)
    shape = (batch, *spatial_pair(x.shape, spatial), channels)
    return cx.emit.reshape(cx.emit.materialize(x, x.layout), shape), x.layout


def from_nhwc_image_in_layout(cx: KernelContext, node: Node, layout: Layout) -> QuantizedValue:
    """Convert an NHWC image in ``layout`` to the result [(N,) C, (H,) W] of ``cx.node``."""
    shape = cx.node.meta["val"].shape
    return cx.make_result(cx.emit.reshape(node, [shape[axis] for axis in layout]), layout)
