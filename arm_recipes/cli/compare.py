"""``arm-recipes compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_file
from arm_recipes.cli import arguments
from arm_recipes.cli.html_output import add_html, check_html
from arm_recipes.cli.labels import add_labels, read_labels
from arm_recipes.cli.parser import SAMPLES
from arm_recipes.cli.samples import check_source
from arm_recipes.recipe import options

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "compare",
        help="compare a program with its model or with another program",
        description="Given a model and a recipe, export the model, run the program on this machine and compare it with "
        "the floating-point model. Given two programs, compare the second with the first.",
    )
    parser.add_argument("model", type=Path, help="file written by torch.export.save, or a .pte")
    parser.add_argument("other", type=Path, nargs="?", help="second .pte to compare with the first")
    arguments.add_samples(
        parser, "--samples", "samples to compare on, other than the calibration samples", required=True
    )
    arguments.add_recipe(parser, required=False)
    add_labels(parser, "compare the top-1 accuracy, too")
    parser.group(SAMPLES).add_argument("--method", default="forward", metavar="NAME", help="method to run")
    add_html(parser, "report and comparison")
    arguments.add_json(parser)
    parser.set_defaults(call=_compare)


def _compare(args: argparse.Namespace) -> None:
    check_source(args.samples, "--samples")
    labels = read_labels(args.labels)
    has_recipe = args.recipe is not None or args.tuned is not None
    if (args.other is None) == (not has_recipe):
        raise ValueError("compare takes a model with --recipe, or two programs without it")
    if not has_recipe:
        recipe_flags = [
            arguments.option_flag(name) for name in options.OPTIONS if getattr(args, name, None) is not None
        ]
        if recipe_flags:
            raise ValueError(f"{recipe_flags[0]} is a recipe option, and both programs are compiled already; remove it")
    html_path = check_html(args)
    if args.other is None:
        comparison, report = _compare_with_model(args, labels)
        if html_path is not None:
            arguments.print_written_path(report.save_html(html_path, comparison))
    elif html_path is not None:
        raise ValueError("--html needs the report of an export; give a model and --recipe")
    else:
        comparison = _compare_programs(args, labels)
    arguments.print_result(comparison, as_json=args.json)


def _compare_with_model(args: argparse.Namespace, labels: Any) -> tuple[Any, Any]:
    recipe_options = arguments.read_recipe_options(args)
    from arm_recipes import export

    program = arguments.load_model(args.model)
    calibration_samples = arguments.read_model_samples(args, "calibration_samples", program)
    recipe = arguments.build_recipe(args, recipe_options, calibration_samples)
    samples = arguments.read_model_samples(args, "samples", program)
    result = export(program, recipe)
    return result.compare(samples, labels, method=args.method), result.report


def _compare_programs(args: argparse.Namespace, labels: Any) -> Any:
    for path in (args.model, args.other):
        check_file(path, "program")
    from arm_recipes import compare
    from arm_recipes.runtime.load import load

    input_infos = arguments.program_inputs(load(args.model), args.method)
    samples = arguments.read_argument_samples(args, "samples", input_infos)
    return compare(args.model, args.other, samples, labels, method=args.method)
