"""``arm-recipes tune``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.html_output import add_html, check_html
from arm_recipes.cli.parser import OUTPUT
from arm_recipes.cli.samples import check_source
from arm_recipes.explore.tune import goals
from arm_recipes.recipe import precisions

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "tune",
        help="search for a precision of each module, within a budget",
        description="Find the most accurate program within limits, or the cheapest program that is accurate enough. "
        "Default goal: at most 1.1 times the cycles of the recipe's own program.",
    )
    arguments.add_model(parser)
    goal = parser.group("goal")
    arguments.add_recipe(parser, calibration_default="every second one of --samples")
    arguments.add_samples(parser, "--samples", "samples to calibrate and measure with", default=arguments.MODEL_INPUTS)
    arguments.add_samples(parser, "--test-samples", "samples to test the result with", default="some of --samples")
    for name in goals.COST_KINDS:
        goal.add_argument(
            f"--{name}",
            type=_parse_limit,
            metavar="LIMIT",
            help=f"limit of the {name}: a factor relative to the program of the unchanged recipe, such as 1.1, or an "
            "absolute value, such as 400000 or 512KiB",
        )
    goal.add_argument(
        "--sqnr", type=float, metavar="DB", help="minimum SQNR in dB; find the cheapest program that reaches it"
    )
    goal.add_argument(
        "--candidate-precisions",
        action="append",
        choices=precisions.PRECISION_NAMES,
        metavar="NAME",
        help=f"precision to choose from: {', '.join(precisions.PRECISION_NAMES)}; repeat for several; default: the "
        "recipe's own and A16W8; for VGF also floating point; with a flash limit also A8W4; for Cortex-M, the recipe's "
        "own and floating point",
    )
    output = parser.group(OUTPUT)
    output.add_argument(
        "--cache-dir", type=Path, metavar="FOLDER", help="keep results in this folder and resume from it"
    )
    output.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the program to this file")
    output.add_argument("--save", type=Path, metavar="FILE", help="write the recipe to this file, for export --tuned")
    add_html(parser, "a chart")
    arguments.add_json(parser)
    parser.set_defaults(call=_tune)


def _tune(args: argparse.Namespace) -> None:
    recipe_options = arguments.read_recipe_options(args)
    for flag, source in (("--samples", args.samples), ("--test-samples", args.test_samples)):
        if source is not None:
            check_source(source, flag)
    budget = {name: getattr(args, name) for name in goals.COST_KINDS if getattr(args, name) is not None} or None
    goals.check_goal(budget, args.sqnr, None)
    outputs = {name: getattr(args, name) for name in ("output", "save")}
    paths = {name: None if path is None else check_writable(path) for name, path in outputs.items()}
    paths["html"] = check_html(args)
    from arm_recipes import ArmRecipe, tune

    program = arguments.load_model(args.model)
    calibration_samples = arguments.read_model_samples(args, "calibration_samples", program)
    recipe = arguments.build_recipe(args, recipe_options, calibration_samples)
    assert isinstance(recipe, ArmRecipe)
    samples = arguments.read_model_samples(args, "samples", program)
    test_samples = arguments.read_model_samples(args, "test_samples", program)
    result = tune(
        program,
        recipe,
        samples,
        budget=budget,
        min_metric=args.sqnr,
        candidate_precisions=args.candidate_precisions,
        test_samples=test_samples,
        cache_dir=args.cache_dir,
    )
    if paths["output"] is not None:
        result.best.save(paths["output"])
    if paths["save"] is not None:
        result.save(paths["save"])
    if paths["html"] is not None:
        result.plot().write_html(str(paths["html"]))
    arguments.print_result(result, as_json=args.json)
    for path in paths.values():
        if path is not None:
            arguments.print_written_path(path)


def _parse_limit(text: str) -> Any:
    """Parse a limit: a factor (with a decimal point and no unit), an integer, or a text with a unit."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
