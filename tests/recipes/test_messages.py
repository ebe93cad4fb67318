"""Silence for third parties, and warnings that point at the user's line."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from arm_recipes import ArmRecipesWarning
from arm_recipes._internal.messages import quiet, warn


def _warn_from(module: str) -> None:
    warnings.warn_explicit("noise", UserWarning, "file.py", 1, module=module, registry={})


def test_third_party_warnings_are_silenced_and_filters_restored() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with quiet():
            for module in (
                "torch",
                "torch.export._trace",
                "torchao.quantization",
                "executorch.exir",
                "copyreg",
            ):
                _warn_from(module)
            _warn_from("users_model")
            _warn_from("torchnot")
        assert warnings.filters == before
        _warn_from("torch")
    assert len(caught) == 3


def test_third_party_log_lines_are_silenced() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("executorch.something")
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        with quiet():
            logger.warning("noise")
            logger.error("noise")
            root.handle(logging.LogRecord("root", 40, "/x/site-packages/executorch/a.py", 1, "noise", (), None))
            logging.getLogger("users_model").warning("kept")
        logger.warning("after")
    finally:
        root.removeHandler(handler)
    assert stream.getvalue() == "kept\nafter\n"


def test_no_handler_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with quiet():
        logging.info("installs a handler if there is none")
    assert root.handlers == []


def test_a_warning_points_at_the_line_outside_of_the_libraries() -> None:
    with pytest.warns(ArmRecipesWarning, match="look here") as caught, _library():
        warn("look here")
    assert caught[0].filename == __file__


@contextmanager
def _library() -> Iterator[None]:
    yield
