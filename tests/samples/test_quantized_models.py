"""Models that PyTorch's own quantization flows have changed are refused with the remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx

from arm_recipes import ArmRecipeType, export, prepare_qat
from arm_recipes.samples import export_arguments

X = torch.rand(1, 3, 8, 8)


class Stubs(nn.Module):
    """A model for eager quantization. Without ``prepare``, its stubs do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.dequant(self.net(self.quant(x)))


def _prepare_fx() -> torch.fx.GraphModule:
    mapping = quantization.get_default_qconfig_mapping("qnnpack")
    prepared = quantize_fx.prepare_fx(Stubs().eval(), mapping, (X,))
    prepared(X)
    return prepared


def _prepare_eager() -> nn.Module:
    model = Stubs().eval()
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    prepared = quantization.prepare(model)
    prepared(X)
    return prepared


def _prepare_qat() -> nn.Module:
    model = Stubs().train()
    model.qconfig = quantization.get_default_qat_qconfig("qnnpack")
    return quantization.prepare_qat(model)


def _lstm() -> nn.Module:
    return quantization.quantize_dynamic(nn.Sequential(nn.LSTM(8, 8)), {nn.LSTM})


def _linear() -> nn.Module:
    return quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear})


def _quantized_buffer() -> nn.Module:
    model = nn.Sequential(nn.ReLU())
    model.register_buffer("table", torch.quantize_per_tensor(X, 0.1, 0, torch.qint8))
    return model


@pytest.fixture(autouse=True)
def _ignore_deprecations() -> None:
    warnings.filterwarnings("ignore", module="torch.ao", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


CAPTURED = "cannot be captured; pass the floating-point model with calibration samples, .* convert_pt2e"
PREPARED = "the model is prepared; pass the floating-point model .*load_state_dict.*strict=False.*convert_pt2e"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantize_fx.convert_fx(_prepare_fx()), f"'net.0' is the quantized module torch.ao.nn.* {CAPTURED}"),
        (lambda: quantize_fx.convert_to_reference_fx(_prepare_fx()), f"quantized module .*reference.* {CAPTURED}"),
        (lambda: quantization.convert(_prepare_eager()), f"'quant' is the quantized module .* {CAPTURED}"),
        (_linear, f"'0' is the quantized module .*dynamic.* {CAPTURED}"),
        (_lstm, f"'0' is the quantized module .*dynamic.* {CAPTURED}"),
        (_quantized_buffer, f"'table' is a quantized tensor, which {CAPTURED}"),
        (_prepare_fx, f"is the observer torch.ao.quantization.observer.* {PREPARED}"),
        (_prepare_eager, f"'quant.activation_post_process' is the observer .* {PREPARED}"),
        (_prepare_qat, f"is the observer torch.ao.quantization.fake_quantize.* {PREPARED}"),
    ],
)
def test_a_quantized_model_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(TypeError, match=f"^model: .*{message}"):
        export_arguments.models_by_method(make())


def test_a_model_of_prepare_qat_is_refused_with_its_own_export() -> None:
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    prepared = prepare_qat(nn.Linear(4, 2), recipe, [(torch.randn(1, 4),)])
    with pytest.raises(TypeError, match=r"^model: it is a model of prepare_qat: call its method export\(samples\)"):
        export(prepared, recipe, [(torch.randn(1, 4),)])


def test_stubs_of_a_floating_point_model_are_accepted() -> None:
    result = export(Stubs().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(X,)])
    assert not result.report.cpu_operators


def test_a_quantized_sample_is_refused() -> None:
    sample = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match=r"^samples\[0\]\[0\] .* is a quantized tensor; pass its numbers, x.deq"):
        export_arguments.examples_by_method([(sample,)], {"forward": nn.ReLU()})
