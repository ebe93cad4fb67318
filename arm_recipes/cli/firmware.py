"""``arm-recipes firmware``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_file
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "firmware",
        help="write a folder that builds: a program, its backend, its memory and its test",
        description="Write what a firmware for Cortex-M needs of a program for an Ethos-U. Its memory is computed, and "
        "tried here to the byte.",
    )
    parser.add_argument("program", type=Path, help="a .pte file")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="the folder: new, empty, or from an earlier call"
    )
    arguments.add_samples(parser, "--samples", "inputs of the self-test, all of which stand in flash; default: noise")
    parser.add_argument("--method", default="forward", help="that the samples are for")
    arguments.add_json(parser)
    parser.set_defaults(call=_firmware)


def _firmware(given: argparse.Namespace) -> None:
    if given.samples is not None:
        check_source(given.samples, "--samples")
    check_file(given.program, "program")
    from arm_recipes.firmware.saving import save_firmware
    from arm_recipes.runtime.load import load

    program, samples = load(given.program), None
    if given.samples is not None:
        found = arguments.read_argument_samples(given, "samples", arguments.program_inputs(program, given.method))
        samples = {given.method: found() if callable(found) else found}
    firmware = save_firmware(program, given.output, samples)
    arguments.print_result(firmware, as_json=given.json)
    arguments.report_written(given.output)
