"""Versions of what decides what a program is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed

#: Beside this package.
TOOLS = ("torch", "executorch", "torchao", "tosa-tools", "ethos-u-vela", "ai-ml-sdk-model-converter")


def version(name: str) -> str:
    """Of an installed package, or that there is none."""
    try:
        return _installed(name)
    except PackageNotFoundError:
        return "(not installed)"
