"""Warnings and progress bars of this package, and suppression of third-party warnings and logs."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TypeVar

from arm_recipes._internal.errors import ArmRecipesWarning

#: Packages whose warnings and log lines are not actionable for users.
_THIRD_PARTY = ("torch", "torchao", "executorch", "functorch", "ethosu", "numpy", "copyreg", "onnx")
_T = TypeVar("_T")
#: Logger of this package: stages and their times at level INFO. Warnings are issued by ``warn``.
LOGGER = logging.getLogger("arm_recipes")
_recorded: ContextVar[list[str] | None] = ContextVar("arm_recipes_recorded", default=None)
_issued: ContextVar[set[str] | None] = ContextVar("arm_recipes_issued", default=None)
_THIRD_PARTY_MODULES = rf"({'|'.join(_THIRD_PARTY)})(\.|$)"


#: How to install Plotly, which draws the charts in notebooks and HTML pages.
INSTALL_PLOTLY = "pip install 'arm-recipes[charts]'"


def warn(message: str) -> None:
    """Issue an ``ArmRecipesWarning`` that points at the line of user code.

    Searches for the first frame outside this package and libraries. A fixed stack level would be wrong, because
    ExecuTorch's own ``export`` also calls this package, from its stages.
    """
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(message)
    issued = _issued.get()
    if issued is not None:
        if message in issued:
            return
        issued.add(message)
    frame = sys._getframe(1)
    skipped_packages = (*_THIRD_PARTY, "arm_recipes", "arm_backend_core", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in skipped_packages:
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
    """Record the messages of ``warn`` inside the block. The warnings are still issued."""
    recorded: list[str] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


@contextmanager
def deduplicate_warnings() -> Iterator[None]:
    """Issue each message of ``warn`` only once inside the block, for functions that run several exports."""
    token = _issued.set(set())
    try:
        yield
    finally:
        _issued.reset(token)


def progress_bar(
    items: Iterable[_T], description: str, unit: str, *, shown: bool, count: int | None = None
) -> Iterable[_T]:
    """Iterate over ``items`` with a progress bar, if ``shown`` and standard error is a terminal."""
    if not (shown and sys.stderr.isatty()):
        return items
    from tqdm import tqdm

    bar: Iterable[_T] = tqdm(items, desc=description, total=count, leave=False, unit=unit)
    return bar


def announce(message: str) -> None:
    """Print why the user has to wait, if standard error is a terminal."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


class _ThirdPartyFilter(logging.Filter):
    """Logging filter that drops all third-party records, also records of level ERROR.

    Records of level ERROR are redundant, because these packages also raise an exception. PyTorch's records contain the
    whole traceback of the exception.

    ExecuTorch logs to the root logger, so the filter checks the file path as well as the logger name.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".")[0] in _THIRD_PARTY:
            return False
        return not any(f"/site-packages/{name}/" in record.pathname for name in _THIRD_PARTY)


class _Suppression:
    """Suppression that threads share. The first block of ``suppress_warnings`` installs it, the last one removes it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks = 0
        self._installed = ExitStack()

    def enter(self) -> None:
        """Begin a block."""
        with self._lock:
            if not self._blocks:
                self._installed.enter_context(_install_filters())
            self._blocks += 1

    def leave(self) -> None:
        """End a block."""
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._installed.close()


_suppression = _Suppression()


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress third-party warnings and logs inside the block. Filters and handlers are restored afterwards.

    At the start of the block, PyTorch and ExecuTorch are imported without their output. Warnings of user modules and
    of this package still appear. Blocks of several threads may overlap.
    """
    _suppression.enter()
    try:
        yield
    finally:
        _suppression.leave()


@contextmanager
def _install_filters() -> Iterator[None]:
    with warnings.catch_warnings(), ExitStack() as cleanup:
        warnings.filterwarnings("ignore", module=_THIRD_PARTY_MODULES)
        root = logging.getLogger()
        # Without a handler, logging.info() in ExecuTorch would install one for the rest of the process.
        if not root.handlers:
            null_handler = logging.NullHandler()
            root.addHandler(null_handler)
            cleanup.callback(root.removeHandler, null_handler)
        # Importing torch is silent, but installs handlers on many of its loggers.
        import torch  # noqa: F401

        names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in _THIRD_PARTY]
        loggers = [root, *map(logging.getLogger, names)]
        handlers = {handler for logger in loggers for handler in logger.handlers}
        if logging.lastResort is not None:
            handlers.add(logging.lastResort)
        third_party_filter = _ThirdPartyFilter()
        for handler in handlers:
            handler.addFilter(third_party_filter)
            cleanup.callback(handler.removeFilter, third_party_filter)
        # Import ExecuTorch here, silenced: during the import, torchao warns about missing optional libraries.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from executorch.exir._warnings import ExperimentalWarning

        # ExecuTorch warns that recipes are experimental. This warning would point at this package.
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        yield


def import_quietly(module: str) -> ModuleType:
    """Import a module of ExecuTorch without the output of the packages that it imports.

    Use it instead of ``import`` in code that may be the first to import ExecuTorch in a process.
    """
    with suppress_warnings():
        return importlib.import_module(module)
