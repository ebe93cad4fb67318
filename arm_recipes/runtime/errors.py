"""Errors of loading and running a program on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from arm_backend_core.errors import ArmRecipesError


@dataclass(frozen=True)
class FailedCommand:
    """The command of an Ethos-U delegate that caused an error.

    Attributes:
        checksum: checksum of the delegate's payload, from its compile spec.
        offset: byte offset from the first command of the stream.
        indexed: whether the command is an indexed DMA.
    """

    checksum: bytes
    offset: int
    indexed: bool


class RunError(ArmRecipesError):
    """A program cannot be loaded or run on this machine. The message says why and what to do.

    Attributes:
        command: the NPU command that failed, if known.
    """

    command: FailedCommand | None = None


class RuntimeUnavailable(RunError):
    """This machine lacks a compiler, driver or package that the program needs."""


class PayloadError(RunError):
    """The payload of a delegate is damaged, or its backend does not accept it."""
