"""Selections become ATen's operator on integers; comparisons become tables or comparisons of integers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cortex_m.lowering import Case, check, lower, quantize

_where = torch.where
_MASK = torch.tensor([True, False, True])
_PAIR = [(2, 3), (2, 3)]

CASES = [
    Case("two tensors of one scale", lambda x: _where(x[0] > x[1], x[0], x[1]), [(2, 3)]),
    Case("two tensors", lambda x, y: _where(x > y, x, y * 2), _PAIR),
    Case("zero", lambda x, y: _where(x > 0, x, y), _PAIR),
    Case("a number", lambda x, y: _where(x > 0.3, x, 1.0), _PAIR),
    Case("a number first", lambda x, y: _where(y <= 0.3, 0.5, x), _PAIR),
    Case("a function of itself", lambda x: _where(x.abs() <= 0.3, 0.0, x), [(2, 3)], kernels="2 quantized_activation"),
    Case("a function of an operand", lambda x, y: _where((x + y) >= 0.1, x, y), _PAIR, kernels="quantized_add"),
    Case("not equal", lambda x, y: _where((x + y).relu() != 0, x, y), _PAIR),
    Case("equal", lambda x, y: _where((x + y).relu() == 0, x, y), _PAIR),
    Case("constant", lambda x, y: _where(_MASK, x, y), _PAIR),
    Case("masked_fill", lambda x: x.masked_fill(_MASK, -1.0) + x, [(2, 3)], kernels="1 quantized_add"),
    Case("and", lambda x, y: _where((x * 2 > 0) & ~(y * 2 < 0.5), x, y), _PAIR),
    Case("logsumexp", lambda x: x.logsumexp(1), [(2, 8)]),
    Case("broadcast", lambda x, y: _where(x * 2 > 0, x, y), [(2, 3, 4), (3, 1)]),
    Case(
        "images",
        lambda x, y: _where(nn.functional.conv2d(x, torch.ones(3, 3, 1, 1)) > 0.1, x, y),
        [(1, 3, 4, 5), (1, 3, 1, 1)],
    ),
    Case("relu", lambda x, y: torch.relu(_where(x * 2 > 0, x, y)), _PAIR),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    lowered = check(case)
    lowered.check_executorch_run(case.sample(1))


def test_an_input_of_booleans_is_a_condition() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _where(self.mask, x * 2, x)

        mask: torch.Tensor

    model = Masked()
    model.register_buffer("mask", _MASK)
    check(Case("buffer", model, [(2, 3)]))


def test_the_quantizer_gives_int8_to_both_branches() -> None:
    case = Case("", lambda x, y: _where(x * 2 > 0, x + y, x * y), _PAIR)
    lowered = lower(quantize(case))
    lowered.check(case.sample(), 1)
    lowered.check_calls("quantized_add, quantized_mul")
