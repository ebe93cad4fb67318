"""torchao's ``convert_pt2e``, without its search for batch norms that were trained with rounding.

If a graph has any batch norm, torchao exports 96 patterns to compare it with, which takes 20 s however small the graph
is. They are those of ``prepare_qat_pt2e``: in a model that was only calibrated there is none to find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def _hide_overload(overload: Any) -> Callable[..., Any]:
    """A function that torchao does not take for a batch norm."""

    def hidden(*args: Any, **keywords: Any) -> Any:
        return overload(*args, **keywords)

    hidden.__name__ = f"hidden_{overload.name().split('::')[1].replace('.', '_')}"
    return hidden


_HIDDEN = {
    overload: _hide_overload(overload)
    for overload in (
        aten.batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit_no_training.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
    )
}
_ORIGINAL = {function: overload for overload, function in _HIDDEN.items()}


def convert(prepared: GraphModule) -> GraphModule:
    """What ``prepare_pt2e`` gave, calibrated, with quantize and dequantize operators."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    for node in prepared.graph.nodes:
        node.target = _HIDDEN.get(node.target, node.target)
    model: GraphModule = convert_pt2e(prepared)
    for node in model.graph.nodes:
        node.target = _ORIGINAL.get(node.target, node.target)
    model.recompile()
    return model
