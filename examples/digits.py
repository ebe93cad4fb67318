"""Handwritten digits: train a network, export it for an Arm NPU and measure the accuracy of the program.

Trains a small convolutional network on scikit-learn's digits (1,797 scans of 8x8 pixels), exports it with a
recipe, and also for TOSA and VGF. Prints the report of the first export. Then it loads the programs from their files
and runs them on the test images, in ExecuTorch's runtime on this machine. ``make demo`` runs this script. Environment
variables select another recipe for the first export: ``RECIPE`` (a name of ``ArmRecipeType``; default:
ETHOSU_U85_INT8) and ``MACS`` (Ethos-U only; default: 256, 128 on U55).
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
        """Maps images [N, 1, 8, 8] with values in [0, 1] to logits [N, 10]."""
        return self.classifier(self.features(image))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images, test images, training labels and test labels; a fifth of the data is for testing."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images = (
        torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for part in parts[:2]
    )
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    return train_images, test_images, train_labels, test_labels


def train(images: Tensor, labels: Tensor, epochs: int = 20, batch: int = 64) -> DigitNet:
    """Trains a network for a few seconds and returns it in evaluation mode."""
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch_indices in torch.randperm(len(images)).split(batch):
            loss = nn.functional.cross_entropy(model(images[batch_indices]), labels[batch_indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Returns the top-1 accuracy in percent."""
    return 100 * (logits.argmax(dim=1) == labels).double().mean().item()


def recipe_from_environment() -> tuple[ArmRecipeType, dict[str, int]]:
    """Returns the recipe that ``RECIPE`` and ``MACS`` select, and its keyword arguments.

    Exits with a message that lists the recipes if ``RECIPE`` is unknown.
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
    """Returns ``digits_u85_256.pte`` for ETHOSU_U85_INT8 with 256 MACs, ``digits_tosa_fp.pte`` for TOSA_FP."""
    name = recipe.name.lower().removeprefix("ethosu_")
    if "macs" in arguments:
        name = f"{name.removesuffix('_int8')}_{arguments['macs']}"
    return f"digits_{name}.pte"


def accuracy_of_file(path: Path, images: Tensor, labels: Tensor) -> tuple[float | None, str]:
    """Runs a saved program, and returns its accuracy in percent and a description of the run.

    If the program was saved with its reference program, the description has the number of equal results. If the program
    cannot run on this machine, returns None and the reason.
    """
    program = load(path)
    backends = {delegate.backend for method in program.content.methods.values() for delegate in method.delegates}
    try:
        logits = torch.cat(list(program.run_batch(images.split(1))))
    except RuntimeUnavailable as error:
        return None, str(error)
    description = f"the .pte, {' and '.join(sorted(backends))}"
    if program.reference is not None:
        reference_logits = torch.cat(list(program.run_batch(images.split(1), backend="tosa")))
        equal = int((logits == reference_logits).all(dim=1).sum())
        description += f"; {equal} of {len(reference_logits)} results equal those of its TOSA graph"
    return accuracy(logits, labels), description


def main() -> None:
    """Trains, exports, runs the programs on this machine and prints the figures."""
    recipe, arguments = recipe_from_environment()
    try:
        export_recipe = ExportRecipe.get_recipe(recipe, **arguments)  # reports invalid arguments before training
    except ValueError as error:
        raise SystemExit(str(error)) from None

    started = time.perf_counter()
    train_images, test_images, train_labels, test_labels = digits()
    model = train(train_images, train_labels)
    trained = time.perf_counter()

    samples = [(image,) for image in train_images[:CALIBRATION_SAMPLES].split(1)]
    result = export(model, export_recipe, samples=samples)
    paths = [result.save(file_name(recipe, arguments), reference=recipe.name.startswith("ETHOSU"))]
    exported = time.perf_counter()

    for other in (ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8):
        if other is not recipe:
            other_result = export(model, ExportRecipe.get_recipe(other), samples=samples)
            paths.append(other_result.save(file_name(other, {})))
    with torch.no_grad():
        float_accuracy = accuracy(model(test_images), test_labels)

    print(result.report)
    print()
    print(f"Recipe                  {recipe.name} {arguments or ''}")
    print(f"Program                 {paths[0]} ({len(result.buffer):,} bytes)")
    print(f"Seconds to train        {trained - started:.1f}")
    print(f"Seconds to export       {exported - trained:.1f}")
    print(f"Test images             {len(test_images)}")
    print(f"Accuracy in float       {float_accuracy:.2f} %")
    for path in paths:
        program_accuracy, description = accuracy_of_file(path, test_images, test_labels)
        figure = "not run:" if program_accuracy is None else f"{program_accuracy:.2f} %"
        print(f"{path.name:<23} {figure} ({description})")
    print(f"Seconds in total        {time.perf_counter() - started:.1f}")


if __name__ == "__main__":
    main()
