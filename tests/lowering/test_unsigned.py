"""uint8 inputs: quantized at the boundary, or cast by the model; a RESCALE in the delegate makes them int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from executorch.export import export as executorch_export
from torch import nn

from arm_recipes import ArmRecipeType, export, load
from tests.small_models import Small, images
from tests.sqnr import sqnr

INT8 = ArmRecipeType.TOSA_INT8


def get(recipe: ArmRecipeType, **options: Any) -> ExportRecipe:
    return ExportRecipe.get_recipe(recipe, **options)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("recipe", ["TOSA_INT8", "VGF_INT8", "CORTEX_M_INT8", "ETHOSU_U55_INT8", "ETHOSU_U85_A8W4"])
def test_uint8_inputs_are_int8_plus_128(recipe: str, channels_last: bool) -> None:
    kind = ArmRecipeType[recipe]
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    samples = [tuple(x.to(memory_format=memory_format) for x in sample) for sample in images()]
    signed = export(Small().eval(), get(kind, quantized_io=True), samples)
    result = export(Small().eval(), get(kind, input_dtype="uint8"), samples, verify=recipe.startswith("ETHOS"))
    (x,), (source,), (other,) = samples[0], result.inputs, signed.inputs
    assert (source.dtype, source.shape, source.scale) == ("uint8", other.shape, other.scale)
    assert source.zero_point == (other.zero_point or 0) + 128
    assert not result.report.methods[0].cpu_operators
    assert result.outputs == signed.outputs
    integers = source.quantize(x * 2)  # some of it saturates
    assert integers.dtype is torch.uint8
    assert torch.equal(integers.int() - 128, other.quantize(x * 2).int())
    assert torch.equal(result.run(integers), signed.run(other.quantize(x * 2)))


def test_uint8_inputs_in_the_programs_constant_methods() -> None:
    session = executorch_export(Small().eval(), images(), get(INT8, input_dtype="uint8"))
    program = load(session.get_pte_buffer())
    names = ("quant_min", "quant_max", "dtype")
    byte = 0  # ExecuTorch's ScalarType
    assert [program.execute(method=f"forward_input0_{name}")[0] for name in names] == [0, 255, byte]


class _Pixels(nn.Module):
    """A network for images of integers: the conversion is a part of the model."""

    def __init__(self, cast: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.cast = Small(), cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.body(self.cast(x) / 128 - 1))


def _pixels(dtype: torch.dtype) -> list[tuple[torch.Tensor]]:
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(0)
    shape = images()[0][0].shape
    return [(torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype),) for _ in range(6)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("quantized_io", [False, True])
@pytest.mark.parametrize(
    "recipe", ["TOSA_INT8", "TOSA_A16W8", "VGF_INT8", "CORTEX_M_INT8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8"]
)
@torch.no_grad()
def test_integers_that_the_model_casts_are_inputs_of_the_target(
    recipe: str, quantized_io: bool, dtype: torch.dtype
) -> None:
    model, samples = _Pixels().eval(), _pixels(dtype)
    chosen = get(ArmRecipeType[recipe], quantized_io=quantized_io)
    result = export(model, chosen, samples, verify=recipe.startswith("ETHOS"))
    (method,), (source,) = result.report.methods, result.inputs
    assert f"torch.{source.dtype}" == str(dtype)
    assert source.scale is None  # the integers are those of the model
    assert not method.cpu_operators
    casts = [name for name in method.boundary if "dequantize" not in name]
    is_cast_on_cpu = recipe == "CORTEX_M_INT8" and dtype is torch.uint8
    assert casts == ["dim_order_ops._to_dim_order_copy.default"] * is_cast_on_cpu
    outputs = [result.outputs[0].to_model(result.run(*sample)) for sample in samples]
    assert sqnr([model(*sample) for sample in samples], outputs) > 30


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float32),
        lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.float32),
        lambda x: torch.ops.prims.convert_element_type.default(x, torch.float32),
        lambda x: x.type_as(torch.ones(1)),
        lambda x: x * 1.0,
        lambda x: x.permute(0, 1, 3, 2).float(),
    ],
)
def test_casts_of_pixels_in_other_words(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = export(_Pixels(cast).eval(), get(ArmRecipeType.ETHOSU_U85_INT8), _pixels(torch.uint8), verify=True)
    (method,) = result.report.methods
    assert [name for name in method.boundary if "dequantize" not in name] == []
    assert not method.cpu_operators


class _Rows(nn.Module):
    """Looks up rows by uint8 indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Parameter(torch.randn(256, 8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(self.table.index_select(0, x.int())))


@pytest.mark.parametrize("recipe", ["TOSA_INT8", "ETHOSU_U85_INT8"])
@torch.no_grad()
def test_uint8_indices_are_not_shifted(recipe: str) -> None:
    samples = [(torch.arange(start, 256, 2, dtype=torch.uint8),) for start in (0, 1)]
    result = export(_Rows().eval(), get(ArmRecipeType[recipe]), samples)
    for sample in samples:
        assert sqnr([_Rows()(*sample)], [result.run(*sample)]) > 30
