"""``arm-recipes run``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.files import check_file, check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.parser import OUTPUT
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands

#: Number of values printed per output.
_PRINTED_VALUES = 8


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "run",
        help="run a program with its delegates on this machine",
        description="Run a program in ExecuTorch's runtime: TOSA delegates on Arm's reference model, Ethos-U delegates "
        "on an NPU emulator, VGF delegates on Vulkan. A TFLite model compiled by Vela runs on the NPU emulator.",
    )
    parser.add_argument("program", type=Path, help=".pte file, or .tflite file compiled by Vela")
    arguments.add_data_file(parser)
    arguments.add_samples(parser, "--inputs", "inputs, one call per sample", required=True)
    execution = parser.group("execution")
    execution.add_argument("--method", default="forward", metavar="NAME", help="method to run")
    execution.add_argument(
        "--backend", choices=["tosa"], help="run the delegates' TOSA graphs; default: the delegates themselves"
    )
    parser.group(OUTPUT).add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="write the outputs to this .npz file, with samples along axis 0",
    )
    arguments.add_json(parser)
    parser.set_defaults(call=_run)


def _run(args: argparse.Namespace) -> None:
    check_source(args.inputs, "--inputs")
    check_file(args.program, "program")
    if args.ptd is not None:
        check_file(args.ptd, "--ptd")
    output = None if args.output is None else check_writable(args.output)
    from arm_recipes.runtime.calls import call_batch
    from arm_recipes.runtime.load import load

    program = load(args.program, args.ptd)
    names = [value.name for value in program.signature(args.method).outputs]
    samples = arguments.read_argument_samples(args, "inputs", arguments.program_inputs(program, args.method))

    def execute(*tensors: Any, **named: Any) -> list[Any]:
        return program.execute(*tensors, method=args.method, backend=args.backend, **named)

    outputs = list(call_batch(execute, samples))
    rows = list(_output_rows(names, outputs))
    if args.json:
        arguments.print_json({"method": args.method, "outputs": rows})
    else:
        for row in rows:
            values = ", ".join(f"{value:.6g}" for value in row["first"])
            shape = f"{row['dtype']}{row['shape']}"
            print(f"sample {row['sample']}  {row['name']}  {shape}  {row['min']:.6g} to {row['max']:.6g}: {values}")
    if output is not None:
        _write_outputs(output, names, outputs)
        arguments.print_written_path(output)


def _output_rows(names: Sequence[str], all_outputs: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the printed figures of each output of each sample."""
    from arm_backend_core.quantization.diagnostics.error_metrics import to_float64

    for sample, outputs in enumerate(all_outputs):
        for name, tensor in zip(names, outputs, strict=True):
            values = to_float64(tensor.detach()).reshape(-1)
            yield {
                "sample": sample,
                "name": name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "min": float(values.min()) if len(values) else 0.0,
                "max": float(values.max()) if len(values) else 0.0,
                "first": values[:_PRINTED_VALUES].tolist(),
            }


def _write_outputs(path: Path, names: Sequence[str], all_outputs: Sequence[Sequence[Any]]) -> None:
    import numpy as np

    columns = zip(*all_outputs, strict=True)
    arrays = {name: np.stack([x.numpy() for x in column]) for name, column in zip(names, columns, strict=True)}
    with path.open("wb") as file:
        np.savez(file, **arrays)
