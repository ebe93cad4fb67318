"""Versions of the tools that affect the compiled program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed

#: Packages, besides this one, that affect the program.
TOOLS = ("torch", "executorch", "torchao", "tosa-tools", "ethos-u-vela", "ai-ml-sdk-model-converter")


def version(name: str) -> str:
    """Return the version of an installed package, or "(not installed)"."""
    try:
        return _installed(name)
    except PackageNotFoundError:
        return "(not installed)"
