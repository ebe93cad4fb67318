"""Branches and Python values that depend on tensors, while the model is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arm_backend_core.recurrent.recurrent_ops import RECURRENT_OPS
from arm_recipes import ArmRecipeType, ExportError, ExportRecipe, export
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.capture import Capture
from arm_recipes.stages.capture.trace_constants import trace_recurrent_layers_by_shape


@pytest.mark.parametrize("layer", [nn.LSTM(4, 3), nn.GRU(4, 3, 2, bidirectional=True), nn.RNN(4, 3)])
def test_the_weights_of_recurrent_layers_are_no_lost_assignments(layer: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The tensor attributes? .* assigned during export")
        Capture(None)("forward", nn.Sequential(layer).eval(), Inputs(torch.randn(5, 1, 4)))


class _Branching(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.ready: Tensor
        self.count: Tensor
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("count", torch.tensor([2, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _first(m: Any, x: Tensor) -> Tensor:
    if not m.ready:
        m.linear.weight.data.copy_(x.mean())
    return m.linear(x) if (m.count > 1).all() else x


def _places(_: Any, x: Tensor) -> Tensor:
    return x.flatten() @ torch.diag(torch.tensor([1.0 / i for i in torch.arange(1, x.numel() + 1).tolist()]))


def _written_through_a_view(m: Any, x: Tensor) -> Tensor:
    known = m.count > 5
    known[0].fill_(True)
    return x * 2 if known.any() else x


_KNOWN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flag": _first,
    "number": lambda m, x: m.linear(x)[:, : m.count.tolist()[0]],
    "not": lambda m, x: x * 2 if ~m.ready else m.linear(x),
    "places": _places,
    "view": _written_through_a_view,
}


@pytest.mark.parametrize("name", _KNOWN)
@torch.no_grad()
def test_values_of_unwritten_buffers_are_known(name: str) -> None:
    model, x = _Branching(_KNOWN[name]).eval(), torch.linspace(-2, 2, 8).reshape(2, 4)
    expected = model(x)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    assert not result.report.cpu_operators
    torch.testing.assert_close(result.run(x), expected, atol=1e-5, rtol=1e-5)


def _written_flag(m: Any, x: Tensor) -> Tensor:
    if m.ready:
        m.ready.fill_(False)
        return x * 2
    return x


def _reassigned_buffer(m: Any, x: Tensor) -> Tensor:
    m.count = m.count + 1
    return x * 2 if (m.count > 2).all() else x


def _updated_by_data(m: Any, x: Tensor) -> Tensor:
    known = m.count > 5
    known |= x[0, :2] > 0
    return x * 2 if known.all() else x


def _data_written_through_a_view(m: Any, x: Tensor) -> Tensor:
    known = m.count > 5
    known[0].copy_(x[0, 0] > 0)
    return x * 2 if known.any() else x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_data_written_through_a_view, "must not depend on the values of tensors"),
        (_written_flag, r"branches on its buffer 'ready', and writes it: .* use torch\.where"),
        (_reassigned_buffer, r"branches on its buffer 'count', and writes it"),
        (_updated_by_data, "must not depend on the values of tensors"),
        (lambda m, x: x * 2 if x.sum() > m.count[0] else x, "must not depend on the values of tensors"),
    ],
    ids=["view", "state", "reassigned", "changed", "input"],
)
def test_values_that_may_change_are_refused(function: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(_Branching(function).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(torch.ones(2, 4),)])


def test_a_buffer_that_is_read_as_an_index_and_written_stays_state() -> None:
    """Each call reads the row after the one before: the index is no constant."""

    class Ring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position: Tensor
            self.register_buffer("position", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            row = x[self.position] + x[self.position + 1]
            self.position.add_(1)
            return row

    x = torch.arange(8.0).reshape(4, 2)
    module = Capture(None)("forward", Ring().eval(), Inputs(x)).module()
    assert [module(x).tolist() for _ in range(3)] == [[2, 4], [6, 8], [10, 12]]


def test_packed_sequences_are_refused_with_a_remedy() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1]

    sample = (torch.randn(2, 5, 6), torch.tensor([5, 3]))
    with pytest.raises(
        ExportError, match=r"run the layer on the padded batch, .* y\[torch.arange\(n\), lengths - 1\]$"
    ):
        export(Packed().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [sample])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [False, True])
def test_steps_of_recurrent_layers_are_not_traced(layer: Callable[..., nn.Module], batch_first: bool) -> None:
    """The results have the shapes and strides that PyTorch's have."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer(6, 5, batch_first=batch_first, bidirectional=True)

        def forward(self, x: Tensor, state: Tensor) -> Any:
            return self.layer(x, (state, state) if layer is nn.LSTM else state)

    model, x, state = Model().eval(), torch.randn(2, 4, 6), torch.randn(2 if batch_first else 4, 2, 5).transpose(0, 1)
    program = Capture(strict=False)("forward", model, Inputs(x, state))
    (call,) = [node for node in program.graph.nodes if node.target in RECURRENT_OPS]
    traced, known = pytree.tree_leaves(call.meta["val"]), pytree.tree_leaves(model(x, state))
    assert [(x.shape, x.stride(), x.dtype) for x in traced] == [(x.shape, x.stride(), x.dtype) for x in known]


def test_overlapping_contexts_restore_pytorchs_kernels() -> None:
    first, second = trace_recurrent_layers_by_shape(), trace_recurrent_layers_by_shape()
    for context in (first, second):
        context.__enter__()
    assert all(dict(layer.py_kernels) != kernels for layer, kernels in RECURRENT_OPS.items())
    for context in (first, second):
        context.__exit__(None, None, None)
    assert all(dict(layer.py_kernels) == kernels for layer, kernels in RECURRENT_OPS.items())
