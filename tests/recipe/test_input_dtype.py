"""The option ``input_dtype``: recipes and options with which it is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from arm_recipes.recipe import options


@pytest.mark.parametrize("recipe", ["TOSA_INT8", "ETHOSU_U55_A8W4", "CORTEX_M_INT8"])
def test_input_dtype_uint8_implies_quantized_io(recipe: str) -> None:
    assert options.resolve_options(recipe, {"input_dtype": "uint8"})["quantized_io"] is True
    assert options.resolve_options(recipe, {"input_dtype": "uint8", "quantized_io": True})["quantized_io"] is True
    assert options.resolve_options(recipe, {"input_dtype": None})["quantized_io"] is False


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("TOSA_INT8", {"input_dtype": "int16"}, "input_dtype must be \"uint8\", or None; got 'int16'"),
        ("TOSA_A16W8", {"input_dtype": "uint8"}, "TOSA_A16W8: input_dtype='uint8' needs int8 .* use an INT8 or A8W4"),
        ("TOSA_INT8", {"input_dtype": "uint8", "quantized_io": False}, "quantized_io=False .* remove one of the two"),
        ("TOSA_FP", {"input_dtype": "uint8"}, "unknown argument 'input_dtype'"),
    ],
)
def test_input_dtype_that_does_not_fit_the_recipe_is_refused(
    recipe: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        options.resolve_options(recipe, arguments)
