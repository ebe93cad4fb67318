"""Loop unrolling of recurrent layers (LSTM, GRU, RNN) into FX nodes.

One time step is traced, and its nodes are copied for the other steps. PyTorch's own decompositions are not used: they
trace every time step, at 2 ms per operator, and may replace a whole LSTM by a call of a CPU library.
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
    """Callable that emits the nodes of ``function(*tensors, **numbers)`` and returns the result node or nodes.

    For a time step and for the initial states, ``layer`` is the weight that identifies the recurrent layer
    (``nodes.TIMESTEP_SLOT``); else None.
    """

    def __call__(self, function: Callable[..., Any], *tensors: Node, layer: Node | None = None, **numbers: Any) -> Any:
        """Raises Unsupported if PyTorch cannot trace the function."""

    def copy_node(self, node: Node, **arguments: Any) -> Node:
        """Emit a copy of an operator with other values of some arguments, without tracing the operator again."""


@dataclass(frozen=True)
class Cell:
    """A recurrent cell, which computes one time step.

    Attributes:
        step: function of the projected input (one tensor for each of ``groups``), the states and the recurrent
            parameters. It returns the new states.
        order: permutation of the gates from PyTorch's order to the order in which ``step`` takes them.
        groups: sizes of groups of consecutive gates with the same activation function. One TABLE computes each group.
            Example: (3, 1) for the sigmoid of the gates i, f, o and the tanh of g.
        merges_biases: whether input bias and recurrent bias can be merged. They can if ``step`` only adds the two
            projections.
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


def _rnn_tanh(x: Tensor, h: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (torch.tanh(x + F.linear(h, weight)),)


_LSTM, _GRU = Cell(_lstm, (0, 1, 3, 2), (3, 1)), Cell(_gru, (0, 1, 2), (2, 1), merges_biases=False)
_RNN_TANH, _RNN_RELU = Cell(_rnn_tanh, (0,), (1,)), Cell(lambda x, h, w: (torch.relu(x + F.linear(h, w)),), (0,), (1,))


def _split_gates(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split the last dimension in proportion to ``sizes``."""
    size_per_gate = x.shape[-1] // sum(sizes)
    return [x[..., a * size_per_gate : b * size_per_gate] for a, b in pairwise(accumulate(sizes, initial=0))]


def _project_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, time_axis: int, groups: Sequence[int]
) -> list[Tensor]:
    """Project the inputs of all time steps to the gates in one matrix product.

    Returns:
        The gates of the first time step, one tensor for each of ``groups``.
    """
    return [part.select(time_axis, 0) for part in _split_gates(F.linear(x, weight, bias), groups)]


def _project_steps(
    emit: NodeEmitter, x: Node, *parameters: Node, time_axis: int, groups: Sequence[int]
) -> list[list[Node]]:
    """Emit ``_project_inputs`` once, and select the gates of each time step from its matrix product.

    The nodes of ``_project_inputs`` select the gates of the first step. Copies of the select nodes with other indices
    select the gates of the other steps. Copying avoids tracing, which takes 2 ms per operator.

    Returns:
        For each time step, one node for each of ``groups``.
    """
    first = emit(_project_inputs, x, *parameters, time_axis=time_axis, groups=groups)
    others = range(1, x.meta["val"].shape[time_axis])
    return [first, *([emit.copy_node(gates, index=step) for gates in first] for step in others)]


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
    emit: NodeEmitter, cell: Cell, parameters: Sequence[Node], has_biases: bool
) -> tuple[list[Node], list[Node]]:
    """Split parameters into [input weight, bias] and [recurrent weight, bias, projection weight (LSTM only)].

    A merged bias (``Cell.merges_biases``) is in the first list.
    """
    count = 4 if has_biases else 2
    ordered: list[Node] = list(parameters)
    if list(cell.order) != sorted(cell.order):
        ordered[:count] = [emit(_reorder_gates, parameter, order=cell.order) for parameter in parameters[:count]]
    input_parameters, recurrent_parameters, projection = ordered[:count:2], ordered[1:count:2], ordered[count:]
    if has_biases and cell.merges_biases:
        input_parameters[1] = emit(torch.add, input_parameters[1], recurrent_parameters.pop())
    return input_parameters, [*recurrent_parameters, *projection]


def _unroll_layers(
    emit: NodeEmitter,
    cell: Cell,
    x: Node,
    states: Sequence[Node],
    parameters: Sequence[Node],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Node, ...]:
    """Unroll all layers; return the output sequence of the last layer and the final states.

    Each of ``states`` is [layers * directions, batch, hidden]. ``parameters`` are ordered by layer, then direction.
    """
    if train and dropout:
        raise Unsupported("dropout between the layers in training mode; call model.eval() before exporting")
    time_axis, directions = (1 if batch_first else 0), (2 if bidirectional else 1)
    count = len(parameters) // (num_layers * directions)
    final_states: list[list[Node]] = [[] for _ in states]
    for layer in range(num_layers):
        outputs = []
        for index in range(layer * directions, (layer + 1) * directions):
            cell_parameters = parameters[index * count : (index + 1) * count]
            input_parameters, recurrent_parameters = _split_parameters(emit, cell, cell_parameters, has_biases)
            step = 1 if index % directions == 0 else -1
            state = [emit(_select_layer, state, layer=cell_parameters[1], index=index) for state in states]
            sequence = []
            projected = _project_steps(emit, x, *input_parameters, time_axis=time_axis, groups=cell.groups)
            for gates in projected[::step]:
                state = list(emit(cell.step, *gates, *state, *recurrent_parameters, layer=cell_parameters[1]))
                sequence.append(state[0])
            outputs.append(emit(_stack, *sequence[::step], dim=time_axis))
            for finals, last in zip(final_states, state, strict=True):
                finals.append(last)
        x = emit(_concat, *outputs) if bidirectional else outputs[0]
    return (x, *(emit(_stack, *finals, dim=0) for finals in final_states))


@decomposition(aten.lstm.input, emits_nodes=True)
def lstm(emit: NodeEmitter, x: Node, states: Sequence[Node], *rest: Any) -> tuple[Node, ...]:
    """LSTM with one or more layers."""
    return _unroll_layers(emit, _LSTM, x, states, *rest)


def _build_single_state_decomposition(cell: Cell) -> Callable[..., tuple[Node, ...]]:
    """Build the decomposition of a layer whose cell has one state."""
    return lambda emit, x, state, *rest: _unroll_layers(emit, cell, x, [state], *rest)


decomposition(aten.gru.input, emits_nodes=True)(_build_single_state_decomposition(_GRU))
decomposition(aten.rnn_tanh.input, emits_nodes=True)(_build_single_state_decomposition(_RNN_TANH))
decomposition(aten.rnn_relu.input, emits_nodes=True)(_build_single_state_decomposition(_RNN_RELU))


def _build_cell_decomposition(cell: Cell) -> Callable[..., Any]:
    """Build the decomposition of a cell module, which computes a single time step."""

    def rule(emit: NodeEmitter, x: Node, hidden: Any, *parameters: Node | None) -> Any:
        """nn.LSTMCell, nn.GRUCell or nn.RNNCell. Calls with the same weight share quantization scales."""
        states = hidden if isinstance(hidden, (list, tuple)) else [hidden]
        cell_parameters = [parameter for parameter in parameters if parameter is not None]
        input_parameters, recurrent_parameters = _split_parameters(
            emit, cell, cell_parameters, len(cell_parameters) == 4
        )
        gates = emit(_project_inputs, emit(_add_time_axis, x), *input_parameters, time_axis=0, groups=cell.groups)
        new_states = emit(cell.step, *gates, *states, *recurrent_parameters, layer=cell_parameters[1])
        return new_states if len(states) > 1 else new_states[0]

    return rule


def _add_time_axis(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


decomposition(aten.lstm_cell.default, emits_nodes=True)(_build_cell_decomposition(_LSTM))
decomposition(aten.gru_cell.default, emits_nodes=True)(_build_cell_decomposition(_GRU))
decomposition(aten.rnn_tanh_cell.default, emits_nodes=True)(_build_cell_decomposition(_RNN_TANH))
decomposition(aten.rnn_relu_cell.default, emits_nodes=True)(_build_cell_decomposition(_RNN_RELU))
