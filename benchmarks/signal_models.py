"""Networks for audio, motion sensors, radar and text, written from their papers, at sizes of a microcontroller."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _SubSpectralNorm(nn.Module):
    """Batch normalization of each of several frequency bands, x[N, C, F, T]."""

    def __init__(self, channels: int, bands: int = 5) -> None:
        super().__init__()
        self.bands = bands
        self.norm = nn.BatchNorm2d(channels * bands)

    def forward(self, x: Tensor) -> Tensor:
        n, c, f, t = x.shape
        normalized: Tensor = self.norm(x.reshape(n, c * self.bands, f // self.bands, t))
        return normalized.reshape(n, c, f, t)


class _BroadcastedResidual(nn.Module):
    """A block of BC-ResNet: a 2D convolution over frequencies, and a 1D convolution over time that is broadcast."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.is_transition = inputs != outputs
        self.widen = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        self.frequency = nn.Conv2d(outputs, outputs, (3, 1), (stride, 1), (1, 0), groups=outputs, bias=False)
        self.sub_norm = _SubSpectralNorm(outputs)
        self.time = nn.Sequential(
            nn.Conv2d(outputs, outputs, (1, 3), 1, (0, dilation), (1, dilation), outputs, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        bands = self.sub_norm(self.frequency(self.widen(x) if self.is_transition else x))
        y: Tensor = bands + self.time(bands.mean(2, keepdim=True))
        return F.relu(y if self.is_transition else x + y)


class BcResNet(nn.Module):
    """Keyword spotter BC-ResNet-1 for 40 mel bands (Kim et al., 2021, arXiv:2106.04140)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 5, (2, 1), 2, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = 16
        for outputs, count, stride, dilation in ((8, 2, 1, 1), (12, 2, 2, 2), (16, 4, 2, 4), (20, 4, 1, 8)):
            for index in range(count):
                blocks.append(_BroadcastedResidual(inputs, outputs, stride if index == 0 else 1, dilation))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Conv2d(20, 20, 5, padding=(0, 2), groups=20), nn.Conv2d(20, 32, 1), nn.ReLU())
        self.classes = nn.Conv2d(32, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map mel bands (N, 1, 40, T) to scores (N, 12)."""
        scores: Tensor = self.classes(self.head(self.blocks(self.stem(x))).mean((2, 3), keepdim=True))
        return scores.flatten(1)


class ConvTasNet(nn.Module):
    """Speech separation: a learned filter bank, masks from dilated convolutions (Luo and Mesgarani, 2019,
    arXiv:1809.07454).
    """

    def __init__(self, filters: int = 64, width: int = 128, blocks: int = 6, speakers: int = 2) -> None:
        super().__init__()
        self.filters, self.speakers = filters, speakers
        self.encoder = nn.Conv1d(1, filters, 16, 8, bias=False)
        self.norm = nn.GroupNorm(1, filters)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(filters, width, 1),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i, groups=width),
                nn.PReLU(),
                nn.GroupNorm(1, width),
                nn.Conv1d(width, filters, 1),
            )
            for i in range(blocks)
        )
        self.masks = nn.Conv1d(filters, filters * speakers, 1)
        self.decoder = nn.ConvTranspose1d(filters, 1, 16, 8, bias=False)

    def forward(self, wave: Tensor) -> Tensor:
        """Map a wave (N, 1, samples) to one wave for each speaker, (N, speakers, samples)."""
        features = F.relu(self.encoder(wave))
        x = self.norm(features)
        for block in self.blocks:
            x = x + block(x)
        masks = torch.sigmoid(self.masks(x)).unflatten(1, (self.speakers, self.filters))
        separated = (masks * features.unsqueeze(1)).flatten(0, 1)
        waves: Tensor = self.decoder(separated)
        return waves.unflatten(0, (-1, self.speakers)).squeeze(2)


class Dtln(nn.Module):
    """Noise suppression: two LSTMs mask a spectrum, then a learned representation (Westhausen and Meyer, 2020,
    arXiv:2005.07551). Input: frames [N, T, 512] of a wave.
    """

    def __init__(self, frame: int = 512, width: int = 64, learned: int = 128) -> None:
        super().__init__()
        bins = frame // 2 + 1
        self.spectrum = nn.LSTM(bins, width, batch_first=True)
        self.spectrum_mask = nn.Linear(width, bins)
        self.encode = nn.Linear(frame, learned, bias=False)
        self.norm = nn.LayerNorm(learned)
        self.features = nn.LSTM(learned, width, batch_first=True)
        self.features_mask = nn.Linear(width, learned)
        self.decode = nn.Linear(learned, frame, bias=False)

    def forward(self, frames: Tensor) -> Tensor:
        """Map frames (N, T, 512) to frames without noise."""
        spectrum = torch.fft.rfft(frames)
        mask = torch.sigmoid(self.spectrum_mask(self.spectrum(spectrum.abs())[0]))
        encoded = self.encode(torch.fft.irfft(spectrum * mask, frames.shape[-1]))
        mask = torch.sigmoid(self.features_mask(self.features(self.norm(encoded))[0]))
        cleaned: Tensor = self.decode(encoded * mask)
        return cleaned


class _Se2Res(nn.Module):
    """A block of ECAPA-TDNN: Res2Net convolutions with squeeze and excitation."""

    def __init__(self, width: int, dilation: int, scale: int = 4) -> None:
        super().__init__()
        part = width // scale
        self.scale = scale
        self.enter, self.leave = (
            nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU(), nn.BatchNorm1d(width)) for _ in "ab"
        )
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(part, part, 3, padding=dilation, dilation=dilation), nn.ReLU(), nn.BatchNorm1d(part)
            )
            for _ in range(scale - 1)
        )
        self.squeeze = nn.Sequential(nn.Conv1d(width, 32, 1), nn.ReLU(), nn.Conv1d(32, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.enter(x).chunk(self.scale, 1)
        done = [first]
        for index, (part, layer) in enumerate(zip(others, self.parts, strict=True)):
            done.append(layer(part if index == 0 else part + done[-1]))
        y = self.leave(torch.cat(done, 1))
        result: Tensor = x + y * self.squeeze(y.mean(2, keepdim=True))
        return result


class EcapaTdnn(nn.Module):
    """Speaker verification with attentive statistics pooling (Desplanques et al., 2020, arXiv:2005.07143)."""

    def __init__(self, bands: int = 40, width: int = 64, embedding: int = 96) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(bands, width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width))
        self.blocks = nn.ModuleList(_Se2Res(width, dilation) for dilation in (2, 3, 4))
        self.merge = nn.Sequential(nn.Conv1d(3 * width, 128, 1), nn.ReLU())
        self.attention = nn.Sequential(nn.Conv1d(3 * 128, 32, 1), nn.Tanh(), nn.Conv1d(32, 128, 1), nn.Softmax(2))
        self.embed = nn.Sequential(nn.BatchNorm1d(256), nn.Linear(256, embedding))

    def forward(self, x: Tensor) -> Tensor:
        """Map mel bands (N, 40, T) to unit vectors (N, 96)."""
        x = self.stem(x)
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        x = self.merge(torch.cat(outputs, 1))
        mean, deviation = x.mean(2, keepdim=True), (x.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
        weights = self.attention(torch.cat([x, mean.expand_as(x), deviation.expand_as(x)], 1))
        mean = (weights * x).sum(2)
        deviation = ((weights * x.square()).sum(2) - mean.square()).clamp(min=1e-5).sqrt()
        vector: Tensor = self.embed(torch.cat([mean, deviation], 1))
        return F.normalize(vector)


class DeepConvLstm(nn.Module):
    """Activity recognition from motion sensors, x[N, time, sensors] (Ordóñez and Roggen, 2016, Sensors 16(1), 115)."""

    def __init__(self, sensors: int = 9, channels: int = 32, width: int = 64, classes: int = 6) -> None:
        super().__init__()
        inputs = (1, channels, channels, channels)
        self.convolutions = nn.Sequential(
            *(layer for size in inputs for layer in (nn.Conv2d(size, channels, (5, 1)), nn.ReLU()))
        )
        self.recurrent = nn.LSTM(channels * sensors, width, 2, batch_first=True)
        self.classes = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, time, sensors) to scores (N, classes)."""
        features = self.convolutions(x.unsqueeze(1)).permute(0, 2, 1, 3).flatten(2)
        scores: Tensor = self.classes(self.recurrent(features)[0][:, -1])
        return scores


class PointNet(nn.Module):
    """Classification of radar points, x[N, 4, points]: position and Doppler (Qi et al., 2017, arXiv:1612.00593)."""

    def __init__(self, features: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.transform = nn.Sequential(*self._layers(32, 32, 64))
        self.matrix = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32 * 32))
        self.local = nn.Sequential(*self._layers(features, 32, 32))
        self.shared = nn.Sequential(*self._layers(32, 64, 128))
        self.classes = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes))

    @staticmethod
    def _layers(*widths: int) -> list[nn.Module]:
        return [
            layer for a, b in itertools.pairwise(widths) for layer in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Map points (N, 4, points) to scores (N, classes)."""
        x = self.local(x)
        matrix = self.matrix(self.transform(x).amax(2)).unflatten(1, (32, 32)) + torch.eye(32)
        x = torch.bmm(x.transpose(1, 2), matrix).transpose(1, 2)
        scores: Tensor = self.classes(self.shared(x).amax(2))
        return scores


class CharCnn(nn.Module):
    """Text classifier over characters, tokens [N, 320] (Zhang et al., 2015, arXiv:1509.01626)."""

    def __init__(self, characters: int = 96, width: int = 64, classes: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, 16)
        layers: list[nn.Module] = [nn.Conv1d(16, width, 7), nn.ReLU(), nn.MaxPool1d(3)]
        layers += [nn.Conv1d(width, width, 7), nn.ReLU(), nn.MaxPool1d(3)]
        layers += [nn.Conv1d(width, width, 3), nn.ReLU(), nn.Conv1d(width, width, 3), nn.ReLU(), nn.MaxPool1d(3)]
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(width * 9, 128), nn.ReLU(), nn.Linear(128, classes)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, 320) to scores (N, classes)."""
        scores: Tensor = self.layers(self.characters(tokens).transpose(1, 2))
        return scores


class S4d(nn.Module):
    """Two diagonal state-space layers, computed as long convolutions by FFT, x[N, T, 4] (Gu et al., 2022,
    arXiv:2206.11893).
    """

    def __init__(self, length: int = 128, inputs: int = 4, width: int = 32, states: int = 16) -> None:
        super().__init__()
        self.length = length
        self.enter, self.leave = nn.Linear(inputs, width), nn.Linear(width, 3)
        self.mixes = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.steps = nn.ParameterList(0.1 * torch.rand(width, 1) + 0.01 for _ in range(2))
        self.gains = nn.ParameterList(torch.randn(width, states, 2) / math.sqrt(states) for _ in range(2))
        self.register_buffer("rates", torch.complex(torch.full((states,), -0.5), math.pi * torch.arange(states)))

    def _kernel(self, layer: int) -> Tensor:
        exponents = (self.steps[layer] * self.rates).unsqueeze(-1) * torch.arange(self.length)
        gains = torch.view_as_complex(self.gains[layer]) * self.steps[layer]
        return 2 * (gains.unsqueeze(-1) * torch.exp(exponents)).sum(1).real

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, 4) to (N, 3)."""
        x = self.enter(x).transpose(1, 2)
        for layer, (mix, norm) in enumerate(zip(self.mixes, self.norms, strict=True)):
            size = 2 * self.length
            spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(self._kernel(layer), size)
            y = F.gelu(torch.fft.irfft(spectrum, size)[..., : self.length] + x)
            x = norm((x + F.glu(mix(y), 1)).transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.leave(x.mean(2))
        return result
