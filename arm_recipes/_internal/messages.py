"""Warnings and errors of this package, and silence for those of others while an export runs."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TypeVar

from arm_backend_core.errors import ArmRecipesError

#: Packages whose warnings and log lines tell a user nothing that can be acted on.
_THIRD_PARTY = ("torch", "torchao", "executorch", "functorch", "ethosu", "numpy", "copyreg", "onnx")
_T = TypeVar("_T")
#: The log of this package: what runs, with its time, at level INFO. Warnings go through ``warn``.
LOGGER = logging.getLogger("arm_recipes")
_recorded: ContextVar[list[str] | None] = ContextVar("arm_recipes_said", default=None)
_MODULES = rf"({'|'.join(_THIRD_PARTY)})(\.|$)"


class ArmRecipesWarning(UserWarning):
    """Something that the user should know about an export that goes on."""


class ExportError(ArmRecipesError):
    """The model could not be exported: the message names the stage, the operator or module, and the line.

    ``__cause__`` is the original exception.
    """


class NotRunnableError(ExportError):
    """``require_runnable`` was asked for, and what is left on the CPU has no kernel."""


class BudgetError(ExportError):
    """The program needs more memory than ``sram_budget`` or ``flash_budget`` grants."""


class AccuracyError(ExportError):
    """Rounding leaves less of a result than ``min_sqnr`` asks for, or what it leaves is not known."""


def warn(message: str) -> None:
    """Issue an ``ArmRecipesWarning`` that points at the user's line.

    ExecuTorch's own ``export`` calls us from deep inside its stages, so the first frame that belongs neither
    to this package nor to a library is looked up instead of counting stack levels.
    """
    said = _recorded.get()
    if said is not None:
        said.append(message)
    frame = sys._getframe(1)
    inside = (*_THIRD_PARTY, "arm_recipes", "arm_backend_core", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in inside:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        ArmRecipesWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


@contextmanager
def record_warnings() -> Iterator[list[str]]:
    """Collect what ``warn`` says inside the block, beside saying it."""
    said: list[str] = []
    token = _recorded.set(said)
    try:
        yield said
    finally:
        _recorded.reset(token)


def progress_bar(items: Iterable[_T], doing: str, unit: str, *, shown: bool, count: int | None = None) -> Iterable[_T]:
    """``items`` with a progress bar; without one if it is not to be shown, or standard error is no terminal."""
    if not (shown and sys.stderr.isatty()):
        return items
    from tqdm import tqdm

    bar: Iterable[_T] = tqdm(items, desc=doing, total=count, leave=False, unit=unit)
    return bar


class _NotThirdParty(logging.Filter):
    """Drop what third parties log, errors too: they raise what matters, and torch logs its whole traceback.

    ExecuTorch logs to the root logger, so the file decides as well as the name.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".")[0] in _THIRD_PARTY:
            return False
        return not any(f"/site-packages/{name}/" in record.pathname for name in _THIRD_PARTY)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings and log lines of third parties inside the block; filters and handlers are restored.

    Imports PyTorch and ExecuTorch, in silence.

    Warnings that the user's own modules or this package issue still appear.
    """
    with warnings.catch_warnings(), ExitStack() as undo:
        warnings.filterwarnings("ignore", module=_MODULES)
        root = logging.getLogger()
        # Without a handler, logging.info() in ExecuTorch would install one for the rest of the process.
        if not root.handlers:
            null = logging.NullHandler()
            root.addHandler(null)
            undo.callback(root.removeHandler, null)
        # torch gives many of its loggers handlers of their own when it is imported, which itself is silent.
        import torch  # noqa: F401

        names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in _THIRD_PARTY]
        loggers = [root, *map(logging.getLogger, names)]
        handlers = {handler for logger in loggers for handler in logger.handlers}
        if logging.lastResort is not None:
            handlers.add(logging.lastResort)
        keep = _NotThirdParty()
        for handler in handlers:
            handler.addFilter(keep)
            undo.callback(handler.removeFilter, keep)
        # Imported now, as it says much while it is: torchao names libraries that other machines have.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from executorch.exir._warnings import ExperimentalWarning

        # ExecuTorch warns that recipes are experimental, and points at the caller: this package.
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        yield
