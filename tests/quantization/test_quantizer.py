"""Models that must be quantized well, or refused by name: masks, weight standardization, 3-d batch norms, types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.errors import ModelError
from arm_recipes import ArmRecipeType, export
from tests.models.exported import sqnr
from tests.ops.runner import Case, Input, quantized

LENGTH = 12


def _causal(value: float) -> Tensor:
    return torch.full((LENGTH, LENGTH), value).triu(1)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "-inf added": lambda scores, keep: scores + _causal(-torch.inf),
    "finfo.min added": lambda scores, keep: scores + _causal(torch.finfo(torch.float32).min),
    "-10000 added": lambda scores, keep: scores + _causal(-1e4),
    "-inf filled": lambda scores, keep: scores.masked_fill(~keep, -torch.inf),
    "finfo.min filled": lambda scores, keep: scores.masked_fill(~keep, torch.finfo(torch.float32).min),
    "where": lambda scores, keep: torch.where(keep, scores, -1e9),
    "where, moved": lambda scores, keep: torch.where(keep, scores, torch.tensor(-1e9)).unsqueeze(0).squeeze(0),
    "1 - mask": lambda scores, keep: scores + (1.0 - keep.float()) * -10000.0,
    "-(1 - mask)": lambda scores, keep: scores - 1e9 * (1.0 - keep.float()),
    "made of a mask": lambda scores, keep: scores + torch.zeros(LENGTH, LENGTH).masked_fill(~keep, -torch.inf),
}


class _Attention(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * 0.25
        return F.softmax(MASKS[self.mask](scores, keep), -1) @ x


@pytest.mark.parametrize("mask", MASKS)
def test_masks_that_a_model_writes_itself(mask: str) -> None:
    torch.manual_seed(0)
    model = _Attention(mask).eval()
    samples = [(torch.randn(2, LENGTH, 16), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()) for _ in range(3)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    with torch.no_grad():
        assert sqnr([model(*samples[0])], [result.run(*samples[0])]) > 30


_HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "temperature": lambda scores, keep: torch.softmax(torch.where(keep, scores, -1e8) / 2, -1),
    "log_softmax": lambda scores, keep: torch.where(keep, scores, -1e8).log_softmax(-1).exp(),
    "distribution": lambda scores, keep: torch.distributions.Categorical(logits=torch.where(keep, scores, -1e8)).probs,
    "max": lambda scores, keep: torch.where(keep, scores, -1e8).amax(-1),
    "max of -inf": lambda scores, keep: scores.masked_fill(~keep, -torch.inf).max(-1)[0],
    "topk": lambda scores, keep: scores.masked_fill(~keep, -1e9).topk(2, -1)[0],
    "min": lambda scores, keep: torch.where(keep, scores, 1e9).amin(-1),
    "min of the other side": lambda scores, keep: torch.where(keep, 1e9, scores).min(-1)[0],
    "least of topk": lambda scores, keep: torch.where(keep, scores, 1e9).topk(2, -1, False)[0],
    "argmax": lambda scores, keep: F.one_hot(torch.where(keep, scores, -1e9).argmax(-1), 8).float(),
}


@pytest.mark.parametrize("head", _HEADS)
def test_what_is_masked_for_other_ends_than_attention(head: str) -> None:
    class Model(nn.Module):
        def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
            return _HEADS[head](scores, keep)

    torch.manual_seed(0)
    samples = []
    for _ in range(8):
        keep = torch.rand(16, 8) > 0.4
        keep[:, :2], keep[:, 2:4] = True, False
        samples.append((2 * torch.randn(16, 8), keep))
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert not result.report.cpu_operators, result.report.cpu_operators
    found, expected = (torch.cat([model(*sample) for sample in samples]) for model in (result.run, Model()))
    assert sqnr([expected], [found]) > (12 if head == "argmax" else 18)  # a step decides between two of 128 rows


_PRIORS = torch.tensor([-95.0, -110.0, -88.0, -120.0, -101.0, -90.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.sigmoid(x * 1000 - 500.0),
        lambda x: torch.softmax(x * 20 + _PRIORS, -1),
        lambda x: torch.logsumexp(-0.5 * x * x + (-117.6), -1) + 117,
        lambda x: torch.softmax(x / -1e-3, -1),
        lambda x: torch.log_softmax(-1000 * x.sin(), -1),
    ],
    ids=["scaled and shifted", "priors", "normalizer", "temperature", "scaled"],
)
def test_what_is_large_and_no_mask(function: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    torch.manual_seed(0)
    samples = [(torch.rand(4, 6),) for _ in range(8)]
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_A16W8), samples)
    found, expected = (torch.cat([model(*sample) for sample in samples]) for model in (result.run, Model()))
    assert sqnr([expected], [found]) > 20


def test_whether_a_row_has_anything_is_still_known() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
            return x.masked_fill(~keep, -1e9).amax(-1) > -1e8, x.masked_fill(~keep, -1e4).argmax(-1)

    x, keep = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(4, 6, dtype=torch.bool)
    keep[1], keep[2], keep[2, 3], x[2, 3] = False, False, True, -4.0
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(x, keep)] * 2)
    some, best = result.run(x, keep)
    assert some.tolist() == [True, False, True, True]
    assert best[2] == 3  # the only one, and the least of all
    assert any("fill value -10000 is replaced" in note for note in result.report.notes)


def test_a_number_that_is_to_be_chosen_first_stays() -> None:
    class Model(nn.Module):
        def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
            return torch.where(keep, scores, 2000.0).amax(-1)

    samples = [(2 * torch.randn(16, 8), torch.rand(16, 8) > 0.4) for _ in range(4)]
    result = export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert (result.run(*samples[0]) - Model()(*samples[0])).abs().max() < 20


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
            module.reset_parameters()  # drawn when the file was read: by then others may have drawn numbers too
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
def test_types_that_are_not_quantized_are_named(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype).eval()
    with pytest.raises(ModelError, match=rf"aten.linear.default .* is {dtype}, .* \.float\(\)"):
        export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.randn(2, 4, dtype=dtype),)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_input_of_another_type_may_be_cast(dtype: torch.dtype) -> None:
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
def test_what_has_no_scale_of_its_own_is_left_alone(name: str) -> None:
    """Weights and biases that are computed, indices beside values: no observer and no integers for them."""

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
def test_inputs_of_any_size(size: float, recipe: ArmRecipeType) -> None:
    """What calibration saw of the input alone decides how well the program does on it; all of it stays legal."""

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
def test_large_tables_stay_int8(words: int, width: int) -> None:
    """A table that a sum reads is int16, for its precision; with a million numbers that would be a megabyte more."""
    torch.manual_seed(0)
    model, size = _Embedded(words).eval(), words * 64 * width
    samples = [(torch.randint(0, words, (1, 16), dtype=torch.int32),) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples[:3])
    assert size < len(result.buffer) < size + 40_000
    assert sqnr([model(*samples[3]).detach()], [result.run(*samples[3])]) > (60 if width == 2 else 38)


class _LinearAttention(nn.Module):
    """Its divisors, sums of weights, are a column of the matrix product that the dividends are in."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        sums = torch.relu(q) @ (torch.relu(k).transpose(-1, -2) @ values)
        return sums[..., :-1] / (sums[..., -1:] + 1e-6)


def test_divisors_that_are_computed_have_more_steps_than_int8() -> None:
    """Small ones, among larger numbers of the same tensor: 13.6 dB with 256 steps."""
    generator = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randn(1, 16, 8, generator=generator) for _ in range(3)) for _ in range(12)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=False)
    result = export(_LinearAttention(), recipe, samples[:8])
    assert result.compare(samples[8:], layers=False).sqnr > 27


def test_writes_to_what_others_share_are_refused() -> None:
    """Quantized, a view is a tensor of its own, and what is written to it would be lost without a word."""

    def written(x: Tensor) -> Tensor:
        y = x * 2
        y.diagonal().fill_(3.0)
        return y + 1

    case = Case("written", written, [Input((4, 4))])
    with pytest.raises(ModelError, match=r"aten.fill_.*share: quantize .*run_decompositions\(\{\}\)\.module\(\)"):
        quantized(case, wide=False)
    functional = torch.export.export(case.module(), case.sample()).run_decompositions({}).module()
    found = quantized(Case("functional", functional, case.inputs), wide=False)
    torch.testing.assert_close(found(*case.sample()), written(*case.sample()), atol=0.05, rtol=0)
