"""Chains of sums and products with constants: which operators they have, and the function that they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.aten.affine_chains import AffineChain, find_affine_chains
from arm_backend_core.aten.constant_folding import Constants


class Constant(nn.Module):
    """A function of x [2, 4, 6, 6] and of constants: one per channel, one per pixel, one per column."""

    def __init__(self, function: Callable[[Tensor, Constant], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = nn.Buffer(torch.rand(4, 1, 1) + 0.5), nn.Parameter(torch.rand(1, 4, 1, 1) + 0.5)
        self.pixel, self.column = nn.Buffer(torch.rand(6, 6)), nn.Buffer(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the function."""
        return self.function(x, self)


CHAINS: dict[str, tuple[int, Callable[[Tensor, Constant], Tensor]]] = {
    "normalization": (3, lambda x, m: (x / 255 - m.a) / m.b),
    "sums": (4, lambda x, m: torch.rsub(torch.add(m.a, x, alpha=3), 2, alpha=0.5) + m.b.sub(1) - 3),
    "copies": (4, lambda x, m: (x / 255).clone() * m.a + m.b),
    "negative": (2, lambda x, m: -(m.a - x)),
    "scalar tensors": (3, lambda x, m: x * m.a.sum() * m.a / m.b.mean()),
    "integers": (1, lambda x, m: x * (4 * m.a).int()),
    "last dimension": (2, lambda x, m: x * m.column + m.column),
}
UNMATCHED: dict[str, Callable[[Tensor, Constant], Tensor]] = {
    "scalars": lambda x, m: x / 255 - 0.5,
    "one element for each pixel": lambda x, m: x + m.pixel,
    "two tensors": lambda x, m: x * x.relu(),
    "a quotient": lambda x, m: m.a / (x.abs() + 1),
    "a quotient that is rounded": lambda x, m: torch.div(x, m.a, rounding_mode="floor"),
    "a constant that adds a dimension": lambda x, m: x + m.a[None, None],
    "a number of 0 as divisor": lambda x, m: x / 0.0,
    "integers": lambda x, m: x.int() * m.a.int(),
    "doubles": lambda x, m: x.double() * m.a.double(),
}


def _find(function: Callable[[Tensor, Constant], Tensor], axis: int) -> tuple[list[AffineChain], Constant, Tensor]:
    model, x = Constant(function), torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    module = torch.export.export(model, (x,)).module()
    return find_affine_chains(module.graph, Constants(module), axis), model, x


@pytest.mark.parametrize("name", CHAINS)
def test_chain_has_its_operators_and_affine_function(name: str) -> None:
    length, function = CHAINS[name]
    axis = -1 if "last" in name else 1
    (chain,), model, x = _find(function, axis)
    assert len(chain.nodes) == length
    assert chain.source.op == "placeholder"
    assert chain.divides == (name == "normalization")
    shape = [-1 if i == axis % 4 else 1 for i in range(4)]
    gain, offset = (
        tensor if tensor is None else tensor.reshape(shape) for tensor in (chain.affine.gain, chain.affine.offset)
    )
    y = (x if gain is None else x * gain) + (0 if offset is None else offset)
    torch.testing.assert_close(y, model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", UNMATCHED)
def test_other_operators_form_no_chain(name: str) -> None:
    for axis in (1, -1):
        assert _find(UNMATCHED[name], axis)[0] == []


def test_a_chain_ends_where_its_result_is_read_twice() -> None:
    def function(x: Tensor, m: Constant) -> Tensor:
        y = x * m.a
        return (y + m.b) * 2 + y.relu()

    chains, _, _ = _find(function, 1)
    assert [len(chain.nodes) for chain in chains] == [1, 2]
    assert chains[1].source is chains[0].last
    assert [chain.has_parameter for chain in chains] == [False, True]


def test_a_sum_has_no_gain_and_a_product_no_offset() -> None:
    (total,), _, _ = _find(lambda x, m: x + m.a, 1)
    (product,), _, _ = _find(lambda x, m: x * m.a, 1)
    assert total.affine.gain is None
    assert product.affine.offset is None
