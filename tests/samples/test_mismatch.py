"""Samples that do not fit the model: errors name the input, its dtype and shape, the expected ones, and the remedy."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes import ArmRecipeType, Inputs, ModelError, export
from arm_recipes.samples.mismatch import check_arguments, describe_input_mismatch, input_names

X = torch.rand(1, 3, 16, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 4, 1)

    def forward(self, image: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.layer(image) * scale


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) * 2


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 3))


def _recipe() -> ExportRecipe:
    return ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)


@pytest.mark.parametrize(
    ("model", "sample", "message"),
    [
        (
            Net(),
            X.half(),
            "('x') is float16[1, 3, 16, 16], the model takes float32[1, 3, 16, 16]; pass x.float()",
        ),
        (Net(), X.double().numpy(), "is float64[1, 3, 16, 16], the model takes float32[1, 3, 16, 16]; pass x.float()"),
        (
            Net(),
            (X * 255).byte(),
            "is uint8[1, 3, 16, 16], the model takes float32[1, 3, 16, 16]; pass x.float(), scaled as in training",
        ),
        (Net(), X.permute(0, 2, 3, 1), "the channels are last; pass x.permute(0, 3, 1, 2)"),
        (Net(), X[0], "is float32[3, 16, 16], the model takes float32[1, 3, 16, 16]: the batch dimension is missing; "),
        (
            Net(),
            (X[0].permute(1, 2, 0) * 255).byte(),
            "is uint8[16, 16, 3], the model takes float32[1, 3, 16, 16]: the batch dimension is missing, and the "
            "channels are last; pass x.permute(2, 0, 1).unsqueeze(0).float(), scaled as in training",
        ),
        (
            Net().half(),
            X,
            "takes float16[1, 3, 16, 16]: its weights are float16; pass the model converted with",
        ),
        (Net().double(), X, "its weights are float64; pass the model converted with model.float()"),
        (Words(), torch.rand(1, 5), "input 0 ('ids') is float32[1, 5], the model takes int64[1, 5]; pass ids.long()"),
        (
            _classifier(),
            torch.rand(1, 1, 16, 16),
            "the model takes float32[1, 3, 16, 16]: '0' (Conv2d) takes 3 channels; pass samples of that shape",
        ),
        (
            _classifier(),
            torch.rand(1, 3, 32, 32),
            "is float32[1, 3, 32, 32], the model takes float32[1, 3, 16, 16]: '2' (Linear) takes 784 features; pass",
        ),
    ],
)
def test_errors_about_a_sample_name_input_expectation_and_remedy(
    model: nn.Module, sample: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT", raising=False)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        export(model.eval(), _recipe(), [(sample,)])
    text = str(caught.value)
    assert text.startswith("samples[0] of method 'forward', input 0")
    assert "\n" not in text
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) < 20
    assert any(__file__ in line for line in lines)


def test_all_mismatched_inputs_are_named() -> None:
    sample = {"image": torch.rand(1, 3, 8).double(), "scale": torch.rand(1, 4, 8).double()}
    with pytest.raises(ValueError, match=r"input 0 \('image'\) .*; pass image.float\(\), scale.float\(\)$"):
        export(Scaled().eval(), _recipe(), [sample])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"img": X, "scale": X}, "has the key 'img', which is not an input; the model takes image, scale, bias"),
        ({"image": X}, "lacks the input 'scale'; the model takes image, scale, bias; add it to each sample"),
        ((X,), "lacks the input 'scale'"),
        ((X, X, X, 7), r"has 4 inputs; .*labels=True.* additional items, \[sample\[:3\] for sample in samples\]"),
        (Inputs(X, X, image=X), "does not fit the model: multiple values for argument 'image'"),
    ],
)
def test_wrong_arguments_are_found_before_the_capture(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^samples\[0\] of method 'forward' {message}"):
        export(Scaled().eval(), _recipe(), [sample])


def test_labels_among_the_inputs_are_refused() -> None:
    loader = DataLoader(TensorDataset(X.repeat(2, 1, 1, 1), torch.arange(2)), batch_size=1)
    for samples in ([(X, torch.tensor([1]))], iter(loader)):
        with pytest.raises(
            ValueError, match=r"has 2 inputs; the model takes x; if labels .* labels=True .* \[\(sample\[0\],\)"
        ):
            export(Net().eval(), _recipe(), samples)
    with pytest.raises(ValueError, match=r"got Tensor; write \[\(x,\)\] for one sample, and \[\(x, label\)\] with"):
        export(Net().eval(), _recipe(), next(iter(loader)))


def test_samples_of_a_program_are_checked() -> None:
    program = torch.export.export(Net().eval(), (X,))
    with pytest.raises(ValueError, match=r"input 0 \('x'\) is float64\[1, 3, 16, 16\], the model .*x.float"):
        export(program, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(X.double(),)])


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("kind", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_FP])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", [_linear, lambda: nn.LSTM(8, 4), lambda: nn.MultiheadAttention(8, 2)])
def test_the_trace_of_a_matrix_product_accepts_what_pytorch_refuses(
    build: Callable[[], nn.Module], dtype: torch.dtype, kind: ArmRecipeType
) -> None:
    """The remedy is to convert whichever of sample and model is not float32."""
    x, name = torch.rand(3, 1, 8), str(dtype).removeprefix("torch.")
    is_attention = isinstance(build(), nn.MultiheadAttention)
    sample, odd = ((x, x, x), (x.to(dtype),) * 3) if is_attention else ((x,), (x.to(dtype),))
    recipe = ExportRecipe.get_recipe(kind)
    with pytest.raises(ValueError, match=rf"is float32\[3, 1, 8\], the model takes {name}.*pass the model converted"):
        export(build().eval().to(dtype), recipe, [sample])
    with pytest.raises(ValueError, match=rf"is {name}\[3, 1, 8\], the model takes float32\[3, 1, 8\]; pass \w+.float"):
        export(build().eval(), recipe, [odd])


@pytest.mark.parametrize(
    ("model", "x", "y", "remedy"),
    [
        (torch.float32, torch.float32, torch.float64, r"convert the input 'y' with .float\(\)"),
        (torch.float64, torch.float64, torch.float64, r"convert the model and the inputs 'x', 'y' with .float\(\)"),
        (torch.float64, torch.float64, torch.float32, r"convert the model and the input 'x' with .float\(\)"),
    ],
)
def test_errors_name_what_to_convert_to_float32(
    model: torch.dtype, x: torch.dtype, y: torch.dtype, remedy: str
) -> None:
    """PyTorch promotes elementwise operands; an integer program does not."""

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) + y * 2

    sample = torch.rand(1, 8).to(x), torch.rand(1, 4).to(y)
    with pytest.raises(ModelError, match=f"quantized from torch.float32: {remedy}$"):
        export(Offset().eval().to(model), _recipe(), [sample])


def test_a_conversion_inside_the_model_is_named() -> None:
    class Precise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.double() * 2

    with pytest.raises(ModelError, match=r"remove the conversion to torch.float64 .* from the model$"):
        export(Precise().eval(), _recipe(), [(torch.rand(1, 8),)])


def test_a_conversion_of_inputs_and_weights_inside_the_model_is_named() -> None:
    class Mixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).float()

    with pytest.raises(ModelError, match=r"remove the conversion to torch\.bfloat16 "):
        export(Mixed(8, 4).eval(), _recipe(), [(torch.rand(1, 8),)])


def test_check_arguments_accepts_variadic_arguments() -> None:
    class Any_(nn.Module):
        def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
            return torch.cat([*parts, *named.values()])

    check_arguments(Any_(), Inputs(X, X, more=X), "a sample")
    names = input_names(Any_(), Inputs(X, (X, X), more={"a": X}))
    assert names == ["parts[0]", "parts[1][0]", "parts[1][1]", "more['a']"]


class Stateful(nn.Module):
    """Counts its calls in a buffer and keeps its input in an attribute."""

    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 4, 1)
        self.register_buffer("sum", torch.zeros(1, 4, 8))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.sum += 1
        self.last = x
        return self.layer(x) + self.sum


def test_describe_mismatch_does_not_change_the_model() -> None:
    model = Stateful().eval()
    state, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    x = torch.rand(1, 3, 8).double()
    with pytest.raises(RuntimeError) as caught:
        model(x)
    model.load_state_dict(state)
    model.last = None
    text = describe_input_mismatch(model, Inputs(x), "samples[0]", caught.value)
    assert text is not None
    assert text.endswith("pass x.float()")
    assert model.last is None
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert type(model.layer.weight) is nn.Parameter


def test_another_failure_is_not_a_mismatch() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("broken")

    assert describe_input_mismatch(Broken(), Inputs(X), "samples[0]", KeyError("broken")) is None
    assert describe_input_mismatch(Net().eval(), Inputs(X), "samples[0]", RuntimeError("elsewhere")) is None


def test_later_samples_name_the_conversion() -> None:
    for other, remedy in (
        (X.double(), r"pass x.float\(\)"),
        (X[0], r"the batch dimension is missing; pass x.unsqueeze\(0\)"),
        (torch.cat([X, X]), r"a batch of 2 items, one for each call; pass x\[i:i \+ 1\]"),
        (X[..., :8], "resize it, or export several sizes with dynamic_shapes= and sizes="),
    ):
        with pytest.raises(ValueError, match=rf"calibration sample 1, input 0 \('x'\) is .*, the .*{remedy}$"):
            export(Net().eval(), _recipe(), [(X,), (other,)])
