"""``arm-recipes sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_saved_program, check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source
from arm_recipes.explore.sweep.configurations import ALL, list_configurations
from arm_recipes.recipe.options import GOALS

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


_SWITCHES = ("extra_flags", "per_channel", "search_alternatives")


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "sweep",
        help="compile a model for many Ethos-U configurations, to choose one",
        description="Compile a model for every combination of what is named; what is not named is all that Vela has.",
    )
    arguments.add_model(parser)
    arguments.add_samples(parser, "--samples", "to calibrate and measure with, instead of those in the model's file")
    for name, more in (
        ("recipe", "default: the int8 recipes"),
        ("system-config", "default: that of the recipe; 'all': all"),
        ("memory-mode", "default: all"),
    ):
        dest = name.replace("-", "_") + "s"
        parser.add_argument(f"--{name}", dest=dest, action="append", metavar="NAME", help=f"repeat for more; {more}")
    parser.add_argument("--macs", type=int, action="append", help="repeat for more; default: all")
    parser.add_argument("--config-ini", help="a Vela .ini file")
    for name in _SWITCHES:
        flag, kind = arguments.FLAG_OVERRIDES[name]
        parser.add_argument(flag, dest=name, **kind)
    parser.add_argument("--optimise", default="auto", help=", ".join(GOALS) + "; default: auto")
    parser.add_argument("--cache-dir", type=Path, help="where finished configurations are kept, to go on from")
    parser.add_argument("--html", type=Path, help="write a picture there (needs Plotly)")
    arguments.add_json(parser)
    parser.set_defaults(call=_sweep)


def _sweep(given: argparse.Namespace) -> None:
    check_saved_program(given.model)
    if given.samples is not None:
        check_source(given.samples, "--samples")
    picture = None if given.html is None else check_writable(given.html)
    arguments.check_no_overwrite([given.model, given.samples], [picture])
    systems = given.system_configs if given.system_configs != [ALL] else ALL
    varied = {"macs": given.macs, "system_config": systems, "memory_mode": given.memory_modes}
    rest = {name: getattr(given, name) for name in (*_SWITCHES, "optimise", "config_ini")}
    list_configurations(given.recipes, varied, {"calibration_samples": None, **rest})  # now: before PyTorch is imported
    from arm_recipes import sweep

    program = arguments.load_model(given.model)
    samples = arguments.model_samples(given, "samples", program)
    found = sweep(
        program,
        given.recipes,
        samples,
        macs=given.macs,
        system_configs=systems,
        memory_modes=given.memory_modes,
        cache_dir=given.cache_dir,
        **rest,
    )
    if picture is not None:
        found.plot().write_html(str(picture))
        arguments.report_written(picture)
    arguments.print_result(found, as_json=given.json)
