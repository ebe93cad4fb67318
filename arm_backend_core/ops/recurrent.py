"""Unrolling of recurrent layers into FX nodes: one time step is traced, and its nodes are copied for all others.

PyTorch's own decompositions trace every step again (2 ms for each operator) and call a CPU library for a whole LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.registry import decomposition

aten = torch.ops.aten


class NodeEmitter(Protocol):
    """Traces ``function(*tensors, **numbers)`` into the graph and returns its result node, or a tuple of nodes.

    ``layer``: the weight of the layer of which this call is one time step, see ``nodes.TIMESTEP_SLOT``.
    """

    def __call__(self, function: Callable[..., Any], *tensors: Node, layer: Node | None = None, **numbers: Any) -> Any:
        """Raises Unsupported if PyTorch cannot trace the function."""


@dataclass(frozen=True)
class Cell:
    """The cell of a recurrent layer: one time step.

    Attributes:
        step: maps the input's contribution to the gates (a tensor for each of ``groups``), the states and the other
            parameters to the new states.
        order: indices of the gates in PyTorch's parameters, in the order that ``step`` expects.
        groups: numbers of consecutive gates that share one activation function, which is then one TABLE.
        merges_biases: whether input and state contributions are only added, so that both biases merge into one.
    """

    step: Callable[..., tuple[Tensor, ...]]
    order: tuple[int, ...]
    groups: tuple[int, ...]
    merges_biases: bool = True


def _lstm(ifo: Tensor, g: Tensor, h: Tensor, c: Tensor, weight: Tensor, *projection: Tensor) -> tuple[Tensor, ...]:
    recurrent_ifo, recurrent_g = _split_gates(F.linear(h, weight), (3, 1))
    g = torch.tanh(g + recurrent_g)
    i, f, o = _split_gates(torch.sigmoid(ifo + recurrent_ifo), (1, 1, 1))
    c = f * c + i * g
    h = o * torch.tanh(c)
    return (F.linear(h, projection[0]) if projection else h), c


def _gru(rz: Tensor, n: Tensor, h: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
    recurrent_rz, recurrent_n = _split_gates(F.linear(h, weight, *bias), (2, 1))
    r, z = _split_gates(torch.sigmoid(rz + recurrent_rz), (1, 1))
    n = torch.tanh(n + r * recurrent_n)
    return (n + z * (h - n),)


def _tanh(x: Tensor, h: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.tanh(x + F.linear(h, weight)),)


_LSTM, _GRU = Cell(_lstm, (0, 1, 3, 2), (3, 1)), Cell(_gru, (0, 1, 2), (2, 1), merges_biases=False)
_RNN_TANH, _RNN_RELU = Cell(_tanh, (0,), (1,)), Cell(lambda x, h, w: (torch.relu(x + F.linear(h, w)),), (0,), (1,))


def _split_gates(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Slices of the last dimension with sizes proportional to ``sizes``."""
    unit = x.shape[-1] // sum(sizes)
    return [x[..., a * unit : b * unit] for a, b in pairwise(accumulate(sizes, initial=0))]


def _project_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, time: int, groups: Sequence[int]
) -> list[list[Tensor]]:
    """The input's contribution to the gates of all steps in one matrix product; a list of tensors for each step."""
    parts = _split_gates(F.linear(x, weight, bias), groups)
    return [[part.select(time, t) for part in parts] for t in range(x.shape[time])]


def _reorder_gates(parameter: Tensor, *, order: Sequence[int]) -> Tensor:
    gates = parameter.chunk(len(order))
    return torch.cat([gates[i] for i in order])


def _select_layer(state: Tensor, *, index: int) -> Tensor:
    return state.select(0, index)


def _stack(*tensors: Tensor, dim: int) -> Tensor:
    return torch.stack(tensors, dim)


def _concat(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors, -1)


def _split_parameters(
    call: NodeEmitter, cell: Cell, parameters: Sequence[Node], biases: bool
) -> tuple[list[Node], list[Node]]:
    """Parameters of the input projection (weight, bias) and of the state (weight, bias, projection weight)."""
    count = 4 if biases else 2
    ordered: list[Node] = list(parameters)
    if list(cell.order) != sorted(cell.order):
        ordered[:count] = [call(_reorder_gates, parameter, order=cell.order) for parameter in parameters[:count]]
    of_input, of_state, projection = ordered[:count:2], ordered[1:count:2], ordered[count:]
    if biases and cell.merges_biases:
        of_input[1] = call(torch.add, of_input[1], of_state.pop())
    return of_input, [*of_state, *projection]


def _unroll_layers(
    call: NodeEmitter,
    cell: Cell,
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
    """Unroll all layers; return the output sequence of the last layer and the final states.

    ``states``: [layers * directions, batch, hidden] each. ``parameters``: grouped by layer and direction.
    """
    if train and dropout:
        raise Unsupported("dropout between the layers in training mode; call model.eval() before exporting")
    time, directions = (1 if batch_first else 0), (2 if bidirectional else 1)
    count = len(parameters) // (num_layers * directions)
    ends: list[list[Node]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            own = parameters[index * count : (index + 1) * count]
            of_input, of_state = _split_parameters(call, cell, own, biases)
            step = 1 if index % directions == 0 else -1
            state = [call(_select_layer, state, layer=own[1], index=index) for state in states]
            sequence = []
            for gates in call(_project_inputs, x, *of_input, time=time, groups=cell.groups)[::step]:
                state = list(call(cell.step, *gates, *state, *of_state, layer=own[1]))
                sequence.append(state[0])
            outputs.append(call(_stack, *sequence[::step], dim=time))
            for end, last in zip(ends, state, strict=True):
                end.append(last)
        x = call(_concat, *outputs) if bidirectional else outputs[0]
    return (x, *(call(_stack, *end, dim=0) for end in ends))


@decomposition(aten.lstm.input, emits_nodes=True)
def lstm(call: NodeEmitter, x: Node, states: Sequence[Node], *rest: Any) -> tuple[Node, ...]:
    """LSTM with one or more layers."""
    return _unroll_layers(call, _LSTM, x, states, *rest)


def _single_state_rule(cell: Cell) -> Callable[..., tuple[Node, ...]]:
    return lambda call, x, state, *rest: _unroll_layers(call, cell, x, [state], *rest)


decomposition(aten.gru.input, emits_nodes=True)(_single_state_rule(_GRU))
decomposition(aten.rnn_tanh.input, emits_nodes=True)(_single_state_rule(_RNN_TANH))
decomposition(aten.rnn_relu.input, emits_nodes=True)(_single_state_rule(_RNN_RELU))


def _cell_rule(cell: Cell) -> Callable[..., Any]:
    def once(call: NodeEmitter, x: Node, hidden: Any, *parameters: Node | None) -> Any:
        """nn.LSTMCell, nn.GRUCell or nn.RNNCell. Calls in a loop share scales, as they share the weight."""
        states = hidden if isinstance(hidden, (list, tuple)) else [hidden]
        own = [parameter for parameter in parameters if parameter is not None]
        of_input, of_state = _split_parameters(call, cell, own, len(own) == 4)
        (gates,) = call(_project_inputs, call(_add_time_axis, x), *of_input, time=0, groups=cell.groups)
        new_states = call(cell.step, *gates, *states, *of_state, layer=own[1])
        return new_states if len(states) > 1 else new_states[0]

    return once


def _add_time_axis(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


decomposition(aten.lstm_cell.default, emits_nodes=True)(_cell_rule(_LSTM))
decomposition(aten.gru_cell.default, emits_nodes=True)(_cell_rule(_GRU))
decomposition(aten.rnn_tanh_cell.default, emits_nodes=True)(_cell_rule(_RNN_TANH))
decomposition(aten.rnn_relu_cell.default, emits_nodes=True)(_cell_rule(_RNN_RELU))
