"""The printed comparison, of layers with given errors."""

from __future__ import annotations

import math
from typing import Any

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorMetrics
from arm_recipes.comparison.diagnosis import LayerAdvice
from arm_recipes.comparison.result import Comparison, IsolatedError, LayerComparison

_EXACT = IsolatedError(math.inf, 0.0, 0.0, (-1.0, 1.0), (-1.0, 1.0), None, 1.0, None, LayerAdvice("", 0.0, "", 0.0))


def _layer(name: str, sqnr: float, isolated: IsolatedError | None) -> LayerComparison:
    fields: dict[str, Any] = {"operator": "aten.relu", "source": "", "dtype": "int8", "scale": 0.1, "zero_point": 0}
    gap = ErrorMetrics(sqnr, 1.0, 0.1)
    return LayerComparison(name, module=name, moves=False, value_source="program", gap=gap, isolated=isolated, **fields)


def test_layers_are_ranked_by_sqnr_in_the_program_if_all_isolated_layers_are_exact() -> None:
    layers = (_layer("first", 40.0, _EXACT), _layer("second", 30.0, None))
    found = Comparison("B", "A", "forward", 1, 1, (), layers, None, 1.0)
    assert [layer.name for layer in found.worst] == ["second", "first"]
    text = str(found)
    assert "Layers with the lowest SQNR\n" in text
    assert "30.0 dB  second  aten.relu" in text
