"""``arm-recipes sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_saved_program
from arm_recipes.cli import arguments
from arm_recipes.cli.html_output import add_html, check_html
from arm_recipes.cli.parser import OUTPUT
from arm_recipes.cli.samples import check_source
from arm_recipes.explore.sweep.configurations import ALL_VALUES, list_configurations, split_recipes
from arm_recipes.explore.sweep.cortex_m_configurations import list_cortex_m_configurations

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


_RECIPE_OPTIONS = ("config_ini", "extra_flags", "per_channel", "search_alternatives")


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "sweep",
        help="compile a model for many Ethos-U configurations and Cortex-M processors and compare them",
        description="Compile a model for the combinations of recipes, MACs, system configurations and memory modes, "
        "and with --cpu for Cortex-M processors.",
    )
    arguments.add_model(parser)
    arguments.add_samples(parser, "--samples", "samples to calibrate and measure with", default=arguments.MODEL_INPUTS)
    configurations = parser.group("configurations")
    for name, default in (
        ("recipe", "default: the int8 recipes of Ethos-U, and CORTEX_M_INT8 with --cpu"),
        ("system-config", "default: the recipe's; 'all' for all"),
        ("memory-mode", "default: all"),
        ("board", "'all' for all; replaces --macs, --system-config and --memory-mode"),
    ):
        dest = name.replace("-", "_") + "s"
        configurations.add_argument(
            f"--{name}", dest=dest, action="append", metavar="NAME", help=f"repeat for several; {default}"
        )
    configurations.add_argument(
        "--macs", type=int, action="append", metavar="N", help="MACs per cycle; repeat for several; default: all"
    )
    configurations.add_argument(
        "--cpu",
        dest="cpus",
        action="append",
        metavar="NAME[=MHZ]",
        help="processor of CORTEX_M_INT8, such as cortex-m4=120; repeat for several; with a clock, the table also "
        "shows the time",
    )
    for name in _RECIPE_OPTIONS:
        arguments.add_option(parser, name)
    arguments.add_option(parser, "optimise", default="auto")
    output = parser.group(OUTPUT)
    output.add_argument(
        "--cache-dir",
        type=Path,
        metavar="FOLDER",
        help="keep finished configurations in this folder and resume from it",
    )
    add_html(parser, "a chart")
    arguments.add_json(parser)
    parser.set_defaults(call=_sweep)


def _sweep(args: argparse.Namespace) -> None:
    check_saved_program(args.model)
    if args.samples is not None:
        check_source(args.samples, "--samples")
    html_path = check_html(args)
    systems = args.system_configs if args.system_configs != [ALL_VALUES] else ALL_VALUES
    varied = {"macs": args.macs, "system_config": systems, "memory_mode": args.memory_modes}
    recipe_options = {name: getattr(args, name) for name in (*_RECIPE_OPTIONS, "optimise")}
    boards = args.boards if args.boards != [ALL_VALUES] else ALL_VALUES
    cpus = None if args.cpus is None else _parse_cpus(args.cpus)
    # check before PyTorch is imported
    npu_recipes, has_cortex_m = split_recipes(args.recipes, cpus)
    fixed = {"calibration_samples": None, **recipe_options}
    if has_cortex_m:
        list_cortex_m_configurations(cpus, fixed)
    if npu_recipes:
        list_configurations(None if args.recipes is None else npu_recipes, varied, fixed, boards)
    from arm_recipes import sweep

    program = arguments.load_model(args.model)
    samples = arguments.read_model_samples(args, "samples", program)
    result = sweep(
        program,
        args.recipes,
        samples,
        macs=args.macs,
        system_configs=systems,
        memory_modes=args.memory_modes,
        boards=boards,
        cpus=cpus,
        cache_dir=args.cache_dir,
        **recipe_options,
    )
    if html_path is not None:
        result.plot().write_html(str(html_path))
        arguments.print_written_path(html_path)
    arguments.print_result(result, as_json=args.json)


def _parse_cpus(texts: list[str]) -> dict[str, float | None]:
    """Parse ``NAME[=MHZ]``.

    Raises:
        ValueError: the clock is not a number.
    """
    clocks: dict[str, float | None] = {}
    for text in texts:
        name, has_clock, clock = text.partition("=")
        try:
            clocks[name] = float(clock) if has_clock else None
        except ValueError:
            raise ValueError(f"--cpu: the clock of {text!r} is not a number of MHz; write --cpu {name}=120") from None
    return clocks
