"""A method that was exported in several sizes: which of them takes given tensors, and what is filled up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


#: What tensors are filled up with: a number for all, or by input.
Pad = float | Mapping[str, float]


@dataclass(frozen=True)
class SizedMethod:
    """What is stored of it, see ``arm_recipes.samples.sizes.SizedMethod``."""

    name: str
    methods: dict[str, dict[str, int]]
    inputs: list[dict[int, str]]
    outputs: list[dict[int, str]]

    @classmethod
    def of(cls, name: str, told: Mapping[str, Any]) -> SizedMethod:
        """As JSON has it."""
        sides = (
            [{int(axis): dim for axis, dim in axes.items()} for axes in told[side]] for side in ("inputs", "outputs")
        )
        return cls(name, dict(told["methods"]), *sides)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """Sizes that tensors have.

        Raises:
            ValueError: two of them disagree.
        """
        found: dict[str, int] = {}
        for tensor, axes in zip(tensors, self.inputs, strict=True):
            for axis, name in axes.items():
                size = int(tensor.shape[axis]) if axis < tensor.dim() else -1
                if found.setdefault(name, size) != size:
                    raise ValueError(f"'{self.name}': inputs have {found[name]} and {size} for the dimension '{name}'")
        return found

    def chosen(self, sizes: Mapping[str, int], pad: Pad | None) -> str:
        """The method with the smallest sizes that are large enough.

        Raises:
            ValueError: there is none, or none of exactly these sizes and nothing to fill up with.
        """
        exact = next((name for name, has in self.methods.items() if has == sizes), None)
        if exact is not None:
            return exact
        given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        fitting = [name for name, has in self.methods.items() if all(sizes[dim] <= has[dim] for dim in sizes)]
        listed = {dim: sorted({has[dim] for has in self.methods.values()}) for dim in sizes}
        exported = "; ".join(f"{dim} of {', '.join(map(str, known))}" for dim, known in listed.items())
        if not fitting:
            raise ValueError(f"'{self.name}' was exported with {exported}; the inputs have {given}, which is more")
        smallest = min(fitting, key=lambda name: math.prod(self.methods[name].values()))
        if pad is None:
            filled = ", ".join(f"{name} = {self.methods[smallest][name]}" for name in sizes)
            raise ValueError(
                f"'{self.name}' was exported with {exported}; the inputs have {given}: give run(..., pad=0), say, to "
                f"fill them up to {filled}"
            )
        return smallest
