"""Tracebacks of errors that address the user have no frames of libraries."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable

import pytest

from arm_backend_core.errors import InternalError, ModelError
from arm_recipes._internal import tracebacks


def _raise(error: Exception) -> None:
    raise error


@tracebacks.shorten_tracebacks
def _call(function: Callable[[], None]) -> None:
    function()


def _frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "is_strict", lambda: False)


def test_user_errors_have_no_inner_frames() -> None:
    with pytest.raises(ModelError) as caught:
        _call(lambda: _raise(ModelError("wrong")))
    assert "_raise" not in _frames(caught.value)


@pytest.mark.parametrize("error", [InternalError("a fault"), ValueError("not of this package"), KeyError("other")])
def test_other_errors_keep_their_frames(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        _call(lambda: _raise(error))
    assert _frames(caught.value)[-1] == "_raise"


def test_strict_mode_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "is_strict", lambda: True)
    with pytest.raises(ModelError) as caught:
        _call(lambda: _raise(ModelError("wrong")))
    assert _frames(caught.value)[-1] == "_raise"


def test_library_frames_are_removed_from_the_causes() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("[1, ")
    error = tracebacks.keep_user_frames(caught.value)
    assert _frames(error) == ["test_library_frames_are_removed_from_the_causes", "raw_decode"]
