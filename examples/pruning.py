"""Structured sparsity: prune a trained network 2:4, fine-tune it, and compare the programs before and after.

Trains a convolutional network on scikit-learn's digits (``digits.py``), sets two of each four weights along the input
channels to 0 (``compute_sparsity_masks``), trains the others further, and exports both networks for Ethos-U55 and
Ethos-U85. Prints accuracy on the test images, bytes and Vela's estimate of cycles.
"""

from __future__ import annotations

import copy

import torch
from digits import digits
from torch import Tensor, nn
from torch.nn.utils import prune

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, compute_sparsity_masks, export

RECIPES = {"U55-128": ArmRecipeType.ETHOSU_U55_INT8, "U85-256": ArmRecipeType.ETHOSU_U85_INT8}


def build_network() -> nn.Sequential:
    """Build a network of three convolutions and two linear layers: (N, 1, 8, 8) in, (N, 10) logits out."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, rate: float) -> nn.Module:
    """Train the network in place, and return it in evaluation mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def prune_2_4(model: nn.Module, images: Tensor) -> None:
    """Set two of each four weights to 0. The masks keep them at 0 in further training."""
    for name, mask in compute_sparsity_masks(model, [(images[:1],)]).items():
        module, _, parameter = name.rpartition(".")
        prune.custom_from_mask(model.get_submodule(module), parameter, mask)


def describe(result: ExportResult) -> str:
    """Describe accuracy of network and program, bytes of weights and program, and cycles."""
    accuracy = result.report.accuracy
    estimates = [delegate.vela for delegate in result.report.delegates if delegate.vela is not None]
    weights, cycles = sum(vela.weight_bytes for vela in estimates), sum(vela.total_cycles for vela in estimates)
    figures = " ".join(f"{text:>8}" for text in (accuracy.figures if accuracy is not None else ()))
    return f"{figures} {weights:>14,} {len(result.buffer):>14,} {cycles:>7,}"


def main() -> None:
    """Train, prune, fine-tune, export and print the figures."""
    train_images, test_images, train_labels, test_labels = digits()
    dense = train(build_network(), train_images, train_labels, epochs=6, rate=2e-3)
    pruned, tuned = copy.deepcopy(dense), copy.deepcopy(dense)
    for model in (pruned, tuned):
        prune_2_4(model, train_images)
    train(tuned, train_images, train_labels, epochs=3, rate=5e-4)

    calibration_samples = [(image,) for image in train_images[:100].split(1)]
    test_samples = [(image,) for image in test_images.split(1)]
    print(f"{'':28} {'float':>8} {'program':>8} {'weights, bytes':>14} {'program, bytes':>14} {'cycles':>7}")
    for npu, recipe_type in RECIPES.items():
        recipe = ExportRecipe.get_recipe(recipe_type, macs=int(npu[4:]), calibration_samples=calibration_samples)
        for name, model in {"dense": dense, "2:4": pruned, "2:4, fine-tuned": tuned}.items():
            result = export(model, recipe, test_samples, labels=test_labels, progress=False)
            print(f"{npu:<12} {name:<15} {describe(result)}", flush=True)


if __name__ == "__main__":
    main()
