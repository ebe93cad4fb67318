"""Errors of the compiler core, and ``Unsupported``, with which a lowering rule refuses an operator."""

from __future__ import annotations

import os


class ArmRecipesError(RuntimeError):
    """Base class of the errors of ``arm_backend_core`` and ``arm_recipes``.

    Wrong arguments raise ``ValueError`` or ``TypeError`` instead.
    """


class ArmBackendError(ArmRecipesError):
    """Base class of the compiler core's own errors."""


class ModelError(ArmBackendError, ValueError):
    """The model cannot be exported or quantized. The message names the operator or value and says what to do."""


class Unsupported(Exception):
    """A target cannot run an operator.

    Lowering rules and decompositions raise it. The compiler catches it and keeps ``reason`` for the report.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fault(Unsupported):
    """A refusal because of a bug of this compiler: a rule or pass failed. See ``compiler_fault``."""


class InternalError(ArmBackendError):
    """A bug of this compiler that stops the compilation, in strict mode (``is_strict``). See ``compiler_fault``."""


def is_strict() -> bool:
    """Whether ``ARM_BACKEND_CORE_STRICT`` is set: faults stop the compilation, and each pass's result is checked."""
    return bool(os.environ.get("ARM_BACKEND_CORE_STRICT"))


def compiler_fault(description: str, error: Exception | None = None) -> Fault:
    """Create a refusal that reports a bug of this compiler.

    If a lowering rule failed on an operator, the operator stays on the CPU and the export continues. If a pass failed,
    the caller of the pass decides whether the export continues.

    Args:
        description: where and how the rule or pass failed.
        error: the exception that the rule or pass raised, if any.

    Raises:
        InternalError: ``ARM_BACKEND_CORE_STRICT`` is set, as it is in the tests.
    """
    reason = f"a fault of this compiler, which should be reported: {description}"
    if is_strict():
        raise InternalError(reason) from error
    return Fault(reason)


class CompileError(ArmBackendError):
    """A delegate cannot be compiled: Vela, the model converter or a pass failed, or Vela wrote a wrong program.

    Args:
        reason: the message of the tool or pass, or how the tool ended.
        delegate: name of the delegate in the program.
        operator: the ATen operator that most likely caused the failure, if known.
        source: the line of the user's model that the operator comes from, if known.
        artifact: path of the TOSA flatbuffer that was being compiled, if it was kept.
    """

    def __init__(
        self,
        reason: str,
        *,
        delegate: str,
        operator: str | None = None,
        source: str | None = None,
        artifact: str | None = None,
    ) -> None:
        lines = [f"Compiling delegate '{delegate}' failed: {reason}"]
        if operator:
            lines.append(f"  likely operator: {operator}" + (f" ({source})" if source else ""))
        if artifact:
            lines.append(f"  TOSA flatbuffer kept at: {artifact}")
        super().__init__("\n".join(lines))
        self.reason = reason
        self.delegate = delegate
        self.operator = operator
        self.source = source
        self.artifact = artifact

    def with_location(self, operator: str, source: str) -> CompileError:
        """Return a copy of the error that names the operator and its source line."""
        artifact = self.artifact
        return CompileError(self.reason, delegate=self.delegate, operator=operator, source=source, artifact=artifact)


class FullDelegationError(ArmBackendError):
    """``require_full_delegation`` is set and operators stay on the CPU."""
