"""torchao's ``convert_pt2e`` without its search for batch norms of quantization-aware training.

If a graph has any batch norm, torchao exports 96 patterns to match against, which takes 20 s however small the graph
is. The patterns match nodes that only ``prepare_qat_pt2e`` inserts, so a model that was only calibrated has no match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def _hide_overload(overload: Any) -> Callable[..., Any]:
    """Wrap an overload in a function that torchao does not recognize as a batch norm."""

    def hidden(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    hidden.__name__ = f"hidden_{overload.name().split('::')[1].replace('.', '_')}"
    return hidden


_HIDDEN_FUNCTIONS = {
    overload: _hide_overload(overload)
    for overload in (
        aten.batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_no_training.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
    )
}
_OVERLOADS = {function: overload for overload, function in _HIDDEN_FUNCTIONS.items()}


def convert(prepared: GraphModule) -> GraphModule:
    """Convert a calibrated model of ``prepare_pt2e``: quantize and dequantize operators replace the observers."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    for node in prepared.graph.nodes:
        node.target = _HIDDEN_FUNCTIONS.get(node.target, node.target)
    model: GraphModule = convert_pt2e(prepared)
    for node in model.graph.nodes:
        node.target = _OVERLOADS.get(node.target, node.target)
    model.recompile()
    return model
