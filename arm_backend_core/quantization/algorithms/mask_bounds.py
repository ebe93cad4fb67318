"""Mask bounds: lower the bounds of masks before exponentials, if masked scores would not be negligible.

``aten.mask_constants`` bounds masks by -64. This suffices if the span of the scores (maximum minus minimum) is at most
52. Calibration measures the span of the scores without their masks. If the span is larger, the bound becomes
-(1.25 * span + 12), rounded down to an integer, so that the exponential of a masked score rounds to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from arm_backend_core.aten.mask_constants import (
    CALIBRATION_MINIMUM,
    EXPONENTIAL_OPS,
    MASK_BOUND,
    MASKED_VALUE,
    VALUE_OPERANDS,
)
from arm_backend_core.ops.composites.attention import QUANTIZABLE_LOWEST
from arm_backend_core.quantization.observer import RangeObserver

aten = torch.ops.aten
Range = tuple[float, float]

#: The exponential of a score this far below another score rounds to 0 (``fixed_point.softmax.EXP_INPUT_RANGE``).
_NEGLIGIBLE_DISTANCE = 12.0
#: Factor by which the span is multiplied, for scores beyond the calibration range.
_HEADROOM = 1.25
#: ``MaskBounds`` passes a lowered bound to an observer as a tensor filled with the bound. The tensor has as many
#: elements as the observer has observed so far, but at most this number. The observer would clip a single element as
#: an outlier.
_MAX_OBSERVED_BOUNDS = 1 << 14


class _ScoreRangeRecorder:
    """Records the range of a tensor's finite values without masked values, extended to 0.

    Calibration calls it with the tensor.
    """

    def __init__(self, bound: float) -> None:
        self._bound, self.score_range = bound, (0.0, 0.0)

    def __call__(self, x: Tensor) -> None:
        """Extend the range by the values of a sample."""
        scores = x[(x > self._bound if self._bound < 0 else x < self._bound) & x.isfinite()]
        if scores.numel():
            low, high = map(float, torch.aminmax(scores))
            self.score_range = min(self.score_range[0], low), max(self.score_range[1], high)


class MaskBounds:
    """Lowers the bounds of masks before exponentials, where the bounds that ``bound_masks`` chose are too high.

    Attributes:
        value_hooks: (node, callback) pairs; calibration calls the callback with each value of the node.
    """

    def __init__(self, graph: Graph) -> None:
        calls = (node for target in EXPONENTIAL_OPS for node in graph.find_nodes(op="call_function", target=target))
        self._exponentials = [node for node in calls if _is_masked(node.args[0])]
        self._recorders: dict[Node, _ScoreRangeRecorder] = {}
        for exponential in self._exponentials:
            self._add_recorders(exponential.args[0])
        self._ranges: dict[Node, Range] = {}
        self.value_hooks: list[tuple[Node, Callable[[Tensor], None]]] = list(self._recorders.items())

    def apply(self, observers: Mapping[Any, Any]) -> None:
        """Lower the bounds that are too high, and extend the observed ranges of the tensors that hold a mask."""
        ratios: dict[Node, float] = {}
        for exponential in self._exponentials:
            low, high = self._score_range(exponential.args[0])
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

    def _add_recorders(self, x: Any) -> None:
        """Add recorders to the tensors whose ranges ``_score_range`` combines.

        These tensors are clamped masks, and tensors without a mask.
        """
        if not isinstance(x, Node) or x in self._recorders:
            return
        if not _is_masked(x) or _is_clamped(x):
            self._recorders[x] = _ScoreRangeRecorder(x.meta[MASKED_VALUE] if _is_clamped(x) else -math.inf)
            return
        for operand in _value_operands(x):
            self._add_recorders(operand)

    def _score_range(self, x: Any) -> Range:
        """Range of ``x`` without masked values, extended to 0."""
        if not isinstance(x, Node):
            return min(float(x), 0.0), max(float(x), 0.0)
        if x in self._recorders:
            return self._recorders[x].score_range
        if x not in self._ranges:
            self._ranges[x] = self._combine_ranges(x)
        return self._ranges[x]

    def _combine_ranges(self, x: Node) -> Range:
        ranges = [self._score_range(operand) for operand in _value_operands(x)]
        if x.target is aten.sub.Tensor:
            ranges[1] = -ranges[1][1], -ranges[1][0]
        if x.target in (aten.add.Tensor, aten.sub.Tensor):
            return sum(low for low, _ in ranges), sum(high for _, high in ranges)
        factor = _mask_scale(x)
        return min(low for low, _ in ranges) * factor, max(high for _, high in ranges) * factor

    def _extend_observed_range(self, reader: Node, node: Node, ratio: float, observers: Mapping[Any, Any]) -> None:
        """Extend the observed ranges of a tensor that holds a mask to its new minimum.

        The new minimum is the lowered bound. If scores are added to the mask, the lowest score is added to the bound.
        """
        value = node.meta.get(MASKED_VALUE, QUANTIZABLE_LOWEST) * ratio
        if MASKED_VALUE in node.meta and not _is_clamped(node):
            value += self._score_range(node)[0]
        for observer in {observers.get(node), observers.get((node, reader))}:
            if isinstance(observer, RangeObserver):
                observer(torch.full((max(1, min(observer.count, _MAX_OBSERVED_BOUNDS)),), value))


def _is_masked(x: Any) -> bool:
    return isinstance(x, Node) and MASKED_VALUE in x.meta


def _is_clamped(x: Node) -> bool:
    """Whether ``x`` is a clamped mask, to which no scores are added yet."""
    return x.target is aten.clamp.default and MASK_BOUND in x.meta


def _value_operands(x: Node) -> list[Any]:
    """Return the operands whose values ``x`` contains (``VALUE_OPERANDS``), except the bound of a mask.

    If ``x`` has no such operands, return all its operands.
    """
    bound = x.meta.get(MASK_BOUND)
    is_difference = x.target is aten.sub.Tensor
    positions = (0, 1) if is_difference else VALUE_OPERANDS.get(x.target, ())  # type: ignore[call-overload]
    return [x.args[i] for i in positions if i != bound] or x.all_input_nodes


def _mask_scale(x: Node) -> float:
    """Return the factor by which ``x`` multiplies a masked operand."""
    operand = next((operand for operand in x.all_input_nodes if _is_masked(operand)), None)
    if operand is None or MASK_BOUND in x.meta:
        return 1.0
    factor: float = x.meta[MASKED_VALUE] / operand.meta[MASKED_VALUE]
    return factor


def _masked_edges(reader: Node) -> list[tuple[Node, Node]]:
    """All (reader, tensor) pairs upstream of ``reader`` whose tensor holds a mask, or is an input of a mask.

    Their nodes have ``MASKED_VALUE`` or ``CALIBRATION_MINIMUM``.
    """
    edges: dict[tuple[Node, Node], None] = {}
    todo = [reader]
    while todo:
        node = todo.pop()
        for source in node.all_input_nodes:
            if (node, source) not in edges and (_is_masked(source) or CALIBRATION_MINIMUM in source.meta):
                edges[node, source] = None
                todo.append(source)
    return list(edges)
