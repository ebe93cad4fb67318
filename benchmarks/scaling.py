"""Scaling of an export: its time by the number of nodes, its memory by the size of the weights.

    python benchmarks/scaling.py --nodes 1000 10000 [--recipes TOSA_INT8 ETHOSU_U85_INT8]
    python benchmarks/scaling.py --memory vit_b_16 encoder_240m [--recipes TOSA_INT8]

Each measurement runs in a new process. Seconds are processor time of the exporting process, without Vela. Milliseconds
per node are those of the whole export divided by the number of nodes; an export of another model precedes it as a
warm-up. Memory is the increase of the peak resident memory by the export, relative to the model's float weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_NODES_PER_BLOCK = 5


class Mixed(nn.Module):
    """Blocks of a convolution, ReLU, multiplication, sigmoid and addition. Every fourth one has a skip connection."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(nodes // _NODES_PER_BLOCK))
        self.gain = nn.Parameter(torch.rand(1, 8, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 8, 4, 4) to the same shape."""
        early = x
        for index, conv in enumerate(self.convs):
            y = torch.sigmoid(torch.relu(conv(x)) * self.gain)
            x, early = y + (early if index % 4 == 3 else x), x
        return x


class Encoder(nn.Module):
    """A transformer encoder of 19 layers, 1,024 wide: 239 million parameters. (N, 32, 1024) in and out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1024, nhead=16, dim_feedforward=4096, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=19, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, 32, 1024) to the same shape."""
        return self.encoder(x)


def main() -> None:
    """Run each measurement that the arguments select in a new process, and print one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", default=[])
    parser.add_argument("--memory", nargs="+", default=[], choices=("vit_b_16", "encoder_240m"))
    parser.add_argument("--recipes", nargs="+", default=["TOSA_INT8", "ETHOSU_U85_INT8"])
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "RECIPE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        what, recipe = given.one
        print(json.dumps(measure_time(int(what), recipe) if what.isdigit() else measure_memory(what, recipe)))
        return
    for recipe in given.recipes:
        for what in (*given.nodes, *given.memory):
            command = [sys.executable, __file__, "--one", what, recipe]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            print(
                (done.stdout.strip().splitlines() or [f"{what} {recipe}: exit status {done.returncode}"])[-1],
                flush=True,
            )


def _export(model: nn.Module, samples: Any, recipe: str) -> Any:
    from arm_recipes import ArmRecipeType, ExportRecipe, export

    return export(model, ExportRecipe.get_recipe(ArmRecipeType[recipe]), samples, progress=False)


def measure_time(nodes: int, recipe: str) -> dict[str, Any]:
    """Measure the processor time of a whole export, by stage and per node."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    samples = [(torch.randn(1, 8, 4, 4),) for _ in range(2)]
    _export(Mixed(20), samples, recipe)
    model = Mixed(nodes).eval()
    time.perf_counter = time.process_time  # the report's seconds too
    start = time.process_time()
    report = _export(model, samples, recipe).report
    spent = time.process_time() - start
    stages = {name: round(value, 2) for name, value in report.seconds.items()}
    by_node = round(1e3 * spent / nodes, 3)
    return {"nodes": nodes, "recipe": recipe, "seconds": round(spent, 2), "ms per node": by_node, "stages": stages}


def measure_memory(name: str, recipe: str) -> dict[str, Any]:
    """Measure the peak resident memory in MiB of an export that is saved, and its increase by the export."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name == "vit_b_16":
        from tests.models import zoo

        model, sample = zoo.torchvision().models.vit_b_16(weights=None).eval(), torch.randn(1, 3, 224, 224)
    else:
        model, sample = Encoder().eval(), torch.randn(1, 32, 1024)
    _export(Mixed(20), [(torch.randn(1, 8, 4, 4),)], recipe)
    weights = sum(parameter.numel() * 4 for parameter in model.parameters()) / 2**20
    before = _resident()
    peak = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.process_time()
    result = _export(model, [(sample,)], recipe)
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder, "model.pte"))
    spent = time.process_time() - start
    done.set()
    watcher.join()
    return {
        "model": name,
        "recipe": recipe,
        "weights MiB": round(weights),
        "before MiB": round(before),
        "sampled peak MiB": round(peak[0]),
        "increase / weights": round((peak[0] - before) / weights, 2),
        "seconds": round(spent, 1),
        "peak MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
