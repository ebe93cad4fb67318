"""``arm-recipes recipes`` and ``arm-recipes operators``."""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arm_backend_core
from arm_backend_core.alternatives.disk_cache import cache_folder, write
from arm_recipes.cli import arguments
from arm_recipes.recipe import options
from arm_recipes.recipe.targets import SPECS

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands


def add_command(commands: Commands) -> None:
    """Their arguments."""
    for name, what, call in (
        ("recipes", "list the recipes and their options", _recipes),
        ("operators", "list the ATen operators that can be delegated", _operators),
    ):
        parser = commands.add_parser(name, help=what)
        arguments.add_json(parser)
        parser.set_defaults(call=call)


def _recipes(given: argparse.Namespace) -> None:
    allowed = {name: options.allowed(name) for name in SPECS}
    expects = {option.name: option.expects for option in options.OPTIONS.values()}
    if given.json:
        arguments.print_json({"recipes": allowed, "options": expects})
        return
    for name, names in allowed.items():
        print(f"{name:<18} {', '.join(names)}")
    print()
    for name, text in expects.items():
        print(f"{name:<24} {text}")


def _operators(given: argparse.Namespace) -> None:
    rows = _known()
    if given.json:
        arguments.print_json({"operators": rows})
        return
    for row in rows:
        if row["integer"] is None:
            print(f"{row['operator']:<48} made of other operators")
        else:
            print(f"{row['operator']:<48} integer: {row['integer']:<6} annotation: {row['annotation']}")
    print(f"{len(rows)} operators")


def _known() -> list[dict[str, Any]]:
    """The operators, kept from call to call: the records need PyTorch, whose import takes seconds."""
    kept = cache_folder() / f"operators-{_key()}.json"
    try:
        rows: list[dict[str, Any]] = json.loads(kept.read_text())
    except (OSError, ValueError):
        rows = _recorded()
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write(kept, json.dumps(rows).encode())
        except OSError:  # slower the next time
            pass
    return rows


def _key() -> str:
    """Changes with the compiler's sources and with PyTorch."""
    root = Path(arm_backend_core.__file__).parent
    digest = hashlib.sha256(f"{version('torch')} {version('executorch')}".encode())
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _recorded() -> list[dict[str, Any]]:
    """Read from the records that the compiler itself uses."""
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
