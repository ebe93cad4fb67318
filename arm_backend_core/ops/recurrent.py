"""Recurrent layers step by step, written node by node: one step is traced, and its nodes are copied for every other.

PyTorch's own decompositions trace every step anew (2 ms for each operator), and call a CPU library for a whole LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.registry import made_of

aten = torch.ops.aten


class Call(Protocol):
    """Writes what ``function(*tensors, **numbers)`` does into the graph; a tuple where it gives several tensors."""

    def __call__(self, function: Callable[..., Any], *tensors: Node, **numbers: Any) -> Any:
        """Raises Unsupported where PyTorch cannot trace it."""


def _project(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, time: int) -> tuple[Tensor, ...]:
    """The input's share of the gates of every step, in one product: a tensor for each step."""
    return F.linear(x, weight, bias).unbind(time)


def _apart(state: Tensor) -> tuple[Tensor, ...]:
    return state.unbind(0)


def _stacked(*tensors: Tensor, dim: int) -> Tensor:
    return torch.stack(tensors, dim)


def _joined(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, -1)


def _lstm_cell(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, *rest: Tensor, biases: bool) -> tuple[Tensor, ...]:
    """Gates in the order input, forget, cell, output; the last weight, if there is one, projects h (torch.nn.LSTM)."""
    bias, projection = rest[0] if biases else None, rest[biases:]
    i, f, g, o = (gates + F.linear(h, weight, bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (F.linear(h, projection[0]) if projection else h), c


def _gru_cell(gates: Tensor, h: Tensor, weight: Tensor, *rest: Tensor, biases: bool) -> tuple[Tensor, ...]:
    """Gates in the order reset, update, new (torch.nn.GRU)."""
    (r_x, z_x, n_x), (r_h, z_h, n_h) = gates.chunk(3, -1), F.linear(h, weight, *rest).chunk(3, -1)
    n = torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h)
    return (n + torch.sigmoid(z_x + z_h) * (h - n),)


def _tanh_cell(gates: Tensor, h: Tensor, weight: Tensor, *rest: Tensor, biases: bool) -> tuple[Tensor, ...]:
    return (torch.tanh(gates + F.linear(h, weight, *rest)),)


def _relu_cell(gates: Tensor, h: Tensor, weight: Tensor, *rest: Tensor, biases: bool) -> tuple[Tensor, ...]:
    return (torch.relu(gates + F.linear(h, weight, *rest)),)


def _layers(
    call: Call,
    cell: Callable[..., tuple[Tensor, ...]],
    x: Node,
    states: Sequence[Node],
    parameters: Sequence[Node],
    biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Node, ...]:
    """The sequence that the last layer gives, and the last states.

    ``states``: [layers * directions, batch, hidden] each; ``parameters``: those of a layer and direction side by side.
    """
    if train and dropout:
        raise Unsupported("dropout between the layers in training mode; call model.eval() before exporting")
    time, directions = (1 if batch_first else 0), (2 if bidirectional else 1)
    starts = [call(_apart, state) for state in states]
    count = len(parameters) // (num_layers * directions)
    ends: list[list[Node]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            w_x, w_h, *rest = parameters[index * count : (index + 1) * count]
            b_x, rest = ([rest[0]], rest[1:]) if biases else ([], rest)
            step = 1 if index % directions == 0 else -1
            state = [start[index] for start in starts]
            sequence = []
            for gates in call(_project, x, w_x, *b_x, time=time)[::step]:
                state = list(call(cell, gates, *state, w_h, *rest, biases=biases))
                sequence.append(state[0])
            outputs.append(call(_stacked, *sequence[::step], dim=time))
            for end, last in zip(ends, state, strict=True):
                end.append(last)
        x = call(_joined, *outputs) if bidirectional else outputs[0]
    return (x, *(call(_stacked, *end, dim=0) for end in ends))


@made_of(aten.lstm.input, stepwise=True)
def lstm(call: Call, x: Node, states: Sequence[Node], *rest: Any) -> tuple[Node, ...]:
    """aten.lstm.input."""
    return _layers(call, _lstm_cell, x, states, *rest)


def _one_state(cell: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Node, ...]]:
    return lambda call, x, state, *rest: _layers(call, cell, x, [state], *rest)


made_of(aten.gru.input, stepwise=True)(_one_state(_gru_cell))
made_of(aten.rnn_tanh.input, stepwise=True)(_one_state(_tanh_cell))
made_of(aten.rnn_relu.input, stepwise=True)(_one_state(_relu_cell))


@made_of(aten.lstm_cell.default)
def lstm_cell(x: Tensor, hx: Sequence[Tensor], w_x: Tensor, w_h: Tensor, *biases: Tensor | None) -> tuple[Tensor, ...]:
    """aten.lstm_cell.default; (h, c)."""
    return _cell(_lstm_cell, x, hx, w_x, w_h, *biases)


def _cell(
    cell: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    states: Sequence[Tensor],
    w_x: Tensor,
    w_h: Tensor,
    b_x: Tensor | None = None,
    b_h: Tensor | None = None,
) -> tuple[Tensor, ...]:
    return cell(F.linear(x, w_x, b_x), *states, w_h, *([] if b_h is None else [b_h]), biases=b_h is not None)


def _one_step(cell: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda x, state, *rest: _cell(cell, x, [state], *rest)[0]


made_of(aten.gru_cell.default)(_one_step(_gru_cell))
made_of(aten.rnn_tanh_cell.default)(_one_step(_tanh_cell))
made_of(aten.rnn_relu_cell.default)(_one_step(_relu_cell))
