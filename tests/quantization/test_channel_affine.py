"""Channel-wise affine functions: the rewrite that folds them, reasons for refusals, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arm_backend_core.aten.decompose import decompose
from arm_backend_core.quantization import (
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.algorithms.channel_affine import RewriteOutcome, fold_channel_affines
from arm_backend_core.quantization.config import QuantizationConfig
from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.tosa.passes.rewrite_tracing import TRACE_VARIABLE
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.sqnr import sqnr

aten = torch.ops.aten
U55, U85, TOSA = (HARDWARE[family] for family in ("ethos-u55", "ethos-u85", "tosa"))
CONFIG = get_symmetric_quantization_config()


class Layers(nn.Module):
    """Constants of 4 channels, as buffers (``mean``, ``std``) and parameters (``gamma``, ``beta``), and layers."""

    def __init__(self, function: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.mean, self.std = (nn.Buffer(torch.rand(4, 1, 1) + low) for low in (0.0, 1.0))
        self.gamma, self.beta = (nn.Parameter(torch.rand(4, 1, 1) + 0.5) for _ in range(2))
        self.conv, self.valid = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, bias=False)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2, padding="valid")
        self.up, self.grouped_up = nn.ConvTranspose2d(4, 4, 2), nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.linear, self.dense = nn.Linear(4, 4), nn.Linear(4 * 6 * 6, 5)
        self.signal = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, 4, 6, 6]."""
        return self.function(self, x)


def _normalize(m: Layers, x: Tensor) -> Tensor:
    return (x / 255 - m.mean) / m.std


def _through_linear(m: Layers, x: Tensor) -> Tensor:
    """A layer scale as in ConvNeXt: the channels are the last dimension of the layer before it."""
    return m.gamma * m.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + x


REWRITES: dict[str, tuple[str, Callable[[Layers, Tensor], Tensor]]] = {
    "normalization": ("depthwise", lambda m, x: m.conv(_normalize(m, x))),
    "normalization, one signal": ("depthwise", lambda m, x: m.signal((x.flatten(2) - m.mean[..., 0]) / m.std[..., 0])),
    "one vector": ("depthwise", lambda m, x: m.conv(x * m.gamma)),
    "subtracted from the constant": ("depthwise", lambda m, x: m.conv(m.beta - x)),
    "alpha, rsub, neg": ("depthwise", lambda m, x: m.conv(-torch.rsub(torch.add(m.beta, x, alpha=3), 2, alpha=0.5))),
    "across pooling": ("depthwise", lambda m, x: F.max_pool2d(m.conv(x).relu(), 2) * m.gamma + m.beta),
    "no padding": ("consumer", lambda m, x: m.valid(_normalize(m, x))),
    "no padding, groups": ("consumer", lambda m, x: m.grouped(_normalize(m, x))),
    "padding and no offset": ("consumer", lambda m, x: m.conv(x / 255 / m.std)),
    "flattened": ("consumer", lambda m, x: m.dense(_normalize(m, x).flatten(1))),
    "after a convolution": ("producer", lambda m, x: torch.relu(m.conv(x) * m.gamma + m.beta)),
    "after one without bias": ("producer", lambda m, x: m.valid(x) + m.beta),
    "after a transposed convolution": ("producer", lambda m, x: m.up(x) * m.gamma),
    "layer scale": ("producer", _through_linear),
    "last dimension": ("producer", lambda m, x: m.linear(x.permute(0, 2, 3, 1)) * m.gamma[:, 0, 0]),
    "a frozen batch norm": ("producer", lambda m, x: m.conv(x) * (m.gamma * (m.std + 1e-5).rsqrt()) + m.beta),
}


def _rows(m: Layers, x: Tensor) -> Tensor:
    """A linear layer whose 4 results are the last dimension, and a function of the 4 channels in dimension 1."""
    return (m.linear(x.flatten(2)[..., :4]) - m.mean[..., 0]) / m.std[..., 0]


def _attention(m: Layers, x: Tensor) -> Tensor:
    """Attention with one temperature for each head."""
    return torch.softmax(x @ x.transpose(2, 3) * m.gamma, -1) @ x


def _sampled(m: Layers, x: Tensor) -> Tensor:
    """Image coordinates with a scale for x and y."""
    grid = m.conv(x)[:, :2] * m.gamma[:2] + m.beta[:2]
    return F.grid_sample(x, grid.permute(0, 2, 3, 1), align_corners=False)


def _residual(m: Layers, x: Tensor) -> Tensor:
    y = m.conv(x)
    return y * m.gamma + y


PER_TENSOR = get_symmetric_quantization_config(is_per_channel=False)
REFUSALS: dict[str, tuple[str, Callable[[Layers, Tensor], Tensor], Hardware, QuantizationConfig | None]] = {
    "not on a target without NPU": ("has no NPU", lambda m, x: m.conv(x * m.gamma), TOSA, CONFIG),
    "a sum on U85": ("one chain", lambda m, x: m.conv(x * m.gamma + m.beta), U85, CONFIG),
    "one pixel": (
        "one pixel",
        lambda m, x: F.conv2d(x.mean((2, 3), keepdim=True) * m.gamma, m.conv.weight[..., :1, :1]),
        U55,
        CONFIG,
    ),
    "attention": ("no convolution", _attention, U55, CONFIG),
    "coordinates": ("coordinates", _sampled, U55, CONFIG),
    "angles": ("angles", lambda m, x: m.conv(torch.sin(x * m.gamma)), U55, CONFIG),
    "floating point": ("alike", lambda m, x: m.conv(_normalize(m, x)), U55, None),
    "weights per tensor": ("scale per channel", lambda m, x: m.conv(_normalize(m, x)), U55, PER_TENSOR),
    "a divisor of 0": ("divisor", lambda m, x: m.conv(x / (m.std - m.std)), U55, CONFIG),
    "a last dimension": ("dimension 1", lambda m, x: x * m.gamma[:, 0, 0].repeat(2)[:6], U55, CONFIG),
}
#: Chains to which an earlier rewrite of the list producer, consumer, depthwise does not apply: (rewrite that applies,
#: part of the reason, function).
LATER_REWRITES: dict[str, tuple[str, str, Callable[[Layers, Tensor], Tensor]]] = {
    "padding": ("depthwise", "pads with zeros", lambda m, x: m.conv(_normalize(m, x))),
    "a parameter": ("depthwise", "training changes", lambda m, x: m.valid(x * m.gamma)),
    "uneven gains": ("depthwise", "factor of 2", lambda m, x: m.valid(x * (m.std - 0.9) ** 2)),
    "a transposed reader": ("depthwise", "no single layer", lambda m, x: m.up(x / m.std) + m.conv(x)[..., :1, :1]),
    "groups of a transposed layer": ("depthwise", "has groups", lambda m, x: m.grouped_up(x) / m.std),
    "a layer read twice": ("depthwise", "other operators", _residual),
    "channels of another dimension": ("depthwise", "not the output channels", lambda m, x: m.signal(_rows(m, x))),
}


def _folded(
    function: Callable[[Layers, Tensor], Tensor],
    hardware: Hardware = U55,
    config: QuantizationConfig | None = CONFIG,
) -> list[RewriteOutcome]:
    """Rewrite a captured function, and check that its results do not change."""
    model, x = Layers(function).eval(), torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    module = torch.export.export(model, (x,)).module()
    decompose(module, quantized=True)
    outcomes = fold_channel_affines(module, hardware, lambda node: config)
    module.graph.eliminate_dead_code()
    module.recompile()
    torch.testing.assert_close(module(x), model(x), atol=1e-4, rtol=1e-4, equal_nan=True)
    is_chain_left = any(outcome.rewrite is None for outcome in outcomes)
    is_arithmetic_left = any(node.target in (aten.mul.Tensor, aten.div.Tensor) for node in module.graph.nodes)
    assert is_arithmetic_left or not is_chain_left
    return outcomes


@pytest.mark.parametrize("name", REWRITES)
def test_chains_are_folded_by_the_first_possible_rewrite(name: str) -> None:
    rewrite, function = REWRITES[name]
    assert [outcome.rewrite for outcome in _folded(function)] == [rewrite]


@pytest.mark.parametrize("name", LATER_REWRITES)
def test_reasons_for_later_rewrites(name: str) -> None:
    rewrite, reason, function = LATER_REWRITES[name]
    (outcome, *_) = _folded(function)
    assert outcome.rewrite == rewrite
    assert any(reason in text for text in outcome.reasons), outcome.reasons


@pytest.mark.parametrize("name", REFUSALS)
def test_chains_that_are_not_folded_have_a_reason(name: str) -> None:
    reason, function, hardware, config = REFUSALS[name]
    outcomes = _folded(function, hardware, config)
    assert outcomes
    for outcome in outcomes:
        assert outcome.rewrite is None
        assert any(reason in text for text in outcome.reasons), outcome.reasons


@pytest.mark.parametrize(
    "config", [get_symmetric_a16w8_quantization_config(), get_symmetric_a8w4_quantization_config()]
)
def test_input_gains_are_not_folded_into_weights_in_a16w8_and_a8w4(config: QuantizationConfig) -> None:
    (outcome,) = _folded(REWRITES["no padding"][1], config=config)
    assert outcome.rewrite == "depthwise"
    assert any("lose accuracy" in text for text in outcome.reasons)


def test_divisions_by_channel_are_faster_as_a_layer_on_every_npu() -> None:
    for hardware in (U55, U85):
        outcomes = _folded(lambda m, x: m.conv(_normalize(m, x)), hardware)
        assert [outcome.rewrite for outcome in outcomes] == ["depthwise"]


class Network(nn.Module):
    """A CNN for [1, 3, 32, 32]. ``first`` transforms the image, ``scale`` the features of the residual branch."""

    def __init__(self, first: nn.Module, scale: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.conv, self.head = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Linear(16, 4),
        )
        self.first, self.scale = first, scale

    def forward(self, x: Tensor) -> Tensor:
        """x [1, 3, 32, 32], from 0 to 255."""
        y = F.relu(self.stem(self.first(x)))
        return self.head((y + self.scale(self.conv(y))).mean((2, 3)))


class Normalize(nn.Module):
    """The normalization of ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1))
        self.std = nn.Buffer(torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 3, H, W], from 0 to 255, of any dtype."""
        return (x.float() / 255 - self.mean) / self.std


class Scale(nn.Module):
    """A learned function of 16 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.linspace(low, 1.5, 16).reshape(16, 1, 1)) for low in (0.5, -1))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 16, H, W]."""
        return x * self.gamma + self.beta


def _images(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    coarse = [torch.rand(1, 3, 4, 4, generator=generator) for _ in range(16)]
    return [((255 * F.interpolate(x, size=(32, 32), mode="bilinear")).round().to(dtype),) for x in coarse]


def _batch_norm() -> nn.Module:
    """A batch norm that computes the normalization of ImageNet."""
    norm, affine = nn.BatchNorm2d(3, eps=0.0), Normalize()
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.copy_(255 * affine.mean.flatten())
    norm.running_var.copy_((255 * affine.std.flatten()) ** 2)
    return norm


class Cast(nn.Module):
    """Pixels as floating point."""

    def forward(self, x: Tensor) -> Tensor:
        """Cast x."""
        return x.float()


RECIPES = [getattr(ArmRecipeType, f"ETHOSU_{npu}_{kind}") for npu in ("U55", "U85") for kind in ("INT8", "A16W8")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_folded_programs_cost_as_much_as_those_with_a_batch_norm(recipe: ArmRecipeType, dtype: torch.dtype) -> None:
    """Compared with a network that has a batch norm at its input; the program is also verified."""
    samples = _images(dtype)
    model = Network(Normalize(), Scale()).eval()
    result = export(model, ExportRecipe.get_recipe(recipe), samples[:12], verify=True)
    norm = Network(nn.Sequential(Cast(), _batch_norm()), nn.Identity()).eval()
    folded = export(norm, ExportRecipe.get_recipe(recipe), samples[:12])
    (delegate,), (expected,) = result.report.delegates, folded.report.delegates
    assert delegate.vela is not None
    assert expected.vela is not None
    assert delegate.vela.total_cycles == expected.vela.total_cycles
    assert delegate.vela.sram_bytes == expected.vela.sram_bytes
    with torch.no_grad():
        found = sqnr([model(*sample) for sample in samples[12:]], [result.run(*sample) for sample in samples[12:]])
    assert found > (40 if "INT8" in recipe.name else 55)


def test_layers_keep_module_and_line() -> None:
    result = export(Network(Normalize(), Scale()).eval(), ExportRecipe.get_recipe(RECIPES[0]), _images()[:12])
    layers = {layer.module: layer for layer in result.compare(_images()[12:]).layers}
    assert {"first", "stem", "conv", "head"} <= layers.keys()
    assert "scale" not in layers
    assert "test_channel_affine.py" in layers["first"].source
    (delegate,) = result.report.delegates
    origins = {origin.module for operator in delegate.origins for origin, _ in operator}
    assert {"first", "stem", "conv", "head"} <= origins


@pytest.mark.parametrize("has_chain", [False, True])
def test_trace_prints_a_line_per_chain_to_standard_error(
    has_chain: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the trace of the peephole rules does; standard output belongs to the user's program."""
    monkeypatch.setenv(TRACE_VARIABLE, "rewrite")
    outcomes = _folded(lambda m, x: m.conv(_normalize(m, x) if has_chain else x))
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == len(outcomes) == has_chain
    assert all(line.startswith("rewrite: affine function ") for line in output.err.splitlines())


class Decaying(nn.Module):
    """A layer whose weight or bias the model writes, beside functions of channels."""

    def __init__(self, written: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.written = written
        self.weight, self.bias = nn.Buffer(torch.randn(4, 3, 1, 1)), nn.Buffer(torch.randn(4))
        self.before, self.after = nn.Buffer(torch.rand(3, 1, 1) * 0.01 + 1), nn.Buffer(torch.rand(4, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with the weight and bias that the last call wrote."""
        y = F.conv2d(x * self.before, self.weight, self.bias) * self.after
        (self.weight if self.written == "weight" else self.bias).mul_(0.5)
        return y


@pytest.mark.parametrize("written", ["weight", "bias"])
def test_weights_that_the_model_writes_stay_state(written: str) -> None:
    samples = [(torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed)),) for seed in range(4)]
    program = export(Decaying(written), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples).program()
    model = Decaying(written)
    for (x,) in samples[:3]:
        assert sqnr([model(x)], [program.execute(x)[0]]) > 20
