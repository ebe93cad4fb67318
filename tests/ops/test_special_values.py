"""Values at the edges of floating point: infinity, not a number, zeros, overflow inside a formula, half precision.

The result must be PyTorch's there too, with its element type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ops import runner
from tests.ops.runner import Case
from tests.tosa_graphs import assert_valid

INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.0, -1.5])
BASES = [-2.0, -2.0, -2.0, -2.0, 0.0, 0.0, 0.0, -0.0, INF, -INF, -INF, -INF, NAN, NAN, 1.0, 1.0, -1.0, 2.0]
POWERS = [2.0, 3.0, -1.0, 0.5, 0.0, -1.0, 0.5, -3.0, 0.0, 3.0, 0.5, -2.0, 0.0, 1.0, NAN, INF, INF, -INF]


def _ramp(low: float, high: float, *shape: int) -> Tensor:
    return torch.linspace(low, high, torch.Size(shape).numel()).reshape(shape)


#: Operands of topk with NaN and infinities. Infinities also replace elements that topk has already selected.
RANKED = torch.tensor(
    [
        [3, NAN, INF, -INF, 2, -INF],
        [-INF, -INF, -INF, -INF, -INF, -INF],
        [NAN, NAN, -INF, NAN, 1, NAN],
        [INF, INF, NAN, 0, -0.0, 1],
    ]
)


def _stable_topk(x: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """topk that selects the first of equal elements, as the target does; PyTorch leaves their order open."""
    count = 5 if x.shape[1] < 8 else 1
    if torch.compiler.is_exporting():
        return torch.topk(x, count, 1, largest)
    values, indices = torch.sort(x, dim=1, descending=largest, stable=True)
    return values[:, :count], indices[:, :count]


#: Function and its operands, by name.
ROWS: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "relu": (torch.relu, [EDGES]),
    "clamp_min": (lambda x: x.clamp(min=-1), [EDGES]),
    "clamp_max": (lambda x: x.clamp(max=1), [EDGES]),
    "sign": (torch.sign, [EDGES]),
    "sgn": (torch.sgn, [EDGES]),
    "power_0": (lambda x: x**0, [EDGES]),
    "power_fraction": (lambda x: x**1.7, [EDGES]),
    "power_negative_fraction": (lambda x: x**-1.7, [EDGES]),
    "power_100": (lambda x: x**100, [EDGES]),
    "power_101": (lambda x: x**101, [EDGES]),
    "power_infinite": (lambda x: x**INF, [EDGES]),
    "power": (torch.pow, [torch.tensor(BASES), torch.tensor(POWERS)]),
    "power_of_negative": (lambda y: torch.pow(-2.0, y), [torch.tensor(POWERS)]),
    "power_of_0": (lambda y: torch.pow(0.0, y), [torch.tensor(POWERS)]),
    "power_of_1": (lambda y: torch.pow(1.0, y), [torch.tensor(POWERS)]),
    "asinh": (torch.asinh, [torch.tensor([1e8, 1e10, -1e20, 1e38, INF, -INF, NAN])]),
    "sinc": (torch.sinc, [torch.tensor([3e-42, -1e-40, 1e-20, 0.0, -0.0, 1e-5, 1.0, INF, NAN])]),
    "remainder": (
        torch.remainder,
        [
            torch.tensor([1.0, 9999.7, -9999.7, 1e9, 1.0, -1.0, 1.0, 0.0, INF, NAN, 7.0, -6.0]),
            torch.tensor([0.1, 0.7, 0.7, 3.0, INF, INF, 0.0, 0.0, 2.0, 2.0, -3.0, 3.0]),
        ],
    ),
    "fmod": (
        torch.fmod,
        [
            torch.tensor([1.0, 9999.7, -9999.7, 1e9, 1.0, -1.0, 1.0, 0.0, INF, NAN, 7.0, -6.0]),
            torch.tensor([0.1, 0.7, 0.7, 3.0, INF, INF, 0.0, 0.0, 2.0, 2.0, -3.0, 3.0]),
        ],
    ),
    "floor_divide": (
        torch.floor_divide,
        [
            torch.tensor([1.0, -7.5, INF, INF, NAN, 1.0, -1.0, 1.0]),
            torch.tensor([0.0, 2.0, 2.0, 0.0, 1.0, INF, INF, 1e-40]),
        ],
    ),
    "spherical_bessel_j0": (torch.special.spherical_bessel_j0, [EDGES]),
    "acosh": (torch.acosh, [torch.tensor([1e8, 1e10, 1e20, 1e38, INF, 0.5, NAN])]),
    "sinh": (torch.sinh, [torch.tensor([89.0, -89.0, 100.0, -100.0, INF, -INF, NAN])]),
    "cosh": (torch.cosh, [torch.tensor([89.0, -89.0, 100.0, -100.0, INF, -INF, NAN])]),
    "div_tiny": (
        torch.div,
        [torch.tensor([1e-39, 1e-40, 1.0, 0.0, 0.0, 1e38]), torch.tensor([1e-39, 3e-40, 1e-39, 0.0, 1e-42, 3e38])],
    ),
    "div_0": (lambda x: x / 0, [EDGES]),
    "safe_softmax": (
        lambda x: torch.ops.aten._safe_softmax(x, -1),
        [torch.tensor([[-INF, -INF], [1.0, 2.0], [-INF, 3.0]])],
    ),
    "softmax_scalar": (lambda x: torch.softmax(x, 0), [torch.tensor(2.0)]),
    "log_softmax_scalar": (lambda x: torch.log_softmax(x, 0), [torch.tensor(2.0)]),
    "sum_of_scalar": (lambda x: x.sum(dim=0) + x.amax(0) + x.mean(0), [torch.tensor(2.0)]),
    "cholesky_inverse_infinite": (
        torch.cholesky_inverse,
        [
            torch.tensor(
                [
                    [[2.0, 0.0, 0.0], [INF, 1.5, 0.0], [0.5, -1.0, 1.0]],
                    [[2.0, 9.0, 9.0], [1.0, 1.0, 9.0], [0.5, INF, 1.0]],
                ]
            )
        ],
    ),
    "compare": (lambda x, y: (x == y, x != y, x > y, x >= y, x < y, x <= y), [EDGES, EDGES.roll(1)]),
    "maximum": (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), [EDGES, EDGES.roll(1)]),
    "topk_largest": (lambda x: _stable_topk(x, True), [RANKED]),
    "topk_smallest": (lambda x: _stable_topk(x, False), [RANKED]),
    "topk_largest_of_many": (lambda x: _stable_topk(x, True), [RANKED.repeat(1, 2)]),
    "topk_smallest_of_many": (lambda x: _stable_topk(x, False), [RANKED.repeat(1, 2)]),
    "half_softmax_to_float": (lambda x: torch.softmax(x, -1, dtype=torch.float32), [_ramp(-3, 4, 2, 8).half()]),
    "half_log_softmax_to_float": (lambda x: torch.log_softmax(x, -1, torch.float32), [_ramp(-3, 4, 2, 8).half()]),
    "half_mean_to_float": (lambda x: x.mean(-1, dtype=torch.float32), [_ramp(-3, 4, 2, 8).half()]),
    "half_mean": (lambda x: x.mean(-1), [_ramp(40, 60, 2, 4096).half()]),
    "half_layer_norm": (nn.LayerNorm(64).half(), [_ramp(-300, 310, 2, 64).half()]),
    "half_batch_norm": (nn.BatchNorm1d(4).half().eval(), [_ramp(-300, 310, 2, 4).half()]),
    "half_mish": (F.mish, [_ramp(-12, 12, 49).half()]),
    "half_nan_to_num": (torch.nan_to_num, [EDGES.half()]),
    "half_div": (torch.div, [_ramp(1, 9, 9).half() * 1e-6, _ramp(9, 1, 9).half() * 1e-6]),
    "half_add_alpha": (
        lambda x, y: torch.add(x, y, alpha=1000),
        [_ramp(-6e4, -5e4, 64).half(), _ramp(60, 70, 64).half()],
    ),
    "bool_sum": (lambda x: (x > 0).sum(-1), [_ramp(-3, 4, 2, 8)]),
}


@pytest.mark.parametrize("name", ROWS)
def test_float(name: str) -> None:
    function, inputs = ROWS[name]
    case = Case(name, function, [], rtol=2e-3 if name.startswith("half") else 2e-5)
    lowered = runner.lower(runner.export(case.module(), tuple(inputs)), "fp")
    lowered.check_delegated()
    got, expected = lowered.run(inputs), runner.flatten_tensors(case.module()(*inputs))
    runner.check_close(case, got, expected)
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+FP")


INTEGERS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "relu_int8": (torch.relu, torch.int8),
    "clamp_min_int8": (lambda x: x.clamp(min=-3), torch.int8),
    "clamp_int32": (lambda x: x.clamp(-3, 4), torch.int32),
    "clamp_max_int32": (lambda x: x.clamp(max=4), torch.int32),
    "topk_int8": (lambda x: torch.topk(x, 3).values, torch.int8),
    "topk_int32": (lambda x: torch.topk(x, 2, largest=False).values, torch.int32),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer(name: str) -> None:
    """Plain integers, not quantized numbers."""
    function, dtype = INTEGERS[name]
    x = torch.tensor([-100, -4, -3, 0, 3, 4, 5, 100], dtype=dtype)
    case = Case(name, function, [])
    lowered = runner.lower(runner.export(case.module(), (x,)), "int")
    lowered.check_delegated()
    (got,), expected = lowered.run([x]), function(x)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+INT+int16+int4+doubleround+inexactround")
