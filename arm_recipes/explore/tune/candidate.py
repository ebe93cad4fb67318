"""A program that the search made, with its cost and its accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arm_recipes.explore.tune.cost import ProgramCost

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Candidate:
    """A program that was made.

    Attributes:
        precisions: by module, as the option ``precisions`` of a recipe; a module's holds for all in it.
        price: what it costs.
        sqnr: against the model in floating point on the samples that judge, dB, of the quantized program in PyTorch.
        accuracy: by the metric, on these samples; the SQNR where there is none.
        search_accuracy: on the samples by which the search goes.
    """

    precisions: dict[str, str]
    price: ProgramCost
    sqnr: float
    accuracy: float
    search_accuracy: float
