"""Renamed keyword arguments: a call with the old name raises a ``TypeError`` that suggests the new name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from arm_backend_core.similar_names import format_suggestion

_P = ParamSpec("_P")
_R = TypeVar("_R")


def reject_renamed_arguments(**renamed: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that a call with a removed keyword raises a ``TypeError`` that suggests the new name.

    Args:
        renamed: removed keywords with their new names, for example ``example_inputs="samples"``.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in renamed.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__}() has no argument '{name}'{format_suggestion([renamed[name]])}")
            return function(*args, **kwargs)

        return wrapper

    return decorate
