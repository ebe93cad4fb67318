"""``arm-recipes recipes`` and ``arm-recipes operators``."""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arm_backend_core
from arm_backend_core.alternatives.disk_cache import cache_folder, write_atomically
from arm_recipes.cli import arguments
from arm_recipes.recipe import options
from arm_recipes.recipe.targets import SPEC_BUILDERS

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Add the commands and their arguments."""
    for name, help_text, call in (
        ("recipes", "list the recipes and their options", _list_recipes),
        ("operators", "list the ATen operators that can be delegated", _list_operators),
    ):
        parser = commands.add_parser(name, help=help_text)
        arguments.add_json(parser)
        parser.set_defaults(call=call)


def _list_recipes(args: argparse.Namespace) -> None:
    option_names = {name: options.option_names(name) for name in SPEC_BUILDERS}
    expects = {option.name: option.expects for option in options.OPTIONS.values()}
    if args.json:
        arguments.print_json({"recipes": option_names, "options": expects})
        return
    for name, names in option_names.items():
        print(f"{name:<18} {', '.join(names)}")
    print()
    for name, text in expects.items():
        print(f"{name:<24} {text}")


def _list_operators(args: argparse.Namespace) -> None:
    rows = _operator_rows()
    if args.json:
        arguments.print_json({"operators": rows})
        return
    for row in rows:
        if row["integer"] is None:
            print(f"{row['operator']:<48} decomposed into other operators")
        else:
            print(f"{row['operator']:<48} integer: {row['integer']:<6} annotation: {row['annotation']}")
    print(f"{len(rows)} operators")


def _operator_rows() -> list[dict[str, Any]]:
    """Return the operators, from a disk cache if possible, because the import of PyTorch takes seconds."""
    cache_file = cache_folder() / f"operators-{_cache_key()}.json"
    try:
        rows: list[dict[str, Any]] = json.loads(cache_file.read_text())
    except (OSError, ValueError):
        rows = _read_records()
        try:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache_file, json.dumps(rows).encode())
        except OSError:  # without a cache, the next call is slower
            pass
    return rows


def _cache_key() -> str:
    """Return the cache key: a hash of the compiler's sources and the versions of PyTorch and ExecuTorch."""
    root = Path(arm_backend_core.__file__).parent
    digest = hashlib.sha256(f"{version('torch')} {version('executorch')}".encode())
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _read_records() -> list[dict[str, Any]]:
    """Read the operators from the compiler's records."""
    from arm_backend_core.ops.catalog import records
    from arm_backend_core.ops.registry import Composite

    rows = []
    for overload, record in records().items():
        row: dict[str, Any] = {"operator": str(overload), "integer": None, "annotation": None}
        if not isinstance(record, Composite):
            row["integer"] = "rule" if record.lower_integer else "table" if record.univariate else "-"
            row["annotation"] = record.kind.name.lower()
        rows.append(row)
    return sorted(rows, key=lambda row: str(row["operator"]))
