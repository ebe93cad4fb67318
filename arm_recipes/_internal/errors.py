"""Errors and warnings that an export raises or issues."""

from __future__ import annotations

from arm_backend_core.errors import ArmRecipesError


class ArmRecipesWarning(UserWarning):
    """A warning about an export that continues."""


class ExportError(ArmRecipesError):
    """The export failed. The message names the stage and, if known, the operator or module and the source line.

    If another exception was the reason, ``__cause__`` is that exception.
    """


class NotRunnableError(ExportError):
    """``require_runnable=True``, and an operator on the CPU has no kernel."""


class BudgetError(ExportError):
    """The program exceeds ``sram_budget``, ``flash_budget``, or the size of a memory in the option ``memory``."""


class AccuracyError(ExportError):
    """The signal-to-quantization-noise ratio (SQNR) of an output is below ``min_sqnr``, or cannot be computed."""
