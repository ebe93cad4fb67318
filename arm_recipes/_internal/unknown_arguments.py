"""Unknown keyword arguments: a ``TypeError`` that names the right argument, or the function that takes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from arm_backend_core.similar_names import format_suggestion, suggest_name

_P = ParamSpec("_P")
_R = TypeVar("_R")


def reject_unknown_arguments(
    renamed: Mapping[str, str], elsewhere: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that a call with an unknown keyword raises a ``TypeError`` with a remedy.

    Args:
        renamed: removed keywords with their new names, for example ``{"example_inputs": "samples"}``.
        elsewhere: keywords of other functions, by the call that takes them, for example
            ``{"ExportRecipe.get_recipe(recipe, ...)": names}``.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name in renamed or not (takes_any or name in parameters):
                    raise TypeError(f"{function.__name__}() has no argument '{name}'{find_remedy(name)}")
            return function(*args, **kwargs)

        def find_remedy(name: str) -> str:
            if name in renamed:
                return format_suggestion([renamed[name]])
            place = next((place for place, names in elsewhere.items() if name in names), None)
            return suggest_name(name, parameters) if place is None else f"; it belongs to {place}"

        return wrapper

    return decorate
