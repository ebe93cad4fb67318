"""Quantizer: weight standardization, 3-d batch norms, computed parameters, dtypes, and in-place writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.errors import ModelError
from arm_recipes import ArmRecipeType, export
from tests.ops.runner import Case, Input, quantize_case
from tests.sqnr import sqnr


class _StandardizedConv(nn.Conv2d):
    """As NFNets have it: the weight is normalized at every call."""

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return self._conv_forward(input, weight, self.bias)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(_StandardizedConv(3, 8, 3), nn.ReLU(), _StandardizedConv(8, 4, 3)), (1, 3, 9, 9)),
        (nn.Sequential(nn.BatchNorm3d(4), nn.ReLU()), (2, 4, 3, 5, 6)),
    ],
    ids=["weight standardization", "batch norm in 3-d"],
)
def test_models_that_are_delegated_whole(model: nn.Module, shape: tuple[int, ...], recipe: ArmRecipeType) -> None:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()  # the weights depend on the random numbers that other modules drew at import
        if isinstance(module, nn.BatchNorm3d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    samples = [(torch.randn(shape),) for _ in range(3)]
    model.eval()
    result = export(model, ExportRecipe.get_recipe(recipe), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    with torch.no_grad():
        assert sqnr([model(*samples[0])], [result.run(*samples[0])]) > 35


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_unsupported_float_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype).eval()
    with pytest.raises(ModelError, match=rf"aten.linear.default .* is {dtype}, .* \.float\(\)"):
        export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.randn(2, 4, dtype=dtype),)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_input_of_another_float_dtype_may_be_cast(dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.float())

    model, x = Model().eval(), torch.randn(2, 4, dtype=dtype)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(x,)])
    with torch.no_grad():
        assert sqnr([model(x)], [result.run(x)]) > 30


COMPUTED: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[tuple[int, ...]]]] = {
    "weight and bias": (lambda x: torch.addmm(x[0], x, x.t()), [(6, 6)]),
    "weight": (lambda x, y: F.linear(x, y, torch.ones(4)), [(2, 8), (4, 8)]),
    "bias": (lambda x, y: F.conv2d(x, torch.ones(4, 4, 3, 3), y), [(1, 4, 8, 8), (4,)]),
    "statistics": (lambda x, m: F.batch_norm(x, m, m * m + 1.0, m), [(2, 4, 5), (4,)]),
    "indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), [(1, 4, 8, 8)]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_parameters_and_indices_have_no_observer(name: str) -> None:
    """Computed weights, biases and statistics, and indices beside values, are not quantized by themselves."""

    class Model(nn.Module):
        def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
            return COMPUTED[name][0](*args)

    torch.manual_seed(0)
    model = Model().eval()
    samples = [tuple(torch.randn(shape) for shape in COMPUTED[name][1]) for _ in range(3)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    expected, actual = model(*samples[0]), result.run(*samples[0])
    pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
    for one, other in pairs:
        if one.dtype is torch.int64:  # of values that are equal when they are quantized, either may be picked
            one, other = (samples[0][0].flatten(2).gather(2, indices.flatten(2)) for indices in (one, other))
        assert sqnr([one], [other]) > 25


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-10, 1e10, 1e30])
def test_inputs_of_any_magnitude(size: float, recipe: ArmRecipeType) -> None:
    """All programs are legal. They are accurate unless the calibrated values are almost zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.relu(self.first(x))
            return self.second(hidden) + y, torch.sigmoid(x) * x

    torch.manual_seed(0)
    model = Model().eval()
    samples = [(torch.randn(1, 3, 8, 8) * size, torch.randn(1, 4, 6, 6)) for _ in range(3)]
    result = export(model, ExportRecipe.get_recipe(recipe), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    with torch.no_grad():
        for expected, actual in zip(model(*samples[0]), result.run(*samples[0]), strict=True):
            assert bool(actual.isfinite().all())
            assert size == 0.0 or size == 1e-30 or sqnr([expected], [actual]) > 25, sqnr([expected], [actual])
            assert (expected - actual).abs().max() <= 0.05 * max(float(expected.abs().max()), 1e-15)


class _Embedded(nn.Module):
    """Words and positions, added and normalized."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.positions, self.norm = nn.Embedding(words, 64), nn.Embedding(16, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.norm(self.words(x) + self.positions(torch.arange(16)))
        return normalized


@pytest.mark.parametrize(("words", "width"), [(1 << 10, 2), (1 << 14, 1)])
def test_large_embedding_tables_stay_int8(words: int, width: int) -> None:
    """A table that an addition reads is int16 for precision. For a million elements, that would add a megabyte."""
    torch.manual_seed(0)
    model, size = _Embedded(words).eval(), words * 64 * width
    samples = [(torch.randint(0, words, (1, 16), dtype=torch.int32),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples[:3])
    assert size < len(result.buffer) < size + 40_000
    assert sqnr([model(*samples[3]).detach()], [result.run(*samples[3])]) > (60 if width == 2 else 38)


class _LinearAttention(nn.Module):
    """The divisors (sums of weights) are a column of the matrix product that also computes the dividends."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        sums = torch.relu(q) @ (torch.relu(k).transpose(-1, -2) @ values)
        return sums[..., :-1] / (sums[..., -1:] + 1e-6)


def test_computed_divisors_have_more_levels_than_int8() -> None:
    """Small divisors share a tensor with larger values: with 256 levels, SQNR would be 13.6 dB."""
    generator = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randn(1, 16, 8, generator=generator) for _ in range(3)) for _ in range(12)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=False)
    result = export(_LinearAttention(), recipe, samples[:8])
    assert result.compare(samples[8:], layers=False).sqnr > 27


def test_in_place_writes_to_views_are_refused() -> None:
    """A quantized view is a separate tensor, so that a write to it would be lost silently."""

    def written(x: Tensor) -> Tensor:
        y = x * 2
        y.diagonal().fill_(3.0)
        return y + 1

    case = Case("written", written, [Input((4, 4))])
    with pytest.raises(ModelError, match=r"aten.fill_.*share: quantize .*run_decompositions\(\{\}\)\.module\(\)"):
        quantize_case(case, int16=False)
    functional = torch.export.export(case.module(), case.sample()).run_decompositions({}).module()
    found = quantize_case(Case("functional", functional, case.inputs), int16=False)
    torch.testing.assert_close(found(*case.sample()), written(*case.sample()), atol=0.05, rtol=0)
