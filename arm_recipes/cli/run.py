"""``arm-recipes run``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_file, check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands

#: Numbers of an output that are printed.
_FIRST = 8


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "run",
        help="run a program on this machine, its delegates included",
        description="Run a program in ExecuTorch's runtime: delegates for TOSA on Arm's reference model, for Ethos-U "
        "on an emulator of the NPU, for VGF on Vulkan. A TFLite model that Vela compiled runs on this emulator.",
    )
    parser.add_argument("program", type=Path, help="a .pte file, or a .tflite that Vela compiled")
    arguments.add_samples(parser, "--inputs", "what to run it with, one call for each sample", required=True)
    parser.add_argument("--method", default="forward")
    parser.add_argument("--backend", choices=["tosa"], help="run the TOSA graphs that the delegates were compiled from")
    parser.add_argument("-o", "--output", type=Path, help="an .npz file for the outputs, the samples along axis 0")
    arguments.add_json(parser)
    parser.set_defaults(call=_run)


def _run(given: argparse.Namespace) -> None:
    check_source(given.inputs, "--inputs")
    check_file(given.program, "program")
    output = None if given.output is None else check_writable(given.output)
    arguments.check_no_overwrite([given.program, given.inputs], [output])
    from arm_recipes.runtime.load import load

    program = load(given.program)
    names = [value.name for value in program.signature(given.method).outputs]
    samples = arguments.read_argument_samples(given, "inputs", arguments.program_inputs(program, given.method))
    found = list(
        program.run_batch(samples() if callable(samples) else samples, method=given.method, backend=given.backend)
    )
    rows = list(_rows(names, found))
    if given.json:
        arguments.print_json({"method": given.method, "outputs": rows})
    else:
        for row in rows:
            values = ", ".join(f"{value:.6g}" for value in row["first"])
            shape = f"{row['dtype']}{row['shape']}"
            print(f"sample {row['sample']}  {row['name']}  {shape}  {row['min']:.6g} to {row['max']:.6g}: {values}")
    if output is not None:
        _write(output, names, found)
        arguments.report_written(output)


def _rows(names: Sequence[str], found: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """What is told of each output of each sample."""
    from arm_backend_core.quantization.diagnostics.error_metrics import in_float64

    for sample, outputs in enumerate(found):
        for name, tensor in zip(names, outputs, strict=True):
            values = in_float64(tensor.detach()).reshape(-1)
            yield {
                "sample": sample,
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "min": float(values.min()) if len(values) else 0.0,
                "max": float(values.max()) if len(values) else 0.0,
                "first": values[:_FIRST].tolist(),
            }


def _write(path: Path, names: Sequence[str], found: Sequence[Sequence[Any]]) -> None:
    import numpy as np

    columns = zip(*found, strict=True)
    arrays = {name: np.stack([x.numpy() for x in column]) for name, column in zip(names, columns, strict=True)}
    with path.open("wb") as file:
        np.savez(file, **arrays)
