"""Composite operators without a record become operators that have one.

Only the nodes concerned are traced, on their fake tensors, and spliced in; the rest of the program is left alone.
Where PyTorch has a decomposition it is used; the functions below are for those that it has none for, or whose own one
would tear apart what a target can run whole.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.errors import fault
from arm_backend_core.nodes import is_constant
from arm_backend_core.ops.registry import find

aten = torch.ops.aten


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
    lowest: float = -math.inf,
) -> Tensor:
    """softmax(query @ key^T * scale + mask) @ value, heads in dimension -3; the mask is not below ``lowest``."""
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool).tril()
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, lowest)
        elif lowest > -math.inf:
            attn_mask = attn_mask.clamp(min=lowest)
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


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
    lowest: float = -math.inf,
) -> Tensor:
    """nn.TransformerEncoderLayer's fused inference form (torch.nn.modules.transformer), batch first."""

    def attention(x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = []
        for weight, bias in zip(qkv_weight.split(embed_dim), qkv_bias.split(embed_dim), strict=True):
            projected = F.linear(x, weight, bias)
            heads.append(projected.view(batch, length, num_heads, embed_dim // num_heads).transpose(1, 2))
        context = scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, lowest=lowest)
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


def lstm(
    x: Tensor,
    state: list[Tensor],
    parameters: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.nn.LSTM step by step; PyTorch's own decomposition calls a CPU library for a whole layer.

    Gates are in the order input, forget, cell, output (torch.nn.LSTM). ``state``: h and c, each
    [layers * directions, batch, hidden]; ``parameters``: four (or two without biases) for each layer and direction.
    """
    steps = list((x.transpose(0, 1) if batch_first else x).unbind(0))
    per_run = 4 if has_biases else 2
    directions = 2 if bidirectional else 1
    last_h, last_c = [], []
    for layer in range(num_layers):
        runs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_x, w_h, *biases = parameters[index * per_run : (index + 1) * per_run]
            b_x, b_h = biases or (None, None)
            h, c = state[0][index], state[1][index]
            outputs = []
            for step in steps[::-1] if direction else steps:
                gates = F.linear(step, w_x, b_x) + F.linear(h, w_h, b_h)
                i, f, g, o = gates.chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outputs.append(h)
            runs.append(outputs[::-1] if direction else outputs)
            last_h.append(h)
            last_c.append(c)
        steps = [torch.cat(parts, -1) if directions > 1 else parts[0] for parts in zip(*runs, strict=True)]
    return torch.stack(steps, 1 if batch_first else 0), torch.stack(last_h), torch.stack(last_c)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * x @ weight."""
    if beta == 1 and alpha == 1 and bias.dim() == 1:
        return F.linear(x, weight.t(), bias)
    return torch.mm(x, weight) * alpha + bias * beta


def clamp(x: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    """PyTorch's own decomposition compares and chooses."""
    raised = x if min is None else torch.maximum(x, min)
    return raised if max is None else torch.minimum(raised, max)


_OWN: dict[OpOverload, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer,
    aten.addmm.default: addmm,
    aten.lstm.input: lstm,
    aten.clamp.Tensor: clamp,
}
_MASKED = (aten.scaled_dot_product_attention.default, aten._transformer_encoder_layer_fwd.default)
#: What stands for minus infinity in a mask that is going to be quantized. exp(-64) is nothing beside any score that
#: counts, and a range of 64 leaves int16 steps of 0.002.
QUANTIZABLE_LOWEST = -64.0


def _decomposition(overload: OpOverload, lowest: float) -> Callable[..., Any] | None:
    if overload in _MASKED:
        return partial(_OWN[overload], lowest=lowest)
    if overload in _OWN:
        return _OWN[overload]
    if overload in torch._decomp.decomposition_table:
        rule: Callable[..., Any] = torch._decomp.decomposition_table[overload]
        return rule
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        return overload.decompose
    return None


def decompose(module: GraphModule, constants: Iterable[Node] = (), lowest: float = -math.inf) -> bool:
    """Splice in the decomposition of every operator without a record, until none is left that has one.

    Args:
        constants: nodes that are parameters or buffers; what is computed from these alone is left whole.
        lowest: the value of an attention mask's minus infinity.

    Returns:
        Whether the graph changed.
    """
    known = set(constants)
    changed = False
    for _ in range(8):  # a decomposition may bring further composites; PyTorch's nest a few levels at most
        _extend(known, module)
        spliced = [
            node
            for node in list(module.graph.nodes)
            if node not in known and _wants(node) and _splice(module, node, lowest)
        ]
        if not spliced:
            return changed
        changed = True
        module.graph.eliminate_dead_code()
    return changed


def _extend(constants: set[Node], module: GraphModule) -> None:
    """Add what is computed from constants alone."""
    for node in module.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and is_constant(node, constants)):
            constants.add(node)


def _wants(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return find(node) is None


def _splice(module: GraphModule, node: Node, lowest: float) -> bool:
    traced = _traced(module, node, lowest)
    if traced is None or (_alternative(node) and not _complete(traced, lowest)):
        return False
    sources = list(node.all_input_nodes)
    with module.graph.inserting_before(node):
        copies = dict(zip(_placeholders(traced), sources, strict=True))
        outputs = _copy(module, traced, node, copies)
    if isinstance(outputs, (tuple, list)):
        for pick in list(node.users):
            assert pick.target is operator.getitem, pick
            pick.replace_all_uses_with(outputs[cast(int, pick.args[1])])
            module.graph.erase_node(pick)
    else:
        node.replace_all_uses_with(outputs)
    module.graph.erase_node(node)
    return True


def _alternative(node: Node) -> bool:
    """Whether PyTorch has a kernel for the operator too.

    Torn apart it would only be slower where parts stay on the CPU, and some parts are no ATen operators: the CPU has no
    kernel for these.
    """
    return node.target not in _OWN and node.target in torch._decomp.decomposition_table


def _complete(traced: GraphModule, lowest: float) -> bool:
    """Whether every operator of a decomposition has a record, or a decomposition for which this holds."""
    constants: set[Node] = set()
    _extend(constants, traced)
    for node in traced.graph.nodes:
        if node.op != "call_function" or node in constants or node.target is operator.getitem or find(node):
            continue
        inner = _traced(traced, node, lowest) if _wants(node) else None
        if inner is None or not _complete(inner, lowest):
            return False
    return True


def _traced(module: GraphModule, node: Node, lowest: float) -> GraphModule | None:
    """The decomposition of ``node``, its placeholders in the order of the node's operands; None if there is none."""
    assert isinstance(node.target, OpOverload)
    rule = _decomposition(node.target, lowest)
    if rule is None:
        return None
    sources = list(node.all_input_nodes)
    values = [_value(module, x) for x in sources]
    if any(not isinstance(value, torch.Tensor) for value in values):
        return None

    def call(*tensors: Tensor) -> Any:
        known = dict(zip(sources, tensors, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: known[x])
        return rule(*args, **kwargs)

    traced = _trace(call, values)
    if traced is not None and any(inner.target is node.target for inner in traced.graph.nodes):
        traced = _trace(call, values, pre_dispatch=False)  # what PyTorch decomposes in C++ alone is traced below that
    if traced is None:
        if node.target in _OWN:
            fault(f"our decomposition of {node.target} cannot be traced")
        return None
    functionalize(traced.graph)
    made = _kinds([x.meta["val"] for x in pytree.tree_leaves(traced.graph.output_node().args) if isinstance(x, Node)])
    expected = _kinds(node.meta.get("val"))
    if made != expected and node.target in _OWN:
        fault(f"our decomposition of {node.target} gives {made} in place of {expected}")
    return traced if made == expected else None


def _kinds(values: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and element types of the tensors of a result."""
    tensors = values if isinstance(values, (list, tuple)) else [values]
    return [(tuple(value.shape), value.dtype) for value in tensors if isinstance(value, torch.Tensor)]


def _trace(call: Callable[..., Any], values: list[Any], *, pre_dispatch: bool = True) -> GraphModule | None:
    """Operators of ``call`` on fake tensors, composites kept whole; None where PyTorch cannot trace it."""
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    try:
        with torch.no_grad():
            if mode is None:
                return make_fx(call, tracing_mode="fake", pre_dispatch=pre_dispatch)(*values)
            with mode:
                return make_fx(call, pre_dispatch=pre_dispatch)(*values)
    except Exception:  # PyTorch raises of all kinds where it has no rule for these operands
        return None


def _placeholders(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _value(module: GraphModule, node: Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None


def _copy(module: GraphModule, traced: GraphModule, origin: Node, copies: dict[Node, Node]) -> Any:
    """Copy traced nodes before ``origin``, with its stack trace; returns what replaces its result."""
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda x: copies[x])
        copy = module.graph.node_copy(node, lambda x: copies[x])
        if node.op == "get_attr":
            copy.target = _adopt(module, operator.attrgetter(str(node.target))(traced))
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            if key in origin.meta:
                copy.meta[key] = origin.meta[key]
        copies[node] = copy
    raise AssertionError("a traced graph has an output")


def _adopt(module: GraphModule, tensor: Tensor) -> str:
    """Register a constant of the decomposition on the module."""
    index = 0
    while hasattr(module, f"_decomposed_constant_{index}"):
        index += 1
    module.register_buffer(f"_decomposed_constant_{index}", tensor)
    return f"_decomposed_constant_{index}"
