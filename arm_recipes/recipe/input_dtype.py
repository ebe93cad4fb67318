"""The option ``input_dtype``: program inputs of type uint8 for a target that computes in int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def find_problem(value: Any) -> str | None:
    """Return the problem of a value, for the end of the message "got VALUE: PROBLEM"; None if the value is valid."""
    return None if value in (None, "uint8") else "none of these"


def check_input_dtype(recipe: str, user_options: Mapping[str, Any]) -> None:
    """Check that ``input_dtype="uint8"`` is allowed. It implies ``quantized_io=True``, and needs int8 activations.

    Raises:
        ValueError: the recipe quantizes inputs to int16, or the user passed ``quantized_io=False``.
    """
    if recipe.rsplit("_", 1)[1] == "A16W8":
        raise ValueError(
            f"{recipe}: input_dtype='uint8' needs int8 activations, and this recipe quantizes inputs to int16: "
            "use an INT8 or A8W4 recipe"
        )
    if user_options.get("quantized_io") is False:
        raise ValueError(
            f"{recipe}: input_dtype='uint8' makes inputs and outputs integers, and quantized_io=False keeps them in "
            "floating point: remove one of the two"
        )
