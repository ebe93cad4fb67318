"""``arm-recipes recipes``, ``arm-recipes boards`` and ``arm-recipes operators``."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arm_backend_core
from arm_backend_core.disk_cache import cache_folder, write_atomically
from arm_recipes._internal.rendering import format_bytes
from arm_recipes.cli import arguments
from arm_recipes.recipe import options
from arm_recipes.recipe.boards import BOARDS, Board
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS

if TYPE_CHECKING:
    from arm_recipes.cli.arguments import Commands

_OPERATORS_FOOTER = """\
int lowering: how quantized values are computed. rule: by integer arithmetic; table: by a table of the function's
values; none: the operator computes integers or booleans, so nothing is quantized
quantization: how the quantizer annotates the tensors of the operator"""


def add_command(commands: Commands) -> None:
    """Add the commands and their arguments."""
    for name, help_text, call in (
        ("recipes", "list the recipes and their options", _list_recipes),
        (
            "boards",
            "list the boards: NPU, clock and memories; --json also lists the sources",
            _list_boards,
        ),
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


def _list_boards(args: argparse.Namespace) -> None:
    if args.json:
        arguments.print_json({"boards": [_board_record(board) for board in BOARDS.values()]})
        return
    rows: list[tuple[str, ...]] = [("name", "NPU", "MHz", "system", "memory mode", "SRAM", "flash", "board")]
    rows += [tuple(map(_format_cell, _board_record(board).values()))[:-2] for board in BOARDS.values()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(BOARDS)} boards; -: not documented, the recipe's default applies; --json has the sources")


def _board_record(board: Board) -> dict[str, Any]:
    """Return the properties and sources of a board. A property that no document states is None."""
    clock = board.clock()
    figures = [board.system_config, board.memory_mode, board.sram, board.flash]
    system_config, memory_mode, sram, flash = (None if figure is None else figure.value for figure in figures)
    return {
        "name": board.name,
        "npu": board.family if board.macs is None else f"{board.family}-{board.macs.value}",
        "mhz": None if clock is None else clock / 1e6,
        "system_config": system_config,
        "memory_mode": memory_mode,
        "sram_bytes": sram,
        "flash_bytes": flash,
        "title": board.title,
        "config_ini": board.config_ini,
        "sources": board.sources,
    }


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list_operators(args: argparse.Namespace) -> None:
    rows = _operator_rows()
    if args.json:
        arguments.print_json({"operators": rows})
        return
    for row in rows:
        if row["integer"] is None:
            print(f"{row['operator']:<48} decomposed into other operators")
        else:
            print(f"{row['operator']:<48} int lowering: {row['integer']:<5}  quantization: {row['annotation']}")
    print(f"{len(rows)} operators\n{_OPERATORS_FOOTER}")


def _operator_rows() -> list[dict[str, Any]]:
    """Return the operators, from a disk cache if possible, because the import of PyTorch takes seconds."""
    name = f"operators-{_cache_key()}.json"
    try:
        rows: list[dict[str, Any]] = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        rows = _read_records()
        with contextlib.suppress(OSError):  # if the cache cannot be written, the next call is only slower
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, json.dumps(rows).encode())
    return rows


def _cache_key() -> str:
    """Return the cache key: a hash of the compiler's sources and the versions of PyTorch and ExecuTorch."""
    root = Path(arm_backend_core.__file__).parent
    digest = hashlib.sha256(f"{version('torch')} {version('executorch')}".encode())
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _read_records() -> list[dict[str, Any]]:
    """Read the operators from the compiler's operator catalog."""
    from arm_backend_core.ops.catalog import aten_entries
    from arm_backend_core.ops.registry import Composite

    rows = []
    for overload, record in aten_entries().items():
        row: dict[str, Any] = {"operator": str(overload), "integer": None, "annotation": None}
        if not isinstance(record, Composite):
            row["integer"] = "rule" if record.lower_integer else "table" if record.is_univariate else "none"
            row["annotation"] = record.kind.name.lower()
        rows.append(row)
    return sorted(rows, key=lambda row: str(row["operator"]))
