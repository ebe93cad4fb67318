"""Interpreter that runs a calibration sample and passes the values of tensors to their observers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.mask_constants import CALIBRATION_MINIMUM
from arm_backend_core.quantization.graph_interpreter import Branch, BranchConditions, GraphInterpreter
from arm_backend_core.quantization.non_finite import NonFiniteError, NonFiniteKind


class ObserverInterpreter(GraphInterpreter):
    """Runs a sample and passes the results of nodes to their observers and other callbacks.

    Args:
        model: the module of the program with observers.
        callbacks_by_node: observers and other functions that are called with the result of a node.
        conditions, taken: as in ``GraphInterpreter``.
        fill_values: by node, the number that replaces NaN and infinities in its result. The callbacks of these nodes
            are not called.

    Attributes:
        problems: "NaN" or "an infinity", by node whose result contains it.
        finite_ranges: (minimum, maximum) of the finite values, by node of a tensor with non-finite values.
    """

    def __init__(
        self,
        model: GraphModule,
        callbacks_by_node: Mapping[Node, Iterable[Callable[[Tensor], Any]]],
        conditions: BranchConditions,
        taken: set[Branch],
        fill_values: Mapping[Node, float] | None = None,
    ) -> None:
        super().__init__(model.graph, conditions, taken)
        self._model, self._callbacks_by_node, self._fill_values = model, callbacks_by_node, fill_values or {}
        self.problems: dict[Node, NonFiniteKind] = {}
        self.finite_ranges: dict[Node, tuple[float, float]] = {}

    def get_attr(self, node: Node) -> Any:
        """Return the value of an attribute of the program's module."""
        return attrgetter(str(node.target))(self._model)

    def on_result(self, node: Node, value: Any) -> Any:
        """Call the callbacks with the value, and return it.

        If an observer rejects non-finite elements, the method records the problem. It replaces infinities by the finite
        maximum and minimum, and NaN by 0. It also applies ``fill_values``, and clamps the value if the node has a
        ``CALIBRATION_MINIMUM``.
        """
        callbacks = self._callbacks_by_node.get(node, ())
        if CALIBRATION_MINIMUM in node.meta:
            value = value.clamp(min=node.meta[CALIBRATION_MINIMUM])
        if node in self._fill_values:
            return torch.where(value.isfinite(), value, self._fill_values[node])
        try:
            for callback in callbacks:  # range observers come first, so the first call raises
                callback(value)
        except NonFiniteError as problem:
            self.problems[node] = problem.kind
            finite = value[value.isfinite()]
            low, high = map(float, torch.aminmax(finite)) if finite.numel() else (0.0, 0.0)
            self.finite_ranges[node] = low, high
            value = value.nan_to_num(0.0, high, low)
            for callback in callbacks:
                callback(value)
        return value
