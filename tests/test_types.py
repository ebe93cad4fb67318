"""The types of arguments are public, and the public functions have them in their signatures."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import arm_recipes
from arm_recipes import types

ALIASES = {name for name, value in vars(types).items() if get_args(value) and name[0] != "_"}


def test_every_alias_is_public() -> None:
    assert {"Budget", "DynamicShapes", "Labels", "Metric", "Model", "Sample", "Samples", "Sizes"} == ALIASES
    assert all(getattr(arm_recipes, name) is getattr(types, name) for name in ALIASES)


def test_public_functions_are_annotated_with_the_aliases() -> None:
    functions: list[Any] = [arm_recipes.export, arm_recipes.sweep, arm_recipes.tune, arm_recipes.compare]
    functions += [arm_recipes.prepare_qat, arm_recipes.save_firmware]
    functions += [
        arm_recipes.ExportResult.compare,
        arm_recipes.ExportResult.save,
        arm_recipes.ExportResult.save_firmware,
    ]
    annotations = {
        f"{function.__name__}.{name}": str(parameter.annotation)
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
    }
    assert [name for name, annotation in annotations.items() if annotation == "Any"] == []
    assert {word for text in annotations.values() for word in re.findall(r"\w+", text)} >= ALIASES - {"Sample"}
