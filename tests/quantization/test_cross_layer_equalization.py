"""Cross-layer equalization: which weights change, that the function does not, and the SQNR that it gains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.quantization.algorithms.cross_layer_equalization import equalize
from arm_recipes import ArmRecipeType, ExportRecipe, export, prepare_qat
from tests.sqnr import sqnr

INT8 = ArmRecipeType.TOSA_INT8
_GAINS = 2.0 ** torch.linspace(-2.5, 2.5, 8)


def _scale_axis(tensor: Any, factors: Tensor, axis: int) -> None:
    if tensor is not None:
        with torch.no_grad():
            tensor.mul_(factors.reshape([-1 if i == axis else 1 for i in range(tensor.dim())]))


class _Uneven(nn.Module):
    """Two layers; channels between them have gains up to a factor of 32 apart, which the second layer divides out."""

    def __init__(self, first: nn.Module, between: nn.Module, *readers: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.readers = first, between, nn.ModuleList(readers)
        source: Any = first[-1] if isinstance(first, nn.Sequential) else first
        for parameter in source.parameters():
            _scale_axis(parameter, _GAINS, 0)
        for reader in readers:
            weight: Any = reader.weight
            _scale_axis(weight, 1 / _GAINS, 0 if weight.shape[1] == 1 else 1)

    def forward(self, x: Tensor) -> Any:
        x = self.between(self.first(x))
        return tuple(reader(x) for reader in self.readers)


def _norm(kind: type[nn.Module]) -> nn.Module:
    norm: Any = kind(8)
    if getattr(norm, "bias", None) is not None:
        nn.init.normal_(norm.bias)
    return norm


IMAGES: dict[str, Any] = {
    "convolutions": lambda: _Uneven(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 2, 1)),
    "pooled": lambda: _Uneven(nn.Conv2d(3, 8, 3, bias=False), nn.MaxPool2d(2), nn.Conv2d(8, 4, 2)),
    "depthwise": lambda: _Uneven(
        nn.Sequential(nn.Conv2d(3, 8, 3), _norm(nn.BatchNorm2d)), nn.ReLU(), nn.Conv2d(8, 8, 2, groups=8)
    ),
}
ROWS: dict[str, Any] = {
    "dense": lambda: _Uneven(
        nn.Sequential(nn.Flatten(), nn.Linear(40, 8), _norm(nn.BatchNorm1d)), nn.ReLU(), nn.Linear(8, 4)
    ),
    "linear": lambda: _Uneven(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 16)),
    "norm": lambda: _Uneven(_norm(nn.LayerNorm), nn.Identity(), nn.Linear(8, 16)),
    "rms norm": lambda: _Uneven(_norm(nn.RMSNorm), nn.Identity(), nn.Linear(8, 16, bias=False), nn.Linear(8, 8)),
}


def _model(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    model = (IMAGES | ROWS)[name]().eval()
    return model, [(torch.randn(1, 3, 8, 8) if name in IMAGES else torch.randn(1, 5, 8),) for _ in range(8)]


def _equalize(model: nn.Module, sample: tuple[Tensor, ...]) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Equalize a captured program; return it with the names of its changed tensors. The model must not change."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    program = torch.export.export(model, sample)
    original = dict(program.state_dict)
    equalize(program)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return program, [key for key, value in program.state_dict.items() if value is not original[key]]


@pytest.mark.parametrize("name", IMAGES | ROWS)
def test_equalization_evens_channel_ranges_and_keeps_the_function(name: str) -> None:
    model, samples = _model(name)
    program, changed = _equalize(model, samples[0])
    assert {key.partition(".")[0] for key in changed} == {"first", "readers"}
    assert not [key for key in changed if "bias" in key and "readers" in key]
    with torch.no_grad():
        for one, other in zip(model(*samples[1]), program.module()(*samples[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    weights = [program.state_dict[key] for key in changed if key.startswith("readers") and key.endswith("weight")]
    for weight in weights:
        axis = 0 if weight.shape[1] == 1 else 1
        sizes = weight.abs().movedim(axis, 0).flatten(1).amax(1)
        assert sizes.max() < 8 * sizes.min()  # before: 32 or more


@pytest.mark.parametrize(("name", "per_channel"), [("convolutions", False), ("rms norm", True)])
def test_equalization_improves_the_sqnr_of_outputs(name: str, per_channel: bool) -> None:
    """Each layer can still be compared with the model."""
    model, samples = _model(name)
    found = {}
    for algorithms in ([], ["cross_layer_equalization"]):
        recipe = ExportRecipe.get_recipe(INT8, algorithms=algorithms, per_channel=per_channel)
        result = export(model, recipe, samples[:-1])
        with torch.no_grad():
            pairs = zip(model(*samples[-1]), result.run(*samples[-1]), strict=True)
        found[len(algorithms)] = min(sqnr(*pair) for pair in pairs)
    assert found[1] > max(found[0] + 10, 35)
    assert min(layer.gap.sqnr for layer in result.compare(samples[-1:]).layers) > 25


def test_prepare_qat_equalizes_the_prepared_model() -> None:
    """The prepared model has other parameters and the same function. Its program has these parameters."""
    model, samples = _model("convolutions")
    (x,) = samples[-1]
    with torch.no_grad():
        expected = model(x)[0]
    found = {}
    for name, algorithms in (
        ("as it was", {"bias_correction"}),
        ("equalized", {"bias_correction", "cross_layer_equalization"}),
    ):
        recipe = ExportRecipe.get_recipe(INT8, algorithms=algorithms, per_channel=False)
        prepared = prepare_qat(copy.deepcopy(model), recipe, samples[:-1], progress=False).eval()
        with torch.no_grad():
            torch.testing.assert_close(prepared.model(x)[0], expected, rtol=1e-4, atol=1e-5)
            found[name] = prepared(x)[0]
            again = prepared.export(progress=False).exported_programs["forward"].module()(x)[0]
        assert torch.equal(again, found[name])
        weights = (dict(one.named_parameters())["first.weight"] for one in (prepared.model, model))
        assert torch.equal(*weights) == (name == "as it was")
    assert sqnr(expected, found["equalized"]) > max(sqnr(expected, found["as it was"]) + 10, 35)


class _Tied(nn.Module):
    """Two operators read one weight, so that it cannot be changed for one of them."""

    def __init__(self, two: Any) -> None:
        super().__init__()
        self.two = two

    def forward(self, x: Tensor) -> Any:
        return self.two(x), nn.functional.linear(x, self.two.readers[0].weight)


class _ReadElsewhere(_Tied):
    """The tensor between the two layers has another reader."""

    def forward(self, x: Tensor) -> Any:
        x = self.two.between(self.two.first(x))
        return self.two.readers[0](x), x.sum()


class _Returned(_Tied):
    def forward(self, x: Tensor) -> Any:
        x = self.two.between(self.two.first(x))
        return self.two.readers[0](x), x


class _Unread(_Tied):
    """A layer whose result nobody reads."""

    def forward(self, x: Tensor) -> Any:
        x = self.two.between(self.two.first(x))
        self.two.readers[1](x)
        return self.two.readers[0](x)


@pytest.mark.parametrize("captured", [False, True])
def test_a_layer_without_readers_does_not_prevent_equalization(captured: bool) -> None:
    torch.manual_seed(0)
    two = _Uneven(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    model, samples = _Unread(two).eval(), [(torch.randn(1, 5, 8),) for _ in range(2)]
    assert _equalize(model, samples[0])[1]
    with torch.no_grad():
        expected = model(*samples[0])
    unread = torch.export.export(model, samples[0])
    assert sum(node.target is torch.ops.aten.linear.default for node in unread.graph.nodes) == 3
    result = export(unread if captured else model, ExportRecipe.get_recipe(INT8), samples)
    assert sqnr(result.run(*samples[0]), expected) > 35
    assert not result.report.cpu_operators


@pytest.mark.parametrize("form", [nn.ReLU6(), nn.GELU(), nn.Softmax(-1), _Tied, _ReadElsewhere, _Returned])
def test_layers_that_are_not_invariant_to_channel_factors_are_not_equalized(form: Any) -> None:
    torch.manual_seed(0)
    wrapped = isinstance(form, type)
    model: nn.Module = _Uneven(nn.Linear(8, 8), nn.ReLU() if wrapped else form, nn.Linear(8, 8))
    model = form(model) if wrapped else model
    assert not _equalize(model.eval(), (torch.randn(1, 5, 8),))[1]


def test_channels_of_similar_range_are_not_equalized() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    assert not _equalize(model, (torch.randn(1, 8),))[1]


def test_channels_that_are_always_zero_have_no_factor() -> None:
    model, samples = _model("linear")
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        parameters["first.weight"][3] = 0
        parameters["readers.0.weight"][:, 5] = 0
    program, changed = _equalize(model, samples[0])
    assert changed
    assert all(bool(torch.isfinite(value).all()) for value in program.state_dict.values())


class Statistics(nn.Module):
    """Learned features beside raw statistics, whose large values have small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(16, 32), nn.Linear(36, 8)
        with torch.no_grad():
            self.head.weight[:, 32:] /= 100

    def forward(self, x: Tensor, statistics: Tensor) -> Tensor:
        """x [1, 16], statistics [1, 4]."""
        return self.head(torch.cat([self.features(x).relu(), statistics * 100], 1))


def test_operands_of_a_concatenation_are_equalized() -> None:
    torch.manual_seed(0)
    model = Statistics().eval()
    samples = [(torch.randn(1, 16), torch.rand(1, 4) * 2 - 1) for _ in range(16)]
    expected = model(*samples[0]).detach()
    for recipe, minimum in ((ArmRecipeType.TOSA_INT8, 33), (ArmRecipeType.TOSA_A16W8, 38)):
        result = export(model, ExportRecipe.get_recipe(recipe), samples)
        assert sqnr(result.run(*samples[0]), expected) > minimum
