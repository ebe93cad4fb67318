"""What can go wrong when a program is loaded and run on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from arm_backend_core.errors import ArmRecipesError


@dataclass(frozen=True)
class Command:
    """A command of an Ethos-U delegate.

    Attributes:
        checksum: of the delegate's payload, as its compile spec has it.
        offset: byte of its command stream, from the first command on.
        indexed: whether it is a DMA by indices.
    """

    checksum: bytes
    offset: int
    indexed: bool


class RunError(ArmRecipesError):
    """A program cannot be loaded or run here; the message says why and what to do.

    Attributes:
        command: that failed, where one did.
    """

    command: Command | None = None


class RuntimeUnavailable(RunError):
    """This machine lacks something that running the program takes: a compiler, a driver, a package."""


class PayloadError(RunError):
    """The payload of a delegate is damaged, or not what its backend takes."""
