"""Weights of four bits, and int16 activations for VGF: what they cost, and that they compute the right thing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from arm_backend_core.quantization import (
    TOSAQuantizer,
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.algorithms.bias_correction import BiasCorrection
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes import ArmRecipeType as R
from arm_recipes import ExportRecipe, ExportResult, export
from tests.graphs import tosa_opt
from tests.ops.runner import export as exported

Samples = list[tuple[Tensor, ...]]


class Net(nn.Module):
    """Every operator with weights that has four bits for them; most bytes are in one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 12 * 12, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _images(count: int = 8) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, 8, 8, generator=generator),) for _ in range(count)]


def _export(recipe: R, **options: object) -> ExportResult:
    return export(Net().eval(), ExportRecipe.get_recipe(recipe, require_full_delegation=True, **options), _images())


def _sqnr(expected: Tensor, actual: Tensor) -> float:
    return 10 * math.log10(float(expected.square().sum() / (expected - actual).square().sum()))


def _tosa(result: ExportResult) -> bytes:
    (delegate,) = result.report.delegates
    return delegate.tosa


WEIGHTS = 64 * 4 * 12 * 12


@pytest.mark.parametrize("precision", ["A8W4", "A16W8"])
def test_vgf_computes_what_tosa_does(precision: str) -> None:
    tosa, vgf = _export(R[f"TOSA_{precision}"]), _export(R[f"VGF_{precision}"])
    for sample in _images():
        assert torch.equal(vgf.run(*sample), tosa.run(*sample))


@pytest.mark.parametrize(("recipe", "least"), [(R.TOSA_A8W4, 20), (R.TOSA_A16W8, 40)])
def test_signal_to_noise(recipe: R, least: float) -> None:
    result, model = _export(recipe), Net().eval()
    with torch.no_grad():
        pairs = [(model(*sample), result.run(*sample)) for sample in _images()]
    assert _sqnr(*(torch.cat(side) for side in zip(*pairs, strict=True))) > least


@pytest.mark.parametrize(("recipe", "weights"), [(R.TOSA_A8W4, "int4"), (R.VGF_A16W8, "int8")])
def test_the_report_says_what_weights_hold(recipe: R, weights: str) -> None:
    (method,) = _export(recipe).report.methods
    assert method.quantization is not None
    assert method.quantization.weights[f"{weights} per channel"] == 4


def test_tosa_has_two_weights_in_a_byte() -> None:
    narrow, wide = (_tosa(_export(recipe)) for recipe in (R.TOSA_A8W4, R.TOSA_INT8))
    assert len(wide) - len(narrow) > 0.49 * WEIGHTS
    spec = "TOSA-1.0+INT+int16"
    assert tosa_opt(wide, Target.from_tosa_spec(spec)) is None
    assert tosa_opt(narrow, Target.from_tosa_spec(f"{spec}+int4")) is None
    assert tosa_opt(narrow, Target.from_tosa_spec(spec)) is not None


def test_vgf_has_a_weight_in_a_byte() -> None:
    """Its tensors have no four bits; the converter widens them."""
    narrow, wide = (_export(recipe).report.delegates[0].payload_bytes for recipe in (R.VGF_A8W4, R.VGF_INT8))
    assert abs(narrow - wide) < 0.05 * WEIGHTS


@pytest.mark.parametrize("family", ["U55", "U65", "U85"])
def test_velas_encoder_needs_fewer_bits_for_15_levels(family: str) -> None:
    narrow, wide = (_export(R[f"ETHOSU_{family}_{precision}"]) for precision in ("A8W4", "INT8"))
    assert len(wide.buffer) - len(narrow.buffer) > 0.35 * WEIGHTS
    sample = _images()[-1]
    assert torch.equal(narrow.run(*sample), narrow.run(*sample, backend="tosa"))


def test_without_the_extension_levels_are_the_same() -> None:
    """In the plain flow a spec may lack it: the weights take a byte each, and the results are the same."""
    program = ObservedProgram(
        exported(Net().eval(), _images()[0]),
        TOSAQuantizer(TosaCompileSpec()).set_global(get_symmetric_a8w4_quantization_config()),
    )
    with torch.no_grad():
        for sample in _images():
            program(*sample)
        quantized = program.convert()
    results = [
        export(quantized, ExportRecipe.get_recipe(recipe), _images()[:1]) for recipe in (R.TOSA_INT8, R.TOSA_A8W4)
    ]
    assert len(_tosa(results[0])) - len(_tosa(results[1])) > 0.49 * WEIGHTS
    assert torch.equal(*(result.run(*_images()[0]) for result in results))


# -- correction of biases


class Shared(nn.Module):
    """Two weights have one bias, and a third bias is read elsewhere too: neither can be corrected for one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.third(self.first(x) + self.second(x)))
        return y + self.third.bias


class Steps(nn.Module):
    """One layer that is read twice: its bias is corrected for the mean of both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)))


#: Module, shape of a sample, and the axis of the result's channels, from the last.
CORRECTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(64, 8), (4, 64), -1),
    "linear without batch": (lambda: nn.Linear(64, 8), (64,), -1),
    "conv1d": (lambda: nn.Conv1d(32, 8, 3), (2, 32, 20), -2),
    "conv2d": (lambda: nn.Conv2d(16, 8, 3), (1, 16, 12, 12), -3),
    "conv2d without batch": (lambda: nn.Conv2d(16, 8, 3), (16, 12, 12), -3),
    "groups": (lambda: nn.Conv2d(16, 8, 3, groups=4), (1, 16, 12, 12), -3),
    "depthwise": (lambda: nn.Conv2d(8, 16, 3, groups=8), (1, 8, 12, 12), -3),
    "conv3d": (lambda: nn.Conv3d(8, 4, 3), (1, 8, 5, 6, 7), -4),
    "no bias": (lambda: nn.Linear(64, 8, bias=False), (4, 64), -1),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8)), (1, 16, 12, 12), -3),
}
LEFT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "shared bias": (Shared, (4, 32)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), (1, 8, 6, 6)),
}


CONFIGS = {
    "A8W4": get_symmetric_a8w4_quantization_config(),
    "A8W4, one scale": get_symmetric_a8w4_quantization_config(is_per_channel=False),
    "INT8": get_symmetric_quantization_config(),
    "A16W8": get_symmetric_a16w8_quantization_config(),
}


def _quantized(model: nn.Module, samples: Samples, config: str, correct: bool) -> Tensor:
    """What the quantized graph gives for the samples; results in int16, whose own rounding does not show."""
    quantizer = TOSAQuantizer(TosaCompileSpec("TOSA-1.0+INT+int16+int4")).set_global(CONFIGS[config])
    observed = ObservedProgram(exported(model, samples[0]), quantizer, algorithms=["int16_outputs"])
    correction = BiasCorrection([observed]) if correct else None
    with torch.no_grad():
        for sample in samples:
            observed(*sample)
        if correction is not None:
            correction.apply()
        program = observed.convert().module(check_guards=False)
        return torch.stack([program(*sample) for sample in samples])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CORRECTED)
def test_the_mean_of_each_channel_is_kept(name: str, config: str) -> None:
    torch.manual_seed(0)
    make, shape, axis = CORRECTED[name]
    model = make().eval()
    samples: Samples = [(torch.rand(shape) + 0.5,) for _ in range(16)]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = torch.stack([model(*sample) for sample in samples])

    def shift(correct: bool) -> Tensor:
        error = _quantized(model, samples, config, correct) - expected
        return error.movedim(axis, 0).flatten(1).mean(1).abs()

    assert shift(correct=True).max() < 0.25 * shift(correct=False).max()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_corrected(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LEFT[name]
    model = make().eval()
    samples: Samples = [(torch.rand(shape) + 0.5,) for _ in range(4)]
    assert torch.equal(*(_quantized(model, samples, "A8W4", correct) for correct in (True, False)))


def test_a_layer_that_is_read_twice_is_corrected_for_both() -> None:
    torch.manual_seed(0)
    model = Steps().eval()
    samples: Samples = [(torch.rand(4, 32) + 0.5,) for _ in range(16)]
    with torch.no_grad():
        expected = torch.stack([model(*sample) for sample in samples])
    plain, corrected = (_quantized(model, samples, "A8W4", correct) for correct in (False, True))
    assert not torch.equal(plain, corrected)
    assert _sqnr(expected, corrected) > _sqnr(expected, plain)


def _bias(program: ExportedProgram) -> Tensor:
    """Of the only layer; in floating point where the model has none."""
    (bias,) = (x for name, x in program.constants.items() if x.dtype is torch.int32 or "corrected" in name)
    return bias


@pytest.mark.parametrize("name", ["linear", "no bias", "batch norm", "groups"])
def test_methods_have_one_bias_corrected_for_all(name: str) -> None:
    torch.manual_seed(0)
    make, shape, _ = CORRECTED[name]
    model = make().eval()
    samples = {method: [(torch.rand(shape) + mean,)] * 2 for method, mean in (("low", 0.5), ("high", 1.5))}
    both = {"both": [*samples["low"], *samples["high"]]}
    found = []
    for given in (samples, both, {"low": samples["low"]}):
        recipe = ExportRecipe.get_recipe(R.TOSA_INT8)
        programs = export(dict.fromkeys(given, model), recipe, dict(given)).exported_programs.values()
        found.append([_bias(program) for program in programs])
    (low, high), (pooled,), (alone,) = found
    assert torch.equal(low, high)
    assert torch.equal(low, pooled)
    assert not torch.equal(low, alone)


def test_weights_are_rounded_for_what_they_sum() -> None:
    """Inputs that vary together: what rounding one weight adds, another takes off."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Unflatten(1, (64, 1, 1)), nn.Conv2d(64, 8, 1)
    )
    samples: Samples = [(torch.randn(64, 4),) for _ in range(6)]
    with torch.no_grad():
        expected = model.eval()(*samples[-1])
    found = []
    for names in (["bias_correction", "int16_outputs"], ["bias_correction", "int16_outputs", "gptq"]):
        recipe = ExportRecipe.get_recipe(R.TOSA_A8W4, algorithms=names)
        found.append(_sqnr(expected, export(model, recipe, samples[:-1]).run(*samples[-1])))
    assert found[1] > found[0] + 2


@pytest.mark.parametrize("shape", [(1, 640), (2, 300)])
def test_weights_of_which_few_inputs_are_known_are_rounded_as_they_are(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, samples = nn.Linear(shape[1], 8).eval(), [(torch.rand(shape),) for _ in range(3)]
    recipes = [
        ExportRecipe.get_recipe(R.TOSA_A8W4, algorithms=names)
        for names in (["bias_correction"], ["bias_correction", "gptq"])
    ]
    assert torch.equal(*(export(model, recipe, samples).run(*samples[0]) for recipe in recipes))
