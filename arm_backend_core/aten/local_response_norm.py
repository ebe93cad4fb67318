"""Local response normalization, x / (k + alpha * mean(x * x))**beta, without a pooling over channels or a division.

``F.local_response_norm`` averages over windows of channels by a pooling of [N, 1, C, H, W]. The channels are then rows,
and an NPU pads each element to 16 channels: 20.4 MiB of SRAM for 64 channels of 32x32 pixels on U55. A 1x1 convolution
with a band matrix computes the same averages from [N, C, H, W].

A product with the power -beta takes one table and one operation; a division takes more than 20 operations. With both
changes, 64 channels of 32x32 pixels between two convolutions take 0.26 instead of 3.5 million cycles, and 192 KiB of
SRAM (U55-128, Vela 5.2).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import add_buffer_node, insert_call, replace_node
from arm_backend_core.nodes import arguments_of, is_float
from arm_backend_core.ops.composites.windows import broadcast_sizes

aten = torch.ops.aten

_POOLS = (aten.avg_pool2d.default, aten.avg_pool3d.default)
_RESHAPES = (aten.view.default, aten.reshape.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)


@dataclass(frozen=True)
class _Windows:
    """Windows along the channels of ``x`` [N, C, ...].

    Attributes:
        x: the tensor.
        padding: zeros before the first channel.
        kernel: channels in a window.
        stride: channels between the starts of two windows.
    """

    x: Node
    padding: int
    kernel: int
    stride: int


def rewrite_local_response_norms(module: GraphModule) -> None:
    """Rewrite averages over windows of channels to convolutions, and divisions by powers of averages to products.

    The divisor of such a division is (k + alpha * average)**beta. A division is rewritten only if the average is an
    average of squares, and k, alpha and beta are positive.
    """
    means_of_squares = _channel_windows_to_convolutions(module)
    for node in module.graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x, power = node.args
        if not isinstance(power, Node) or not _is_positive_power(power, means_of_squares):
            continue
        base, exponent = power.args
        with module.graph.inserting_before(node):
            reciprocal = insert_call(power, aten.pow.Tensor_Scalar, base, -cast(float, exponent))
            result = insert_call(node, aten.mul.Tensor, x, reciprocal)
        replace_node(node, result)


def _is_positive_power(node: Node, means_of_squares: Container[Node]) -> bool:
    """Whether ``node`` is a positive power of k + alpha * mean of squares with positive k and alpha.

    The base is then at least k, so that the reciprocal of the power is bounded.
    """
    if node.target is not aten.pow.Tensor_Scalar or not _is_positive(node.args[1]):
        return False
    base = cast(Node, node.args[0])
    if base.target is not aten.add.Tensor or base.kwargs or not _is_positive(base.args[1]):
        return False
    source = base.args[0]
    while isinstance(source, Node) and source not in means_of_squares:
        is_scaled = source.target is aten.mul.Tensor and _is_positive(source.args[1])
        source = source.args[0] if is_scaled or source.target in _RESHAPES else None
    return source is not None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _channel_windows_to_convolutions(module: GraphModule) -> set[Node]:
    """Replace each pooling that averages over windows of channels by a convolution.

    Returns:
        The results that are averages of squares.
    """
    means_of_squares = set()
    for node in [n for n in module.graph.nodes if n.op == "call_function" and n.target in _POOLS]:
        windows = _match_channel_windows(node)
        if windows is None:
            continue
        x, shape = windows.x, windows.x.meta["val"].shape
        pool_shape = list(node.meta["val"].shape)
        with module.graph.inserting_before(node):
            weight = add_buffer_node(module, f"{node.name}_weight", _band_matrix(shape[1], pool_shape[2], windows))
            image = insert_call(node, aten.reshape.default, x, [shape[0], shape[1], shape[2], math.prod(shape[3:])])
            result = insert_call(node, aten.conv2d.default, image, weight)
            result = insert_call(node, aten.reshape.default, result, pool_shape)
        replace_node(node, result)
        if _is_square(x):
            means_of_squares.add(result)
    return means_of_squares


def _is_square(node: Node) -> bool:
    is_product = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return is_product or (node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 2))


def _band_matrix(channels: int, results: int, windows: _Windows) -> Tensor:
    """The weight [results, channels, 1, 1] of the convolution: 1 / kernel in the window of each result."""
    starts = torch.arange(results)[:, None] * windows.stride - windows.padding
    positions = torch.arange(channels)[None]
    band = (positions >= starts) & (positions < starts + windows.kernel)
    return (band / windows.kernel)[..., None, None]


def _match_channel_windows(node: Node) -> _Windows | None:
    """Match a pooling along the rows of [N, 1, C, ...], which is a view of [N, C, ...]."""
    arguments = arguments_of(node)
    spatial = 2 if node.target is aten.avg_pool2d.default else 3
    kernel, stride, padding = (
        broadcast_sizes(arguments[name], spatial) for name in ("kernel_size", "stride", "padding")
    )
    stride = stride or kernel
    is_plain = not arguments["ceil_mode"] and arguments["divisor_override"] is None
    if not is_plain or not is_float(node) or node.meta["val"].dim() != spatial + 2:
        return None
    if any(size != 1 for size in (*kernel[1:], *stride[1:])) or any(padding):
        return None
    source, before = arguments["self"], 0
    if source.target in (aten.pad.default, aten.constant_pad_nd.default):
        zeros = _rows_of_zeros(source, spatial)
        if zeros is None:
            return None
        source, before = source.args[0], zeros
    if source.target not in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        return None
    x = source.args[0]
    shape, rows = x.meta["val"].shape, source.meta["val"].shape
    if len(shape) < 3 or rows[1] != 1 or (rows[0], *rows[2:4]) != tuple(shape[:3]):
        return None
    return _Windows(x, before, kernel[0], stride[0])


def _rows_of_zeros(pad: Node, spatial: int) -> int | None:
    """The number of rows of zeros that ``pad`` adds before the first row; None if it is another padding."""
    arguments = arguments_of(pad)
    sizes = [*arguments["pad"], *[0] * (2 * spatial)]
    rows = 2 * (spatial - 1)  # ``sizes`` has (before, after) of the last dimension first
    is_zero = arguments.get("mode", "constant") == "constant" and not arguments.get("value")
    others = [*sizes[:rows], *sizes[rows + 2 :]]
    return sizes[rows] if is_zero and not any(others) and min(sizes) >= 0 else None
