"""Shape variants: a method is exported for several sizes of its dynamic dimensions. The inputs select a variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


#: Padding value: one number for all inputs, or {name of an input: number}.
Pad = float | Mapping[str, float]


@dataclass(frozen=True)
class StoredShapeVariants:
    """A method with shape variants, as the program stores it (``samples.shape_variants.ShapeVariants.to_dict``).

    Attributes:
        name: name by which users call the method.
        sizes_by_method: sizes of each exported variant, for example ``{"forward__batch_8": {"batch": 8}}``.
        inputs: dynamic axes of each input tensor, with the names of their dimensions, for example ``[{0: "batch"}]``.
        outputs: dynamic axes of each output tensor, like ``inputs``.
    """

    name: str
    sizes_by_method: dict[str, dict[str, int]]
    inputs: list[dict[int, str]]
    outputs: list[dict[int, str]]

    @classmethod
    def from_dict(cls, name: str, stored: Mapping[str, Any]) -> StoredShapeVariants:
        """Read the JSON object of a method."""
        sides = (
            [{int(axis): dim for axis, dim in axes.items()} for axes in stored[side]] for side in ("inputs", "outputs")
        )
        return cls(name, dict(stored["methods"]), *sides)

    def read_sizes(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """Read the sizes of the named dimensions from the input shapes.

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
        """Select the variant with exactly these sizes, else the smallest (by product of sizes) that is large enough.

        Raises:
            ValueError: no variant is large enough, or no variant has exactly these sizes and ``pad`` is None.
        """
        exact_match = next((name for name, exported in self.sizes_by_method.items() if exported == sizes), None)
        if exact_match is not None:
            return exact_match
        input_sizes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        large_enough = [
            name for name, exported in self.sizes_by_method.items() if all(sizes[dim] <= exported[dim] for dim in sizes)
        ]
        exported_sizes = {dim: sorted({exported[dim] for exported in self.sizes_by_method.values()}) for dim in sizes}
        variants = "; ".join(f"{dim} of {', '.join(map(str, known))}" for dim, known in exported_sizes.items())
        if not large_enough:
            raise ValueError(
                f"'{self.name}' was exported with {variants}; the inputs have {input_sizes}, which is larger"
            )
        smallest = min(large_enough, key=lambda name: math.prod(self.sizes_by_method[name].values()))
        if pad is None:
            padded = ", ".join(f"{name} = {self.sizes_by_method[smallest][name]}" for name in sizes)
            raise ValueError(
                f"'{self.name}' was exported with {variants}; the inputs have {input_sizes}: give a padding value, "
                f"run(..., pad=0) for example, to pad them to {padded}"
            )
        return smallest
