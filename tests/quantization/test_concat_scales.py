"""Scales of concatenations: which operands keep their own scale, and the SQNR that this gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arm_backend_core.quantization.algorithms.concat_scales import _pool_observers
from arm_backend_core.quantization.observer import HistogramObserver
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export, prepare_qat
from arm_recipes.comparison.accuracy import sum_output_errors

INT8 = ArmRecipeType.TOSA_INT8
_SAMPLES = [(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),) for seed in range(8)]


class _Detector(nn.Module):
    """A head whose scores, 0 to 1, give offsets and sizes in pixels; all are joined. (N, 3, H, W) to (N, 2 H W, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.convolution(x).unflatten(1, (2, 5)).permute(0, 1, 3, 4, 2).sigmoid()
        centres, sizes = found[..., :2] * 64, (found[..., 2:4] * 2) ** 2 * 16
        return torch.cat([centres, sizes, found[..., 4:]], -1).flatten(1, 3)


class _Joined(nn.Module):
    """Applies ``join`` to two convolutions of one image. The second has weights that are ``gain`` times as large."""

    def __init__(self, gain: float, join: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.small, self.large, self.join = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), join
        with torch.no_grad():
            self.large.weight.mul_(gain)

    def forward(self, x: Tensor) -> Any:
        return self.join(self.small(x), self.large(x))


def _exported(model: nn.Module, target: ArmRecipeType = INT8, *, joins: bool = True) -> ExportResult:
    recipe = ExportRecipe.get_recipe(
        target, algorithms=["int16_outputs", "concat_scales"] if joins else ["int16_outputs"]
    )
    return export(model.eval(), recipe, _SAMPLES[:-2], verify=True)


def _output_sqnr(model: nn.Module, result: ExportResult) -> list[float]:
    """SQNR of each output over two of the calibration samples."""
    pairs = [(model(*x), result.run(*x)) for x in _SAMPLES[:2]]
    outputs = [list(zip(*map(pytree.tree_leaves, pair), strict=True)) for pair in pairs]
    return [sum_output_errors(*zip(*found, strict=True)).metrics.sqnr for found in zip(*outputs, strict=True)]


@pytest.mark.parametrize("target", [INT8, ArmRecipeType.TOSA_A16W8, ArmRecipeType.ETHOSU_U55_INT8])
def test_other_readers_of_an_operand_get_its_own_scale(target: ArmRecipeType) -> None:
    torch.manual_seed(0)
    model = _Detector()
    (before,), (after,) = (_output_sqnr(model, _exported(model, target, joins=joins)) for joins in (False, True))
    # In int16, a second TABLE has the squares of values that are small relative to the range.
    assert before < (55 if target is ArmRecipeType.TOSA_A16W8 else 30)
    assert after > max(before + 10, 40)


_JOINS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the operand is returned": lambda x, y: (torch.cat([x, y], 1), x),
    "stacked": lambda x, y: (torch.stack([y, x]), x * x),
    "a slice of it": lambda x, y: (torch.cat([y, x[:, :2]], 1), x.exp()),
    "joined twice": lambda x, y: (lambda z: (torch.cat([z, y], 1), z * z))(torch.cat([x, x.relu()], 1)),
}


@pytest.mark.parametrize("name", _JOINS)
def test_operands_of_much_smaller_range_keep_their_scale(name: str) -> None:
    torch.manual_seed(0)
    model = _Joined(100.0, _JOINS[name])
    before, after = (_output_sqnr(model, _exported(model, joins=joins)) for joins in (False, True))
    assert before[1] < 20
    assert after[1] > 35
    assert after[0] > before[0] - 1


def test_concatenation_with_a_slice_of_small_values_keeps_the_scale_of_the_other_operand() -> None:
    torch.manual_seed(0)
    model = _Joined(100.0, lambda x, y: (torch.cat([x, y[:, :1]], 1), x.exp(), y.relu()))
    with torch.no_grad():
        model.large.weight[0] /= 100
    before, after = (_output_sqnr(model, _exported(model, joins=joins)) for joins in (False, True))
    assert after[1] > 35 > 20 > before[1]
    assert after[2] > before[2] - 1


_UNCHANGED: dict[str, tuple[float, Callable[[Tensor, Tensor], Any]]] = {
    "of one size": (1.0, lambda x, y: (torch.cat([x, y], 1), x * x)),
    "read nowhere else": (100.0, lambda x, y: torch.cat([x, y], 1).tanh()),
    "moved and joined alone": (100.0, lambda x, y: torch.cat([x.flip(2), torch.cat([y, x], 1)], 1).tanh()),
    "returned": (1.0, lambda x, y: torch.cat([x, y], 1).flatten(1)),
    "of the steps of a loop": (1.0, lambda x, y: torch.stack([x + y * i for i in range(3)])),
}


@pytest.mark.parametrize("name", _UNCHANGED)
def test_concatenations_without_a_gain_are_unchanged(name: str) -> None:
    torch.manual_seed(0)
    gain, join = _UNCHANGED[name]
    model = _Joined(gain, join)
    assert _exported(model, joins=True).buffer == _exported(model, joins=False).buffer


_RETURNED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "joined": lambda x, y: torch.cat([x, y], 1),
    "of two levels": lambda x, y: torch.cat([torch.cat([x.relu(), y], 1), torch.cat([x, y.relu()], 1)], 2).flip(3),
    "stacked and taken apart": lambda x, y: (lambda z: (z[:, 0], z[:, 1]))(torch.stack([x.sigmoid(), y], 1)),
}


@pytest.mark.parametrize("target", [INT8, ArmRecipeType.ETHOSU_U55_INT8])
@pytest.mark.parametrize("name", _RETURNED)
def test_returned_concatenations_have_the_precision_of_their_operands(name: str, target: ArmRecipeType) -> None:
    torch.manual_seed(0)
    model = _Joined(100.0, _RETURNED[name])
    before, after = (_exported(model, target, joins=joins) for joins in (False, True))
    fine = [pytree.tree_leaves(run(*_SAMPLES[0]))[0][:, :4] for run in (model, before.run, after.run)]
    assert sum_output_errors(fine[:1], fine[1:2]).metrics.sqnr < 20
    assert sum_output_errors(fine[:1], fine[2:]).metrics.sqnr > 35


def test_a_quantized_output_has_one_scale() -> None:
    model = _Joined(100.0, _RETURNED["joined"]).eval()
    (output,) = export(model, ExportRecipe.get_recipe(INT8, quantized_io=True), _SAMPLES).outputs
    assert output.dtype == "int8"


def test_operands_of_similar_range_share_a_scale_and_others_do_not() -> None:
    """The shared scale is calibrated with the values of all its operands."""
    torch.manual_seed(0)
    model = _Joined(100.0, lambda x, y: (torch.cat([x, y, y + 1], 1), x * x, y * y))
    before, after = (_output_sqnr(model, _exported(model, joins=joins)) for joins in (False, True))
    assert after[1] > 35 > 20 > before[1]
    assert after[2] > before[2] - 1


def test_biases_follow_the_operand_that_they_are_added_to() -> None:
    torch.manual_seed(0)
    reader = nn.Conv2d(4, 4, 1)
    with torch.no_grad():
        assert reader.bias is not None
        reader.bias.fill_(3.0)
    model = _Joined(100.0, lambda x, y: (torch.cat([x, y], 1), reader(x)))
    model.reader = reader
    assert _output_sqnr(model, _exported(model, ArmRecipeType.ETHOSU_U85_INT8))[1] > 35


def test_prepare_qat_keeps_scales_of_concatenated_operands() -> None:
    torch.manual_seed(0)
    model = _Detector()
    prepared = prepare_qat(model, ExportRecipe.get_recipe(INT8, algorithms=["concat_scales"]), _SAMPLES)
    prepared.train()
    prepared(torch.randn(2, 3, 4, 8)).sum().backward()  # other shapes than in calibration
    prepared.eval()
    result = prepared.export()
    assert _output_sqnr(model, result)[0] > 40
    expected, found = prepared(*_SAMPLES[0]), result.run(*_SAMPLES[0])
    assert float((expected - found).abs().max()) <= 1.01 * float((expected.max() - expected.min()) / 255)


def test_pooled_observers_of_integers_have_a_scale_that_represents_integers() -> None:
    observers = [
        HistogramObserver(torch.int8, qscheme=torch.per_tensor_affine, quant_min=-128, quant_max=127) for _ in range(2)
    ]
    for observer, values in zip(observers, ([0.0, 1.0, 3.0], [0.0, 2.0, 5.0]), strict=True):
        observer(torch.tensor(values))
    scale = float(_pool_observers(observers).calculate_qparams()[0])
    assert (1 / scale).is_integer()
