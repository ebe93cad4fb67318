"""Rank reduction: operators on tensors of more than six dimensions become operators on fewer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from arm_backend_core.aten.high_rank import reduce_ranks

aten = torch.ops.aten


@pytest.mark.parametrize(
    "read",
    [
        lambda x: aten.view.default(x, [4, 6]),
        lambda x: aten.squeeze.default(x),
        lambda x: aten.squeeze_copy.default(x),
    ],
)
def test_views_of_high_rank_views_become_one(read: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        return read(aten.view.default(x, [1, 2, 1, 2, 1, 3, 1, 2]))

    x = torch.arange(24.0).reshape(4, 6)
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(x)
    reduce_ranks(module)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [aten.reshape.default]
    module.recompile()
    assert torch.equal(module(x), function(x))
