"""Pad inputs to an exported size, and crop outputs to the sizes of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from arm_recipes.runtime.shape_variants import Pad
    from arm_recipes.runtime.signature import Signature


def pad_inputs(tensors: Sequence[Tensor], expected: Signature, pad: Pad | None) -> list[Tensor]:
    """Pad tensors at the end of each axis to the shapes of the signature.

    Raises:
        ValueError: ``pad`` has no number for a tensor that must be padded.
    """
    import torch

    padded = []
    for tensor, value in zip(tensors, expected.inputs, strict=True):
        shape = getattr(value, "shape", ())
        if tuple(tensor.shape) != tuple(shape) and tensor.dim() == len(shape):
            number = pad.get(value.name) if isinstance(pad, Mapping) else pad
            if number is None:
                raise ValueError(f"pad has no number for the input '{value.name}', which must be padded")
            missing = [n for have, want in zip(tensor.shape, shape, strict=True) for n in (want - have, 0)]
            tensor = torch.nn.functional.pad(tensor, missing[::-1], value=number)
        padded.append(tensor)
    return padded


def crop_outputs(outputs: Sequence[Any], axes: Sequence[Mapping[int, str]], sizes: Mapping[str, int]) -> list[Any]:
    """Crop outputs to ``sizes`` along the dimensions that they share with the inputs."""
    results = []
    for output, of in zip(outputs, axes, strict=True):
        for axis, name in of.items():
            output = output.narrow(axis, 0, sizes[name])
        results.append(output)
    return results
