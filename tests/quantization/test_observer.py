"""Scales and zero points from what calibration shows, degenerate tensors included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from arm_backend_core.quantization import (
    QuantizationConfig,
    TOSAQuantizer,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.observer import (
    ActivationObserver,
    HeadroomObserver,
    NonFiniteError,
    PerChannelWeightObserver,
    RangeObserver,
    WeightObserver,
    find_min_mse_range,
)
from tests.ops.runner import export, spec

_INT8: dict[str, Any] = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_affine}
_WEIGHT: dict[str, Any] = {"dtype": torch.int8, "quant_min": -127, "quant_max": 127}
_FOUR_BITS: dict[str, Any] = {"dtype": torch.int8, "quant_min": -7, "quant_max": 7}
_OBSERVERS = {
    "int8": lambda: ActivationObserver(**_INT8),
    "int16": lambda: HeadroomObserver(
        dtype=torch.int16, quant_min=-32768, quant_max=32767, qscheme=torch.per_tensor_symmetric
    ),
    "weight": lambda: WeightObserver(**_WEIGHT, qscheme=torch.per_tensor_symmetric),
    "channels": lambda: PerChannelWeightObserver(**_WEIGHT, qscheme=torch.per_channel_symmetric, ch_axis=0),
    "four bits": lambda: PerChannelWeightObserver(**_FOUR_BITS, qscheme=torch.per_channel_symmetric, ch_axis=0),
    "four bits, one scale": lambda: WeightObserver(**_FOUR_BITS, qscheme=torch.per_tensor_symmetric),
}


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(4, 4000, generator=generator)
    outlier = normal.clone()
    outlier[0, 0] = 1e6
    return {
        "normal": normal,
        "few": normal[:, :3],
        "one": normal[:1, :1],
        "relu": normal.relu(),
        "negative": -normal.abs() - 1,
        "outlier": outlier,
        "largest": torch.tensor([[torch.finfo(torch.float32).max, torch.finfo(torch.float32).min]]),
        **{f"{value:g}": torch.full((4, 4000), value) for value in (0.0, 1.0, -3.0, 1e-30, -1e-30, 1e30, 1e-45)},
        **{f"{scale:g} normal": normal * scale for scale in (1e-30, 1e-7, 1e7, 1e30)},
        **{f"few {scale:g}": normal[:, :3] * scale for scale in (1e-30, 1e-7, 1e7, 1e30)},
    }


def _rounded(x: Tensor, observer: RangeObserver) -> Tensor:
    scale, zero_point = (t.double() for t in observer.calculate_qparams())
    if len(scale) > 1:
        scale, zero_point = scale[:, None], zero_point[:, None]
    integers = (torch.round(x.double() / scale) + zero_point).clamp(observer.quant_min, observer.quant_max)
    return (integers - zero_point) * scale


@pytest.mark.parametrize("tensor", _tensors())
@pytest.mark.parametrize("kind", _OBSERVERS)
def test_every_calibration_gives_a_scale_that_represents_it(kind: str, tensor: str) -> None:
    observer, x = _OBSERVERS[kind](), _tensors()[tensor]
    assert observer(x) is x
    scale, zero_point = observer.calculate_qparams()
    assert scale.dtype is torch.float32
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())
    assert bool(((zero_point >= observer.quant_min) & (zero_point <= observer.quant_max)).all())
    assert kind != "int16" or not zero_point.any()
    # Scales end at 2**-60; few values have a range twice as wide as what was seen. Of 15 levels few can be better.
    error, size = (((y**2).mean()) ** 0.5 for y in (_rounded(x, observer) - x.double(), x.double()))
    share = 0.15 if kind.startswith("four") else 0.01
    assert error <= max(share * float(size), 2.0**-60)


def test_what_was_observed_may_change_and_is_not_kept() -> None:
    """A buffer is written after it was observed; of a large tensor a part is kept, not its memory."""
    x = torch.linspace(-1, 1, 1 << 18)
    fresh, observer = ActivationObserver(**_INT8), ActivationObserver(**_INT8)
    for each in (fresh, observer):
        each(x.clone() if each is fresh else x)
    x.fill_(3)
    assert observer.calculate_qparams() == fresh.calculate_qparams()
    for _ in range(8):
        observer(torch.randn(1 << 18))
    kept = observer._statistics.values
    assert sum(part.untyped_storage().nbytes() for part in kept) == 4 * sum(part.numel() for part in kept)


def test_parameters_are_computed_once_until_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = ActivationObserver._range

    def counted(self: ActivationObserver, seen: Any) -> Any:
        calls.append(seen)
        return original(self, seen)

    monkeypatch.setattr(ActivationObserver, "_range", counted)
    observer = ActivationObserver(**_INT8)
    observer(torch.linspace(-1, 1, 100))
    first = observer.calculate_qparams()
    assert observer.calculate_qparams() is first
    assert len(calls) == 1
    observer(torch.linspace(-4, 4, 100))
    assert float(observer.calculate_qparams()[0]) > 2 * float(first[0])
    assert len(calls) == 2


def _error(x: Tensor, low: float, high: float) -> float:
    step = (high - low) / 255
    zero = round(-low / step)
    integers = (torch.round(x.double() / step) + zero).clamp(0, 255)
    return float((((integers - zero) * step - x) ** 2).mean())


@pytest.mark.parametrize("name", ["normal", "relu", "heavy tail", "two scales", "outlier"])
def test_the_range_has_nearly_the_least_error_of_all(name: str) -> None:
    """A search by brute force over 40 x 40 ranges finds none that is 3% better."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20000, generator=generator)
    x = {
        "normal": x,
        "relu": x.relu(),
        "heavy tail": x.sign() * x.abs() ** 3,
        "two scales": torch.cat([x, 20 * x[:50]]),
        "outlier": torch.cat([x, torch.tensor([300.0])]),
    }[name]
    low, high = (float(bound) for bound in find_min_mse_range(x, x.min().numpy(), x.max().numpy(), 255))
    found = _error(x, low, high)
    best = math.inf
    for bottom in [float(x.min()) * 0.87**k for k in range(40)] if x.min() < 0 else [0.0]:
        best = min(best, *(_error(x, bottom, float(x.max()) * 0.87**k) for k in range(40)))
    assert found <= 1.03 * best, (low, high)


def test_a_range_that_is_a_small_part_of_the_values_is_found() -> None:
    """Among 3 million values that lie close together one is far away: bins over all of them would be too coarse."""
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) / 200
    x[0] = 1.0
    low, high = (float(bound) for bound in find_min_mse_range(x, x.min().numpy(), x.max().numpy(), 255))
    best = min((_error(x, float(x.min()), 0.9**k), 0.9**k) for k in range(30))
    assert high < 0.3
    assert _error(x, low, high) <= 1.03 * best[0], (high, best)


def _quantized(module: nn.Module, config: QuantizationConfig, *samples: tuple[Tensor, ...]) -> nn.Module:
    model = export(module.eval(), samples[0]).module(check_guards=False)
    prepared = prepare_pt2e(model, TOSAQuantizer(spec("int")).set_global(config))
    with torch.no_grad():
        for sample in samples:
            prepared(*sample)
    converted: nn.Module = convert_pt2e(prepared)
    return converted


@pytest.mark.parametrize(("value", "what"), [(0.0, "an infinity"), (-1.0, "NaN")])
def test_what_is_not_finite_in_calibration_is_named(value: float, what: str) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.log(x) * y

    samples = [(torch.ones(2, 3), torch.ones(2, 3)), (torch.full((2, 3), value), torch.ones(2, 3))]
    with pytest.raises(
        NonFiniteError, match=rf"the result of aten.log.default \('log', .*test_observer.py:\d+\) holds {what}"
    ):
        _quantized(Product(), get_symmetric_quantization_config(), *samples)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8])
def test_a_bias_survives_an_input_that_calibration_saw_nothing_of(size: float, per_channel: bool) -> None:
    """In steps of a tiny scale the bias would not fit into int32."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    nn.init.constant_(linear.bias, 3.0)
    with torch.no_grad():
        linear.weight[1] = 0.0
    x = torch.randn(2, 8) * size
    result = _quantized(linear, get_symmetric_quantization_config(per_channel), (x,))(x)
    assert torch.allclose(result, torch.full((2, 4), 3.0), atol=0.05)


def test_channels_that_share_a_scale_fit_the_largest_bias_of_them() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2)
    nn.init.constant_(layer.bias, 3.0)  # type: ignore[arg-type]
    x = torch.zeros(1, 4, 5)
    result = _quantized(layer, get_symmetric_quantization_config(), (x,))(x)
    assert torch.allclose(result, torch.full((1, 6, 7), 3.0), atol=0.05)


@pytest.mark.parametrize("config", [get_symmetric_quantization_config, get_symmetric_a16w8_quantization_config])
def test_small_weights_with_large_inputs(config: type) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    with torch.no_grad():
        linear.weight *= 1e-5
    x = torch.randn(16, 8) * 1e5
    expected = linear(x)
    result = _quantized(linear, config(), (x,))(x)
    assert (result - expected).abs().max() < 0.03 * expected.abs().max()


# -- weights of four bits


def _four_bits(weight: Tensor, axis: int = 0) -> Tensor:
    """The scale of each channel."""
    observer = PerChannelWeightObserver(**_FOUR_BITS, qscheme=torch.per_channel_symmetric, ch_axis=axis)
    observer(weight)
    return observer.calculate_qparams()[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_what_four_bits_hold_exactly_is_not_clipped(axis: int) -> None:
    weight = torch.arange(-7.0, 8) * torch.tensor([[0.5], [1.25], [1e-9], [1e30]])
    assert torch.equal(_four_bits(weight.movedim(0, axis), axis), torch.tensor([0.5, 1.25, 1e-9, 1e30]))


def test_a_far_weight_is_clipped_where_that_errs_less() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 4000, generator=generator)
    weight[1, 0] = 8.0
    scale = _four_bits(weight)[:, None]
    peaks = weight.abs().amax(1, keepdim=True) / 7

    def error(step: Tensor) -> Tensor:
        return ((weight / step).round().clamp(-7, 7) * step - weight).square().sum(1)

    assert (error(scale) < 0.7 * error(peaks)).all()
    for other in torch.linspace(0.3, 1, 50):  # the candidates are 3 % of the peak apart
        assert (error(scale) < 1.05 * error(peaks * other)).all()
