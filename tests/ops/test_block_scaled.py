"""Block-scaled layers: linear layers and convolutions in OCP MX formats, compared with fake quantization in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from arm_backend_core.delegate import delegate
from arm_backend_core.errors import ModelError
from arm_backend_core.ops.block_scaled import TORCHAO_FORMATS, fake_quantize_blocks, quantize_blocks
from arm_backend_core.targets.compile_spec import EthosUCompileSpec, TosaCompileSpec, VgfCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes import ArmRecipeType, ExportRecipe, export, load
from arm_recipes.recipe import options
from arm_recipes.stages.block_scaled import MXConfig, MXConv2d, MXLinear, can_block_scale
from tests.ops.runner import FunctionModule
from tests.runtime.ethosu_emulator import payloads
from tests.tosa_graphs import validate_by_tosa_opt

SPEC = "TOSA-1.1+FP+mxfp"
#: A model and the shape of its input.
_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 5), (3, 64)),
    "vector": (lambda: nn.Linear(32, 5, bias=False), (32,)),
    "rows": (lambda: nn.Linear(96, 7), (2, 3, 4, 96)),
    "partial_block": (lambda: nn.Linear(40, 7), (3, 40)),
    "conv2d": (lambda: nn.Conv2d(64, 6, 3, padding=1), (2, 64, 5, 6)),
    "pointwise": (lambda: nn.Conv2d(32, 6, 1, bias=False), (1, 32, 4, 4)),
    "strided": (lambda: nn.Conv2d(35, 6, (2, 3), stride=(1, 2), padding=(0, 1)), (1, 35, 7, 10)),
    "dilated": (lambda: nn.Conv2d(32, 6, 3, dilation=2, stride=2), (1, 32, 10, 9)),
    "unbatched": (lambda: nn.Conv2d(32, 6, 3), (32, 5, 5)),
}


def _draw_uneven_channels(shape: tuple[int, ...]) -> Tensor:
    """Draw channels of very different magnitudes, including zeros."""
    x = torch.linspace(-9, 11, int(torch.tensor(shape).prod())).sin().reshape(shape)
    return x * 10.0 ** (torch.arange(shape[-1]) % 7 - 3) * (torch.arange(shape[-1]) % 5 > 0)


def _layers(name: str, format: str) -> tuple[nn.Module, Tensor]:
    make, shape = _LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval().requires_grad_(False)
    quantize_(model, MXConfig(format), can_block_scale)
    return model, _draw_uneven_channels(shape)


@pytest.mark.parametrize("format", TORCHAO_FORMATS)
@pytest.mark.parametrize("name", _LAYERS)
def test_block_scaled_layers_equal_fake_quantization_in_pytorch(name: str, format: str) -> None:
    model, x = _layers(name, format)
    lowered = delegate(torch.export.export(model, (x,)), TosaCompileSpec(SPEC))
    assert not [node for node in lowered.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    torch.testing.assert_close(lowered.module()(x), model(x), rtol=1e-5, atol=1e-6 * float(model(x).abs().max()))


@pytest.mark.parametrize("format", TORCHAO_FORMATS)
def test_each_block_is_rounded_with_its_own_scale(format: str) -> None:
    """Rounding changes values, so that the test above can fail. A factor on one block changes its scale only."""
    x = _draw_uneven_channels((3, 64))
    elements, scales = quantize_blocks(x, format)
    assert scales.shape == (3, 2)
    assert torch.equal(scales.log2(), scales.log2().round())
    assert not torch.equal(fake_quantize_blocks(x, format), x)
    assert torch.equal(fake_quantize_blocks(fake_quantize_blocks(x, format), format), fake_quantize_blocks(x, format))
    x[:, :32] *= 1024
    assert torch.equal(quantize_blocks(x, format)[0], elements)


def test_block_scaled_graphs_pass_tosa_opt() -> None:
    model, x = _layers("conv2d", "fp6e2m3")
    (flatbuffer,) = payloads(delegate(torch.export.export(model, (x,)), TosaCompileSpec(SPEC)))
    assert validate_by_tosa_opt(flatbuffer, Target.from_tosa_spec(SPEC)) is None


def test_layers_that_read_one_tensor_share_its_cast_to_block_scaled() -> None:
    first, second = nn.Linear(32, 4), nn.Linear(32, 6)
    model = nn.ModuleList([first, second]).eval().requires_grad_(False)
    quantize_(model, MXConfig(), can_block_scale)
    x = _draw_uneven_channels((3, 32))
    lowered = delegate(
        torch.export.export(FunctionModule(lambda x: (first(x), second(x))), (x,)), TosaCompileSpec(SPEC)
    )
    (flatbuffer,) = payloads(lowered)
    assert flatbuffer.count(b"cast_to_block_scaled") <= 2  # elements and scales
    for result, layer in zip(lowered.module()(x), (first, second), strict=True):
        torch.testing.assert_close(result, layer(x))


@pytest.mark.parametrize("format", TORCHAO_FORMATS)
def test_option_mx_block_scales_the_layers_of_a_model(format: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 40, 3, groups=40), nn.Flatten(), nn.Linear(640, 64)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, mx=format), (x,))
    plain = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), (x,))
    assert type(model[0]) is nn.Conv2d
    assert result.report.notes == ("'2' of 'forward' is not block-scaled: groups=40",)
    assert len(result.buffer) < 0.6 * len(plain.buffer)
    (output,) = load(result.buffer).execute(x)
    noise = (output - model(x)).square().sum() / model(x).square().sum()
    bits = {"fp8e4m3": 3, "fp8e5m2": 2, "fp6e2m3": 3, "fp6e3m2": 2, "fp4e2m1": 1}[format]
    assert 0 < noise < 4.0**-bits


def test_block_scaled_layer_keeps_bfloat16_inputs_and_outputs() -> None:
    layer = nn.Linear(64, 8).bfloat16().requires_grad_(False).eval()
    x = _draw_uneven_channels((3, 64)).bfloat16()
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, mx="fp8e4m3", extensions=["bf16"])
    (output,) = load(export(layer, recipe, (x,)).buffer).execute(x)
    assert output.dtype is torch.bfloat16
    quantize_(layer, MXConfig("fp8e4m3"), can_block_scale)
    assert torch.equal(output, layer(x))


def test_option_mx_without_a_block_scaled_layer_is_warned_about() -> None:
    """weight_norm computes the weight in each call, in a module that torchao does not replace."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(32, 4)).eval()
    with pytest.warns(UserWarning, match="the option mx has no effect: no layer of 'forward' is block-scaled"):
        result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, mx="fp8e4m3"), (torch.ones(1, 32),))
    assert result.report.notes[0] == "'ParametrizedLinear' of 'forward' is not block-scaled: a ParametrizedLinear"


def test_can_block_scale_accepts_linear_and_plain_conv2d() -> None:
    assert can_block_scale(nn.Linear(3, 4))
    assert can_block_scale(nn.Conv2d(3, 4, 1))
    others = nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(3, 4, 3, padding="same"), nn.Conv1d(3, 4, 1), nn.ReLU()
    assert not any(map(can_block_scale, (*others, nn.Conv2d(3, 4, 3, padding_mode="reflect"))))
    layer = nn.Linear(32, 4)
    quantize_(layer, MXConfig("fp4e2m1"), can_block_scale)
    assert type(layer) is MXLinear
    assert set(layer.state_dict()) == {"weight", "bias"}
    quantize_(layer, MXConfig("fp8e4m3"))
    assert layer.format == "fp4e2m1"
    assert issubclass(MXConv2d, nn.Conv2d)


def test_refusals_of_block_scaled_programs_and_options() -> None:
    assert tuple(TORCHAO_FORMATS) == options.MX_FORMATS
    model, x = _layers("linear", "fp8e4m3")
    program = torch.export.export(model, (x,))
    for spec in (TosaCompileSpec("TOSA-1.0+FP"), EthosUCompileSpec("ethos-u85-256")):
        with pytest.raises(ModelError, match=r"mx_linear.*cannot be exported for .*TOSA_FP with extensions="):
            delegate(program, spec)
    with pytest.raises(ValueError, match=r"the VGF converter takes TOSA 1\.0"):
        VgfCompileSpec(SPEC)
    with pytest.raises(ValueError, match=r"does not support block-scaled types \('mxfp'\)"):
        ExportRecipe.get_recipe(ArmRecipeType.VGF_FP, extensions=["mxfp"])
    with pytest.raises(ValueError, match="mx must be one of 'fp8e4m3'"):
        ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, mx="fp8")
    with pytest.raises(ValueError, match=r"format='fp8': there is no such format\. Allowed: fp8e4m3"):
        MXConfig("fp8")
    with pytest.raises(ValueError, match="'forward' is already captured"):
        export(program, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP, mx="fp8e4m3"), (x,))
    with pytest.raises(ValueError, match=r"must start with 'TOSA-1\.0'; 1\.1 is supported with 'mxfp' only"):
        Target.from_tosa_spec("TOSA-1.1+FP")
