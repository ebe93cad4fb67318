"""``arm-recipes export``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.html_output import add_html, check_html
from arm_recipes.cli.labels import add_labels, read_labels
from arm_recipes.cli.parser import OPTION_GROUP_TITLES, OUTPUT, check_no_overwrite
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "export",
        help="compile a program that torch.export.save wrote",
        description="Compile a program. Integer recipes calibrate with --calibration-samples, or by default with the "
        "inputs saved in the program.",
    )
    arguments.add_model(parser)
    arguments.add_recipe(parser)
    output = parser.group(OUTPUT)
    output.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="write the program to this file; default: the model's name with .pte",
    )
    output.add_argument("--reference", action="store_true", help="also write the reference program, model.tosa.pte")
    output.add_argument("--etrecord", action="store_true", help="also write the ETRecord, model.etrecord")
    arguments.add_samples(
        parser, "--bundled-samples", "also write a bundled program, model.bpte, with these samples and their outputs"
    )
    add_labels(parser, "report the expected top-1 accuracy on the calibration samples")
    add_html(parser, "the report")
    compilation = parser.group(OPTION_GROUP_TITLES["all"])
    compilation.add_argument(
        "--channels-last", action="store_true", help="compile for inputs in torch.channels_last memory format"
    )
    compilation.add_argument(
        "--sizes",
        type=arguments.parse_sizes,
        action=arguments.MergeDicts,
        metavar="DIMENSION=SIZES",
        help="compile a program with dynamic shapes for these sizes, such as x_0=1,8 for axis 0 of input x; repeat for "
        "several dimensions",
    )
    compilation.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="cache compiled programs in this folder")
    compilation.add_argument(
        "--verify",
        action="store_true",
        help="run each Ethos-U delegate and compare it with the TOSA reference model; compare int8 kernels "
        "with a second implementation",
    )
    arguments.add_json(parser)
    parser.set_defaults(call=_export)


def _export(args: argparse.Namespace) -> None:
    recipe_options = arguments.read_recipe_options(args)
    args.output = args.output or args.model.with_suffix(".pte")
    check_no_overwrite(args)
    output = check_writable(args.output)
    html_path = check_html(args)
    if args.bundled_samples is not None:
        check_source(args.bundled_samples, "--bundled-samples")
    labels = read_labels(args.labels)
    if labels is not None and args.calibration_samples is None:
        raise ValueError("--labels needs the samples that the labels belong to; add --calibration-samples")
    from arm_recipes import export

    program = arguments.load_model(args.model)
    samples = arguments.read_model_samples(args, "calibration_samples", program)
    # With --sizes, pass the samples to ``export``, which resizes them to each size. It does not resize the calibration
    # samples of a recipe.
    recipe = arguments.build_recipe(args, recipe_options, None if args.sizes else samples)
    bundled = arguments.read_model_samples(args, "bundled_samples", program)
    result = export(
        program,
        recipe,
        samples if args.sizes or labels is not None else None,
        labels=labels,
        sizes=args.sizes,
        channels_last=args.channels_last,
        verify=args.verify,
        cache_dir=args.cache_dir,
    )
    result.save(output, reference=args.reference, etrecord=args.etrecord, bundled_samples=bundled)
    arguments.print_result(result.report, as_json=args.json)
    arguments.print_written_path(output)
    if html_path is not None:
        arguments.print_written_path(result.report.save_html(html_path))
