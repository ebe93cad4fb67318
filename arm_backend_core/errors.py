"""Errors that the compiler core raises, and the refusal that the partitioner treats as data."""

from __future__ import annotations

import os


class ArmBackendError(RuntimeError):
    """Base class of every error that reaches the user from the compiler core."""


class ModelError(ArmBackendError, ValueError):
    """The model, or a value that it computes, cannot be quantized; the message names it and says what to do."""


class Unsupported(Exception):
    """A target cannot run an operator.

    A lowering rule raises it; the partitioner catches it and keeps ``reason`` for the report.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fault(Unsupported):
    """A rule of ours failed where it should have lowered the operator or refused it; ``compiler_fault`` makes it."""


class InternalError(ArmBackendError):
    """A ``Fault``, where faults are errors."""


def is_strict() -> bool:
    """Whether ``ARM_BACKEND_CORE_STRICT`` is set: faults are errors, and every pass is checked."""
    return bool(os.environ.get("ARM_BACKEND_CORE_STRICT"))


def compiler_fault(what: str, error: Exception | None = None) -> Fault:
    """The refusal of an operator on which a rule of ours failed: the export goes on with it on the CPU.

    Args:
        what: how it failed.
        error: the exception that the rule raised, if it did.

    Raises:
        InternalError: ``ARM_BACKEND_CORE_STRICT`` is set, as it is in the tests.
    """
    reason = f"a fault of this compiler, which should be reported: {what}"
    if is_strict():
        raise InternalError(reason) from error
    return Fault(reason)


class CompileError(ArmBackendError):
    """Vela or the model converter refused a delegate, or died on it.

    Args:
        reason: what the tool said, or how it died.
        delegate: name of the delegate in the program.
        operator: the ATen operator that most likely caused it, if known.
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
        """The same failure with its operator and source line."""
        artifact = self.artifact
        return CompileError(self.reason, delegate=self.delegate, operator=operator, source=source, artifact=artifact)


class FullDelegationError(ArmBackendError):
    """``require_full_delegation`` was asked for and operators are left on the CPU."""
