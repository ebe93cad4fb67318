"""The Ethos-U accelerators that tests compile for."""

from __future__ import annotations

ACCELERATORS = ("ethos-u55-128", "ethos-u65-256", "ethos-u85-256")
"""One of each family: those of the recipes."""

VERIFY_ACCELERATORS = ("ethos-u55-32", "ethos-u55-256", "ethos-u65-512", "ethos-u85-128", "ethos-u85-2048")
"""What ``--verify`` adds: other numbers of MACs have other blocks and weight orders; at 512 MACs, U65 has two cores."""
