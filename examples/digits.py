"""Handwritten digits, from training to a program for an Arm NPU, and to the accuracy of the program itself.

Trains a small convolutional network on scikit-learn's digits (1,797 real scans of 8x8 pixels), exports it
with one of the recipes and prints what an engineer asks about the result. Then it loads programs from their
files and runs them on the test images, in ExecuTorch's runtime on this machine. ``make demo`` runs it; the
environment variables ``RECIPE`` (a name of ``ArmRecipeType``, by default ETHOSU_U85_INT8) and ``MACS``
(Ethos-U only; by default 256, 128 on U55) pick another target.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, RuntimeUnavailable, export, load

CALIBRATION_SAMPLES = 100


class DigitNet(nn.Module):
    """Two convolutions and two linear layers: (N, 1, 8, 8) in, (N, 10) logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, image: Tensor) -> Tensor:
        """Maps images with values in [0, 1] to logits."""
        return self.classifier(self.features(image))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images to train and to test with, then their labels; a fifth of the data is for testing."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images = (
        torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return train_images, test_images, train_labels, test_labels


def train(images: Tensor, labels: Tensor, epochs: int = 20, batch: int = 64) -> DigitNet:
    """Trains a network for some seconds and returns it in eval mode."""
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(batch):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percentage of rows whose largest logit is at the label."""
    return 100 * (logits.argmax(dim=1) == labels).double().mean().item()


def recipe_from_environment() -> tuple[ArmRecipeType, dict[str, int]]:
    """Returns the recipe that ``RECIPE`` and ``MACS`` ask for, and its keyword arguments.

    Exits with a message that lists the recipes if there is none of that name.
    """
    name = os.environ.get("RECIPE") or "ETHOSU_U85_INT8"
    if name not in ArmRecipeType.__members__:
        raise SystemExit(f"RECIPE={name} is unknown. Choose one of: {', '.join(ArmRecipeType.__members__)}")
    macs = os.environ.get("MACS")
    if macs is None or not macs.strip():
        if not name.startswith("ETHOSU"):
            return ArmRecipeType[name], {}
        macs = "128" if "U55" in name else "256"
    if not macs.isdigit():
        raise SystemExit(f"MACS={macs} is not a number")
    return ArmRecipeType[name], {"macs": int(macs)}


def file_name(recipe: ArmRecipeType, arguments: dict[str, int]) -> str:
    """``digits_u85_256.pte`` for ETHOSU_U85_INT8 with 256 MACs, ``digits_tosa_fp.pte`` for TOSA_FP."""
    name = recipe.name.lower().removeprefix("ethosu_")
    if "macs" in arguments:
        name = f"{name.removesuffix('_int8')}_{arguments['macs']}"
    return f"digits_{name}.pte"


def accuracy_of_file(path: Path, images: Tensor, labels: Tensor) -> tuple[float | None, str]:
    """Accuracy of a program from its file, and what executed it; None where this machine cannot, with the reason.

    A program that has its reference program beside it is compared with that, logit by logit.
    """
    program = load(path)
    backends = {delegate.backend for method in program.content.methods.values() for delegate in method.delegates}
    try:
        logits = torch.cat([outputs[0] for outputs in program.run_batch(images.split(1))])
    except RuntimeUnavailable as error:
        return None, str(error)
    how = f"the .pte itself, {' and '.join(sorted(backends))}"
    if program.reference is not None:
        others = torch.cat([outputs[0] for outputs in program.run_batch(images.split(1), backend="tosa")])
        same = int((logits == others).all(dim=1).sum())
        how += f"; {same} of {len(others)} results are those of its TOSA graph"
    return accuracy(logits, labels), how


def main() -> None:
    """Trains, exports, executes the programs on this machine and prints the figures."""
    recipe, arguments = recipe_from_environment()
    try:
        chosen = ExportRecipe.get_recipe(recipe, **arguments)  # bad arguments end here, before any training
    except ValueError as error:
        raise SystemExit(str(error)) from None

    started = time.perf_counter()
    train_images, test_images, train_labels, test_labels = digits()
    model = train(train_images, train_labels)
    trained = time.perf_counter()

    samples = [(image,) for image in train_images[:CALIBRATION_SAMPLES].split(1)]
    result = export(model, chosen, samples=samples)
    paths = [result.save(file_name(recipe, arguments), reference=recipe.name.startswith("ETHOSU"))]
    exported = time.perf_counter()

    for other in (ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8):
        if other is not recipe:
            simulated = export(model, ExportRecipe.get_recipe(other), samples=samples)
            paths.append(simulated.save(file_name(other, {})))
    with torch.no_grad():
        in_float = accuracy(model(test_images), test_labels)

    print(result.report)
    print()
    print(f"Recipe                  {recipe.name} {arguments or ''}")
    print(f"Program                 {paths[0]} ({len(result.buffer):,} bytes)")
    print(f"Seconds to train        {trained - started:.1f}")
    print(f"Seconds to export       {exported - trained:.1f}")
    print(f"Test images             {len(test_images)}")
    print(f"Accuracy in float       {in_float:.2f} %")
    for path in paths:
        measured, how = accuracy_of_file(path, test_images, test_labels)
        figure = "not run:" if measured is None else f"{measured:.2f} %"
        print(f"{path.name:<23} {figure} ({how})")
    print(f"Seconds in all          {time.perf_counter() - started:.1f}")


if __name__ == "__main__":
    main()
