"""The command line: ``python -m arm_recipes``."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from arm_recipes import options
from arm_recipes.files import check_saved_program, check_writable
from arm_recipes.messages import ArmRecipesWarning, ExportError
from arm_recipes.targets import SPECS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0: done; 1: the export failed; 2: the arguments are wrong (also how argparse exits).
    """
    # PyTorch and ExecuTorch take seconds to import: not before the arguments are known to be right.
    given = _parser().parse_args(arguments)
    try:
        if given.command == "recipes":
            print(_recipes())
        elif given.command == "operators":
            print(_operators())
        elif given.command == "inspect":
            _inspect(given.program, as_json=given.json)
        else:
            return _export(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _export(given: argparse.Namespace) -> int:
    """Compile a program; returns the exit code.

    Raises:
        ValueError: an argument is wrong.
    """
    chosen = {name: getattr(given, name) for name in options.OPTIONS if hasattr(given, name)}
    SPECS[given.recipe](options.check(given.recipe, chosen))
    model = check_saved_program(given.model)
    output = check_writable(given.output or model.with_suffix(".pte"))
    from arm_backend_core.errors import ArmBackendError
    from arm_recipes import ArmRecipeType, ExportRecipe, RunError, export

    with warnings.catch_warnings():
        warnings.simplefilter("always", ArmRecipesWarning)
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        try:
            recipe = ExportRecipe.get_recipe(ArmRecipeType[given.recipe], **chosen)
            result = export(model, recipe, verify=given.verify)
            result.save(output, tosa=given.tosa)
        except (ArmBackendError, ExportError, RunError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(result.report.to_dict(), indent=2) if given.json else result.report)
    print(f"wrote {output}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="arm-recipes", description="Compile PyTorch programs for Arm targets.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("recipes", help="list the recipes and their options")
    commands.add_parser("operators", help="list the ATen operators that can be delegated")
    shown = commands.add_parser("inspect", help="tell what is in a program, and what the firmware must have for it")
    shown.add_argument("program", type=Path, help="a .pte file")
    shown.add_argument("--json", action="store_true", help="print it as JSON")
    one = commands.add_parser(
        "export",
        help="compile a program that torch.export.save wrote",
        description="Compile a program. Quantizing recipes calibrate with the inputs saved in it.",
        argument_default=argparse.SUPPRESS,
    )
    one.add_argument("model", type=Path, help="file written by torch.export.save")
    one.add_argument("--recipe", required=True, choices=list(SPECS), metavar="NAME")
    one.add_argument("-o", "--output", type=Path, default=None, help="default: the model's name with .pte")
    one.add_argument("--tosa", action="store_true", default=False, help="write the TOSA twin too: model.tosa.pte")
    one.add_argument(
        "--verify", action="store_true", default=False, help="run what Vela compiled, against its TOSA graph"
    )
    one.add_argument("--json", action="store_true", default=False, help="print the report as JSON")
    one.add_argument("--macs", type=int)
    for name in ("system_config", "memory_mode", "config_ini", "dump_dir"):
        one.add_argument(_flag(name), help=options.OPTIONS[name].expects)
    one.add_argument("--extra-flags", action="append", metavar="FLAG", help="for Vela; repeat for more")
    one.add_argument("--extension", dest="extensions", action="append", metavar="NAME", help="of TOSA; repeat for more")
    one.add_argument("--per-tensor", dest="per_channel", action="store_false", help="one scale per weight tensor")
    for name in ("direct_drive", "quantized_io", "require_full_delegation", "require_runnable"):
        one.add_argument(_flag(name), action="store_true")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _inspect(program: Path, *, as_json: bool) -> None:
    """Print what is in a program; raises ``ValueError`` if it is none."""
    from arm_recipes.runtime.inspect import inspect

    inspection = inspect(program)
    print(json.dumps(inspection.to_dict(), indent=2) if as_json else inspection)


def _recipes() -> str:
    lines = [f"{name:<18} {', '.join(options.allowed(name))}" for name in SPECS]
    lines += ["", *(f"{option.name:<24} {option.expects}" for option in options.OPTIONS.values())]
    return "\n".join(lines)


def _operators() -> str:
    """One line an operator, read from the records that the compiler itself uses."""
    from arm_backend_core.ops.registry import Composite, records

    lines = []
    for overload, record in records().items():
        if isinstance(record, Composite):
            lines.append(f"{overload!s:<48} made of other operators")
            continue
        integer = "rule" if record.lower_integer else "table" if record.univariate else "-"
        lines.append(f"{overload!s:<48} integer: {integer:<6} annotation: {record.kind.name.lower()}")
    return "\n".join([*sorted(lines), f"{len(lines)} operators"])
