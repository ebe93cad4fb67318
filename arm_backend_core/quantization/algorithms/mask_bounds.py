"""Mask bounds: lower the bounds of masks before exponentials, if masked scores would not be negligible.

``aten.mask_constants`` bounds masks by -64, which suffices for scores that span up to 52. Calibration measures the span
of the scores without their masks. For larger spans, the bound becomes -(1.25 * span + 12), so that the exponential of a
masked score rounds to 0. Other programs do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from arm_backend_core.aten.mask_constants import (
    EXPONENTIAL_OPS,
    MASK_BOUND,
    MASKED_VALUE,
    OBSERVED_MINIMUM,
    VALUE_OPERANDS,
)
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST
from arm_backend_core.quantization.observer import RangeObserver

aten = torch.ops.aten
Span = tuple[float, float]

#: The exponential of a score this far below another score rounds to 0 (``fixed_point.softmax.EXP_RANGE_NEPERS``).
_NEGLIGIBLE_DISTANCE = 12.0
#: Factor of the span, for scores beyond the calibration range.
_HEADROOM = 1.25
#: Maximum number of copies of a bound that an observer sees: many, so that it does not clip them as outliers.
_MAX_OBSERVED_BOUNDS = 1 << 14


class _ScoreRange:
    """Range of the values of a tensor within bounds; called with the tensor during calibration."""

    def __init__(self, bound: float) -> None:
        self._bound, self.span = bound, (0.0, 0.0)

    def __call__(self, x: Tensor) -> None:
        """Extend the range by the values of a sample."""
        scores = x[(x > self._bound if self._bound < 0 else x < self._bound) & x.isfinite()]
        if scores.numel():
            low, high = map(float, torch.aminmax(scores))
            self.span = min(self.span[0], low), max(self.span[1], high)


class MaskBounds:
    """The masks before the exponentials of a graph that ``bound_masks`` has edited.

    Attributes:
        watchers: (node, callback) pairs for calibration.
    """

    def __init__(self, graph: Graph) -> None:
        calls = (node for target in EXPONENTIAL_OPS for node in graph.find_nodes(op="call_function", target=target))
        self._exponentials = [node for node in calls if _is_masked(node.args[0])]
        self._ranges: dict[Node, _ScoreRange] = {}
        for exponential in self._exponentials:
            self._record_ranges(exponential.args[0])
        self._spans: dict[Node, Span] = {}
        self.watchers: list[tuple[Node, Callable[[Tensor], None]]] = list(self._ranges.items())

    def apply(self, observers: Mapping[Any, Any]) -> None:
        """Lower the bounds that are too high, in the graph and in the observers of the tensors that hold a mask."""
        ratios: dict[Node, float] = {}
        for exponential in self._exponentials:
            low, high = self._span(exponential.args[0])
            if high - low > -QUANTIZABLE_LOWEST - _NEGLIGIBLE_DISTANCE:
                ratio = math.ceil(_HEADROOM * (high - low) + _NEGLIGIBLE_DISTANCE) / -QUANTIZABLE_LOWEST
                for _, node in _masked_edges(exponential):
                    ratios[node] = max(ratios.get(node, 1.0), ratio)
        for exponential in self._exponentials if ratios else ():
            for reader, node in _masked_edges(exponential):
                ratio = max(ratios.get(x, 1.0) for _, x in [(reader, node), *_masked_edges(node)])
                if ratio > 1:
                    self._extend_observed_range(reader, node, ratio, observers)
        for node in ratios:
            if MASK_BOUND in node.meta:
                index = node.meta[MASK_BOUND]
                bound: Any = node.args[index]
                node.update_arg(index, bound * ratios[node])
        self._exponentials = []

    def _record_ranges(self, x: Any) -> None:
        """Record the ranges that ``_span`` reads: those of clamped masks and of tensors without a mask."""
        if not isinstance(x, Node) or x in self._ranges:
            return
        if not _is_masked(x) or _is_clamped(x):
            self._ranges[x] = _ScoreRange(x.meta[MASKED_VALUE] if _is_clamped(x) else -math.inf)
            return
        for operand in _value_operands(x):
            self._record_ranges(operand)

    def _span(self, x: Any) -> Span:
        """Range of ``x`` without masked values, extended to 0."""
        if not isinstance(x, Node):
            return min(float(x), 0.0), max(float(x), 0.0)
        if x in self._ranges:
            return self._ranges[x].span
        if x not in self._spans:
            self._spans[x] = self._combine_spans(x)
        return self._spans[x]

    def _combine_spans(self, x: Node) -> Span:
        spans = [self._span(operand) for operand in _value_operands(x)]
        if x.target is aten.sub.Tensor:
            spans[1] = -spans[1][1], -spans[1][0]
        if x.target in (aten.add.Tensor, aten.sub.Tensor):
            return sum(low for low, _ in spans), sum(high for _, high in spans)
        scaled = _mask_scale(x)
        return min(low for low, _ in spans) * scaled, max(high for _, high in spans) * scaled

    def _extend_observed_range(self, reader: Node, node: Node, ratio: float, observers: Mapping[Any, Any]) -> None:
        """Extend the ranges of a tensor that holds a mask to its lower bound, plus the lowest score."""
        value = node.meta.get(MASKED_VALUE, QUANTIZABLE_LOWEST) * ratio
        if MASKED_VALUE in node.meta and not _is_clamped(node):
            value += self._span(node)[0]
        for observer in {observers.get(node), observers.get((node, reader))}:
            if isinstance(observer, RangeObserver):
                observer(torch.full((max(1, min(observer.count, _MAX_OBSERVED_BOUNDS)),), value))


def _is_masked(x: Any) -> bool:
    return isinstance(x, Node) and MASKED_VALUE in x.meta


def _is_clamped(x: Node) -> bool:
    """Whether ``x`` is a clamped mask, to which no scores are added yet."""
    return x.target is aten.clamp.default and MASK_BOUND in x.meta


def _value_operands(x: Node) -> list[Any]:
    """The operands whose values appear in ``x``, without a number that is the bound."""
    bound = x.meta.get(MASK_BOUND)
    is_difference = x.target is aten.sub.Tensor
    positions = (0, 1) if is_difference else VALUE_OPERANDS.get(x.target, ())  # type: ignore[call-overload]
    return [x.args[i] for i in positions if i != bound] or x.all_input_nodes


def _mask_scale(x: Node) -> float:
    """The factor that ``x`` multiplies a masked operand by."""
    operand = next((operand for operand in x.all_input_nodes if _is_masked(operand)), None)
    if operand is None or MASK_BOUND in x.meta:
        return 1.0
    factor: float = x.meta[MASKED_VALUE] / operand.meta[MASKED_VALUE]
    return factor


def _masked_edges(reader: Node) -> list[tuple[Node, Node]]:
    """All (reader, tensor) pairs upstream of ``reader`` whose tensor contains a mask."""
    edges: dict[tuple[Node, Node], None] = {}
    todo = [reader]
    while todo:
        node = todo.pop()
        for source in node.all_input_nodes:
            if (node, source) not in edges and (_is_masked(source) or OBSERVED_MINIMUM in source.meta):
                edges[node, source] = None
                todo.append(source)
    return list(edges)
