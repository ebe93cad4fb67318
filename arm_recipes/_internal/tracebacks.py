"""Short tracebacks: an error that addresses the user shows the user's own lines, not the frames of libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from arm_backend_core.errors import ArmRecipesError, InternalError, is_strict
from arm_recipes._internal.error_location import is_argument_error, is_library_file

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Error = TypeVar("_Error", bound=BaseException)


def shorten_tracebacks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a public function: remove the frames inside of the function from errors that address the user.

    Errors that address the user are ``ArmRecipesError``, except ``InternalError``, and ``ValueError`` and ``TypeError``
    that this package raised. The ``__cause__`` of such an error keeps its traceback. With ``ARM_BACKEND_CORE_STRICT``,
    all frames stay.
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (ArmRecipesError, ValueError, TypeError) as error:
            addresses_user = isinstance(error, ArmRecipesError) or is_argument_error(error)
            if is_strict() or isinstance(error, InternalError) or not addresses_user:
                raise
            raise error.with_traceback(None)  # noqa: B904

    return wrapper


def keep_user_frames(error: _Error) -> _Error:
    """Remove library frames from the tracebacks of an exception and of its chain of causes or contexts.

    The innermost frame stays. With ``ARM_BACKEND_CORE_STRICT``, all frames stay.
    """
    if is_strict():
        return error
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = _user_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
    return error


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    kept = [frame for frame in frames[:-1] if not is_library_file(frame.tb_frame.f_code.co_filename)] + frames[-1:]
    for frame, following in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = following
    return kept[0] if kept else None
