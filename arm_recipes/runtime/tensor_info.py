"""Inputs and outputs of a program: name, dtype, shape and quantization parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of the program.

    Attributes:
        dtype: as PyTorch names it, for example ``int8``.
        scale, zero_point: an integer stands for the real number ``(integer - zero_point) * scale``.
            None where the tensor is not quantized.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None = None
    zero_point: int | None = None

    def quantize(self, real: torch.Tensor) -> torch.Tensor:
        """The integers that the program takes for real numbers, rounded half to even and saturated.

        Raises:
            ValueError: the tensor is not quantized.
        """
        import torch

        scale, zero_point = self._parameters()
        dtype = getattr(torch, self.dtype)
        limits = torch.iinfo(dtype)
        return (torch.round(real / scale) + zero_point).clamp(limits.min, limits.max).to(dtype)

    def dequantize(self, integers: torch.Tensor) -> torch.Tensor:
        """The real numbers that integers of the program stand for.

        Raises:
            ValueError: the tensor is not quantized.
        """
        scale, zero_point = self._parameters()
        return (integers.float() - zero_point) * scale

    def to_program(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the program takes for a tensor of the model: integers for real numbers where it is quantized."""
        from arm_backend_core.kinds import ScalarKind, kind_of

        quantizes = self.scale is not None and kind_of(tensor.dtype) is ScalarKind.FLOAT
        return self.quantize(tensor) if quantizes else tensor

    def to_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the program is in the model: real numbers for integers where it is quantized."""
        from arm_backend_core.kinds import ScalarKind, kind_of

        dequantizes = self.scale is not None and kind_of(tensor.dtype) is ScalarKind.INTEGER
        return self.dequantize(tensor) if dequantizes else tensor

    def _parameters(self) -> tuple[float, int]:
        if self.scale is None or self.zero_point is None:
            raise ValueError(f"'{self.name}' is not quantized ({self.dtype}); export with quantized_io=True")
        return self.scale, self.zero_point

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return text if self.scale is None else f"{text} scale={self.scale:.6g} zero_point={self.zero_point}"
