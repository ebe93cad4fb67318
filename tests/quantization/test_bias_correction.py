"""Bias correction: the mean error of each output channel is subtracted from the bias."""

from __future__ import annotations

import copy
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
from arm_recipes import ArmRecipeType, ExportRecipe, export
from tests.ops.runner import export as exported
from tests.small_models import Samples
from tests.sqnr import sqnr


class Shared(nn.Module):
    """Two layers share a bias, and the third layer's bias has another reader: neither bias can be corrected."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.third(self.first(x) + self.second(x)))
        return y + self.third.bias


class Steps(nn.Module):
    """One layer that is called twice: its bias is corrected for the mean error over both calls."""

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


NOT_CORRECTED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
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
    """Outputs of the quantized graph. They are int16, so that their own rounding error is negligible."""
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


@pytest.mark.parametrize("name", NOT_CORRECTED)
def test_shared_biases_and_transposed_convolutions_are_not_corrected(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NOT_CORRECTED[name]
    model = make().eval()
    samples: Samples = [(torch.rand(shape) + 0.5,) for _ in range(4)]
    assert torch.equal(*(_quantized(model, samples, "A8W4", correct) for correct in (True, False)))


def test_a_layer_that_is_called_twice_is_corrected_for_both_calls() -> None:
    torch.manual_seed(0)
    model = Steps().eval()
    samples: Samples = [(torch.rand(4, 32) + 0.5,) for _ in range(16)]
    with torch.no_grad():
        expected = torch.stack([model(*sample) for sample in samples])
    plain, corrected = (_quantized(model, samples, "A8W4", correct) for correct in (False, True))
    assert not torch.equal(plain, corrected)
    assert sqnr(expected, corrected) > sqnr(expected, plain)


def _bias(program: ExportedProgram) -> Tensor:
    """The bias of the only layer. It is float if the model has none."""
    (bias,) = (x for name, x in program.constants.items() if x.dtype is torch.int32 or "corrected" in name)
    return bias


@pytest.mark.parametrize("name", ["linear", "no bias", "batch norm", "groups"])
def test_methods_share_a_bias_that_is_corrected_for_all(name: str) -> None:
    torch.manual_seed(0)
    make, shape, _ = CORRECTED[name]
    model = make().eval()
    samples = {method: [(torch.rand(shape) + mean,)] * 2 for method, mean in (("low", 0.5), ("high", 1.5))}
    both = {"both": [*samples["low"], *samples["high"]]}
    found = []
    for given in (samples, both, {"low": samples["low"]}):
        recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
        programs = export(dict.fromkeys(given, model), recipe, dict(given)).exported_programs.values()
        found.append([_bias(program) for program in programs])
    (low, high), (pooled,), (alone,) = found
    assert torch.equal(low, high)
    assert torch.equal(low, pooled)
    assert not torch.equal(low, alone)


def test_rows_of_zeros_stay_zero_before_a_norm() -> None:
    """Rows of zeros (padding) have no error of rounded weights. A norm would amplify a bias correction."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.layer(x).reshape(1, 2, 32), dim=-1)

    samples: Samples = [(torch.rand(1, 2, 16) * torch.tensor([[1.0], [0.0]]),) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert not result.run(*samples[0])[:, 1].any()
