"""Complex numbers between real inputs and results: pairs of real numbers, in one delegate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import runner
from tests.ops.runner import Case, Input
from tests.sqnr import sqnr
from tests.tosa_graphs import assert_valid


def _complex(x: Tensor) -> Tensor:
    """[..., 6] as [..., 3] complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (3, 2)))


def _filtered(x: Tensor, y: Tensor) -> Tensor:
    """A layer of a Fourier neural operator."""
    spectrum = torch.fft.rfft2(x, norm="ortho")
    weight = torch.view_as_complex(torch.linspace(-1, 1, spectrum.numel() * 2).reshape(*spectrum.shape, 2))
    return torch.fft.irfft2(spectrum * weight, s=x.shape[-2:], norm="ortho")


def _modes(x: Tensor, y: Tensor) -> Tensor:
    """A layer of a Fourier neural operator in its usual form: it writes the low frequencies into zeros."""
    weight = torch.view_as_complex(torch.linspace(-1, 1, 4 * 3 * 2 * 2).reshape(4, 3, 2, 2))
    written = torch.zeros(x.shape[0], 3, 4, dtype=torch.cfloat)
    written[:, :, :2] = torch.einsum("bix,iox->box", torch.fft.rfft(x)[:, :, :2], weight)
    return torch.fft.irfft(written, n=6)


def _rotated(x: Tensor, y: Tensor) -> Tensor:
    """Rotary embeddings as in the first code of Llama."""
    angles = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1, 0.01]))
    return torch.view_as_real(_complex(x) * torch.polar(torch.ones_like(angles), angles)).flatten(2)


def _convolved(x: Tensor, y: Tensor) -> Tensor:
    """Convolution, linear layers with a bias and without one, complex and real factors."""
    weight = torch.view_as_complex(torch.linspace(-1, 1, 5 * 4 * 2 * 2).reshape(5, 4, 2, 2))
    z = F.conv1d(_complex(x), weight, torch.linspace(-1, 1, 5).to(torch.cfloat) * (1 + 2j))
    z = F.linear(z, weight[:3, 0] * 0.5, torch.full((3,), 0.5 - 1j)) @ (torch.eye(3) + 0.5).to(torch.cfloat)
    return torch.view_as_real(torch.addmm(z[0], z[0], weight[:3, 1, :1].expand(3, 3)))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rfft": lambda x, y: torch.view_as_real(torch.fft.rfft(x)),
    "rfft_ortho": lambda x, y: torch.fft.rfft(x, dim=1, norm="ortho").real,
    "rfft_longer": lambda x, y: torch.fft.rfft(x, n=9).imag,
    "rfft2": lambda x, y: (torch.fft.rfft2(x).real, torch.fft.rfft2(x).imag),
    "rfftn": lambda x, y: torch.fft.rfftn(x, norm="forward").abs(),
    "irfft": lambda x, y: torch.fft.irfft(_complex(x)),
    "irfft_odd": lambda x, y: torch.fft.irfft(_complex(x), n=5, norm="forward"),
    "irfft2": lambda x, y: torch.fft.irfft2(_complex(x)),
    "fft": lambda x, y: torch.view_as_real(torch.fft.fft(x)),
    "ifft": lambda x, y: torch.view_as_real(torch.fft.ifft(_complex(x), dim=1)),
    "fft2": lambda x, y: torch.fft.fft2(_complex(x)).real,
    "spectral_layer": _filtered,
    "stft": lambda x, y: torch.view_as_real(torch.stft(x.flatten(), 12, 5, return_complex=True)),
    "mixing": lambda x, y: torch.fft.fft2(x).real + y,
    "arithmetic": lambda x, y: torch.view_as_real((_complex(x) - 2 * _complex(y)) * _complex(y) + y[..., :3]),
    "quotient": lambda x, y: torch.view_as_real(_complex(x) / (_complex(y) * 0.1 + 3) / (y[..., :3].abs() + 1)),
    "parts": lambda x, y: (_complex(x).angle(), (-_complex(x)).imag, _complex(x).conj().imag),
    "modes": _modes,
    "rotated": _rotated,
    "convolved": _convolved,
    "numbers": lambda x, y: torch.view_as_real(_complex(x) * 2j + (1 - 2j) - 3 + y[..., :3] * 1j),
    "polar": lambda x, y: torch.view_as_real(torch.polar(x.abs(), y) + torch.complex(x, y) + torch.zeros_like(x) * 1j),
    "exponential": lambda x, y: torch.view_as_real(torch.exp(_complex(x)) + torch.log(_complex(y))),
    "powers": lambda x, y: torch.view_as_real(
        _complex(x) ** 3 + _complex(y) ** (2 + 0j) + torch.sqrt(_complex(y)) + _complex(y) ** 1.5
    ),
    "signs": lambda x, y: torch.view_as_real(torch.sgn(_complex(x)) + 1 / _complex(y)),
    "sums": lambda x, y: torch.view_as_real(_complex(x).sum(1) + _complex(y).mean(1) + _complex(x).cumsum(1)[:, 1]),
    "lengths": lambda x, y: torch.linalg.vector_norm(_complex(x), dim=1) + _complex(y).norm(),
    "chosen": lambda x, y: torch.view_as_real(torch.where(x[..., :3] > 0, _complex(x), y[..., :3].to(torch.cfloat))),
    "written": lambda x, y: torch.view_as_real(torch.select_scatter(_complex(x), _complex(y)[:, 1], 1, 2)),
    "subtracted": lambda x, y: torch.view_as_real(1 - _complex(x) + torch.rsub(_complex(y), y[..., :3])),
    "picked": lambda x, y: torch.view_as_real(
        _complex(x).index_select(1, torch.tensor([3, 0])) + _complex(y)[:, [1, 2]].gather(1, torch.ones(2, 2, 3).long())
    ),
    "masked": lambda x, y: torch.view_as_real(
        _complex(x).masked_fill(y[..., :3] > 0, 2j).tril().lerp(_complex(y), 0.3)
    ),
    "equal": lambda x, y: ((_complex(x) == y[..., :3]) | (_complex(x) != _complex(y))).float() + y[..., :3],
    "waves": lambda x, y: torch.view_as_real(torch.cos(_complex(x)) + torch.sin(_complex(y) * 0.5)),
    "tangents": lambda x, y: torch.view_as_real(torch.tanh(_complex(x)) + torch.tanh(_complex(y) * 30)),
    "tan": lambda x, y: torch.view_as_real(torch.tan(_complex(x)) + torch.sigmoid(_complex(y))),
    "logarithms": lambda x, y: torch.view_as_real(torch.log2(_complex(x)) - torch.log10(_complex(y))),
    "powers of two": lambda x, y: torch.view_as_real(torch.exp2(_complex(x)) * torch.rsqrt(_complex(y))),
    "hyperbolic": lambda x, y: torch.view_as_real(torch.sinh(_complex(x)) * 0.5 + torch.cosh(_complex(y))),
    "products": lambda x, y: torch.view_as_real(_complex(x).prod(1) + _complex(y).prod(-1, keepdim=True)[:, 0]),
    "parts of": lambda x, y: torch.view_as_real(
        _complex(x).diagonal(0, 1, 2)[..., None] + _complex(y).unfold(1, 3, 1)[:, 0]
    ),
    "added rows": lambda x, y: torch.view_as_real(_complex(x).index_add(1, torch.tensor([2, 0]), _complex(y)[:, :2])),
    "filled": lambda x, y: (
        torch.ones_like(_complex(x), dtype=torch.float32) * torch.full_like(_complex(y), 2j).imag + y[..., :3]
    ),
    "batched": lambda x, y: torch.view_as_real(
        torch.baddbmm(
            _complex(x)[:, :3], _complex(y)[:, :3], torch.addcmul(_complex(x), _complex(y), _complex(x))[:, 1:]
        )
    ),
    "moved": lambda x, y: torch.view_as_real(torch.cat([_complex(x), _complex(y)], 1).transpose(1, 2)[..., 1:]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_whole_in_float(name: str) -> None:
    case = Case(name, FUNCTIONS[name], [Input((2, 4, 6)), Input((2, 4, 6))], atol=1e-5)
    inputs = case.sample()
    lowered = runner.lower(runner.export(case.module(), inputs), "fp")
    lowered.check_delegated()
    assert_valid(lowered.log.delegates[0].tosa, "TOSA-1.0+FP")
    runner.check_close(case, lowered.run(inputs), runner.flatten_tensors(case.module()(*inputs)))


@pytest.mark.parametrize("name", ["rfft2", "spectral_layer", "stft", "rotated", "polar"])
def test_runs_whole_in_integers(name: str) -> None:
    case = Case(name, FUNCTIONS[name], [Input((2, 4, 6)), Input((2, 4, 6))])
    module, inputs = runner.quantize_case(case, int16=True), case.sample()
    lowered = runner.lower(runner.export(module, inputs), "int")
    lowered.check_delegated()
    for ours, theirs in zip(lowered.run(inputs), runner.flatten_tensors(case.module()(*inputs)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3 * float(theirs.abs().max()), rtol=0)


WAVE = torch.randn(2, 90, generator=torch.Generator().manual_seed(5))
SPEECH = {"n_fft": 16, "hop_length": 5, "win_length": 12, "window": torch.hann_window(12)}
SHORT_TIME: dict[str, dict[str, Any]] = {
    "speech": {},
    "no window": {"window": None},
    "odd": {"n_fft": 15, "win_length": 10, "window": torch.hamming_window(10)},
    "default window length": {"win_length": None, "window": torch.hann_window(16)},
    "default hop": {"hop_length": None},
    "not centered": {"center": False, "window": torch.hamming_window(12)},
    "aligned": {"center": False, "align_to_window": True},
    "normalized": {"normalized": True},
    "two sides": {"onesided": False},
    "zeros around": {"pad_mode": "constant"},
    "repeated edges": {"pad_mode": "replicate"},
    "circular": {"pad_mode": "circular"},
    "rows of samples": {"hop_length": 4},
    "real and imaginary part": {"return_complex": False},
}


def _spectrum(x: Tensor, **changed: Any) -> Tensor:
    z = torch.stft(x, **{**SPEECH, "return_complex": True, **changed})
    return torch.view_as_real(z) if z.is_complex() else z


def _synthesis(x: Tensor, length: int | None = None, **changed: Any) -> Tensor:
    """A spectrum with half of its high frequencies, as a signal."""
    given = {**SPEECH, **changed}
    z = torch.stft(x, **given, return_complex=True)
    weight = torch.linspace(1, 0.5, z.shape[-2])[:, None]
    return torch.istft(z * weight, **given, length=length)


@pytest.mark.parametrize("name", SHORT_TIME)
def test_short_time_transforms_run_whole_in_float(name: str) -> None:
    lowered = _lower_whole(lambda x: _spectrum(x, **SHORT_TIME[name]))
    torch.testing.assert_close(lowered.run((WAVE,))[0], _spectrum(WAVE, **SHORT_TIME[name]), atol=1e-5, rtol=1e-5)


INVERSE: dict[str, dict[str, Any]] = {
    name: SHORT_TIME[name] for name in ("speech", "default window length", "normalized", "two sides", "rows of samples")
} | {
    "shorter": {"length": 70},
    "not centered": {"center": False, "win_length": 16, "window": torch.hamming_window(16)},
    "one dimension": {},
}


@pytest.mark.parametrize("name", INVERSE)
def test_inverse_short_time_transforms_run_whole_in_float(name: str) -> None:
    wave = WAVE[0] if name == "one dimension" else WAVE
    lowered = _lower_whole(lambda x: _synthesis(x, **INVERSE[name]), wave)
    torch.testing.assert_close(lowered.run((wave,))[0], _synthesis(wave, **INVERSE[name]), atol=1e-5, rtol=1e-5)


def _lower_whole(function: Callable[[Tensor], Tensor], wave: Tensor = WAVE) -> runner.DelegatedProgram:
    lowered = runner.lower(runner.export(Case("short time", function, ()).module(), (wave,)), "fp")
    lowered.check_delegated()
    return lowered


@pytest.mark.parametrize("exponent", [0.5, 0])
def test_a_power_of_zero_is_a_number(exponent: float) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -2.0]])

    def power(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) ** exponent)

    torch.testing.assert_close(_lower_whole(power, x).run((x,))[0], power(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("int16", "min_sqnr"), [(False, 30.0), (True, 70.0)])
@pytest.mark.parametrize(
    "function", [lambda x: torch.view_as_complex(_spectrum(x)).abs(), _synthesis], ids=["lengths", "synthesis"]
)
def test_windows_that_are_shorter_than_a_transform_keep_both_parts(
    function: Callable[[Tensor], Tensor], int16: bool, min_sqnr: float
) -> None:
    """Rounding is the only error: without the imaginary part, SQNR was 6 dB."""
    case = Case("short time", function, [Input((2, 90))])
    module, inputs = runner.quantize_case(case, int16=int16), case.sample()
    lowered = runner.lower(runner.export(module, inputs), "int")
    lowered.check_delegated()
    assert sqnr(function(*inputs), lowered.run(inputs)[0]) > min_sqnr


def test_a_complex_window_is_refused() -> None:
    window = torch.hann_window(12) * (1 + 1j)
    function = Case("stft", lambda x: _spectrum(x, window=window, onesided=False), ()).module()
    runner.lower(runner.export(function, (WAVE,)), "fp").check_refused("stft")


def test_complex_operators_without_a_rule_stay_on_the_cpu() -> None:
    """They read complex numbers, which are assembled from a delegate's pairs of real numbers."""
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    function = Case("acosh", lambda x: torch.acosh(torch.fft.rfft(x)).real * 2, ()).module()
    lowered = runner.lower(runner.export(function, (x,)), "fp")
    lowered.check_refused("acosh")
    torch.testing.assert_close(lowered.run((x,))[0], function(x))


def test_complex_numbers_without_a_rule_are_not_cast_to_real_ones() -> None:
    """They were cast like integers, since they are not floating point. The imaginary part was lost: SQNR was 3 dB."""
    case = Case("acosh", lambda x: torch.acosh(torch.fft.rfft(x)).abs() * 2, [Input((2, 6))])
    module, inputs = runner.quantize_case(case, int16=True), case.sample()
    lowered = runner.lower(runner.export(module, inputs), "int")
    assert not lowered.program.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype)
    assert sqnr(case.module()(*inputs), lowered.run(inputs)[0]) > 60


def test_a_refusal_of_complex_numbers_keeps_both_parts() -> None:
    function = Case("acosh", lambda x: torch.acosh(torch.fft.rfft(x)).abs(), ()).module()
    lowered = runner.lower(runner.export(function, (torch.linspace(-1, 1, 12).reshape(2, 6),)), "fp")
    assert all(".to(torch.float32)" not in refused.reason for refused in lowered.log.refused_operators)
    assert any("view_as_real" in refused.reason for refused in lowered.log.refused_operators)
