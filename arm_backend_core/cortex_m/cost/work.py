"""Work of a kernel call: its products and its instructions."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Work of one kernel call.

    Attributes:
        macs: multiply-accumulates of the operator as the model defines it, counted as for the NPU. The kernel may
            compute more products.
        instructions: estimated number of executed instructions.
    """

    macs: int
    instructions: float
