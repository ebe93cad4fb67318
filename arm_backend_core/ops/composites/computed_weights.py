"""Dynamic weights: decompositions of layers whose weight (or bias of a normalization) is computed at run time.

The layers become matrix products and elementwise operators. The lowering rules of the layers need constant weights;
MATMUL accepts computed operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.ops.composites.windows import (
    broadcast_sizes,
    compute_window_indices,
    conv_transpose,
    iterate_window_elements,
)

aten = torch.ops.aten


def linear_by_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear layer as a matrix product. If the weight is a vector, the result has no channel dimension."""
    result = torch.matmul(x, weight.t())
    return result if bias is None else result + bias


def convolution_by_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """Convolution of x [(N,) C, ...] and weight [OC, C / groups, ...] by im2col and a matrix product."""
    kernel = list(weight.shape[2:])
    stride, dilation = (broadcast_sizes(values, len(kernel)) for values in (stride, dilation))
    if isinstance(padding, str):  # "same": an odd total padding has one more element at the end
        totals = [step * (size - 1) if padding == "same" else 0 for step, size in zip(dilation, kernel, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(pad, pad) for pad in broadcast_sizes(padding, len(kernel))]
    x = F.pad(x, [pad for pair in reversed(pads) for pad in pair])
    batch, sizes = x.shape[: -len(kernel) - 1], x.shape[-len(kernel) :]
    window = list(zip(sizes, kernel, stride, dilation, strict=True))
    out = [(size - spacing * (taps - 1) - 1) // step + 1 for size, taps, step, spacing in window]
    window_indices = [
        compute_window_indices(size, n, taps, step, 0, spacing)
        for n, (size, taps, step, spacing) in zip(out, window, strict=True)
    ]
    elements = torch.stack(
        [element for element, _ in iterate_window_elements(x, torch.tensor(0), window_indices)], len(batch) + 1
    )
    columns = elements.reshape(*batch, groups, weight[0].numel(), -1)
    result = torch.matmul(weight.reshape(groups, -1, weight[0].numel()), columns).reshape(*batch, -1, *out)
    return result if bias is None else result + bias.reshape(-1, *[1] * len(kernel))


def _dispatch_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, *transposed: Any
) -> Tensor:
    is_transposed, output_padding, groups = transposed
    if is_transposed:
        return conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return convolution_by_matmul(x, weight, bias, stride, padding, dilation, groups)


def _build_norm_decomposition(norm: Any) -> Callable[..., Tensor]:
    def rule(x: Tensor, shape_or_groups: Any, weight: Tensor | None = None, *rest: Any) -> Tensor:
        """Normalize, then scale and shift.

        ``shape_or_groups`` is the normalized shape, or the number of groups of a group norm.
        """
        if norm is aten.rms_norm:
            y = aten.rms_norm(x, shape_or_groups, None, *rest[:1])
            return y if weight is None else y * weight
        bias, eps = rest[0] if rest else None, rest[1] if rest[1:] else 1e-5
        y = norm(x, shape_or_groups, None, None, eps)
        is_group_norm = norm is aten.group_norm
        shape = [-1, *[1] * (x.dim() - 2)] if is_group_norm else list(x.shape[x.dim() - len(shape_or_groups) :])
        y = y if weight is None else y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    return rule


#: {operator: (argument positions, decomposition)}. The operator's lowering rule needs constants at these positions: the
#: weight, for normalization also the bias. The decomposition is used if one of them is computed at run time.
DYNAMIC_WEIGHT_DECOMPOSITIONS: dict[Any, tuple[slice, Callable[..., Tensor]]] = {
    aten.linear.default: (slice(1, 2), linear_by_matmul),
    aten.convolution.default: (slice(1, 2), _dispatch_convolution),
    **dict.fromkeys(
        (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), (slice(1, 2), convolution_by_matmul)
    ),
    **dict.fromkeys(
        (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), (slice(1, 2), convolution_by_matmul)
    ),
    **dict.fromkeys((aten.conv_transpose1d.default, aten.conv_transpose2d.input), (slice(1, 2), conv_transpose)),
    aten.layer_norm.default: (slice(2, 4), _build_norm_decomposition(aten.layer_norm)),
    aten.group_norm.default: (slice(2, 4), _build_norm_decomposition(aten.group_norm)),
    aten.rms_norm.default: (slice(2, 3), _build_norm_decomposition(aten.rms_norm)),
}
