"""Write the page on firmware for each board from the records of the boards.

    python docs/board_pages.py           # write docs/users/firmware_boards.md
    python docs/board_pages.py --check   # compare; write nothing

NPU, configuration and memories come from ``boards.py`` and ``board_support.py`` of ``arm_recipes/recipe/`` and from
Vela's configuration. This module has the instructions for the vendors' build and flash tools, each with its source. An
instruction that no document states is omitted.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_recipes._internal.rendering import format_bytes
from arm_recipes.recipe import options
from arm_recipes.recipe.board_support import Memories, Memory, Placement, find_support
from arm_recipes.recipe.boards import BOARDS, Board
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS

PAGE = Path(__file__).parent / "users" / "firmware_boards.md"
_ZEPHYR = "https://github.com/zephyrproject-rtos/zephyr/blob"
_MPS3 = f"{_ZEPHYR}/3943b6284dd9a879b19afeb50a0138cf232e592b/boards/arm/mps3/doc/index.rst"
_MPS4 = f"{_ZEPHYR}/a27ef2b31dd6e18bcd58ef735275199ca4b26e05/boards/arm/mps4/doc/index.rst"
_ALIF = f"{_ZEPHYR}/1ef3e445829147befb12deaba57f323756fec8bc/boards/alif/ensemble_e8_dk/doc/index.rst"
_PSOC = f"{_ZEPHYR}/261c59d23320091fcaaed9d484f89890100b82eb/boards/infineon/kit_pse84_eval/doc/index.rst"
_NUVOTON = f"{_ZEPHYR}/307f6f13de2d3ff4cef3a2820911c25b44bf1647/boards/nuvoton/numaker_m55m1/doc/index.rst"
_RENESAS = f"{_ZEPHYR}/0a04bc0d3d5da72977a958e54f40a444fd3b366b/boards/renesas/ek_ra8p1/doc/index.rst"
_HIMAX = (
    "https://github.com/HimaxWiseEyePlus/Seeed_Grove_Vision_AI_Module_V2/blob/"
    "002479e2f09d692e0780ae61d49054049881b128/README.md"
)
_WIDTH = 120
#: The part of the page before this marker is written by hand.
_MARKER = "<!-- docs/board_pages.py writes the rest of this page. -->\n"


@dataclass(frozen=True)
class ListItem:
    """An item of the list below the table of a board family.

    Attributes:
        text: instruction or fact.
        source: address of the document that states the text; "" if this project or its tables are the source.
    """

    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text} ([source]({self.source}))." if self.source else f"{self.text}."


@dataclass(frozen=True)
class BoardFamily:
    """Boards that are built and flashed with the same tools.

    Attributes:
        title: heading of the section.
        prefix: start of the names of the boards.
        items: build and flash instructions, and facts about the boards.
    """

    title: str
    prefix: str
    items: tuple[ListItem, ...]


_UNDOCUMENTED = "We found no document that describes how firmware with ExecuTorch uses this NPU"

FAMILIES = (
    BoardFamily(
        "Arm Corstone",
        "corstone-",
        (
            ListItem("Memory of Corstone-300: the NPU reaches SRAM and DDR, not the core's TCMs"),
            ListItem(
                "FVP: set `ARMFVP_BIN_PATH` to its folder, then `west build -b <target> <application> -t run`", _MPS3
            ),
            ListItem("Corstone-315 and -320 have only an FVP: run it in the same way", _MPS4),
            ListItem(
                "MPS3 board with AN547: build for `mps3/corstone300/an547`, copy the ELF file to `SOFTWARE` on the "
                "board's USB drive, name it in `MB/HBI0309C/AN547/images.txt`, and reset",
                _MPS3,
            ),
            ListItem(
                "MACs: start the FVP and export with the same number, for example `-C ethosu.num_macs=128` and "
                "`macs=128`. On Corstone-315 and -320, the parameter is `mps4_board.subsystem.ethosu.num_macs`"
            ),
        ),
    ),
    BoardFamily(
        "Alif Ensemble",
        "alif-",
        (
            ListItem(
                "The E8 development kit can also be configured as E4 or E6; the Zephyr targets above are for E8", _ALIF
            ),
            ListItem("Flash with a J-Link probe and `west flash`, or with Alif's Security Toolkit (SETOOLS)", _ALIF),
            ListItem(
                "Memory of E3, E5 and E7: SRAM0 has 4 MiB and SRAM1 2.5 MiB. They are not contiguous: "
                "`.arm_model_temp` must fit into one of them"
            ),
        ),
    ),
    BoardFamily(
        "Himax WiseEye2",
        "himax-",
        (
            ListItem(
                "Toolchain: Arm GNU toolchain 13.2.rel1 in `PATH`; build with `make` in `EPII_CM55M_APP_S`", _HIMAX
            ),
            ListItem(
                "Image: run `we2_local_image_gen project_case1_blp_wlcsp.json` in `we2_image_gen_local`; it converts "
                "the ELF file to an image",
                _HIMAX,
            ),
            ListItem(
                "Flash: `python3 xmodem/xmodem_send.py --port=<port> --baudrate=921600 --protocol=xmodem "
                "--file=<image>`; an image has at most 1 MB",
                _HIMAX,
            ),
            ListItem(
                "The makefiles of `EPII_CM55M_APP_S` do not use CMake: add the sources that the firmware folder's "
                "`CMakeLists.txt` lists"
            ),
        ),
    ),
    BoardFamily(
        "Infineon PSOC Edge",
        "infineon-",
        (
            ListItem("Build with `--sysbuild`: the Cortex-M55 needs an application of the Cortex-M33", _PSOC),
            ListItem(
                "Flash with Infineon's OpenOCD, `west flash` with `-DOPENOCD=<path>`; set the switch `BOOT SW` to on",
                _PSOC,
            ),
        ),
    ),
    BoardFamily(
        "Nuvoton NuMaker-M55M1",
        "nuvoton-",
        (
            ListItem("Flash with the Nu-Link2 on the board, `west flash`", _NUVOTON),
            ListItem("Serial port over USB: set the switches 1 to 3 of the DIP switch ISW1 to on", _NUVOTON),
        ),
    ),
    BoardFamily("NXP i.MX 93", "nxp-", (ListItem(_UNDOCUMENTED),)),
    BoardFamily(
        "Renesas",
        "renesas-",
        (
            ListItem("Flash the EK-RA8P1 with the J-Link on the board, `west flash -r jlink`", _RENESAS),
            ListItem(
                "Zephyr gives each of the two cores half of MRAM and SRAM: change the nodes `code_mram_cm85` and "
                "`sram0` for a larger program",
                _RENESAS,
            ),
            ListItem(f"RZ/G3E: {_UNDOCUMENTED[0].lower()}{_UNDOCUMENTED[1:]}"),
        ),
    ),
)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write the page on firmware for each board.")
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    if parser.parse_args().check:
        return int(PAGE.read_text() != render_page())
    PAGE.write_text(render_page())
    return 0


def render_page() -> str:
    """Return the text of the page: the hand-written part unchanged, then a section for each family."""
    head = PAGE.read_text().partition(_MARKER)[0]
    lines = (line for family in FAMILIES for line in _render_family(family))
    return "\n".join([f"{head}{_MARKER}", *lines]).rstrip() + "\n"


def find_boards(family: BoardFamily) -> list[Board]:
    """Find the boards of a family by the prefix of their names."""
    return [board for board in BOARDS.values() if board.name.startswith(family.prefix)]


def _render_family(family: BoardFamily) -> Iterator[str]:
    yield f"## {family.title}\n"
    columns = ("`board=`", "Recipe", "MACs", "Memory mode", "`.arm_model_pte`", "`.arm_model_temp`", "Fast scratch")
    yield _row((*columns, "SRAM", "Flash", "Zephyr's target"))
    yield _row(["---"] * (len(columns) + 3))
    for board in find_boards(family):
        yield _row(_board_cells(board))
    yield ""
    for item in (*_memory_items(family), *family.items):
        yield textwrap.fill(
            str(item),
            _WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    yield ""


def _memory_items(family: BoardFamily) -> Iterator[ListItem]:
    """Yield the memories in the linker scripts of ``save_firmware``. Boards with the same memories share an item."""
    boards_by_memories: dict[Memories, list[str]] = {}
    for board in find_boards(family):
        support = find_support(board.name)
        if support is not None and support.memories is not None:
            boards_by_memories.setdefault(support.memories, []).append(f"`{board.name}`")
    for memories, names in boards_by_memories.items():
        regions = ", ".join(
            f"`{memory.name}` at `0x{memory.origin:08x}` ({_memory_kinds(memories, memory)})"
            for memory in memories.all()
        )
        yield ListItem(f"Memories in the linker scripts of {', '.join(names)}: {regions}", memories.source)


def _memory_kinds(memories: Memories, memory: Memory) -> str:
    """Kinds of memory, as in the table of boards, that a memory of the linker scripts serves as."""
    kinds = {"SRAM": memories.sram, "flash": memories.flash, "DRAM": memories.dram}
    return " and ".join(kind for kind, of_kind in kinds.items() if of_kind == memory)


def _board_cells(board: Board) -> Iterator[str]:
    recipe = f"ETHOSU_{board.family.removeprefix('ethos-').upper()}_INT8"
    spec = SPEC_BUILDERS[recipe](options.resolve_options(recipe, {"board": board.name}))
    assert isinstance(spec, EthosUCompileSpec)
    configuration, support = spec.configuration, find_support(board.name)
    spills = configuration.arena_on_second_port
    placement = Placement.of(configuration.const_memory, arena_on_second_port=spills)
    yield f"`{board.name}`"
    yield f"`{recipe}`"
    yield "yours" if board.macs is None else str(board.macs.value)
    yield f"`{spec.memory_mode}`{'' if board.memory_mode else ' (default)'}"
    yield _KIND_TITLES[placement.program]
    yield _KIND_TITLES[placement.scratch]
    yield "SRAM" if spills else "-"
    for size in (board.sram, board.flash):
        yield "-" if size is None else format_bytes(size.value)
    yield "-" if support is None or support.zephyr is None else f"`{support.zephyr.target}`"


#: Titles of the kinds of memory in the table.
_KIND_TITLES = {"flash": "flash", "dram": "DRAM", "sram": "SRAM"}


def _row(cells: Sequence[str] | Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
