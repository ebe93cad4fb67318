"""Decompositions of attention operators: scaled dot product, fused inference layers, FlexAttention."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


#: Replaces minus infinity in an attention mask that will be quantized. exp(-64) is negligible, and a range of 64 has
#: int16 steps of 0.002. If attention scores span more than 52, calibration lowers the bound
#: (quantization.algorithms.mask_bounds).
QUANTIZABLE_LOWEST = -64.0


@decomposition(aten.scaled_dot_product_attention.default, takes_quantized=True)
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
    """softmax(query @ key^T * scale + mask) @ value. Dimension -3 holds the heads.

    In floating point, the result is 0 for a query whose keys are all masked.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores, has_mask = _compute_attention_scores(query, key, attn_mask, is_causal, scale, quantized)
    weights = aten._safe_softmax(scores, -1) if has_mask else torch.softmax(scores, -1)
    return torch.matmul(weights, value)


def _compute_attention_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, quantized: bool
) -> tuple[Tensor, bool]:
    """Return query @ key^T * scale + mask, and whether there is a mask (``mask`` or causal)."""
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if mask is None:
        return scores, False
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -math.inf)  # if quantized, aten/mask_constants bounds it
    elif quantized:
        mask = mask.clamp(min=QUANTIZABLE_LOWEST)  # a mask that is a program input may contain -inf
    if mask.dtype is not scores.dtype:
        mask = mask.to(scores.dtype)
    return scores + mask, True


@decomposition(aten._scaled_dot_product_flash_attention_for_cpu.default, takes_quantized=True)
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    quantized: bool = False,
) -> tuple[Tensor, Tensor]:
    """The core ATen attention: return the attention, and logsumexp of the scores.

    In floating point, both are 0 for a query whose keys are all masked. PyTorch's own decomposition returns the
    attention weights instead of logsumexp.
    """
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    scores, _ = _compute_attention_scores(query, key, attn_mask, is_causal, scale, quantized)
    sums = torch.logsumexp(scores if scores.dtype is torch.float64 else scores.float(), -1)
    sums = torch.where(sums == -math.inf, 0.0, sums)
    return scaled_dot_product_attention(*arguments, scale=scale, quantized=quantized), sums


@decomposition(aten._transformer_encoder_layer_fwd.default, takes_quantized=True)
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
    """Fused operator of nn.TransformerEncoderLayer in eval mode (torch.nn.modules.transformer), batch first.

    ``mask`` and ``mask_type`` are as in ``multi_head_attention``.
    """

    def attention(x: Tensor) -> Tensor:
        sizes = embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias
        return multi_head_attention(x, x, x, *sizes, mask, mask_type=mask_type, quantized=quantized)[0]

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


@decomposition(aten._native_multi_head_attention.default, takes_quantized=True)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
    *,
    quantized: bool = False,
) -> tuple[Tensor, None]:
    """Fused operator of nn.MultiheadAttention in eval mode, batch first. Returns None for the attention weights.

    A nonzero ``mask`` element hides a key; in ``scaled_dot_product_attention``, True makes a key visible. ``mask_type``
    gives the shape of a mask of two dimensions: 0 for [queries, keys], 1 for [batch, keys].
    """
    heads, weights, biases = [], qkv_weight.split(embed_dim), qkv_bias.split(embed_dim)
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        projected = F.linear(x, weight, bias)
        heads.append(projected.view(*x.shape[:2], num_heads, embed_dim // num_heads).transpose(1, 2))
    is_visible = None if mask is None else mask == 0
    if is_visible is not None and is_visible.dim() == 2 and mask_type == 1:
        is_visible = is_visible[:, None, None, :]
    context = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_visible, quantized=quantized)
    return F.linear(context.transpose(1, 2).flatten(2), proj_weight, proj_bias), None


def flex_attention(
    *tensors: Tensor,
    functions: tuple[GraphModule, ...],
    scale: float,
    num_score_buffers: int,
    used_results: Container[int],
) -> list[Tensor | None]:
    """FlexAttention: softmax(scores) @ value, log2 of the sum of exp(scores), and max(scores) / ln 2.

    Args:
        tensors: query [batch, heads, L, E], key and value [batch or 1, heads or fewer, S, E], then the tensors that the
            score and mask functions capture.
        functions: graphs of the score and the mask function.
        scale: factor by which query @ key^T is multiplied.
        num_score_buffers: number of captured tensors of the score function.
        used_results: indices of the results that the program uses; None is returned for the others.
    """
    (query, key, value, *buffers), (score, mask) = tensors, functions
    sizes = (*query.shape[:3], key.shape[2])
    positions = [torch.arange(size).reshape([-1 if i == j else 1 for j in range(4)]) for i, size in enumerate(sizes)]
    result, mask_result = (function.graph.output_node().all_input_nodes[0] for function in functions)
    is_unmasked = mask_result.target is aten.new_ones.default  # PyTorch's default mask function, which masks nothing
    is_visible = None if is_unmasked else _VectorizedInterpreter(mask).run(*positions, *buffers[num_score_buffers:])
    if result is next(iter(score.graph.nodes)) and not (1 in used_results or 2 in used_results):
        return [F.scaled_dot_product_attention(query, key, value, is_visible, scale=scale, enable_gqa=True), None, None]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    score_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = torch.matmul(query.to(score_dtype), key.to(score_dtype).transpose(-2, -1)) * scale
    scores = _VectorizedInterpreter(score).run(scores, *positions, *buffers[:num_score_buffers])
    scores = scores if is_visible is None else torch.where(is_visible, scores, -math.inf)
    weights = torch.softmax(scores, -1) if is_visible is None else aten._safe_softmax(scores, -1)
    context = torch.matmul(weights.to(query.dtype), value)
    sums = torch.logsumexp(scores, -1) / math.log(2) if 1 in used_results else None
    return [context, sums, scores.amax(-1) / math.log(2) if 2 in used_results else None]


class _VectorizedInterpreter(Interpreter):
    """Evaluates a graph on all positions at once. PyTorch traced the graph for a single position.

    Evaluating all positions at once is possible because the operators of the graph broadcast.

    In the graph, ``tensor[position]`` is a ``flat_apply`` node. This class indexes the tensor with all positions.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operator, or index the tensor for ``flat_apply``."""
        if target is not torch.ops.higher_order.flat_apply:
            return super().call_function(target, args, kwargs)
        _, _, function, table, *positions = args
        assert function.__name__ == "ModIndex", function
        return table[tuple(positions)]
