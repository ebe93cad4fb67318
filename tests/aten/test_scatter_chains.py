"""Writes into slices of a tensor, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from arm_backend_core.aten.scatter_chains import resolve_scatter_chains
from arm_backend_core.graph_edits import eliminate_dead_code
from tests.ops.runner import Case, Input, export, lower, quantize_case
from tests.sqnr import sqnr

aten = torch.ops.aten


def _normalize_pixels(x: Tensor) -> Tensor:
    """Normalize pixel coordinates in place, as the prompt encoder of Segment Anything does."""
    c = x.clone()
    c[..., 0] = c[..., 0] / 1024
    c[..., 1] = c[..., 1] / 768
    return 2 * c - 1


def _normalize_slices(x: Tensor) -> Tensor:
    c = x.clone()
    c[..., :1] = c[..., :1] / 1024
    c[..., -1:] = c[..., -1:] * (1 / 768)
    return 2 * c - 1


@pytest.mark.parametrize("function", [_normalize_pixels, _normalize_slices])
@pytest.mark.parametrize(("int16", "min_sqnr"), [(False, 40), (True, 75)])
def test_coordinates_that_are_normalized_in_place_are_exact(
    function: Callable[[Tensor], Tensor], int16: bool, min_sqnr: float
) -> None:
    """With the tensor that holds pixels and fractions, the SQNR is -2 dB in INT8 and 27 dB in A16W8."""
    case = Case("normalize", function, (Input((1, 64, 2), 0, 700),))
    program = export(case.module(), case.sample()).run_decompositions({})
    captured = Case("captured", program.module(check_guards=False), case.inputs)
    lowered = lower(export(quantize_case(captured, int16=int16), case.sample()), "int")
    lowered.check_delegated()
    (found,) = lowered.run(case.sample())
    assert sqnr(function(*case.sample()), found) > min_sqnr


def _select(x: Tensor, value: Tensor, index: int) -> Tensor:
    return aten.select_scatter.default(x, value, -1, index)


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        (lambda x, y: _select(_select(_select(x, y, 0), y + 1, 2), y + 2, -2), {"cat": 1}),
        # Of two writes to an index, the last one determines the value. A later read returns this value.
        (lambda x, y: _select(_select(_select(_select(x, y, 0), y + 1, 1), y + 2, 2), y + 3, 0), {"cat": 1}),
        (lambda x, y: _select(x, y, 0).select(1, 0), {"select_scatter": 1}),
        (lambda x, y: _select(x, y, 0).select(1, 2), {}),
        (lambda x, y: _select(x, y, 0)[:, 1:], {}),
        (lambda x, y: _select(x, y, 0)[:, :2], {"select_scatter": 1}),
        (lambda x, y: _select(x, y, 0)[1:], {"select_scatter": 1}),
        (lambda x, y: _select(_select(x, y, 0), y, 1), {"select_scatter": 2}),
        (lambda x, y: aten.slice_scatter.default(_select(x, y, 0), x[:, 1:] * 2, 1, 1), {"cat": 1}),
        (lambda x, y: _select(aten.slice_scatter.default(x, x[:, 1:] * 2, 1, 1, 9), y, 1), {"select_scatter": 1}),
        (lambda x, y: _select(aten.slice_scatter.default(x, x * 2, 1), y, 1), {"cat": 1}),
        (lambda x, y: _select(aten.slice_scatter.default(x, x[:, ::2] * 2, 1, 0, None, 2), y, 1), {"cat": 1}),
    ],
)
def test_chains_keep_their_values(function: Callable[[Tensor, Tensor], Tensor], operators: dict[str, int]) -> None:
    inputs = torch.randn(4, 3), torch.randn(4)
    module = make_fx(function, tracing_mode="fake")(*inputs)
    resolve_scatter_chains(module)
    eliminate_dead_code(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*inputs), function(*inputs))
    names = Counter(str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function")
    kinds = ("cat", "select_scatter", "slice_scatter")
    found: dict[str, Any] = {kind: names[kind] for kind in kinds if names[kind]}
    assert {kind: count for kind, count in found.items() if kind != "slice_scatter"} == operators


def test_interleaved_writes_are_no_concatenation_of_all_elements() -> None:
    def interleave(x: Tensor) -> Tensor:
        even = aten.slice_scatter.default(x, x[:, ::2] * 2, 1, 0, None, 2)
        return aten.slice_scatter.default(even, x[:, 1::2] * 3, 1, 1, None, 2)

    module = make_fx(interleave, tracing_mode="fake")(torch.randn(2, 32))
    resolve_scatter_chains(module)
    assert not module.graph.find_nodes(op="call_function", target=aten.cat.default)


def test_slices_of_a_tensor_whose_size_depends_on_data_are_kept() -> None:
    def positive_rows(x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_select(0, rows)[:, :2]

    class Rows(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return positive_rows(x)

    inputs = torch.randn(8, 3)
    module = torch.export.export(Rows(), (inputs,)).module(check_guards=False)
    resolve_scatter_chains(module)
    torch.testing.assert_close(module(inputs), positive_rows(inputs))
