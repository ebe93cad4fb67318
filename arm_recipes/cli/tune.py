"""``arm-recipes tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source
from arm_recipes.explore.tune import goals
from arm_recipes.recipe import precisions

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "tune",
        help="choose a precision for each part of a model, within a budget",
        description="Find the most exact program within limits, or the cheapest that is exact enough. Without any "
        "goal: at most 1.1 times the cycles of the recipe's own program.",
    )
    arguments.add_model(parser)
    arguments.add_recipe(parser)
    arguments.add_samples(parser, "--samples", "to calibrate and measure with, instead of those in the model's file")
    arguments.add_samples(parser, "--test-samples", "to judge with, others than --samples")
    for name in goals.COST_KINDS:
        parser.add_argument(f"--{name}", type=_limit, help="at most: 1.1 is a factor, 512KiB or 400000 absolute")
    parser.add_argument("--sqnr", type=float, metavar="DB", help="at least; the cheapest program that has it")
    parser.add_argument(
        "--candidate-precisions",
        action="append",
        choices=precisions.NAMES,
        metavar="NAME",
        help="a precision; repeat for more",
    )
    parser.add_argument("--cache-dir", type=Path, help="where what was tried is kept, to go on from")
    parser.add_argument("-o", "--output", type=Path, help="write the program there")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the recipe there, for export --tuned")
    parser.add_argument("--html", type=Path, help="write a picture there (needs Plotly)")
    arguments.add_json(parser)
    parser.set_defaults(call=_tune)


def _tune(given: argparse.Namespace) -> None:
    chosen = arguments.read_recipe_options(given)
    for flag, source in (("--samples", given.samples), ("--test-samples", given.test_samples)):
        if source is not None:
            check_source(source, flag)
    budget = {name: getattr(given, name) for name in goals.COST_KINDS if getattr(given, name) is not None} or None
    goals.check_goal(budget, given.sqnr, None)
    written = {name: getattr(given, name) for name in ("output", "save", "html")}
    paths = {name: None if path is None else check_writable(path) for name, path in written.items()}
    read = [given.model, given.samples, given.test_samples, given.calibration_samples, given.tuned]
    arguments.check_no_overwrite(read, paths.values())
    from arm_recipes import ArmRecipe, tune

    program = arguments.load_model(given.model)
    recipe = arguments.build_recipe(given, chosen, program)
    assert isinstance(recipe, ArmRecipe)
    samples = arguments.model_samples(given, "samples", program)
    found = tune(
        program,
        recipe,
        samples,
        budget=budget,
        min_metric=given.sqnr,
        candidate_precisions=given.candidate_precisions,
        test_samples=arguments.model_samples(given, "test_samples", program),
        cache_dir=given.cache_dir,
    )
    if paths["output"] is not None:
        found.best.save(paths["output"])
    if paths["save"] is not None:
        found.save(paths["save"])
    if paths["html"] is not None:
        found.plot().write_html(str(paths["html"]))
    arguments.print_result(found, as_json=given.json)
    for path in paths.values():
        if path is not None:
            arguments.report_written(path)


def _limit(text: str) -> Any:
    """A factor where there is a point and no unit, else a number, or a text with a unit."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
