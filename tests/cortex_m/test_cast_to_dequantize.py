"""8-bit integers that a program reads as real numbers: kernels read them as int8, floating-point operators do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from tests.sqnr import sqnr

_COPY = "dim_order_ops._to_dim_order_copy.default"


class Cast(nn.Module):
    """A function of integers that are cast to floating point, and a convolution of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.conv = function, nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.conv(self.function(x.float())))


def _samples(dtype: torch.dtype, memory_format: torch.memory_format) -> list[tuple[Tensor]]:
    limits, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    values = (torch.randint(limits.min, limits.max + 1, (1, 3, 8, 8), generator=generator) for _ in range(4))
    return [(x.to(dtype).contiguous(memory_format=memory_format),) for x in values]


def _export(function: Callable[[Tensor], Tensor], samples: list[tuple[Tensor]]) -> ExportResult:
    return export(Cast(function).eval(), ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples, verify=True)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("function", [lambda x: x, lambda x: x / 255 - 0.5, lambda x: torch.relu(x - 3)])
@torch.no_grad()
def test_kernels_read_the_integers(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    samples = _samples(dtype, memory_format)
    result = _export(function, samples)
    (method,) = result.report.methods
    assert not method.cpu_operators
    assert (_COPY in method.boundary) == (dtype is torch.uint8)
    assert "cortex_m.quantize_per_tensor.default" not in method.boundary
    assert any(note.startswith("verified") for note in result.report.notes)
    expected = [Cast(function)(*sample) for sample in samples]
    assert sqnr(expected, [result.run(*sample) for sample in samples]) > 35


@torch.no_grad()
def test_floating_point_operators_read_the_integers_of_the_model() -> None:
    class Erf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(torch.sort(x.float(), 1).values)

    x = torch.arange(200, 216, dtype=torch.uint8).flip(0)[None]
    result = export(Erf().eval(), ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), [(x,)] * 2)
    assert (result.run(x) - Erf()(x)).abs().max() <= 1


class DequantizedInput(nn.Module):
    """A linear layer of an int16 input that the model dequantizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        real = torch.ops.quantized_decomposed.dequantize_per_tensor.default(x, 0.01, 0, -32768, 32767, torch.int16)
        return torch.as_tensor(self.linear(real))


@torch.no_grad()
def test_int16_integers_are_dequantized_before_kernels_read_them() -> None:
    samples = [(torch.randint(-300, 300, (1, 16), dtype=torch.int16),) for _ in range(4)]
    result = export(DequantizedInput().eval(), ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples)
    expected = [DequantizedInput()(*sample) for sample in samples]
    assert sqnr(expected, [result.run(*sample) for sample in samples]) > 35
