"""Boards: every record compiles with the installed Vela, every figure has a source, and wrong names are explained."""

from __future__ import annotations

from typing import Any

import pytest

from arm_backend_core.targets import vela_config
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_recipes.recipe import options
from arm_recipes.recipe.boards import BOARDS, Board, find_board
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS


def _recipe(board: Board) -> str:
    return f"ETHOSU_{board.family.removeprefix('ethos-').upper()}_INT8"


def _spec(board: str, **overrides: Any) -> EthosUCompileSpec:
    recipe = _recipe(BOARDS[board])
    spec = SPEC_BUILDERS[recipe](options.resolve_options(recipe, {"board": board, **overrides}))
    assert isinstance(spec, EthosUCompileSpec)
    return spec


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board.name)
def test_a_board_determines_the_compile_spec(board: Board) -> None:
    spec = _spec(board.name)
    for figure, value in ((board.macs, spec.target.macs), (board.sram, spec.sram_budget)):
        assert figure is None or figure.value == value
    for name, used in (("system_config", spec.system_config), ("memory_mode", spec.memory_mode)):
        assert getattr(board, name) is None or getattr(board, name).value == used
    assert board.config_ini in (None, spec.config_ini)
    assert board.clock() in (None, spec.configuration.core_clock)


@pytest.mark.parametrize("board", BOARDS.values(), ids=lambda board: board.name)
def test_every_figure_has_a_source(board: Board) -> None:
    assert all(source.startswith("https://") and " " not in source for source in board.sources.values())
    stated = {name for name in board.options if name != "config_ini"}
    assert {name.removesuffix("_budget") for name in stated} == set(board.sources)


def test_every_configuration_of_our_file_belongs_to_a_board() -> None:
    used = {board.system_config.value for board in BOARDS.values() if board.config_ini and board.system_config}
    assert used == set(vela_config.list_sections("Boards/vela.ini", vela_config.SYSTEM_CONFIG))


def test_the_users_options_precede_the_boards() -> None:
    assert _spec("alif-e7-he", memory_mode="Sram_Only").memory_mode == "Sram_Only"
    assert _spec("alif-e7-he", sram_budget="64KiB").sram_budget == 64 * 1024
    assert _spec("corstone-300", macs=64).target.macs == 64
    assert _spec("alif-e7-he", macs=128).target.macs == 128


@pytest.mark.parametrize("name", ["alif-e7-hp", "ALIF_E7_HP", "Alif E7 HP"])
def test_find_board_ignores_case_and_separators(name: str) -> None:
    assert find_board(name).name == "alif-e7-hp"


def test_an_unknown_board_lists_near_names_and_says_how_to_describe_it() -> None:
    with pytest.raises(ValueError, match=r"'alif-e7'.*did you mean 'alif-e7-hp' or 'alif-e7-he'\?") as raised:
        find_board("alif-e7")
    assert "arm-recipes boards" in str(raised.value)
    for option in ("macs", "system_config", "memory_mode", "config_ini", "sram_budget", "flash_budget"):
        assert option in str(raised.value)
    with pytest.raises(ValueError, match="did you mean 'alif-e7-hp' or 'alif-e7-he'"):
        find_board("Alif Ensemble E7")
    with pytest.raises(ValueError, match="did you mean 'renesas-ra8p1'"):
        find_board("renesas-ra8")
    with pytest.raises(ValueError, match="board must be the name of a board; got 7: not a str"):
        options.resolve_options("ETHOSU_U55_INT8", {"board": 7})


def test_a_board_with_another_npu_is_refused() -> None:
    with pytest.raises(ValueError, match="board='alif-e8-u85': it has an Ethos-U85; use a recipe of ETHOSU_U85"):
        options.resolve_options("ETHOSU_U55_INT8", {"board": "alif-e8-u85"})
    with pytest.raises(ValueError, match="macs=128: board 'alif-e7-hp' has 256 MACs; omit macs"):
        options.resolve_options("ETHOSU_U55_INT8", {"board": "alif-e7-hp", "macs": 128})
