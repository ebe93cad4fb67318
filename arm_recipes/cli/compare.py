"""``arm-recipes compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_file, check_writable
from arm_recipes.cli import arguments
from arm_recipes.cli.samples import check_source
from arm_recipes.recipe import options

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Its arguments."""
    parser = commands.add_parser(
        "compare",
        help="tell what a program loses against its model, or against another program",
        description="With the file of a model and a recipe: export it, and compare the program as it runs here with "
        "the model in floating point. With two programs: compare the second with the first.",
    )
    parser.add_argument("model", type=Path, help="file written by torch.export.save, or a .pte")
    parser.add_argument("other", type=Path, nargs="?", help="a second .pte")
    arguments.add_samples(parser, "--samples", "to compare with: others than those that calibrate", required=True)
    arguments.add_recipe(parser, required=False)
    parser.add_argument("--labels", type=Path, help="an .npy file of classes, one for each item of the samples")
    parser.add_argument("--method", default="forward")
    parser.add_argument("--html", type=Path, help="write a page of the report and the comparison there (needs Plotly)")
    arguments.add_json(parser)
    parser.set_defaults(call=_compare)


def _compare(given: argparse.Namespace) -> None:
    check_source(given.samples, "--samples")
    labels = None if given.labels is None else _labels(given.labels)
    has_recipe = given.recipe is not None or given.tuned is not None
    if (given.other is None) == (not has_recipe):
        raise ValueError("compare takes a model with --recipe, or two programs without")
    if not has_recipe:
        lost = [name for name in options.OPTIONS if getattr(given, name, None) is not None]
        if lost:
            raise ValueError(f"{lost[0]} belongs to a recipe, and two programs are compiled already: leave it out")
    page = None if given.html is None else check_writable(given.html)
    arguments.check_no_overwrite(
        [given.model, given.other, given.samples, given.calibration_samples, given.labels], [page]
    )
    if given.other is None:
        found, report = _with_model(given, labels)
        if page is not None:
            arguments.report_written(report.save_html(page, found))
    elif page is not None:
        raise ValueError("--html: the page is of an export's report; give a model and --recipe")
    else:
        found = _programs(given, labels)
    arguments.print_result(found, as_json=given.json)


def _with_model(given: argparse.Namespace, labels: Any) -> tuple[Any, Any]:
    chosen = arguments.read_recipe_options(given)
    from arm_recipes import export

    program = arguments.load_model(given.model)
    result = export(program, arguments.build_recipe(given, chosen, program))
    samples = arguments.model_samples(given, "samples", program)
    return result.compare(samples, labels, method=given.method), result.report


def _programs(given: argparse.Namespace, labels: Any) -> Any:
    for path in (given.model, given.other):
        check_file(path, "program")
    from arm_recipes import compare
    from arm_recipes.runtime.load import load

    slots = arguments.program_inputs(load(given.model), given.method)
    samples = arguments.read_argument_samples(given, "samples", slots)
    return compare(given.model, given.other, samples, labels, method=given.method)


def _labels(path: Path) -> Any:
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--labels: '{path}' cannot be read as an array: {error}") from error
    if not isinstance(loaded, np.ndarray) or loaded.ndim != 1 or loaded.dtype.kind not in "iu":
        raise ValueError(f"--labels: '{path}' is not an .npy file of integers in one dimension")
    return loaded
