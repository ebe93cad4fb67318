"""Chains of sums, products and quotients with constants, which together compute an affine function of each channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.aten.layer_affine import ChannelAffine
from arm_backend_core.nodes import FEEDS_DROPOUT, arguments_of, is_complex, overload_of

aten = torch.ops.aten
#: For each operator, the factors of the first and the second operand as a function of the argument ``alpha``.
_SUMS: dict[Any, Callable[[float], tuple[float, float]]] = {
    overload: factors
    for name, factors in (
        ("add", lambda alpha: (1.0, alpha)),
        ("sub", lambda alpha: (1.0, -alpha)),
        ("rsub", lambda alpha: (-alpha, 1.0)),
    )
    for overload in (getattr(aten, name).Tensor, getattr(aten, name).Scalar)
}
#: Operators that copy or alias their operand and change no element.
COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
#: A constant of a chain: a number for all channels, or a tensor [C] or [].
Coefficient = Tensor | float


class _Step(NamedTuple):
    """An operator of a chain: scale * x + term. Constants have the shape [C] or [], or are numbers."""

    x: Node
    scale: Coefficient = 1.0
    term: Coefficient | None = None
    divides: bool = False

    @property
    def has_channels(self) -> bool:
        """Whether a constant has an element for each channel."""
        return any(isinstance(value, Tensor) and value.dim() == 1 for value in (self.scale, self.term))


@dataclass(frozen=True)
class AffineChain:
    """Sums, products and quotients with constants; each is the only reader of the preceding one.

    Attributes:
        source: the operand of the first operator.
        nodes: the operators in execution order.
        axis: dimension of the channels.
        affine: the function of the chain.
        divides: True if the chain divides by a constant with an element for each channel.
        has_parameter: True if a constant of the chain is a parameter or is computed from a parameter.
    """

    source: Node
    nodes: tuple[Node, ...]
    axis: int
    affine: ChannelAffine
    divides: bool
    has_parameter: bool

    @property
    def last(self) -> Node:
        """The last operator, whose result is the result of the chain."""
        return self.nodes[-1]


def find_affine_chains(graph: Graph, constants: Constants, axis: int) -> list[AffineChain]:
    """Find the maximal chains in which a constant has an element for each channel of dimension ``axis``."""
    matches = {node: _match_step(node, constants, axis) for node in graph.nodes}
    steps = {node: step for node, step in matches.items() if step is not None}
    chains = []
    for first, step in steps.items():
        if step.x in steps and _may_continue_after(step.x):
            continue  # not the first operator of its chain
        nodes = [first]
        while _may_continue_after(nodes[-1]) and (reader := next(iter(nodes[-1].users))) in steps:
            nodes.append(reader)
        if any(steps[node].has_channels for node in nodes):
            chains.append(_make_chain(nodes, steps, constants, axis))
    return chains


def _may_continue_after(node: Node) -> bool:
    """Whether a chain may continue after ``node``: it has one reader, and training inserts no dropout after it.

    ``FEEDS_DROPOUT`` marks the operand of a dropout that the export removed. Training inserts the dropout again.
    """
    return len(node.users) == 1 and FEEDS_DROPOUT not in node.meta


def _make_chain(nodes: list[Node], steps: dict[Node, _Step], constants: Constants, axis: int) -> AffineChain:
    gain: Coefficient = 1.0
    offset: Coefficient | None = None
    for node in nodes:
        _, scale, term, _ = steps[node]
        gain, offset = gain * scale, None if offset is None else offset * scale
        offset = term if offset is None else offset if term is None else offset + term
    source = steps[nodes[0]].x
    channels = source.meta["val"].shape[axis]
    operands = {x for node in nodes for x in node.all_input_nodes if x in constants}
    has_gain = isinstance(gain, Tensor) or gain != 1.0
    affine = ChannelAffine(
        _per_channel(gain, channels) if has_gain else None, None if offset is None else _per_channel(offset, channels)
    )
    divides = any(steps[node].divides and steps[node].has_channels for node in nodes)
    return AffineChain(source, tuple(nodes), axis, affine, divides, any(map(constants.depends_on_parameter, operands)))


def _per_channel(value: Coefficient, channels: int) -> Tensor:
    """A constant as [C]."""
    return value.expand(channels).contiguous() if isinstance(value, Tensor) else torch.full((channels,), value)


def _match_step(node: Node, constants: Constants, axis: int) -> _Step | None:
    """Match a sum, product or quotient of a float32 tensor and a constant; the result has the shape of the tensor.

    A negation is a product with -1, and a copy is a product with 1. Copies occur because some models copy a tensor to
    write it in place, as ``torchvision.transforms.Normalize`` does. The functional graph still contains the copy.
    """
    target = overload_of(node.target)
    if target in COPIES:
        operands: list[Any] = [node.args[0], 1.0]
    elif target is aten.neg.default:
        operands = [node.args[0], -1.0]
    elif target in _SUMS or target in _PRODUCTS or target in _DIVISIONS:
        operands = list(node.args[:2])
    else:
        return None
    is_left = operands[1] in constants or not isinstance(operands[1], Node)
    x, operand = operands if is_left else operands[::-1]
    if not isinstance(x, Node) or x in constants or (target in _DIVISIONS and not is_left):
        return None
    values: list[Any] = [each.meta.get("val") for each in (x, node)]
    if not all(isinstance(value, Tensor) and value.dtype is torch.float32 for value in values):
        return None
    constant = _constant_value(operand, x, constants, axis)
    is_zero_divisor = target in _DIVISIONS and isinstance(constant, float) and constant == 0
    if constant is None or is_zero_divisor or values[0].shape != values[1].shape or values[0].dim() < 2:
        return None
    if target in _SUMS:
        factors = _SUMS[target](float(arguments_of(node).get("alpha", 1)))
        own, other = factors if is_left else factors[::-1]
        return _Step(x, own, constant * other)
    divides = target in _DIVISIONS
    return _Step(x, 1 / constant if divides else constant, divides=divides)


def _constant_value(operand: Any, x: Node, constants: Constants, axis: int) -> Coefficient | None:
    """The constant that an operator combines with ``x``, as a number or a tensor [] or [C].

    Returns:
        None if ``operand`` is not constant, is complex, or varies along another dimension than ``axis``.
    """
    if isinstance(operand, (int, float)):
        return float(operand)
    if operand not in constants or is_complex(operand):
        return None
    if operand.meta["val"].numel() == 1:
        return constants.value(operand).reshape(()).float()
    values = constants.channel_values(operand, x.meta["val"].shape, axis)
    return None if values is None else values.float()
