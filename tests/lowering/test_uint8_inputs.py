"""uint8 inputs: quantized at the boundary, or cast by the model; a RESCALE in the delegate makes them int8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from executorch.export import export as executorch_export
from torch import nn

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, export, load
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.small_models import Small, images
from tests.sqnr import sqnr
from tests.tosa_graphs import build_graph, make_target

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
    integers = source.quantize(x * 2)  # some elements saturate
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
    """A network for integer images: the cast to float is a part of the model."""

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
def test_other_operators_that_cast_pixels_to_float(cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
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


def _convolve(b: Builder, x: Value) -> Value:
    """A convolution of x [N, H, W, C] whose padding has the zero point of uint8 0."""
    weight = b.const(np.random.default_rng(1).integers(-127, 128, (4, 3, 3, x.shape[-1])), DType.INT8)
    bias = b.const(np.arange(4), DType.INT32)
    sums = b.conv2d(x, weight, bias, stride=(2, 2), pad=(1, 1, 1, 1), dilation=(1, 1), zps=(-128, 0))
    return b.rescale(sums, DType.INT8, 1 / 300, 0, 5)


def _add(b: Builder, x: Value) -> Value:
    shifted = b.rescale(x, DType.INT32, 8.0, -128)
    return b.rescale(b.add(shifted, b.rescale(b.reverse(x, 1), DType.INT32, 4.0)), DType.INT8, 1 / 16)


#: Readers of a uint8 input, with which Vela could fuse the RESCALE.
_READERS: dict[str, Callable[[Builder, Value], Value]] = {
    "none": lambda b, x: x,
    "convolution": _convolve,
    "transposed": lambda b, x: _convolve(b, b.transpose(x, (0, 3, 1, 2))),
    "slice": lambda b, x: _convolve(b, b.narrow(x, 1, 1, 5)),
    "pad": lambda b, x: b.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), -128),
    "pool": lambda b, x: b.avg_pool2d(x, (2, 2), (2, 2), (0, 0, 0, 0)),
    "addition": _add,
    "product": lambda b, x: b.rescale(b.mul(x, b.const(np.full((1, 1, 1, 1), 77), DType.INT8)), DType.INT16, 0.37),
    "concatenation": lambda b, x: b.concat([x, b.clamp(x, -10, 10)], 3),
    "requantization": lambda b, x: b.rescale(x, DType.INT8, 0.73, -128, 4),
    "int16": lambda b, x: b.rescale(x, DType.INT16, 128.0, -128),
    "table": lambda b, x: b.table(x, np.random.default_rng(2).integers(-128, 128, 256)),
    "sum": lambda b, x: b.rescale(b.reduce("REDUCE_SUM", b.rescale(x, DType.INT32, 1.0), 3), DType.INT8, 0.1),
    "magnitude": lambda b, x: b.rescale(b.unary("ABS", b.rescale(x, DType.INT32, 1.0)), DType.INT8, 0.9),
}


@pytest.mark.parametrize("accelerator", ["ethos-u55-128", "ethos-u65-256", "ethos-u85-256"])
@pytest.mark.parametrize("reader", _READERS)
def test_npus_read_uint8(reader: str, accelerator: str, emulator: Emulator) -> None:
    def body(b: Builder, x: Value) -> Value:
        return _READERS[reader](b, b.rescale(x, DType.INT8, 1.0, 128, input_unsigned=True))

    target = make_target(accelerator)
    graph = build_graph(body, ((1, 8, 8, 4), DType.INT8), target=target)
    x = np.arange(256, dtype=np.uint8).reshape(1, 8, 8, 4).view(np.int8)
    expected = reference_model.run(serialize(graph), [x])
    pipeline.run(graph, target)
    payload = compile_ethosu(
        serialize(graph), EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None
    )
    results = emulator.run(read_payload(payload.data), [x], [(array.dtype.name, array.shape) for array in expected])
    for actual, array in zip(results, expected, strict=True):
        np.testing.assert_array_equal(actual, array)
