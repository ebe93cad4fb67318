"""Candidate: a program that the search compiled, with its cost and accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from arm_recipes.explore.tune.cost import ProgramCost


@dataclass(frozen=True)
class Candidate:
    """A program that was compiled.

    Attributes:
        precisions: precision by module, as the option ``precisions`` of a recipe; it applies to all submodules.
        cost: estimated cost.
        sqnr: SQNR in dB against the floating-point model on the test samples, of the quantized program in PyTorch.
        accuracy: metric on the test samples; the SQNR without a metric.
        search_accuracy: metric on the search samples.
    """

    precisions: dict[str, str]
    cost: ProgramCost
    sqnr: float
    accuracy: float
    search_accuracy: float
