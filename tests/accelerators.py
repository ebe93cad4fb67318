"""The Ethos-U accelerators that tests compile for."""

from __future__ import annotations

ACCELERATORS = ("ethos-u55-128", "ethos-u65-256", "ethos-u85-256")
"""One NPU of each family: the defaults of the recipes."""

VERIFY_ACCELERATORS = ("ethos-u55-32", "ethos-u55-256", "ethos-u65-512", "ethos-u85-128", "ethos-u85-2048")
"""Additional NPUs of ``--verify``: block sizes and weight order depend on the MACs; U65-512 has two cores."""
