"""Operators that are made of others, as functions of tensors.

Those that PyTorch has no decomposition for, or whose own would tear apart what a target can run whole, take long to
trace, or need operators that no target has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.pooling import cells
from arm_backend_core.ops.registry import made_of

aten = torch.ops.aten

#: What stands for minus infinity in a mask that is going to be quantized. exp(-64) is nothing beside any score that
#: counts, and a range of 64 leaves int16 steps of 0.002.
QUANTIZABLE_LOWEST = -64.0


# -- attention ----------------------------------------------------------------------------------------------------


@made_of(aten.scaled_dot_product_attention.default, tell_quantized=True)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    quantized: bool = False,
) -> Tensor:
    """softmax(query @ key^T * scale + mask) @ value, heads in dimension -3; 0 for a query that may read no key."""
    lowest = QUANTIZABLE_LOWEST if quantized else -math.inf
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if attn_mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, lowest)
    elif quantized:
        attn_mask = attn_mask.clamp(min=lowest)
    if attn_mask.dtype is not scores.dtype:
        attn_mask = attn_mask.to(scores.dtype)
    weights = aten._safe_softmax(scores + attn_mask, -1)
    return torch.matmul(weights, value)


@made_of(aten._transformer_encoder_layer_fwd.default, tell_quantized=True)
def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
    quantized: bool = False,
) -> Tensor:
    """nn.TransformerEncoderLayer's fused inference form (torch.nn.modules.transformer), batch first."""

    def attention(x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = []
        for weight, bias in zip(qkv_weight.split(embed_dim), qkv_bias.split(embed_dim), strict=True):
            projected = F.linear(x, weight, bias)
            heads.append(projected.view(batch, length, num_heads, embed_dim // num_heads).transpose(1, 2))
        context = scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, quantized=quantized)
        return F.linear(context.transpose(1, 2).reshape(batch, length, embed_dim), proj_weight, proj_bias)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attention(norm(src, norm_weight_1, norm_bias_1))
        return src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attention(src), norm_weight_1, norm_bias_1)
    return norm(src + feed_forward(src), norm_weight_2, norm_bias_2)


# -- normalization ------------------------------------------------------------------------------------------------


@made_of(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, None, None]:
    """The core ATen form; without the statistics, which are empty."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps), None, None


@made_of(aten.native_layer_norm.default)
def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, None, None]:
    """The core ATen form; without mean and deviation."""
    return F.layer_norm(x, shape, weight, bias, eps), None, None


@made_of(aten.native_group_norm.default)
def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, None, None]:
    """The core ATen form; without mean and deviation."""
    return F.group_norm(x, groups, weight, bias, eps), None, None


# -- products -----------------------------------------------------------------------------------------------------


@made_of(aten.addmm.default)
def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * x @ weight."""
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return F.linear(x, weight.t(), bias)
    return torch.mm(x, weight) * alpha + bias * beta


def product_of_nothing(shape: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A matrix product that sums over no elements: the bias, or 0; ``shape`` is the result's."""
    zeros = torch.zeros(shape, dtype=x.dtype)
    return zeros if bias is None else zeros + bias


def product_with_vector(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` with one output channel, which its result has no dimension for."""
    result = torch.matmul(x, weight)
    return result if bias is None else result + bias


@made_of(aten.bilinear.default)
def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x^T @ weight[o] @ y for every o; weight [O, I, J], x [..., I], y [..., J] -> [..., O]."""
    outputs, size, _ = weight.shape
    mixed = F.linear(x, weight.permute(0, 2, 1).reshape(-1, size)).unflatten(-1, (outputs, -1))
    result = (mixed * y.unsqueeze(-2)).sum(-1)
    return result if bias is None else result + bias


# -- elementwise --------------------------------------------------------------------------------------------------


@made_of(aten.clamp.Tensor)
def clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """PyTorch's own decomposition compares and chooses."""
    raised = x if min is None else torch.maximum(x, min)
    return raised if max is None else torch.minimum(raised, max)


@made_of(aten.hypot.default)
def hypot(x: Tensor, y: Tensor) -> Tensor:
    """sqrt(x * x + y * y) as large * sqrt(1 + (small / large)**2), whose squares do not overflow."""
    large, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = small / torch.where(large == 0, 1.0, large)
    return torch.where(torch.isinf(x) | torch.isinf(y), math.inf, large * torch.sqrt(1 + ratio * ratio))


@made_of(aten.copysign.Tensor)
def copysign(x: Tensor, y: Tensor) -> Tensor:
    """The magnitude of x with the sign of y, which minus zero has too."""
    dtype = (x / y).dtype  # integers become floating-point numbers alike
    x, y = x.to(dtype), y.to(dtype)
    return torch.where(torch.minimum(y, 1 / y) < 0, -x.abs(), x.abs())


@made_of(aten.signbit.default)
def signbit(x: Tensor) -> Tensor:
    """Minus zero has it too."""
    return torch.minimum(x, 1 / x) < 0


@made_of(aten.rrelu_with_noise.default)
def rrelu(
    x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """Outside training the slope is the middle of its range."""
    if training:
        raise Unsupported("rrelu in training mode; call model.eval() before exporting")
    return F.leaky_relu(x, (lower + upper) / 2)


@made_of(aten.rrelu_with_noise_functional.default)
def rrelu_functional(x: Tensor, noise: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """What PyTorch makes of it where it replaces writes; ``noise`` is written to in training only."""
    return rrelu(x, noise, *args), noise


# -- extremes and sums along a dimension --------------------------------------------------------------------------


def _descending(x: Tensor) -> Tensor:
    """The order turned round; -x of the smallest integer would be itself."""
    return -x if x.is_floating_point() else ~x


@made_of(aten.max.dim)
def max_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices."""
    return torch.amax(x, dim, keepdim), torch.argmax(x, dim, keepdim)


@made_of(aten.min.dim)
def min_dim(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices."""
    return torch.amin(x, dim, keepdim), torch.argmax(_descending(x), dim, keepdim)


@made_of(aten.argmin.default)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Of equal elements the first, as in argmax."""
    return torch.argmax(_descending(x), dim, keepdim)


@made_of(aten.max.default)
def max_all(x: Tensor) -> Tensor:
    """Over all dimensions."""
    return torch.amax(x)


@made_of(aten.min.default)
def min_all(x: Tensor) -> Tensor:
    """Over all dimensions."""
    return torch.amin(x)


def _at(x: Tensor, dim: int, rank: int) -> Tensor:
    """The element of this rank, 1 the smallest, along ``dim``, which stays; not a number counts as the largest."""
    return torch.topk(x, rank, dim, largest=False)[0].narrow(dim, rank - 1, 1) if x.dim() else x


@made_of(aten.sort.default, aten.sort.stable)
def sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Tensor, None]:
    """The values by topk, for which the CPU has a kernel; its order of equal elements is not PyTorch's."""
    return torch.topk(x, x.shape[dim] if x.dim() else 1, dim, largest=descending)[0], None


@made_of(aten.kthvalue.default)
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, None]:
    """The value without its index."""
    value = _at(x, dim, k)
    return value if keepdim else value.squeeze(dim), None


@made_of(aten.median.dim, tell_quantized=True)
def median_dim(x: Tensor, dim: int, keepdim: bool = False, *, quantized: bool) -> tuple[Tensor, None]:
    """Of an even number of elements the lower one in the middle, without its index; NaN where there is one."""
    value = _at(x, dim, (x.shape[dim] + 1) // 2 if x.dim() else 1)
    if x.is_floating_point() and not quantized:
        value = torch.where(torch.any(x != x, dim, keepdim=True), math.nan, value)
    return value if keepdim else value.squeeze(dim), None


@made_of(aten.median.default)
def median(x: Tensor) -> Tensor:
    """Over all dimensions."""
    return torch.median(x.reshape(-1), 0)[0]


def _with_mean(spread: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def both(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dims = args[0] if args and not isinstance(args[0], bool) else kwargs.get("dim")
        return spread(x, *args, **kwargs), torch.mean(x, dims, kwargs.get("keepdim", args[2] if args[2:] else False))

    return both


made_of(aten.var_mean.default, aten.var_mean.dim, aten.var_mean.correction)(_with_mean(torch.var))
made_of(aten.std_mean.default, aten.std_mean.dim, aten.std_mean.correction)(_with_mean(torch.std))


@made_of(aten.cumprod.default)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """In steps as ``cumsum``."""
    return _cumulative(x, dim, dtype, torch.mul, 1.0)


@made_of(aten.cumsum.default, tell_quantized=True)
def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None, quantized: bool = False) -> Tensor:
    """Quantized, a product with a triangle of ones, which is rounded once; else in steps."""
    if quantized and x.dim() and x.is_floating_point():
        size = x.shape[dim]
        return torch.matmul(x.transpose(dim, -1), torch.ones(size, size).triu()).transpose(dim, -1)
    return _cumulative(x, dim, dtype, torch.add, 0.0)


def _cumulative(x: Tensor, dim: int, dtype: torch.dtype | None, join: Callable[..., Tensor], neutral: float) -> Tensor:
    """log2(n) steps: each joins what lies 1, 2, 4, ... elements before, so that infinity stays where it is."""
    x = x if dtype in (None, x.dtype) else x.to(dtype)
    if not x.is_floating_point() or not x.dim():
        raise Unsupported("a cumulative sum or product of integers or of a scalar; convert with .to(torch.float32)")
    x = x.transpose(dim, -1)
    size, reach = x.shape[-1], 1
    while reach < size:
        x = join(x, F.pad(x[..., : size - reach], (reach, 0), value=neutral))
        reach *= 2
    return x.transpose(dim, -1)


# -- movement -----------------------------------------------------------------------------------------------------


@made_of(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """In a square of side n laid out flat, every (n + 1)-th element."""
    x = x.movedim((dim1, dim2), (-2, -1))
    x = x[..., max(offset, 0) :] if offset > 0 else x[..., max(-offset, 0) :, :]
    side = min(x.shape[-2:])
    return x[..., :side, :side].flatten(-2)[..., :: side + 1]


@made_of(aten.meshgrid.default, aten.meshgrid.indexing)
def meshgrid(tensors: Sequence[Tensor], *, indexing: str = "ij") -> list[Tensor]:
    """Each tensor along a dimension of its own; "xy" swaps the first two."""
    order = [1, 0, *range(2, len(tensors))] if indexing == "xy" and len(tensors) > 1 else list(range(len(tensors)))
    shape = [tensors[i].numel() for i in order]
    return [x.reshape([-1 if i == j else 1 for j in order]).expand(shape) for i, x in enumerate(tensors)]


@made_of(aten.im2col.default)
def unfold(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """x [N, C, H, W] -> [N, C * KH * KW, windows]: one strided picture for each place in the window."""
    if x.dim() == 3:
        return unfold(x.unsqueeze(0), kernel, dilation, padding, stride).squeeze(0)
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    batch, channels, height, width = x.shape
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    rows, columns = ((size - spans[i]) // stride[i] + 1 for i, size in enumerate((height, width)))
    if list(kernel) == list(stride) and list(dilation) == [1, 1]:  # windows beside each other
        x = x[:, :, : rows * kernel[0], : columns * kernel[1]].reshape(
            batch, channels, rows, kernel[0], columns, kernel[1]
        )
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)
    pictures = []
    for i, j in product(range(kernel[0]), range(kernel[1])):
        down = x[:, :, i * dilation[0] : i * dilation[0] + (rows - 1) * stride[0] + 1 : stride[0]]
        pictures.append(down[..., j * dilation[1] : j * dilation[1] + (columns - 1) * stride[1] + 1 : stride[1]])
    return torch.stack(pictures, 2).reshape(batch, channels * kernel[0] * kernel[1], rows * columns)


@made_of(aten.col2im.default)
def fold(
    x: Tensor,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """x [N, C * KH * KW, windows] -> [N, C, H, W], the reverse of ``unfold`` where windows lie beside each other."""
    if list(kernel) != list(stride) or list(dilation) != [1, 1] or any(padding) or x.dim() != 3:
        raise Unsupported("fold with windows that overlap, padding or dilation; write it as a transposed convolution")
    rows, columns = (output_size[i] // kernel[i] for i in (0, 1))
    grid = x.reshape(x.shape[0], -1, kernel[0], kernel[1], rows, columns).permute(0, 1, 4, 2, 5, 3)
    image = grid.reshape(x.shape[0], -1, rows * kernel[0], columns * kernel[1])
    return F.pad(image, (0, output_size[1] - image.shape[3], 0, output_size[0] - image.shape[2]))


# -- pooling and resizing -----------------------------------------------------------------------------------------


@made_of(aten.max_pool2d_with_indices.default, tell_quantized=True)
def max_pool2d_with_indices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
    *,
    quantized: bool = False,
) -> tuple[Tensor, Tensor]:
    """Maxima, and where in the input's image they are: the windows' elements are compared in turn, as PyTorch does.

    Where the indices are not used, nothing is left of the comparisons.
    """
    kernel, padding, dilation = (list(v) * 2 if len(v) == 1 else list(v) for v in (kernel, padding, dilation))
    stride = (list(stride) * 2 if len(stride) == 1 else list(stride)) or kernel
    maxima = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    (height, width), (rows, columns) = x.shape[-2:], maxima.shape[-2:]
    ends = [
        max((out - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - padding[i] - size, 0)
        for i, (out, size) in enumerate(((rows, height), (columns, width)))
    ]
    padded = F.pad(x, (padding[1], ends[1], padding[0], ends[0]), value=-math.inf)
    corner_y, corner_x = torch.arange(rows) * stride[0] - padding[0], torch.arange(columns) * stride[1] - padding[1]
    # Positions are counted in float32, which every target selects from: exact, images are below 2**24 pixels. In a
    # program that is going to be quantized they are no real numbers.
    corner = (corner_y.reshape(-1, 1) * width + corner_x).to(torch.int32 if quantized else torch.float32)
    best: Tensor | None = None
    for i, j in product(range(kernel[0]), range(kernel[1])):
        y, z = i * dilation[0], j * dilation[1]
        down = padded[..., y : y + (rows - 1) * stride[0] + 1 : stride[0], :]
        element = down[..., z : z + (columns - 1) * stride[1] + 1 : stride[1]]
        position = corner + (y * width + z)
        if best is None:
            best, index = element, position.expand(maxima.shape)
        else:
            better = (element > best) | (element != element)
            best, index = torch.where(better, element, best), torch.where(better, position, index)
    return maxima, index.to(torch.int32).to(torch.int64)


@made_of(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Every output cell is the largest of its part of the input; indices where the parts are of one size alone."""
    height, width = x.shape[-2:]
    if height % output_size[0] == 0 and width % output_size[1] == 0:
        return aten.max_pool2d_with_indices(x, [height // output_size[0], width // output_size[1]])
    columns = [x[..., start:end].amax(-1, keepdim=True) for start, end in cells(width, output_size[1])]
    narrow = torch.cat(columns, -1)
    rows = [narrow[..., start:end, :].amax(-2, keepdim=True) for start, end in cells(height, output_size[0])]
    return torch.cat(rows, -2), None


@made_of(aten.adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool3d(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Over height and width, then over depth; x [..., D, H, W]."""
    depth, height, width = output_size
    flat = F.adaptive_avg_pool2d(x.flatten(0, -4), (height, width)).flatten(-2)
    return F.adaptive_avg_pool2d(flat, (depth, height * width)).reshape(*x.shape[:-3], depth, height, width)


@made_of(aten.adaptive_max_pool3d.default)
def adaptive_max_pool3d(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, None]:
    """The same, without indices."""
    depth, height, width = output_size
    flat = F.adaptive_max_pool2d(x.flatten(0, -4), (height, width)).flatten(-2)
    return F.adaptive_max_pool2d(flat, (depth, height * width)).reshape(*x.shape[:-3], depth, height, width), None


@made_of(aten.max_pool3d_with_indices.default)
def max_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, None]:
    """Over height and width, then over depth; x [N, C, D, H, W]."""
    kernel, padding, dilation = (list(v) * 3 if len(v) == 1 else list(v) for v in (kernel, padding, dilation))
    stride = (list(stride) * 3 if len(stride) == 1 else list(stride)) or kernel
    flat = F.max_pool2d(x.flatten(0, -4), kernel[1:], stride[1:], padding[1:], dilation[1:], ceil_mode)
    deep = flat.reshape(-1, x.shape[-3], flat.shape[-2] * flat.shape[-1])
    result = F.max_pool2d(deep, (kernel[0], 1), (stride[0], 1), (padding[0], 0), (dilation[0], 1), ceil_mode)
    return result.reshape(*x.shape[:-3], result.shape[-2], *flat.shape[-2:]), None


@made_of(aten.avg_pool3d.default)
def avg_pool3d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Over height and width, then over depth: what the windows divide by is a product too."""
    if divisor_override is not None:
        raise Unsupported("avg_pool3d with divisor_override; multiply the result instead")
    kernel, padding = (list(v) * 3 if len(v) == 1 else list(v) for v in (kernel, padding))
    stride = (list(stride) * 3 if len(stride) == 1 else list(stride)) or kernel
    flat = F.avg_pool2d(x.flatten(0, -4), kernel[1:], stride[1:], padding[1:], ceil_mode, count_include_pad)
    deep = flat.reshape(-1, x.shape[-3], flat.shape[-2] * flat.shape[-1])
    result = F.avg_pool2d(deep, (kernel[0], 1), (stride[0], 1), (padding[0], 0), ceil_mode, count_include_pad)
    return result.reshape(*x.shape[:-3], result.shape[-2], *flat.shape[-2:])


def _one_row(images: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        *corners, factors = rest
        size, factors = size and [1, *size], factors and [1.0, *factors]
        result: Tensor = images(x.unsqueeze(2), size, *corners, factors).squeeze(2)
        return result

    return upsample


def _volume(images: OpOverload) -> Callable[..., Tensor]:
    def upsample(x: Tensor, size: Sequence[int] | None, *rest: Any) -> Tensor:
        *corners, factors = rest
        pictures = images(x.flatten(1, 2), size and size[1:], *corners, factors and factors[1:])
        height, width = pictures.shape[2:]
        deep = pictures.reshape(*x.shape[:3], height * width)
        size, factors = size and [size[0], height * width], factors and [factors[0], 1.0]
        return images(deep, size, *corners, factors).unflatten(-1, (height, width))

    return upsample


for _image_rule, _row, _depth in (
    (aten.upsample_bilinear2d.vec, aten.upsample_linear1d.vec, aten.upsample_trilinear3d.vec),
    (aten.upsample_nearest2d.vec, aten.upsample_nearest1d.vec, aten.upsample_nearest3d.vec),
    (aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact1d.vec, aten._upsample_nearest_exact3d.vec),
):
    made_of(_row)(_one_row(_image_rule))  # x [N, C, L] as an image of one row
    made_of(_depth)(_volume(_image_rule))  # x [N, C, D, H, W]: every picture, then along the depth
