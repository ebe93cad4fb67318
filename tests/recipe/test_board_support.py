"""Facts that vendors publish about boards: each has a source and agrees with the record of the board."""

from __future__ import annotations

from itertools import pairwise

import pytest

from arm_recipes.recipe.board_support import SUPPORT, Placement, find_support
from arm_recipes.recipe.boards import BOARDS


@pytest.mark.parametrize("name", SUPPORT)
def test_facts_have_sources(name: str) -> None:
    support = SUPPORT[name]
    assert name in BOARDS
    assert support.cpu in ("cortex-m55", "cortex-m85")
    for fact in (support.memories, support.zephyr, support.cmsis):
        assert fact is None or (fact.source.startswith("https://") and " " not in fact.source)


@pytest.mark.parametrize("name", [name for name, support in SUPPORT.items() if support.memories is not None])
def test_memories_do_not_overlap_and_are_not_larger_than_those_of_the_board(name: str) -> None:
    board, memories = BOARDS[name], SUPPORT[name].memories
    assert memories is not None
    regions = sorted((memory.origin, memory.origin + memory.size) for memory in memories.all())
    assert all(start % 32 == 0 and start < end for start, end in regions)
    assert all(first[1] <= second[0] for first, second in pairwise(regions))
    assert len({memory.name for memory in memories.all()}) == len(memories.all())
    if board.sram is not None:
        assert memories.sram.size <= board.sram.value
    if board.flash is not None and memories.flash is not None:
        assert memories.flash.size <= board.flash.value
    assert memories.sram.npu_bytes is None or memories.sram.npu_bytes <= memories.sram.size


def test_the_regions_of_zephyr_are_in_memories_of_the_board() -> None:
    """A devicetree node that this project adds starts in a memory of the board."""
    for name, support in SUPPORT.items():
        if support.zephyr is None or "reg = <0x3" not in support.zephyr.nodes:
            continue
        assert support.memories is not None
        sram = support.memories.sram
        assert sram.origin <= 0x31100000 < sram.origin + sram.size, name
        assert "DT_SIZE_M(1)" in support.zephyr.nodes
        assert sram.size == 4 * 1024**2


@pytest.mark.parametrize(
    ("memory", "arena_on_second_port", "expected"),
    [
        ("OffChipFlash", False, Placement("flash", "sram")),
        ("Dram", True, Placement("dram", "dram")),
        ("OnChipFlash", False, Placement("sram", "sram")),
        ("Sram", False, Placement("sram", "sram")),
    ],
)
def test_placement_from_the_memory_of_constants(memory: str, arena_on_second_port: bool, expected: Placement) -> None:
    assert Placement.of(memory, arena_on_second_port=arena_on_second_port) == expected


def test_overlays_have_the_name_of_the_zephyr_board() -> None:
    zephyr = SUPPORT["corstone-300"].zephyr
    assert zephyr is not None
    assert zephyr.overlay == "mps3_corstone300_fvp.overlay"
    assert find_support("corstone-1000") is None
