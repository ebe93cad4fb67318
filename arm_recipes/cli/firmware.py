"""``arm-recipes firmware``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_file
from arm_recipes.cli import arguments
from arm_recipes.cli.parser import OUTPUT, SAMPLES
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "firmware",
        help="write firmware sources for a program: data, backend, memory pools and self-test",
        description="Write a folder with the sources that Cortex-M firmware needs to run a program for Ethos-U or "
        "CORTEX_M_INT8. The sizes of the memory pools are computed, and checked by a run on this machine.",
    )
    parser.add_argument("program", type=Path, help=".pte file")
    arguments.add_data_file(parser)
    parser.group(OUTPUT).add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        required=True,
        help="folder to write: new, empty or from an earlier call",
    )
    arguments.add_samples(parser, "--samples", "inputs of the self-test, stored in flash", default="random inputs")
    parser.group(SAMPLES).add_argument(
        "--method", default="forward", metavar="NAME", help="method that the samples are for"
    )
    arguments.add_json(parser)
    parser.set_defaults(call=_firmware)


def _firmware(args: argparse.Namespace) -> None:
    if args.samples is not None:
        check_source(args.samples, "--samples")
    check_file(args.program, "program")
    if args.ptd is not None:
        check_file(args.ptd, "--ptd")
    from arm_recipes import load, save_firmware

    program, samples = load(args.program, args.ptd), None
    if args.samples is not None:
        input_infos = arguments.program_inputs(program, args.method)
        samples = {args.method: arguments.read_argument_samples(args, "samples", input_infos)}
    firmware = save_firmware(program, args.output, samples)
    arguments.print_result(firmware, as_json=args.json)
    arguments.print_written_path(args.output)
