"""Documentation: examples run, the site builds, and all recipes, options and public names occur."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import arm_recipes
from arm_backend_core.targets.hardware import HARDWARE
from arm_backend_core.tosa.vela_workarounds.catalog import WORKAROUNDS
from arm_recipes import ArmRecipeType
from arm_recipes.recipe.boards import BOARDS
from arm_recipes.recipe.options import OPTIONS
from docs import board_pages
from tests.cli.command_server import CommandServer
from tests.runtime import vela_bugs

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_PAGES = sorted([_ROOT / "README.md", *_DOCS.rglob("*.md")])
#: Blocks of ``text`` are not run: output, installation, and commands for another machine.
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_KINDS = frozenset({"python", "bash", "text"})
#: The example of ``add_operator.md`` registers an operator, which other tests of this process would see.
_EXECUTED_PAGES = [page for page in _PAGES if page.name != "add_operator.md"]
_SOURCE_FOLDERS = ("arm_backend_core", "arm_recipes", "runtime", "tests", "benchmarks", "docs")
_SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".h"})
#: Identifiers of contributor pages that no source contains, with the reason.
_NOT_IN_SOURCES = {
    "_A8W4": "end of a recipe's name",
    "_A16W8": "end of a recipe's name",
    "ethosu_": "start of a method's name",
    "add_int8": "name of a test row, which a loop builds",
    "cell_clip": "attribute of a TFLite operator",
    "conv2d_3": "name of a value in an example",
    "ethos_u55_regs": "module of Vela",
    **dict.fromkeys(
        ("early_start", "early_start_resize", "early_start_strided", "missing_kernel_wait", "stale_table"),
        "Vela bug that has no record: the backend repairs the command stream",
    ),
    **dict.fromkeys(("OPA_32", "OPB_32", "OPB_SCALE", "PAD_BOTTOM", "PAD_LEFT"), "register of the NPU or its value"),
}


def _blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, language and text of each code block."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in _BLOCK.finditer(text)]


def test_code_blocks_have_a_known_language() -> None:
    found = [(page.name, line, kind) for page in _PAGES for line, kind, _ in _blocks(page) if kind not in _KINDS]
    assert found == []


@pytest.fixture
def server() -> Iterator[CommandServer]:
    """Server for the commands of a page; it starts with the first command."""
    server = CommandServer()
    yield server
    server.close()


@pytest.mark.parametrize("page", _EXECUTED_PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: CommandServer) -> None:
    """The examples of a page run in order."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    # The server takes as long to start as one command.
    has_many_commands = sum(kind == "bash" for _, kind, _ in _blocks(page)) > 2
    for line, kind, text in _blocks(page):
        if kind == "python":
            code = compile("\n" * (line - 1) + text, str(page), "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, names)
        elif kind == "bash":
            commands = _parse_commands(text) if has_many_commands else None
            if commands is None:
                _shell(text, tmp_path)
            for arguments in commands or ():
                exit_code, output = server.run(arguments, tmp_path)
                assert exit_code == 0, f"{arguments}\n{output[-3000:]}"


def _parse_commands(text: str) -> list[list[str]] | None:
    """Return the arguments of each command, if all are ``arm-recipes`` without shell operators and variables."""
    commands = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    is_plain = not re.search(r"[|&;<>$`()*?~#]", text) and all(words[:1] == ["arm-recipes"] for words in commands)
    return [words[1:] for words in commands] if is_plain else None


def _shell(text: str, folder: Path) -> None:
    """Run a script in a shell with the programs of this environment and this checkout."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stderr[-3000:]}"


def test_only_plain_arm_recipes_commands_run_without_a_shell() -> None:
    assert _parse_commands("arm-recipes export a \\\n  -o 'b c'\narm-recipes recipes\n") == [
        ["export", "a", "-o", "b c"],
        ["recipes"],
    ]
    assert _parse_commands("arm-recipes recipes | head\n") is None
    assert _parse_commands("cmake --version\n") is None


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "users" / "reference" / "index.html").read_text()
    assert "arm_recipes.api.export" in reference


def test_every_recipe_and_option_is_named() -> None:
    text = (_DOCS / "users" / "recipes.md").read_text()
    missing = [name for name in (*OPTIONS, *(recipe.name for recipe in ArmRecipeType)) if f"`{name}" not in text]
    assert missing == []


def test_the_reference_has_every_public_name() -> None:
    text = (_DOCS / "users" / "reference.md").read_text()
    foreign = {"ExportRecipe"}  # ExecuTorch's
    missing = [name for name in arm_recipes.__all__ if name not in foreign and not re.search(rf"\.{name}$", text, re.M)]
    assert missing == []


def _identifiers_in_sources() -> set[str]:
    """Words of all sources except this test, and names of files."""
    files = [*_ROOT.glob("*"), *(file for folder in _SOURCE_FOLDERS for file in (_ROOT / folder).rglob("*"))]
    words = {file.stem for file in files}
    for file in files:
        if (file.suffix in _SOURCE_SUFFIXES or file.name == "Makefile") and file != Path(__file__):
            words.update(re.findall(r"[A-Za-z_]\w*", file.read_text()))
    return words


def test_identifiers_in_contributor_pages_exist() -> None:
    """Each identifier in backticks that has an underscore or only capitals occurs in the sources."""
    known = _identifiers_in_sources()
    assert not known & _NOT_IN_SOURCES.keys(), "these are in the sources now: remove them from _NOT_IN_SOURCES"
    unknown = []
    for page in sorted((_DOCS / "contributors").glob("*.md")):
        prose = _BLOCK.sub("", page.read_text())
        words = {word for code in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"[A-Za-z_]\w*", code)}
        named = {word for word in words if "_" in word or word.isupper()}
        unknown += [f"{page.name}: {word}" for word in sorted(named - known - _NOT_IN_SOURCES.keys())]
    assert unknown == []


#: Vela bugs without a record of their own: the backend repairs the command stream, or another record has them.
_VELA_BUGS_WITHOUT_RECORD = {
    "table_overflow",
    "early_start",
    "stale_table",
    "missing_kernel_wait",
    "early_start_resize",
    "early_start_strided",
}


def _vela_bug_rows() -> dict[str, list[tuple[str, str]]]:
    """{name of a bug: (releases, NPUs) of each of its rows}, from the tables of bugs in vela.md."""
    rows = defaultdict[str, list[tuple[str, str]]](list)
    text = (_DOCS / "contributors" / "vela.md").read_text()
    for name, releases, npus in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \|$", text, re.M):
        rows[name].append((releases, npus))
    return rows


def test_the_tables_of_vela_bugs_agree_with_the_records() -> None:
    families = [family for family, hardware in HARDWARE.items() if hardware.is_ethos_u]
    records = {
        record.name: (record.releases, [family for family in families if record.name in HARDWARE[family].vela_bugs])
        for record in WORKAROUNDS
    } | {
        bug.name: (bug.releases, [family for family in families if any(family in x for x in bug.miscompiled)])
        for bug in vela_bugs.NOT_EMITTED
    }
    expected = {
        name: [
            (
                ", ".join(f"{major}.{minor}" for major, minor in releases),
                "all" if affected == families else ", ".join(x.removeprefix("ethos-").upper() for x in affected),
            )
        ]
        for name, (releases, affected) in records.items()
    }
    rows = _vela_bug_rows()
    assert rows.keys() - expected.keys() == _VELA_BUGS_WITHOUT_RECORD
    assert {name: rows[name] for name in expected} == expected


def test_each_vela_bug_has_a_replacement_or_a_fix() -> None:
    """Each bug is in the first column of one row below the headings "Workarounds" and "Bugs fixed"."""
    text = (_DOCS / "contributors" / "vela.md").read_text()
    tables = text[text.index("\n## Workarounds\n") : text.index("\n## TFLite models\n")]
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", tables, re.M)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    bugs = _vela_bug_rows()
    assert sorted(name for name in named if name in bugs) == sorted(bugs)


def test_install_commands_name_extras_that_exist() -> None:
    """``'.[all]'`` in pages and ``'arm-recipes[all]'`` in pages and messages."""
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [file for folder in ("arm_backend_core", "arm_recipes") for file in (_ROOT / folder).rglob("*.py")]
    command = re.compile(r"pip install '(?:arm-recipes|\.)\[(\w+)\]'")
    named = {extra for file in (*_PAGES, *sources) for extra in command.findall(file.read_text())}
    assert {"all", "ethosu", "vgf"} <= named <= set(extras)


def test_a_first_installation_is_from_a_clone() -> None:
    """No package index has arm-recipes: pip resolves its name only where it is installed, as messages may assume."""
    for page in ("README.md", "docs/users/first_steps.md"):
        first = re.search(r"pip install (\S+)", (_ROOT / page).read_text())
        assert first is not None, page
        assert first[1].startswith("'.["), page


def test_the_firmware_page_lists_every_board() -> None:
    """Every board has a row."""
    assert board_pages.PAGE.read_text() == board_pages.render_page(), "run docs/board_pages.py"
    named = [board.name for family in board_pages.FAMILIES for board in board_pages.find_boards(family)]
    assert sorted(named) == sorted(BOARDS)


def test_every_page_is_in_the_navigation() -> None:
    text = (_ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(_DOCS).as_posix() for page in _PAGES if page.is_relative_to(_DOCS)]
    assert [page for page in pages if f": {page}\n" not in text] == []
