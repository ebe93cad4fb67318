"""Inputs and outputs of a program: name, dtype, shape and quantization parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """An input or output tensor of a program.

    Attributes:
        dtype: PyTorch's name, for example ``int8``.
        scale, zero_point: quantization parameters: ``real = (integer - zero_point) * scale``. None if the tensor is not
            quantized.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes; 0 if the value is no tensor, for example None or a string."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        return math.prod(self.shape) * dtype.itemsize if isinstance(dtype, torch.dtype) else 0

    def quantize(self, real: torch.Tensor) -> torch.Tensor:
        """Quantize real numbers for the program: round half to even, then saturate.

        Raises:
            ValueError: the tensor is not quantized.
        """
        import torch

        scale, zero_point = self._quantization_parameters()
        dtype = getattr(torch, self.dtype)
        limits = torch.iinfo(dtype)
        return (torch.round(real / scale) + zero_point).clamp(limits.min, limits.max).to(dtype)

    def dequantize(self, integers: torch.Tensor) -> torch.Tensor:
        """Dequantize integers of the program to float32.

        Raises:
            ValueError: the tensor is not quantized.
        """
        scale, zero_point = self._quantization_parameters()
        return (integers.float() - zero_point) * scale

    def to_program(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a model tensor to a program tensor: quantize floats if the program's tensor is quantized."""
        from arm_backend_core.scalar_kind import ScalarKind, kind_of

        quantizes = self.scale is not None and kind_of(tensor.dtype) is ScalarKind.FLOAT
        return self.quantize(tensor) if quantizes else tensor

    def to_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a program tensor to a model tensor: dequantize integers if the program's tensor is quantized."""
        from arm_backend_core.scalar_kind import ScalarKind, kind_of

        dequantizes = self.scale is not None and kind_of(tensor.dtype) is ScalarKind.INTEGER
        return self.dequantize(tensor) if dequantizes else tensor

    def _quantization_parameters(self) -> tuple[float, int]:
        if self.scale is None or self.zero_point is None:
            raise ValueError(f"'{self.name}' is not quantized ({self.dtype}); export with quantized_io=True")
        return self.scale, self.zero_point

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return text if self.scale is None else f"{text} scale={self.scale:.6g} zero_point={self.zero_point}"
