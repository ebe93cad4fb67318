"""What can go wrong when a program is loaded and run on this machine."""

from __future__ import annotations


class RunError(RuntimeError):
    """A program cannot be loaded or run here; the message says why and what to do."""


class RuntimeUnavailable(RunError):
    """This machine lacks something that running the program takes: a compiler, a driver, a package."""


class PayloadError(RunError):
    """The payload of a delegate is damaged, or not what its backend takes."""
