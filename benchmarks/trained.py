"""Accuracy of small trained networks in each precision, measured by running the programs.

    python benchmarks/trained.py --out rows.jsonl [--models digits_cnn ...]
    python benchmarks/trained.py --out rows.jsonl --table benchmarks/trained.md    # format earlier rows

The digits are those of scikit-learn; the sounds for the keyword spotter are synthetic. Each training takes less than a
minute. The scores are those of test data: the percentage of correct answers, or the signal-to-noise ratio of denoised
images. Our Ethos-U85-256 programs run on the emulator; for the peer's, the TOSA reference model runs the graphs that
Vela compiled. Each score is followed by the SQNR of the outputs against the floating-point network, except for QAT,
which has other weights.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rows

RECIPE = "ETHOSU_U85_INT8"
VARIANTS = ("float", "INT8", "tuned", "QAT", "A16W8", "peer INT8")
_CALIBRATION, _SOUNDS, _QAT_EPOCHS = 64, 200, 3


@dataclass(frozen=True)
class Task:
    """A network with its data.

    Attributes:
        train, test: inputs and targets.
        loss: loss function of a batch of outputs and targets.
        score: score of all outputs and targets; higher is better.
        unit: unit of the score.
        epochs, rate: number of epochs and learning rate of the training in floating point.
        options: options of the recipes other than their defaults.
    """

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor], float]
    unit: str
    epochs: int
    rate: float = 3e-3
    options: dict[str, Any] = field(default_factory=dict)


class _Cnn(nn.Module):
    """Depthwise separable CNN, typical for microcontrollers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        for stride in (2, 1):
            layers += [nn.Conv2d(16, 16, 3, stride, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6()]
            layers += [nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layers(x)
        return scores


class _Vit(nn.Module):
    """Vision transformer: patches of 2x2, two encoder layers."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        scores: Tensor = self.head(self.norm(tokens).mean(1))
        return scores


class _Denoiser(nn.Module):
    """Denoising autoencoder with a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 96), nn.ReLU(),
            nn.Linear(96, 64),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        pictures: Tensor = self.layers(x)
        return pictures


class _Spotter(nn.Module):
    """Keyword spotter: a GRU over the frames of a sound."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, frames: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrent(frames)[0][:, -1])
        return scores


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.3, random_state=0, stratify=labels)
    first, second = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for part in parts[:2])
    return first, second, torch.tensor(parts[2]), torch.tensor(parts[3])


def _sounds(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Energies of 16 bands over 24 frames: a tone that rises or falls, slowly or fast, once or twice, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 8, (count,), generator=generator)
    frames = torch.arange(24).float()
    rising, fast, twice = labels & 1, labels >> 1 & 1, labels >> 2
    start = 3 + 3 * torch.rand(count, 1, generator=generator)
    slope = 0.25 + 0.25 * fast[:, None]
    place = start + slope * (frames % (12 + 12 * (1 - twice[:, None])))
    place = torch.where(rising[:, None] == 1, place, 15 - place)
    bands = torch.exp(-((torch.arange(16) - place[..., None]) ** 2) / 2)
    return bands + 0.45 * torch.randn(count, 24, 16, generator=generator), labels


def _compute_accuracy(outputs: Tensor, labels: Tensor) -> float:
    return 100 * float((outputs.argmax(1) == labels).double().mean())


def _compute_snr(outputs: Tensor, clean: Tensor) -> float:
    return 10 * math.log10(float(clean.square().sum() / (outputs - clean).square().sum()))


def create_task(name: str) -> Task:
    """Create an untrained network with its data."""
    torch.manual_seed(0)
    if name == "spotter_gru":
        data = _sounds(3000, 1), _sounds(_SOUNDS, 2)
        return Task(_Spotter(), *data, F.cross_entropy, _compute_accuracy, "% correct", 12)
    train, test, train_labels, test_labels = _digits()
    if name == "denoiser":
        noisy = [(x + 0.25 * torch.randn(x.shape), x.flatten(1)) for x in (train, test)]
        return Task(_Denoiser(), noisy[0], noisy[1], F.mse_loss, _compute_snr, "dB", 40)
    data = (train, train_labels), (test, test_labels)
    if name == "digits_uneven":
        from tests.small_models import UnevenGains

        return Task(
            UnevenGains(),
            *data,
            F.cross_entropy,
            _compute_accuracy,
            "% correct",
            15,
            rate=1e-2,
            options={"per_channel": False},
        )
    model = {"digits_cnn": _Cnn, "digits_vit": _Vit}[name]()
    return Task(model, *data, F.cross_entropy, _compute_accuracy, "% correct", 15)


MODELS = ("digits_cnn", "digits_uneven", "digits_vit", "denoiser", "spotter_gru")


def fit(model: nn.Module, task: Task, epochs: int, rate: float) -> None:
    """Train by Adam in batches of 32. The learning rate decays linearly to 2%."""
    inputs, targets = task.train
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps, step = epochs * -(-len(inputs) // 32), 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs)).split(32):
            for group in optimizer.param_groups:
                group["lr"] = rate * max(1 - step / steps, 0.02)
            loss = task.loss(model(inputs[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


def measure(name: str) -> dict[str, Any]:
    """Measure score and SQNR of each variant, and the seconds of the whole run."""
    from arm_recipes import ArmRecipeType, ExportRecipe, export, prepare_qat, tune
    from benchmarks.compare import _export_with_peer, first_output
    from benchmarks.coverage import sqnr

    started = time.perf_counter()
    task = create_task(name)
    fit(task.model.train(), task, task.epochs, task.rate)
    model = task.model.eval()
    samples = [(x[None],) for x in task.train[0][:_CALIBRATION]]
    inputs, targets = task.test
    expected = _outputs(model, inputs)

    def rate(run: Callable[[Tensor], Any]) -> list[float | None]:
        outputs = _outputs(run, inputs)
        return [task.score(outputs, targets), sqnr([expected], [outputs])]

    def recipe(kind: str = RECIPE) -> Any:
        return ExportRecipe.get_recipe(ArmRecipeType[kind], **task.options)

    found: dict[str, Any] = {"float": [task.score(expected, targets), None]}
    found["INT8"] = rate(export(model, recipe(), samples).run)
    found["A16W8"] = rate(export(model, recipe("ETHOSU_U85_A16W8"), samples).run)
    found["tuned"] = rate(tune(model, recipe(), samples, budget={"cycles": 1.1}, progress=False).best.run)
    prepared = prepare_qat(copy.deepcopy(model), recipe(), samples)
    fit(prepared.train(), task, _QAT_EPOCHS, task.rate / 10)
    found["QAT"] = [task.score(_outputs(prepared.eval().export(samples).run, inputs), targets), None]
    try:
        run = _export_with_peer(copy.deepcopy(model), samples, RECIPE)[1]
        found["peer INT8"] = rate(lambda x: first_output(run(x)))
    except Exception as error:  # a failed export is a result
        found["peer INT8"] = str(error).partition("\n")[0][:80]
    return {"model": name, "unit": task.unit, **found, "seconds": round(time.perf_counter() - started)}


def _outputs(run: Callable[[Tensor], Any], inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([run(x[None]) for x in inputs])


def format_table(found: Iterable[dict[str, Any]]) -> str:
    """Format the rows as Markdown."""
    lines = ["# Trained networks", "", "Written by `trained.py`; README.md explains the figures.", ""]
    lines += [f"| model | {' | '.join(VARIANTS)} | seconds |", "|---" * (len(VARIANTS) + 2) + "|"]
    for row in found:
        cells = [_cell(row[name]) for name in VARIANTS]
        lines.append(f"| {row['model']} ({row['unit']}) | {' | '.join(cells)} | {row['seconds']} |")
    return "\n".join(lines) + "\n"


def _cell(figures: list[Any] | str) -> str:
    if isinstance(figures, str):
        return figures
    score, signal = figures
    return f"{score:.2f}" if signal is None else f"{score:.2f} ({signal:.1f} dB)"


if __name__ == "__main__":
    rows.main(__doc__, measure, format_table, models=MODELS)
