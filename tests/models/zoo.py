"""The model zoo: models for recorded figures and benchmarks, with seeded random weights.

Every builder is deterministic: the same name gives the same weights and the same inputs in every process,
so that tests, benchmarks and runs of ExecuTorch's own Arm backend use the same network.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

CONVOLUTION = "convolution"
"""A network of convolutions and linear layers, whose integer results can be compared operator by operator."""

ATTENTION = "attention"
"""A network with softmax and layer normalization inside."""


class Entry(NamedTuple):
    """A model of the zoo, ready to be exported."""

    model: nn.Module
    """The model, in evaluation mode."""

    samples: list[tuple[Tensor, ...]]
    """Input tuples with batch size 1. The first one is the example input, and all are calibration samples."""

    kind: str
    """``CONVOLUTION`` or ``ATTENTION``."""


class DepthwiseSeparable(nn.Module):
    """A 3x3 depthwise and a 1x1 convolution, each with batch normalization and ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.depthwise_norm = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        self.pointwise_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, channels, H, W) to the same shape."""
        x = torch.relu(self.depthwise_norm(self.depthwise(x)))
        return torch.relu(self.pointwise_norm(self.pointwise(x)))


class DsCnn(nn.Module):
    """MLPerf Tiny's keyword spotter: 49 frames of 10 MFCC features in, 12 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 64, (10, 4), stride=(2, 2), padding=(5, 1), bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.blocks = nn.Sequential(*(DepthwiseSeparable(64) for _ in range(4)))
        self.dropout = nn.Dropout(0.4)
        self.pool = nn.AvgPool2d((24, 5))  # 24 of the 25 rows, as in the reference implementation
        self.classifier = nn.Linear(64, 12)

    def forward(self, features: Tensor) -> Tensor:
        """Maps (N, 1, 49, 10) to (N, 12)."""
        x = self.pool(self.dropout(self.blocks(self.stem(features))))
        return self.classifier(torch.flatten(x, 1))


class DeepAutoencoder(nn.Module):
    """MLPerf Tiny's anomaly detector: 5 frames of 128 mel bands, through a bottleneck of 8 and back."""

    def __init__(self) -> None:
        super().__init__()
        widths = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [nn.Linear(wide, narrow), nn.BatchNorm1d(narrow), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 640))

    def forward(self, frames: Tensor) -> Tensor:
        """Maps (N, 640) to (N, 640)."""
        return self.layers(frames)


class SequenceClassifier(nn.Module):
    """A classifier on two ``nn.TransformerEncoderLayer`` of width 128: (N, 32, 40) in, (N, 10) out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(40, 128)
        layer = nn.TransformerEncoderLayer(128, nhead=4, dim_feedforward=256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.classifier = nn.Linear(128, 10)

    def forward(self, frames: Tensor) -> Tensor:
        """Maps (N, 32, 40) to (N, 10)."""
        return self.classifier(self.encoder(self.project(frames)).mean(dim=1))


class PlainBert(nn.Module):
    """A BERT of two layers that takes token ids and returns the last hidden state, as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        transformers = _transformers()
        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=64,
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps int32 token ids (N, 32) to (N, 32, 128)."""
        return self.bert(input_ids=tokens).last_hidden_state


class PlainVit(nn.Module):
    """A ViT of hidden size 96 and 3 layers for images of 64x64 in patches of 8x8, as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        transformers = _transformers()
        config = transformers.ViTConfig(
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=3,
            intermediate_size=192,
            image_size=64,
            patch_size=8,
            num_labels=10,
        )
        self.vit = transformers.ViTForImageClassification(config)

    def forward(self, image: Tensor) -> Tensor:
        """Maps (N, 3, 64, 64) to (N, 10)."""
        return self.vit(pixel_values=image).logits


_libraries: list[torch.library.Library] = []


@lru_cache(maxsize=1)
def torchvision() -> ModuleType:
    """Import torchvision on a CPU build of PyTorch.

    torchvision's wheel is built for CUDA, and its compiled operators do not load. The import only needs the schemas of
    two operators, which the classification networks do not call.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)  # garbage collection of a Library would remove its definitions
    return importlib.import_module("torchvision")


def _transformers() -> ModuleType:
    torchvision()  # transformers imports torchvision if it is installed
    return importlib.import_module("transformers")


def _vision(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision().models, name)(weights=None)


def _image(size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(1, 3, size, size)


_BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "ds_cnn": (DsCnn, lambda: torch.rand(1, 1, 49, 10) * 2 - 1, CONVOLUTION),
    "deep_autoencoder": (DeepAutoencoder, lambda: torch.rand(1, 640) * 2 - 1, CONVOLUTION),
    "mobilenet_v2": (_vision("mobilenet_v2"), _image(224), CONVOLUTION),
    "mobilenet_v3_small": (_vision("mobilenet_v3_small"), _image(224), CONVOLUTION),
    "resnet18": (_vision("resnet18"), _image(224), CONVOLUTION),
    "efficientnet_b0": (_vision("efficientnet_b0"), _image(224), CONVOLUTION),
    "squeezenet1_1": (_vision("squeezenet1_1"), _image(224), CONVOLUTION),
    "transformer_encoder": (SequenceClassifier, lambda: torch.randn(1, 32, 40), ATTENTION),
    "tiny_bert": (PlainBert, lambda: torch.randint(0, 1000, (1, 32), dtype=torch.int32), ATTENTION),
    "tiny_vit": (PlainVit, _image(64), ATTENTION),
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)
"""Names of the models."""


def build(name: str, samples: int = 4, seed: int = 0) -> Entry:
    """Build a model of the zoo with ``samples`` random input tuples.

    The global random state does not change. Model and first samples do not depend on the number of samples.

    Raises:
        KeyError: if there is no model of that name.
        ValueError: if ``samples`` is not positive.
    """
    return build_entry(*_BUILDERS[name], samples, seed)


def build_entry(make: Callable[[], nn.Module], draw: Callable[[], Tensor], kind: str, samples: int, seed: int) -> Entry:
    """Build a model and ``samples`` inputs from random numbers of ``seed``.

    Raises:
        ValueError: if ``samples`` is not positive.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        initialize_batch_norm(model, lambda: (draw(),))
        torch.manual_seed(seed + 1)
        inputs: list[tuple[Tensor, ...]] = [(draw(),) for _ in range(samples)]
    return Entry(model, inputs, kind)


def initialize_batch_norm(model: nn.Module, draw: Callable[[], tuple[Tensor, ...]]) -> None:
    """Set statistics and affine parameters of batch normalizations to values that are plausible for a trained network.

    With the initial statistics (mean 0, variance 1), the output of a deep random network would depend on biases only,
    and the folding of normalizations into convolutions would not be tested. With the exact statistics of random data,
    every layer amplifies differences between samples, noise included. The variance is therefore slightly larger than
    the measured one: the output depends on the input, and rounding errors stay bounded.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = None  # cumulative average over the batches below
        nn.init.uniform_(norm.weight, 0.75, 1.25)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
        norm.train()
    is_1d = isinstance(norms[0], nn.BatchNorm1d)  # without spatial positions, the statistics need more samples
    with torch.no_grad():
        for _ in range(2):
            batch = zip(*(draw() for _ in range(128 if is_1d else 8)), strict=True)
            model(*(torch.cat(values) for values in batch))
    for norm in norms:
        norm.eval()
        if norm.running_var is not None:
            norm.running_var *= 2.0 if is_1d else 1.1
