"""Reads recipes that were written down. The command line reads them too, so nothing here imports PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arm_recipes.recipe.targets import recipe_name


def read_recipe(source: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a recipe that was written down.

    Raises:
        ValueError: it is no such thing; the message says what is wrong.
    """
    what, found = "the recipe", source
    if not isinstance(source, Mapping):
        what = f"'{source}'"
        try:
            found = json.loads(Path(source).expanduser().read_text())
        except OSError as error:
            raise ValueError(f"{what} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{what} is no JSON file: {error}") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("recipe"), str):
        raise ValueError(f'{what} is no recipe: it must have the form {{"recipe": NAME, "options": {{...}}}}')
    options = found.get("options", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"{what}: options must be a dict, not {type(options).__name__}")
    return recipe_name(found["recipe"]), dict(options)
