"""Discrete Fourier transforms as matrix products with cosine and sine matrices, one dimension at a time.

A complex tensor is a real tensor [..., 2], see ``ComplexAsReal``. Short-time Fourier transforms (``torch.stft``,
``torch.istft``) apply the same matrices to frames of the signal. The window is folded into the matrix. The matrix has
rows (in the inverse transform, columns) only for samples of the window. For example, a window of 400 samples in a
512-point transform gives 400 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from arm_backend_core.errors import Unsupported

aten = torch.ops.aten


@dataclass(frozen=True)
class ComplexAsReal:
    """A complex tensor as real data [..., 2], in the form of ``torch.view_as_real``."""

    data: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Real and imaginary part."""
        return self.data[..., 0], self.data[..., 1]

    @staticmethod
    def from_parts(real: Tensor, imaginary: Tensor) -> ComplexAsReal:
        """Build a complex tensor from its real and imaginary part."""
        return ComplexAsReal(torch.stack([real, imaginary], -1))


def _dft_matrices(n: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 * pi * j * k / n, [n, count]; rounded to 15 decimals, so that exact zeros are 0."""
    angles = 2 * math.pi * (np.outer(np.arange(n), np.arange(count)) % n) / n
    cosine, sine = (np.round(wave(angles), 15).astype(np.float32) for wave in (np.cos, np.sin))
    return torch.tensor(cosine).to(like.dtype), torch.tensor(sine).to(like.dtype)


def _matmul_along(x: Tensor, dim: int, *matrices: Tensor) -> Sequence[Tensor]:
    """The products of x with each [size, count] matrix along ``dim``.

    One matrix product computes them all: several products would be several layers, which take more cycles.
    """
    product = torch.matmul(x.transpose(dim, -1), torch.cat(matrices, 1)).transpose(dim, -1)
    return product.split([matrix.shape[1] for matrix in matrices], dim)


def _dft(z: ComplexAsReal, dims: Sequence[int], sign: int) -> ComplexAsReal:
    """Unnormalized DFT along ``dims`` with kernel exp(sign * i * angle)."""
    real, imaginary = z.parts
    for dim in dims:
        cosine, sine = _dft_matrices(real.shape[dim], real.shape[dim], real)
        (real_cosine, real_sine), (imaginary_cosine, imaginary_sine) = (
            _matmul_along(part, dim, cosine, sine * sign) for part in (real, imaginary)
        )
        real, imaginary = real_cosine - imaginary_sine, imaginary_cosine + real_sine
    return ComplexAsReal.from_parts(real, imaginary)


def _normalization_factor(sizes: Sequence[int], normalization: int) -> float:
    """Factor of ATen's normalization modes for n elements. Mode 0: 1, mode 1: 1 / sqrt(n), mode 2: 1 / n."""
    return (1.0, math.prod(sizes) ** -0.5, 1 / math.prod(sizes))[normalization]


def real_to_complex(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> ComplexAsReal:
    """``aten._fft_r2c``: a real transform along the last of ``dim``, then complex transforms along the others."""
    n, last = x.shape[dim[-1]], dim[-1]
    cosine, sine = _dft_matrices(n, n // 2 + 1 if onesided else n, x)
    first = ComplexAsReal.from_parts(*_matmul_along(x, last, cosine, -sine))
    factor = _normalization_factor([x.shape[d] for d in dim], normalization)
    return ComplexAsReal(_dft(first, [d % x.dim() for d in dim[:-1]], -1).data * factor)


def complex_to_complex(z: ComplexAsReal, dim: Sequence[int], normalization: int, forward: bool) -> ComplexAsReal:
    """``aten._fft_c2c``."""
    axes = [d % (z.data.dim() - 1) for d in dim]
    factor = _normalization_factor([z.data.shape[d] for d in axes], normalization)
    return ComplexAsReal(_dft(z, axes, -1 if forward else 1).data * factor)


def complex_to_real(z: ComplexAsReal, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """``aten._fft_c2r``, the inverse transform of a one-sided spectrum.

    In the sum over the last dimension, each frequency has the factor 2, because the one-sided spectrum omits its
    conjugate. Frequency 0 and, for even sizes, the Nyquist frequency have the factor 1, because they have no conjugate.
    """
    axes = [d % (z.data.dim() - 1) for d in dim]
    real, imaginary = _dft(z, axes[:-1], 1).parts
    cosine, sine = _dft_matrices(last_dim_size, real.shape[axes[-1]], real)
    multiplicity = torch.tensor([1.0 if 2 * k % last_dim_size == 0 else 2.0 for k in range(cosine.shape[1])])
    matrix = torch.cat([cosine * multiplicity, -sine * multiplicity], 1).t()
    (result,) = _matmul_along(torch.cat([real, imaginary], axes[-1]), axes[-1], matrix)
    return result * _normalization_factor([*(z.data.shape[d] for d in axes[:-1]), last_dim_size], normalization)


# -- short-time transforms -----------------------------------------------------------------------------------------


def _window_or_ones(window: Tensor | ComplexAsReal | None, count: int, like: Tensor) -> Tensor:
    """The window's ``count`` samples; ones if no window is passed.

    Raises:
        Unsupported: the window is complex.
    """
    if isinstance(window, ComplexAsReal):
        raise Unsupported(
            "a short-time Fourier transform with a complex window; multiply by its real and imaginary parts separately"
        )
    return torch.ones(count, dtype=like.dtype) if window is None else window


def _stft(
    x: Tensor | ComplexAsReal,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> ComplexAsReal | Tensor:
    """Short-time Fourier transform of x [.., samples] -> [.., frequencies, frames].

    The window of frame t begins at sample t * hop_length + (n_fft - win_length) // 2 of x; with ``align_to_window``, at
    sample t * hop_length.
    """
    parts = x.parts if isinstance(x, ComplexAsReal) else (x,)
    real = parts[0]
    hop, count = hop_length or n_fft // 4, win_length or n_fft
    left = (n_fft - count) // 2
    start, span = (0, count) if align_to_window else (left, n_fft)
    frames = 1 + (real.shape[-1] - span) // hop
    windowed_samples = [p[..., start : start + (frames - 1) * hop + count].unfold(-1, count, hop) for p in parts]
    is_onesided = onesided if onesided is not None else len(parts) == 1
    # Cosine and sine by sample of the frame and frequency, [n_fft, frequencies].
    waves = _dft_matrices(n_fft, n_fft // 2 + 1 if is_onesided else n_fft, real)
    weights = _window_or_ones(window, count, real)[:, None] * _normalization_factor([n_fft], int(normalized))
    cosine, sine = (wave[left : left + count] * weights for wave in waves)
    # One product for both waves: two would be two layers, which take twice the cycles on Ethos-U55.
    products = [torch.matmul(samples, torch.cat([cosine, -sine], 1)).mT for samples in windowed_samples]
    spectrum = ComplexAsReal.from_parts(*products[0].tensor_split(2, -2))
    if len(parts) == 2:  # the transform of the imaginary part, times i
        real, imaginary = products[1].tensor_split(2, -2)
        spectrum = ComplexAsReal(spectrum.data + ComplexAsReal.from_parts(-imaginary, real).data)
    return spectrum if return_complex else spectrum.data


def _stft_centered(
    x: Tensor | ComplexAsReal,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    *args: Any,
    **kwargs: Any,
) -> ComplexAsReal | Tensor:
    """Short-time transform. If ``center`` is true, padding centers frame t on sample t * hop_length of the signal."""
    if center:
        parts = x.parts if isinstance(x, ComplexAsReal) else (x,)
        padded = [F.pad(p[None], (n_fft // 2, n_fft // 2), pad_mode)[0] for p in parts]
        x = ComplexAsReal.from_parts(*padded) if isinstance(x, ComplexAsReal) else padded[0]
    return _stft(x, n_fft, hop_length, win_length, window, *args, **kwargs)


def _istft(
    z: ComplexAsReal,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Inverse short-time transform, z [.., frequencies, frames] -> [.., samples].

    The overlap-add of windowed frames is divided by the overlap-add of squared windows.

    Raises:
        Unsupported: the result is complex, or no window covers some of its samples.
    """
    if return_complex:
        raise Unsupported("torch.istft with return_complex=True; use torch.fft.ifft of the frames")
    real, imaginary = (part.mT for part in z.parts)  # [.., frames, frequencies]
    hop, count, frames = hop_length or n_fft // 4, win_length or n_fft, real.shape[-2]
    left, half = (n_fft - count) // 2, n_fft // 2 + 1
    weights = _window_or_ones(window, count, real)
    multiplicity = torch.tensor([1.0 if 2 * k % n_fft == 0 else 2.0 for k in range(half)])
    factor = _normalization_factor([n_fft], 1 if normalized else 2)
    # Like PyTorch, ignore the upper half of the frequencies of a two-sided spectrum.
    cosine, sine = (
        (w[left : left + count] * multiplicity * factor).t() * weights for w in _dft_matrices(n_fft, half, real)
    )
    windowed = torch.matmul(real[..., :half], cosine) - torch.matmul(imaginary[..., :half], sine)
    summed = _overlap_add(windowed, hop)
    envelope = _overlap_add((weights * weights).expand(frames, count), hop)
    start = n_fft // 2 if center else 0
    padded_length = n_fft + (frames - 1) * hop
    out_length = padded_length - 2 * start if length is None else length
    # The range of the result, as indices of ``summed``, whose sample 0 is the first that a window covers.
    valid_start, valid_end = start - left, min(start + out_length, padded_length) - left
    valid = slice(max(valid_start, 0), min(valid_end, summed.shape[-1]))
    if valid_start < 0 or valid_end > summed.shape[-1]:
        raise Unsupported("torch.istft of samples that no window covers; PyTorch raises an error for them too")
    return F.pad(summed[..., valid] * (1 / envelope[valid]), (0, out_length - (valid_end - valid_start)))


def _overlap_add(x: Tensor, hop: int) -> Tensor:
    """Overlap-add x [.., frames, n] -> [.., samples]. Each frame starts ``hop`` samples after the preceding one."""
    frames, n = x.shape[-2:]
    windows, samples = x.reshape(-1, frames, n).mT, n + (frames - 1) * hop
    return F.fold(windows, (1, samples), (1, n), stride=(1, hop)).reshape(*x.shape[:-2], samples)


#: Decompositions of the short-time Fourier transforms. They apply to real inputs too.
STFT_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.stft.default: _stft,
    aten.stft.center: _stft_centered,
    aten.istft.default: _istft,
}
