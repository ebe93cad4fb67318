"""Shape variants: a method that was exported in several sizes, and the choice of a size for given tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


#: Padding value: one number for all inputs, or a number for each input by name.
Pad = float | Mapping[str, float]


@dataclass(frozen=True)
class SizedMethod:
    """A method in several sizes, as the program stores it; see ``arm_recipes.samples.sizes.Sized``.

    Attributes:
        name: of the method that users call.
        methods: size of each named dimension, by the name of the exported method.
        inputs, outputs: for each tensor, the names of its dimensions by axis.
    """

    name: str
    methods: dict[str, dict[str, int]]
    inputs: list[dict[int, str]]
    outputs: list[dict[int, str]]

    @classmethod
    def from_dict(cls, name: str, stored: Mapping[str, Any]) -> SizedMethod:
        """Read the JSON object of a method."""
        sides = (
            [{int(axis): dim for axis, dim in axes.items()} for axes in stored[side]] for side in ("inputs", "outputs")
        )
        return cls(name, dict(stored["methods"]), *sides)

    def sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """Sizes of the named dimensions of ``tensors``.

        Raises:
            ValueError: two inputs have different sizes for the same dimension.
        """
        sizes: dict[str, int] = {}
        for tensor, axes in zip(tensors, self.inputs, strict=True):
            for axis, name in axes.items():
                size = int(tensor.shape[axis]) if axis < tensor.dim() else -1
                if sizes.setdefault(name, size) != size:
                    raise ValueError(f"'{self.name}': inputs have {sizes[name]} and {size} for the dimension '{name}'")
        return sizes

    def select_method(self, sizes: Mapping[str, int], pad: Pad | None) -> str:
        """Select the exported method with the smallest sizes that fit.

        Raises:
            ValueError: the inputs are larger than every exported size, or no size is equal and ``pad`` is None.
        """
        exact = next((name for name, has in self.methods.items() if has == sizes), None)
        if exact is not None:
            return exact
        actual = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        fitting = [name for name, has in self.methods.items() if all(sizes[dim] <= has[dim] for dim in sizes)]
        listed = {dim: sorted({has[dim] for has in self.methods.values()}) for dim in sizes}
        exported = "; ".join(f"{dim} of {', '.join(map(str, known))}" for dim, known in listed.items())
        if not fitting:
            raise ValueError(f"'{self.name}' was exported with {exported}; the inputs have {actual}, which is larger")
        smallest = min(fitting, key=lambda name: math.prod(self.methods[name].values()))
        if pad is None:
            padded = ", ".join(f"{name} = {self.methods[smallest][name]}" for name in sizes)
            raise ValueError(
                f"'{self.name}' was exported with {exported}; the inputs have {actual}: give a padding value, "
                f"run(..., pad=0) for example, to pad them to {padded}"
            )
        return smallest
