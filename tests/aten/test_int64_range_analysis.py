"""Interval analysis: the intervals of integer results, by the rules of the operators' records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from arm_backend_core.aten.int64_range_analysis import IntervalAnalysis
from arm_backend_core.nodes import INTERVAL
from arm_backend_core.ops.intervals import ASSUMED_INTERVAL, INT64

aten = torch.ops.aten


def _trace(function: Callable[..., Any], operands: int) -> Graph:
    """The graph of a function of int64 tensors [2, 3]."""
    tensors = [torch.ones(2, 3, dtype=torch.int64) for _ in range(operands)]
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*tensors).graph


def _infer(function: Callable[..., Any], *intervals: tuple[int, int]) -> tuple[Node, tuple[int, int] | None]:
    """The node of the result, an operator on int64 [2, 3], and its interval."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(
        *(torch.ones(2, 3, dtype=torch.int64) for _ in intervals)
    ).graph
    inferred = IntervalAnalysis({})
    for node, interval in zip(graph.find_nodes(op="placeholder"), intervals, strict=True):
        node.meta[INTERVAL] = interval
    for node in graph.nodes:
        if node.op == "call_function":
            inferred.fits_int32(node)
    (result,) = graph.output_node().all_input_nodes
    return result, inferred._inferred.get(result)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: aten.add.Tensor(x, y), (-12, 12)),
        (lambda x, y: aten.add.Tensor(x, y, alpha=3), (-16, 26)),
        (lambda x, y: aten.sub.Tensor(x, y, alpha=3), (-31, 11)),
        (lambda x, y: aten.rsub.Scalar(x, 1), (-4, 11)),
        (lambda x, y: aten.mul.Tensor(x, y), (-70, 35)),
        (lambda x, y: aten.neg.default(x), (-5, 10)),
        (lambda x, y: aten.abs.default(x), (0, 10)),
        (lambda x, y: aten.clamp.default(x, None, 3), (-10, 3)),
        (lambda x, y: aten.clamp.default(x, -1), (-1, 5)),
        (lambda x, y: aten.clamp.Tensor(x, y, None), (-2, 7)),
        (lambda x, y: aten.remainder.Tensor(x, y), (-2, 7)),
        (lambda x, y: aten.fmod.Tensor(x, y), (-10, 5)),
        (lambda x, y: aten.floor_divide.default(x, y), (-10, 10)),
        (lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="trunc"), (-10, 10)),
        (lambda x, y: aten.maximum.default(x, y), (-10, 7)),
        (lambda x, y: aten.where.self(x > y, y, y), (-2, 7)),
        (lambda x, y: aten.where.ScalarOther(x > y, y, 9), (-2, 9)),
        (lambda x, y: aten.sum.dim_IntList(x, [1]), (-60, 30)),
        (lambda x, y: aten.cumsum.default(y, 1), (-12, 42)),
        (lambda x, y: aten.argmax.default(x), (0, 5)),
        (lambda x, y: aten.argmin.default(x, 1), (0, 2)),
        (lambda x, y: aten.constant_pad_nd.default(y, [1, 1], 9), (-2, 9)),
        (lambda x, y: aten.pad.default(y, [1, 1]), (-2, 7)),
        (lambda x, y: aten.cat.default([x, y]), (-10, 7)),
        (lambda x, y: aten.select.int(y, 0, 1), (-2, 7)),
        (lambda x, y: aten.one_hot.default(y, 8), (0, 1)),
        (lambda x, y: aten.add.Tensor(aten.topk.default(x, 2)[1], 1), (1, 7)),
        (lambda x, y: aten._to_copy.default(x, dtype=torch.int64), (-10, 5)),
        (lambda x, y: aten.neg.default(aten._to_copy.default(x / 2, dtype=torch.int64)), (1 - (1 << 30), 1 << 30)),
        (lambda x, y: aten._to_copy.default(aten.clamp.default(x / 2, -1.5, 2.0), dtype=torch.int64), (-2, 2)),
        (lambda x, y: aten.bitwise_and.Tensor(x, y), (-16, 15)),
        (lambda x, y: aten.bitwise_and.Scalar(x, 5), (0, 5)),
        (lambda x, y: aten.bitwise_or.Tensor(x, y), (-16, 15)),
        (lambda x, y: aten.bitwise_xor.Scalar(aten.abs.default(y), 8), (0, 15)),
        (lambda x, y: aten.bitwise_not.default(x), (-6, 9)),
        (lambda x, y: aten.__rshift__.Scalar(x, 1), (-5, 2)),
        (lambda x, y: aten.bitwise_right_shift.Tensor(x, aten.abs.default(y)), (-10, 5)),
        (lambda x, y: aten.__lshift__.Scalar(x, 4), (-160, 80)),
        (lambda x, y: aten.bitwise_left_shift.Tensor(x, y), (-1280, 640)),
        # Negative bits: a left shift gives 0, a right shift the sign. So do as many bits as the type has.
        (lambda x, y: aten.bitwise_left_shift.Tensor(aten.clamp.default(x, 3), y), (0, 640)),
        (lambda x, y: aten.bitwise_left_shift.Tensor(aten.clamp.default(x, 3), aten.mul.Tensor(y, 0)), (3, 5)),
        (
            lambda x, y: aten.bitwise_right_shift.Tensor(aten.clamp.default(x, 3), aten.clamp.default(y, None, 0)),
            (0, 5),
        ),
        (lambda x, y: aten.bitwise_right_shift.Tensor(aten.clamp.default(x, None, -3), y), (-10, -1)),
        (lambda x, y: aten.__lshift__.Scalar(aten.clamp.default(x, 3), 64), (0, 0)),
        (lambda x, y: aten.gcd.default(x, y), INT64),
    ],
)
def test_interval_of_a_result(function: Callable[[Tensor, Tensor], Any], expected: tuple[int, int]) -> None:
    assert _infer(function, (-10, 5), (-2, 7))[1] == expected


def test_flattened_row_indices_are_assumed_to_fit_int32() -> None:
    large = (0, 1 << 30)
    assert _infer(lambda x: aten.mul.Tensor(x, 640), large)[1] == ASSUMED_INTERVAL
    assert _infer(lambda x: aten.mul.Tensor(x, 1 << 13), large)[1] == (0, 1 << 43)


def test_operand_that_may_exceed_int32_is_found() -> None:
    def read(x: Tensor) -> Tensor:
        return aten.neg.default(aten.mul.Tensor(x, x))

    node, interval = _infer(read, (0, 1 << 20))
    assert interval == (-(1 << 40), 0)
    inferred = IntervalAnalysis({})
    product = node.all_input_nodes[0]
    product.all_input_nodes[0].meta[INTERVAL] = (0, 1 << 20)
    assert not inferred.fits_int32(product)
    assert inferred.find_overflowing_operand(node) is product


def test_indices_and_casts_are_exempt_from_the_overflow_check() -> None:
    def index(x: Tensor, i: Tensor) -> Any:
        return aten.index.Tensor(x, [aten.mul.Tensor(i, i)])

    def convert(x: Tensor) -> Any:
        return aten._to_copy.default(aten.mul.Tensor(x, x), dtype=torch.int32)

    for function, count in ((index, 2), (convert, 1)):
        graph = _trace(function, count)
        (reader,) = graph.output_node().all_input_nodes
        inferred = IntervalAnalysis({})
        for each in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            each.all_input_nodes[0].meta[INTERVAL] = (0, 1 << 20)
            assert not inferred.fits_int32(each)
        assert inferred.find_overflowing_operand(reader) is None
