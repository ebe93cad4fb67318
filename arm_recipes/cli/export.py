"""``arm-recipes export``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from arm_recipes._internal.files import check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "export",
        help="compile a program that torch.export.save wrote",
        description="Compile a program. Quantizing recipes calibrate with --calibration-samples, or with the "
        "inputs saved in the program.",
    )
    arguments.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, help="default: the model's name with .pte")
    arguments.add_recipe(parser)
    parser.add_argument("--reference", action="store_true", help="write the reference program too: model.tosa.pte")
    parser.add_argument("--etrecord", action="store_true", help="write ExecuTorch's record too: model.etrecord")
    arguments.add_samples(parser, "--bundled-samples", "write a bundled program too, model.bpte, with what these give")
    parser.add_argument("--html", type=Path, help="write the report as a page there (needs Plotly)")
    parser.add_argument("--channels-last", action="store_true", help="take images as torch.channels_last has them")
    parser.add_argument("--cache-dir", type=Path, help="keep programs there; what is there already is not made again")
    parser.add_argument("--verify", action="store_true", help="run what Vela compiled, against its TOSA graph")
    arguments.add_json(parser)
    parser.set_defaults(call=_export)


def _export(given: argparse.Namespace) -> None:
    chosen = arguments.read_recipe_options(given)
    output = check_writable(given.output or given.model.with_suffix(".pte"))
    page = None if given.html is None else check_writable(given.html)
    if given.bundled_samples is not None:
        check_source(given.bundled_samples, "--bundled-samples")
    arguments.check_no_overwrite([given.model, given.calibration_samples, given.bundled_samples], [output, page])
    from arm_recipes import export

    program = arguments.load_model(given.model)
    recipe = arguments.build_recipe(given, chosen, program)
    result = export(program, recipe, channels_last=given.channels_last, verify=given.verify, cache_dir=given.cache_dir)
    bundled = arguments.model_samples(given, "bundled_samples", program)
    result.save(output, reference=given.reference, etrecord=given.etrecord, bundled_samples=bundled)
    arguments.print_result(result.report, as_json=given.json)
    arguments.report_written(output)
    if page is not None:
        arguments.report_written(result.report.save_html(page))
