"""Sample inputs in the memory format ``channels_last`` or with other strides, in ExecuTorch's runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

import arm_recipes
from arm_recipes import ArmRecipeType, ExportResult, export

FP, INT8, VGF = ArmRecipeType.TOSA_FP, ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8
U85 = ArmRecipeType.ETHOSU_U85_INT8
CHANNELS_LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format
LAYOUTS = {"contiguous": (CONTIGUOUS, CONTIGUOUS), "channels_last": (CHANNELS_LAST, torch.channels_last_3d)}
#: Error relative to the largest output.
TOLERANCE = {"FP": 1e-5, "INT8": 0.03}
Middle = Callable[[Tensor], Tensor]


class Convs(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, middle: Middle = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.first(x)))


def _on_the_cpu(x: Tensor) -> Tensor:
    """Return the input by way of int64 arithmetic, which no target has and which keeps the memory format."""
    return ((x * 1000).to(torch.int64) * 2**33).to(torch.float32) * (0.001 * 2.0**-33)


def _draw(*shape: int, layout: str = "channels_last") -> Tensor:
    x = torch.randn(*shape)
    return x.contiguous(memory_format=LAYOUTS[layout][x.dim() - 4])


def _images(layout: str = "channels_last") -> list[tuple[Tensor, ...]]:
    return [(_draw(1, 3, 5, 6, layout=layout),) for _ in range(4)]


def _check(
    model: nn.Module, recipe: ArmRecipeType, samples: list[tuple[Tensor, ...]], **options: Any
) -> tuple[ExportResult, list[str]]:
    """Export a model and compare its program with it, for inputs in each memory format.

    Returns:
        The export result and its operators on the CPU.
    """
    model, inputs = model.eval(), samples[0]
    result = export(copy.deepcopy(model), ExportRecipe.get_recipe(recipe, **options), samples)
    with torch.no_grad():
        outputs = model(*inputs)
    given = [info.quantize(x) if info.scale is not None else x for info, x in zip(result.inputs, inputs, strict=True)]
    results = [arm_recipes.load(result.buffer).execute(*given)]
    for layouts in LAYOUTS.values():
        laid = [x.contiguous(memory_format=layouts[x.dim() - 4]) if x.dim() >= 4 else x.contiguous() for x in given]
        results.append(arm_recipes.load(result.buffer).execute(*laid))
    expected = outputs if isinstance(outputs, tuple) else (outputs,)
    for info, real, first, *others in zip(result.outputs, expected, *results, strict=True):
        assert all(torch.equal(first, other) for other in others)
        ours = first if info.scale is None else info.dequantize(first)
        error = float((ours - real).abs().max() / real.abs().max())
        assert error <= TOLERANCE[recipe.name.rsplit("_", 1)[1]], error
    return result, [operator.operator for operator in result.report.cpu_operators]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [(FP, {}), (INT8, {}), (INT8, {"quantized_io": True}), (VGF, {})],
    ids=["FP", "INT8", "INT8-quantized_io", "VGF"],
)
def test_convolutions(recipe: ArmRecipeType, options: dict[str, Any], layout: str) -> None:
    result, _ = _check(Convs(), recipe, _images(layout), **options)
    (delegate,) = result.report.delegates
    # TOSA convolves NHWC, as a channels_last input lies; the output is contiguous.
    transposes = delegate.tosa_operators.count("TRANSPOSE")
    expected = (1, (1, 5, 6, 3)) if layout == "channels_last" else (2, (1, 3, 5, 6))
    assert (transposes, delegate.inputs[0].shape) == expected


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_a_model_with_channels_last_weights(recipe: ArmRecipeType) -> None:
    _check(Convs().to(memory_format=CHANNELS_LAST), recipe, _images())  # type: ignore[call-overload]


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    "middle",
    [_on_the_cpu, lambda x: _on_the_cpu(x) + x, lambda x: torch.topk(torch.cat([x] * 120, 3), x.shape[3], 3).values],
    ids=["int64", "sum", "topk"],
)
def test_the_cpu_between_delegates(middle: Middle, recipe: ArmRecipeType) -> None:
    result, on_cpu = _check(Convs(middle), recipe, _images())
    assert on_cpu == ["aten.topk.default"] or "aten.mul.Tensor" in on_cpu
    assert len(result.report.delegates) == 2


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_cpu_operators_before_and_after_the_delegates(recipe: ArmRecipeType) -> None:
    class Ends(Convs):
        def forward(self, x: Tensor) -> Tensor:
            return _on_the_cpu(super().forward(_on_the_cpu(x)) + super().forward(x))

    result, on_cpu = _check(Ends(), recipe, _images())
    assert "aten.mul.Tensor" in on_cpu
    assert len(result.report.delegates) == 3


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_conv3d_with_channels_last_3d(recipe: ArmRecipeType) -> None:
    class Volumes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (torch.relu(x) + 1).amax(2)

    result, on_cpu = _check(Volumes(), recipe, [(_draw(1, 3, 4, 5, 6),) for _ in range(4)])
    assert on_cpu == []
    assert result.report.delegates[0].inputs[0].shape == (1, 3, 4, 5, 6)  # see dim_order_of


@pytest.mark.parametrize("quantized_io", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_mask_and_vector_inputs(layout: str, quantized_io: bool) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.convolution, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(6, 4)

        def forward(self, image: Tensor, mask: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
            y = self.convolution(image) * mask
            return y, self.linear(vector) + y.mean((2, 3))

    samples: list[tuple[Tensor, ...]] = [
        (_draw(1, 3, 5, 6), _draw(1, 4, 5, 6, layout=layout), torch.randn(1, 6)) for _ in range(4)
    ]
    _check(Several(), INT8, samples, quantized_io=quantized_io)


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_views_of_a_channels_last_input(recipe: ArmRecipeType) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.layer(x.transpose(2, 3)), x.permute(0, 2, 3, 1)

    _check(Views(), recipe, _images())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
def test_a_mutated_buffer(recipe: ArmRecipeType, layout: str) -> None:
    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Conv2d(3, 3, 3, padding=1)
            self.sum = nn.Buffer(torch.zeros(1, 3, 5, 6).contiguous(memory_format=CHANNELS_LAST))

        def forward(self, x: Tensor) -> Tensor:
            self.sum.add_(self.layer(x))
            return torch.relu(self.sum)

    _check(State(), recipe, _images(layout))


class Pixels(nn.Module):
    """Takes any image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * 0.5) + x


@pytest.mark.parametrize("recipe", [FP, INT8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("model", "make_input"),
    [
        (Convs(), lambda: torch.randn(5, 6, 3).permute(2, 0, 1)[None]),
        (Convs(), lambda: torch.randn(1, 3, 6, 5).transpose(2, 3)),
        (Convs(), lambda: torch.randn(1, 3, 5, 12)[..., ::2]),
        (Convs(), lambda: torch.randn(1, 1, 5, 6).expand(1, 3, 5, 6)),
        (Pixels(), lambda: torch.randn(5, 6, 1).permute(2, 0, 1)[None]),
        (Pixels(), lambda: torch.randn(1, 8).T),
        (nn.Conv1d(3, 4, 3), lambda: torch.randn(1, 7, 3).transpose(1, 2)),
    ],
    ids=["HWC-image", "transposed", "strided", "expanded", "one-channel", "row", "sequence"],
)
def test_inputs_with_other_strides(model: nn.Module, make_input: Callable[[], Tensor], recipe: ArmRecipeType) -> None:
    result, on_cpu = _check(model, recipe, [(make_input(),) for _ in range(4)])
    assert on_cpu == []
    assert len(result.report.delegates) == 1


@pytest.mark.filterwarnings("ignore:.*is int64, which TOSA does not support")
def test_an_embedding_with_transposed_indices() -> None:
    index = torch.randint(0, 8, (3, 2)).T
    torch.manual_seed(0)
    result, on_cpu = _check(nn.Embedding(8, 4), FP, [(index,)])
    assert on_cpu == []
    assert result.report.methods[0].boundary == {"dim_order_ops._to_dim_order_copy.default": 1}


def test_input_layout_is_kept_if_its_first_reader_stays_on_the_cpu() -> None:
    """The transpose of an input for an operator is not lost when that operator stays on the CPU."""

    class Twice(Convs):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fmod(x.double(), 100).float()) + super().forward(x)

    _, on_cpu = _check(Twice(), FP, _images())
    assert "aten.fmod.Scalar" in on_cpu


@pytest.mark.parametrize("captured", [False, True], ids=["module", "program"])
def test_option_channels_last_with_contiguous_samples(captured: bool) -> None:
    samples = _images("contiguous")
    model: Any = torch.export.export(Convs().eval(), samples[0]) if captured else Convs().eval()
    result = export(model, ExportRecipe.get_recipe(U85), samples, channels_last=True)
    (delegate,) = result.report.delegates
    assert delegate.inputs[0].shape == (1, 5, 6, 3)
    assert not any("input" in layer.reason for layer in result.report.layers)
    converted = [(x.to(memory_format=CHANNELS_LAST),) for (x,) in samples]
    expected_result = export(Convs().eval(), ExportRecipe.get_recipe(U85), converted)
    assert delegate.tosa == expected_result.report.delegates[0].tosa
    assert {layer.module for layer in result.report.layers} == {layer.module for layer in expected_result.report.layers}
    assert torch.equal(result.run(*samples[0]), result.run(*converted[0]))


def test_option_channels_last_without_effect_warns() -> None:
    model = nn.Linear(4, 4).eval()
    with pytest.warns(arm_recipes.ArmRecipesWarning, match="channels_last has no effect on 'forward'"):
        export(model, ExportRecipe.get_recipe(FP), [(torch.ones(1, 4),)], channels_last=True)
