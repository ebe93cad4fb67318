"""Errors of loading and running a program on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from arm_backend_core.errors import ArmRecipesError


@dataclass(frozen=True)
class Command:
    """A command of an Ethos-U delegate.

    Attributes:
        checksum: checksum of the delegate's payload, from its compile spec.
        offset: byte offset from the first command of the stream.
        indexed: whether it is an indexed DMA.
    """

    checksum: bytes
    offset: int
    indexed: bool


class RunError(ArmRecipesError):
    """A program cannot be loaded or run here; the message says why and what to do.

    Attributes:
        command: the NPU command that failed, if known.
    """

    command: Command | None = None


class RuntimeUnavailable(RunError):
    """This machine lacks something that the program needs: a compiler, a driver, a package."""


class PayloadError(RunError):
    """The payload of a delegate is damaged, or its backend does not accept it."""
