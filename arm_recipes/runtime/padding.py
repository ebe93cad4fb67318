"""Padding for shape variants: pad inputs to an exported shape, and crop outputs to the sizes of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from arm_recipes.runtime.shape_variants import Pad
    from arm_recipes.runtime.signature import Signature


def pad_inputs(tensors: Sequence[Tensor], expected: Signature, pad: Pad | None) -> list[Tensor]:
    """Pad tensors at the end of each axis to the shapes of the signature.

    Args:
        tensors: inputs of the call.
        expected: signature of the shape variant.
        pad: fill value for all inputs, or {name of an input: fill value}.

    Raises:
        ValueError: ``pad`` has no number for a tensor that must be padded.
    """
    import torch

    padded = []
    for tensor, value in zip(tensors, expected.inputs, strict=True):
        shape = getattr(value, "shape", ())
        if tuple(tensor.shape) != tuple(shape) and tensor.dim() == len(shape):
            fill_value = pad.get(value.name) if isinstance(pad, Mapping) else pad
            if fill_value is None:
                raise ValueError(f"pad has no number for the input '{value.name}', which must be padded")
            amounts = [n for actual, target in zip(tensor.shape, shape, strict=True) for n in (target - actual, 0)]
            tensor = torch.nn.functional.pad(tensor, amounts[::-1], value=fill_value)
        padded.append(tensor)
    return padded


def crop_outputs(outputs: Sequence[Any], axes: Sequence[Mapping[int, str]], sizes: Mapping[str, int]) -> list[Any]:
    """Crop outputs along axes whose size depends on an input size.

    Args:
        outputs: outputs of the shape variant.
        axes: for each output, {axis: name of the dimension}.
        sizes: {name of a dimension: size in this call}.
    """
    results = []
    for output, cropped_axes in zip(outputs, axes, strict=True):
        for axis, name in cropped_axes.items():
            output = output.narrow(axis, 0, sizes[name])
        results.append(output)
    return results
