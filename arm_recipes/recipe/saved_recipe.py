"""Read saved recipes. The command line uses this module, so it does not import PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arm_recipes.recipe.compile_specs import normalize_recipe_name


def read_saved_recipe(source: str | Path | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Read the name and the options of a saved recipe.

    Args:
        source: path of the JSON file, or the dict.

    Raises:
        ValueError: ``source`` is not a saved recipe; the message names the problem.
    """
    description, content = "the recipe", source
    if not isinstance(source, Mapping):
        description = f"'{source}'"
        try:
            content = json.loads(Path(source).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{description} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{description} is not a JSON file: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("recipe"), str):
        raise ValueError(f'{description} is not a recipe: it must have the form {{"recipe": NAME, "options": {{...}}}}')
    options = content.get("options", {})
    if not isinstance(options, Mapping):
        raise ValueError(f"{description}: options must be a dict, not {type(options).__name__}")
    return normalize_recipe_name(content["recipe"]), dict(options)
