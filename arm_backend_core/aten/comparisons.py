"""Comparisons in another form: of what an extreme is taken of, and as numbers for hardware without booleans."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.aten.batch_norm import call
from arm_backend_core.aten.int64 import INT32
from arm_backend_core.nodes import is_float

aten = torch.ops.aten
_CASTS = (aten.to.dtype, aten._to_copy.default)
#: The bounds beside the number, and whether the comparison holds at the upper one (of three: at both).
_STEPS = {
    aten.gt.Scalar: (0, 1, True),
    aten.ge.Scalar: (-1, 0, True),
    aten.lt.Scalar: (-1, 0, False),
    aten.le.Scalar: (0, 1, False),
    aten.ne.Scalar: (-1, 1, True),
    aten.eq.Scalar: (-1, 1, False),
}

_EXTREMES: dict[Any, Any] = {
    (aten.eq.Tensor, aten.maximum.default): aten.ge.Tensor,
    (aten.ne.Tensor, aten.maximum.default): aten.lt.Tensor,
    (aten.eq.Tensor, aten.minimum.default): aten.le.Tensor,
    (aten.ne.Tensor, aten.minimum.default): aten.gt.Tensor,
}


def compare_operands(module: GraphModule) -> None:
    """Have x == maximum(x, y) ask whether x >= y: quantized, the maximum has other steps, which x does not meet."""
    for node in [node for node in module.graph.nodes if node.target in (aten.eq.Tensor, aten.ne.Tensor)]:
        for x, extreme in (node.args, node.args[::-1]):
            wanted = _EXTREMES.get((node.target, extreme.target)) if isinstance(extreme, Node) else None
            if wanted is not None and isinstance(x, Node) and x in extreme.args:
                first, second = extreme.args
                node.target, node.args = wanted, (x, second if x is first else first)
                break


def count_comparisons(module: GraphModule) -> None:
    """Write a comparison of integers that casts alone read (token != padding) as a difference, which gives 0 and 1.

    An integer is bounded to the two or three next to the number, so that no difference overflows.
    """
    for node in [node for target in _STEPS for node in module.graph.find_nodes(op="call_function", target=target)]:
        x, number = cast(tuple[Node, Any], node.args)
        whole = not is_float(x) and x.meta["val"].dtype is not torch.bool and int(number) == number
        read = all(user.target in _CASTS and user.meta["val"].dtype is not torch.bool for user in node.users)
        if not (whole and read and abs(number) < INT32[1]):
            continue
        low, high, above = _STEPS[node.target]
        both = high - low > 1
        with module.graph.inserting_before(node):
            value = call(node, aten.clamp.default, x, int(number) + low, int(number) + high)
            value = call(node, aten.sub.Tensor, value, int(number) + (0 if both else low))
            value = call(node, aten.mul.Tensor, value, value) if both else value
            value = value if above else call(node, aten.rsub.Scalar, value, 1)
        node.replace_all_uses_with(value)
        module.graph.erase_node(node)
