"""The printed comparison, of layers with given errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from arm_backend_core.quantization.diagnostics.error_metrics import ErrorMetrics
from arm_recipes.comparison.diagnosis import LayerAdvice
from arm_recipes.comparison.result import Comparison, IsolatedError, LayerComparison, OutputComparison

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


@pytest.mark.parametrize(("sqnr", "is_noted"), [(47.0, True), (29.0, False)])
def test_a_note_says_that_a_high_sqnr_is_enough_for_most_tasks(sqnr: float, is_noted: bool) -> None:
    advice = LayerAdvice("rounding", 1.0, "use int16", 60.0, "A16W8")
    layer = _layer("first", 40.0, replace(_EXACT, sqnr=40.0, advice=advice))
    output = OutputComparison("output0", ErrorMetrics(sqnr, 1.0, 0.1))
    text = str(Comparison("B", "A", "forward", 1, 1, (output,), (layer,), None, 1.0))
    assert ("an SQNR of 47.0 dB rarely changes the result of a task" in text) == is_noted
