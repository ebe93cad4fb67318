"""Overhead of ``Program.run`` over the executor of the delegate, and memory leaks of a loaded program.

For a small convolutional network with int8 inputs and outputs, TOSA, VGF and Ethos-U:

- milliseconds of ``Program.run``, of the delegate's executor alone on the same arrays, and of the TOSA reference model
  in this process (the executor of TOSA runs it in another process); the three alternate;
- resident memory after a warm-up and after ``--runs`` more runs of one loaded program.

With ``--models``, for models of ``tests/models/zoo.py`` in int8 on U55-128 and U85-256: processor seconds of an
inference in ``Program.run``, in the emulator alone, and in the TOSA reference model; the minimum of three rounds.

    .venv/bin/python benchmarks/runtime.py [--runs 10000]
    .venv/bin/python benchmarks/runtime.py --models [mobilenet_v2 ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import torch
import tosa_reference_model
from executorch.export import ExportRecipe
from torch import nn

from arm_recipes import ArmRecipeType, export, load
from arm_recipes.runtime.delegates import DELEGATE_FACTORIES
from arm_recipes.runtime.ethosu_payload import EthosUTensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # models and their inputs are those of the tests

ROUNDS = 300
MODEL_ROUNDS = 3
WARM_UP = 500
#: Runs between two measurements of memory.
MEMORY_INTERVAL = 1000


def small_network() -> nn.Module:
    """A convolution, pooling and a linear layer on 16x16 images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()


def time_alternately(
    functions: list[Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of each function in each round. The functions alternate, so that other load affects all of them alike."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, measured in zip(functions, seconds, strict=True):
            start = clock()
            function()
            measured.append(clock() - start)
    return seconds


@contextlib.contextmanager
def suppress_native_output() -> Iterator[None]:
    """Redirect stdout and stderr of native code to /dev/null: the reference model prints a line for each flatbuffer."""
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for fd in saved:
            os.dup2(null, fd)
        yield
    finally:
        for fd, copy in saved.items():
            os.dup2(copy, fd)
            os.close(copy)
        os.close(null)


def resident_kib() -> int:
    """Resident memory of this process and its child processes, one of which runs the reference model."""
    own = psutil.Process()
    return sum(int(process.memory_info().rss) for process in (own, *own.children())) // 1024


def measure(recipe: ArmRecipeType, runs: int) -> None:
    """Measure one recipe, and print times and memory."""
    samples = [(torch.randn(1, 3, 16, 16),) for _ in range(4)]
    result = export(small_network(), ExportRecipe.get_recipe(recipe, quantized_io=True), samples)
    program = load(result.buffer)
    integers = result.inputs[0].quantize(samples[0][0])
    (delegate,) = program.content.methods["forward"].delegates
    executor = DELEGATE_FACTORIES[delegate.backend](bytes(delegate.data), delegate.compile_specs, lambda _: None)
    array = integers.numpy()
    arrays = [array.view(np.uint8).reshape(-1) if isinstance(executor.inputs[0], EthosUTensor) else array]
    program.execute(integers)
    flatbuffer = result.report.delegates[0].tosa
    with suppress_native_output():
        measured = time_alternately(
            [
                lambda: program.execute(integers),
                lambda: executor.run(arrays),
                lambda: tosa_reference_model.run(flatbuffer, [array]),
            ],
            ROUNDS,
        )
    run_ms, executor_ms, reference_ms = (1e3 * statistics.median(seconds) for seconds in measured)
    overhead_ms = run_ms - executor_ms
    print(f"{recipe.name}: {run_ms:.3f} ms a run, {executor_ms:.3f} ms in the executor alone: {overhead_ms:+.3f} ms")
    print(f"  TOSA reference model in this process: {reference_ms:.3f} ms")

    for _ in range(WARM_UP):
        program.execute(integers)
    readings = [resident_kib()]
    for done in range(1, runs + 1):
        program.execute(integers)
        if done % MEMORY_INTERVAL == 0:
            readings.append(resident_kib())
    print(f"  resident KiB after every {MEMORY_INTERVAL:,} runs: {', '.join(f'{reading:,}' for reading in readings)}")
    print(f"  {readings[-1] - readings[0]:+,} KiB in {runs:,} runs")


def measure_model(name: str, recipe: ArmRecipeType) -> list[float]:
    """Minimum processor seconds of ``Program.run``, of its delegates alone, and of the reference model."""
    from tests.models import zoo
    from tests.runtime.ethosu_emulator import random_inputs

    entry = zoo.build(name, 2)
    result = export(entry.model, ExportRecipe.get_recipe(recipe), entry.samples)
    program = load(result.buffer)
    program.execute(*entry.samples[0])
    executors, models = [], []
    delegates = program.content.methods["forward"].delegates
    for delegate, compiled in zip(delegates, result.report.delegates, strict=True):
        arrays = random_inputs(compiled, seed=0)
        executor = DELEGATE_FACTORIES[delegate.backend](bytes(delegate.data), delegate.compile_specs, lambda _: None)
        executors.append((executor.run, [array.view(np.uint8).reshape(-1) for array in arrays]))
        models.append((compiled.tosa, arrays))
    with suppress_native_output():
        measured = time_alternately(
            [
                lambda: program.execute(*entry.samples[0]),
                lambda: [run(arrays) for run, arrays in executors],
                lambda: [tosa_reference_model.run(flatbuffer, arrays) for flatbuffer, arrays in models],
            ],
            MODEL_ROUNDS,
            time.process_time,
        )
    return [min(seconds) for seconds in measured]


def measure_models(names: Sequence[str]) -> None:
    """Measure models, and print a Markdown table."""
    recipes = (ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8)
    print(
        "| model | "
        + " | ".join(f"{recipe.name}: run, executor alone, reference model, s" for recipe in recipes)
        + " |"
    )
    print("|---" * (1 + len(recipes)) + "|")
    for name in names:
        cells = []
        for recipe in recipes:
            run, alone, reference = measure_model(name, recipe)
            cells.append(f"{run:.4f}, {alone:.4f}, {reference:.3f} = {reference / run:.1f}x")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure what the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--models", nargs="*", help="names of the zoo (default: all)")
    arguments = parser.parse_args()
    if arguments.models is not None:
        from tests.models import zoo

        measure_models(arguments.models or zoo.NAMES)
        return
    for recipe in (ArmRecipeType.TOSA_INT8, ArmRecipeType.VGF_INT8, ArmRecipeType.ETHOSU_U85_INT8):
        measure(recipe, arguments.runs)


if __name__ == "__main__":
    main()
