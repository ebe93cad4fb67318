"""Observers: scales and zero points from calibration, including degenerate tensors."""

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
    HeadroomObserver,
    HistogramObserver,
    NonFiniteError,
    PerChannelWeightObserver,
    RangeObserver,
    WeightObserver,
    find_min_mse_range,
)
from tests.ops.runner import export, make_compile_spec

_INT8: dict[str, Any] = {"dtype": torch.int8, "quant_min": -128, "quant_max": 127, "qscheme": torch.per_tensor_affine}
_WEIGHT: dict[str, Any] = {"dtype": torch.int8, "quant_min": -127, "quant_max": 127}
_INT4: dict[str, Any] = {"dtype": torch.int8, "quant_min": -7, "quant_max": 7}
_OBSERVERS = {
    "int8": lambda: HistogramObserver(**_INT8),
    "int16": lambda: HeadroomObserver(
        dtype=torch.int16, quant_min=-32768, quant_max=32767, qscheme=torch.per_tensor_symmetric
    ),
    "weight": lambda: WeightObserver(**_WEIGHT, qscheme=torch.per_tensor_symmetric),
    "channels": lambda: PerChannelWeightObserver(**_WEIGHT, qscheme=torch.per_channel_symmetric, ch_axis=0),
    "int4": lambda: PerChannelWeightObserver(**_INT4, qscheme=torch.per_channel_symmetric, ch_axis=0),
    "int4 per tensor": lambda: WeightObserver(**_INT4, qscheme=torch.per_tensor_symmetric),
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
def test_scales_represent_normal_and_degenerate_tensors(kind: str, tensor: str) -> None:
    observer, x = _OBSERVERS[kind](), _tensors()[tensor]
    assert observer(x) is x
    scale, zero_point = observer.calculate_qparams()
    assert scale.dtype is torch.float32
    assert bool(scale.isfinite().all())
    assert bool((scale > 0).all())
    assert bool(((zero_point >= observer.quant_min) & (zero_point <= observer.quant_max)).all())
    assert kind != "int16" or not zero_point.any()
    # The smallest scale is 2**-60. Few values get twice their range. 15 levels are seldom more precise than 15 %.
    error, size = (((y**2).mean()) ** 0.5 for y in (_rounded(x, observer) - x.double(), x.double()))
    share = 0.15 if kind.startswith("int4") else 0.01
    assert error <= max(share * float(size), 2.0**-60)


def test_observers_copy_a_sample_of_the_observed_values() -> None:
    """A buffer may be written after it was observed, and the memory of a large tensor must not stay alive."""
    x = torch.linspace(-1, 1, 1 << 18)
    fresh, observer = HistogramObserver(**_INT8), HistogramObserver(**_INT8)
    for each in (fresh, observer):
        each(x.clone() if each is fresh else x)
    x.fill_(3)
    assert observer.calculate_qparams() == fresh.calculate_qparams()
    for _ in range(8):
        observer(torch.randn(1 << 18))
    kept = observer._statistics.values
    assert sum(part.untyped_storage().nbytes() for part in kept) == 4 * sum(part.numel() for part in kept)


def test_quantization_parameters_are_cached_until_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = HistogramObserver._range

    def counted(self: HistogramObserver, seen: Any) -> Any:
        calls.append(seen)
        return original(self, seen)

    monkeypatch.setattr(HistogramObserver, "_range", counted)
    observer = HistogramObserver(**_INT8)
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
def test_min_mse_range_is_close_to_a_brute_force_search(name: str) -> None:
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


def test_min_mse_range_far_below_an_outlier() -> None:
    """With one outlier among 3 million close values, histogram bins over the whole range would be too coarse."""
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) / 200
    x[0] = 1.0
    low, high = (float(bound) for bound in find_min_mse_range(x, x.min().numpy(), x.max().numpy(), 255))
    best = min((_error(x, float(x.min()), 0.9**k), 0.9**k) for k in range(30))
    assert high < 0.3
    assert _error(x, low, high) <= 1.03 * best[0], (high, best)


def _quantized(module: nn.Module, config: QuantizationConfig, *samples: tuple[Tensor, ...]) -> nn.Module:
    model = export(module.eval(), samples[0]).module(check_guards=False)
    prepared = prepare_pt2e(model, TOSAQuantizer(make_compile_spec("int")).set_global(config))
    with torch.no_grad():
        for sample in samples:
            prepared(*sample)
    converted: nn.Module = convert_pt2e(prepared)
    return converted


@pytest.mark.parametrize(("value", "what"), [(0.0, "an infinity"), (-1.0, "NaN")])
def test_non_finite_calibration_values_name_the_operator(value: float, what: str) -> None:
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
def test_a_bias_survives_an_input_that_was_zero_in_calibration(size: float, per_channel: bool) -> None:
    """In steps of a tiny scale the bias would not fit into int32."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 4)
    nn.init.constant_(linear.bias, 3.0)
    with torch.no_grad():
        linear.weight[1] = 0.0
    x = torch.randn(2, 8) * size
    result = _quantized(linear, get_symmetric_quantization_config(per_channel), (x,))(x)
    assert torch.allclose(result, torch.full((2, 4), 3.0), atol=0.05)


def test_a_scale_of_several_channels_fits_their_largest_bias() -> None:
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


# -- int4 weights


def _int4_scales(weight: Tensor, axis: int = 0) -> Tensor:
    """The scale of each channel."""
    observer = PerChannelWeightObserver(**_INT4, qscheme=torch.per_channel_symmetric, ch_axis=axis)
    observer(weight)
    return observer.calculate_qparams()[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_exactly_representable_int4_weights_are_not_clipped(axis: int) -> None:
    weight = torch.arange(-7.0, 8) * torch.tensor([[0.5], [1.25], [1e-9], [1e30]])
    assert torch.equal(_int4_scales(weight.movedim(0, axis), axis), torch.tensor([0.5, 1.25, 1e-9, 1e30]))


def test_an_outlier_weight_is_clipped_if_that_lowers_the_error() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 4000, generator=generator)
    weight[1, 0] = 8.0
    scale = _int4_scales(weight)[:, None]
    peaks = weight.abs().amax(1, keepdim=True) / 7

    def error(step: Tensor) -> Tensor:
        return ((weight / step).round().clamp(-7, 7) * step - weight).square().sum(1)

    assert (error(scale) < 0.7 * error(peaks)).all()
    for other in torch.linspace(0.3, 1, 50):  # the candidates are 3 % of the peak apart
        assert (error(scale) < 1.05 * error(peaks * other)).all()
