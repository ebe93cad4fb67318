"""Work of operators with portable kernels."""

from __future__ import annotations

from arm_backend_core.cortex_m.cost.portable_kernels import operator_work
from arm_backend_core.targets.cortex_m import Processor

M4, M3 = Processor.resolve("cortex-m4"), Processor.resolve("cortex-m3")
SHAPE = (1, 8, 16)


def test_views_cost_nothing() -> None:
    assert operator_work("view_copy", M4, SHAPE, [SHAPE]).instructions == 0


def test_products_of_float_matrices_are_counted() -> None:
    assert operator_work("linear", M4, (2, 32), [(2, 16), (32, 16)]).macs == 2 * 32 * 16
    assert operator_work("addmm", M4, (2, 32), [(32,), (2, 16), (16, 32)]).macs == 2 * 32 * 16
    assert operator_work("convolution", M4, (1, 8, 4, 4), [(1, 3, 4, 4), (8, 3, 3, 3), (8,)]).macs == 128 * 27


def test_functions_cost_more_than_sums_and_most_without_fpu() -> None:
    costs = [
        operator_work(name, processor, SHAPE, [SHAPE]).instructions
        for name, processor in (("clone", M4), ("permute_copy", M4), ("add", M4), ("exp", M4), ("exp", M3))
    ]
    assert costs == sorted(costs)
    assert len(set(costs)) == len(costs)


def test_a_reduction_costs_what_it_reads() -> None:
    assert operator_work("sum", M4, (1,), [(1, 1000)]).instructions > 1000
