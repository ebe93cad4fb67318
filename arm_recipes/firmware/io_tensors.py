"""Input and output tensors of the firmware's self-test: check or generate inputs, convert tensors to bytes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.pte import PteTensor
from arm_recipes.runtime.tensor_info import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

#: Seed of the random inputs for a method without samples.
_RANDOM_INPUT_SEED = 0


@dataclass(frozen=True)
class IOTensor:
    """An input or output of a method, with its description and its memory layout."""

    info: TensorInfo
    layout: PteTensor

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return self.info.nbytes


def create_random_inputs(inputs: Sequence[IOTensor]) -> list[Tensor]:
    """Create inputs for a method without samples: random values for floats and quantized integers.

    Other inputs are zeros, because a random integer may be an index that is out of range.
    """
    import torch

    from arm_backend_core.scalar_kind import ScalarKind, kind_of

    generator = torch.Generator().manual_seed(_RANDOM_INPUT_SEED)
    values = []
    for io_tensor in inputs:
        shape, dtype = io_tensor.info.shape, getattr(torch, io_tensor.info.dtype)
        if kind_of(dtype) is ScalarKind.FLOAT:
            values.append(torch.randn(shape, generator=generator).to(dtype))
        elif io_tensor.info.scale is not None:
            limits = torch.iinfo(dtype)
            values.append(torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype))
        else:
            values.append(torch.zeros(shape, dtype=dtype))
    return values


def check_input_tensors(values: Sequence[Any], inputs: Sequence[IOTensor], label: str) -> list[Tensor]:
    """Check number, shapes and dtypes of a sample's tensors, and return the tensors.

    Args:
        values: the tensors, or values that are convertible to tensors.
        inputs: inputs of the method.
        label: name of the sample in messages.

    Raises:
        ValueError: the tensors do not match the inputs of the program.
    """
    import torch

    if len(values) != len(inputs):
        raise ValueError(f"{label} has {len(values)} tensors, the program takes {len(inputs)}")
    tensors = []
    for value, io_tensor in zip(values, inputs, strict=True):
        tensor = torch.as_tensor(value)
        info = io_tensor.info
        if tuple(tensor.shape) != info.shape or str(tensor.dtype) != f"torch.{info.dtype}":
            actual = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            raise ValueError(f"{label}: '{info.name}' is {actual}, the program takes {info.dtype}{list(info.shape)}")
        tensors.append(tensor)
    return tensors


def tensor_to_bytes(tensor: Tensor, layout: PteTensor) -> bytes:
    """Convert a tensor to bytes, in the dimension order of its memory layout."""
    import torch

    ordered = tensor.detach().permute(layout.dim_order).contiguous()
    return bytes(ordered.reshape(-1).view(torch.uint8).numpy().tobytes())


def tensor_from_bytes(data: bytes, io_tensor: IOTensor) -> Tensor:
    """Convert bytes to a tensor; the inverse of ``tensor_to_bytes``."""
    import torch

    order = io_tensor.layout.dim_order
    dtype = getattr(torch, io_tensor.info.dtype)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    inverse = [order.index(axis) for axis in range(len(order))]
    return flat.reshape([io_tensor.info.shape[axis] for axis in order]).permute(inverse).contiguous()


def samples_by_method(samples: Any, main: str) -> Mapping[str, Any]:
    """Samples by method name. If ``samples`` is not a dict, they belong to the method ``main``."""
    if samples is None:
        return {}
    return samples if isinstance(samples, Mapping) else {main: samples}
