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
        callbacks_by_node: {node: observers and other functions to call with the node's result}.
        conditions, taken: as in ``GraphInterpreter``.
        fill_values: {node: number that replaces NaN and infinities in its result}. The interpreter does not call the
            callbacks of these nodes.

    Attributes:
        problems: {node whose result contains non-finite values: "NaN" or "an infinity"}.
        finite_ranges: {node in ``problems``: (minimum, maximum) of the finite values of its result}.
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

        The method first clamps the value if the node has a ``CALIBRATION_MINIMUM``. If the node is in ``fill_values``,
        the method fills non-finite elements, and calls no callback. If an observer rejects non-finite elements, the
        method records the problem, replaces infinities by the finite maximum and minimum, and NaN by 0, and calls the
        callbacks again.
        """
        callbacks = self._callbacks_by_node.get(node, ())
        if CALIBRATION_MINIMUM in node.meta:
            value = value.clamp(min=node.meta[CALIBRATION_MINIMUM])
        if node in self._fill_values:
            return torch.where(value.isfinite(), value, self._fill_values[node])
        try:
            for callback in callbacks:  # a range observer comes first: it rejects non-finite values
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
