"""Files of a firmware folder for a board: linker scripts, CMake presets, Zephyr overlay, CMSIS layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from arm_recipes._internal.rendering import format_bytes
from arm_recipes.firmware.kernels import Kernels
from arm_recipes.recipe.board_support import BoardSupport, CmsisDevice, Memory, Placement, ZephyrBoard, find_support
from arm_recipes.recipe.boards import find_board
from arm_recipes.runtime.build import CPP_FOLDER

#: Kind of memory -> placeholder in ``linker/arm_model.ld`` that the user replaces by the name of the memory.
_UNKNOWN_MEMORY_NAMES = {"sram": "SRAM", "flash": "FLASH_OR_DDR", "dram": "FLASH_OR_DDR"}
#: Sections of the model (``.pte`` and ``.ptd``), as pairs: the macro that defines the section's name, and the default
#: name.
_MODEL_SECTIONS = (
    ("ARM_MODEL_PTE_SECTION", ".rodata.arm_model_pte"),
    ("ARM_MODEL_PTD_SECTION", ".rodata.arm_model_ptd"),
)
#: Section for the NPU's scratch (tensor arena): the pool of ExecuTorch's temp allocator, and memory-planned buffer 0 if
#: it contains the scratch.
_SCRATCH_SECTION = ("ARM_MODEL_TEMP_SECTION", ".bss.arm_model_temp")
_FAST_SCRATCH_SECTION = ("ARM_MODEL_FAST_SCRATCH_SECTION", ".bss.arm_model_fast_scratch")
#: CMSIS components that each program needs, of the packs ARM::CMSIS and PyTorch::ExecuTorch.
_COMPONENTS = (
    "ARM::CMSIS:CORE",
    "Machine Learning:ExecuTorch:Runtime",
    "Machine Learning:ExecuTorch:Kernel Utils",
    "Machine Learning:ExecuTorch:Kernel Registration",
)
#: Sources of the CMSIS layer. Cortex-M kernels are not selected one by one: a program that calls one of them gets the
#: sources of all Cortex-M kernels (``_LAYER_KERNELS``). Components select the portable kernels.
_LAYER_SOURCES = ("model.c", "golden.c", "self_test.cpp")
_LAYER_NPU_SOURCES = (
    "backend/backends/ethosu/ethosu_backend.cpp",
    "backend/backends/ethosu/npu_driver.cpp",
    "backend/payload/ethosu_payload.cpp",
)
_LAYER_KERNELS = tuple(f"backend/kernels/{path.name}" for path in sorted(CPP_FOLDER.glob("kernels/*.cpp")))
_PACK_SOURCE = (
    "https://github.com/pytorch/executorch/blob/cff6f4dd32e630945b7188512c1f2b4f102b05ad/backends/arm/cmsis_pack/"
    "README.md"
)


@dataclass(frozen=True)
class FirmwareBoard:
    """The board of a firmware folder.

    Attributes:
        name: value of the recipe option ``board``.
        title: title of the board (``Board.title``).
        family: NPU family.
        placement: kinds of memory ("sram", "flash" or "dram") that hold the program and the NPU's scratch.
        support: published facts about the board.
    """

    name: str
    title: str
    family: str
    placement: Placement
    support: BoardSupport

    def memory(self, kind: str) -> Memory | None:
        """The board's memory of a kind ("sram", "flash" or "dram"); None if no document describes it."""
        memories = self.support.memories
        memory: Memory | None = None if memories is None else getattr(memories, kind)
        return memory

    def memory_name(self, kind: str) -> str:
        """Name of a memory in the linker script; a placeholder if no document describes the memory."""
        memory = self.memory(kind)
        return _UNKNOWN_MEMORY_NAMES[kind] if memory is None else memory.name


def find_firmware_board(recipe: object) -> FirmwareBoard | None:
    """Find the board of a recipe.

    Returns:
        The board; None for recipes of other packages or without the option ``board``, or if nothing is published about
        the board.
    """
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec
    from arm_recipes.recipe import options
    from arm_recipes.recipe.compile_specs import SPEC_BUILDERS
    from arm_recipes.recipe.recipe import ArmRecipe

    if not isinstance(recipe, ArmRecipe) or recipe.options.get("board") is None:
        return None
    board = find_board(recipe.options["board"])
    support = find_support(board.name)
    if support is None:
        return None
    spec = SPEC_BUILDERS[recipe.type_name](options.resolve_options(recipe.type_name, dict(recipe.options)))
    assert isinstance(spec, EthosUCompileSpec)
    configuration = spec.configuration
    placement = Placement.of(configuration.const_memory, arena_on_second_port=configuration.arena_on_second_port)
    return FirmwareBoard(board.name, board.title, board.family, placement, support)


def memory_placeholders(board: FirmwareBoard | None) -> dict[str, str]:
    """Return {template placeholder: text} for ``linker/arm_model.ld`` and ``zephyr/CMakeLists.txt``.

    For a memory that no document describes, the text is a name that the user replaces (``_UNKNOWN_MEMORY_NAMES``).
    """
    if board is None:
        program, sram = _UNKNOWN_MEMORY_NAMES["flash"], _UNKNOWN_MEMORY_NAMES["sram"]
        scratch = sram
        replaced = "replace the names of the memories"
    else:
        placement = board.placement
        program, scratch = board.memory_name(placement.program), board.memory_name(placement.scratch)
        sram = board.memory_name("sram")
        kinds = (placement.program, placement.scratch, "sram")
        unknown = sorted({_UNKNOWN_MEMORY_NAMES[kind] for kind in kinds if board.memory(kind) is None})
        replaced = f"the names of the memories are those of {board.name}"
        replaced += f"; replace the placeholder {' and '.join(unknown)}" if unknown else ""
    return {
        "PTE_MEMORY": program,
        "SCRATCH_MEMORY": scratch,
        "SRAM_MEMORY": sram,
        "MEMORY_NAMES": replaced,
        "NPU_REACH": "".join(_npu_reach_assertion(board)),
        "ZEPHYR_SECTIONS": "\n".join(_zephyr_commands(board)),
    }


def render_board_files(board: FirmwareBoard | None, kernels: Kernels, *, has_npu: bool) -> dict[str, bytes]:
    """Render the files for a board, and return them by path in the folder.

    Args:
        board: the board; None for only the CMake preset of this machine.
        kernels: the program's CPU kernels.
        has_npu: whether the program has delegates.
    """
    files = {"CMakePresets.json": json.dumps(_cmake_presets(board), indent=2) + "\n"}
    if board is not None:
        support = board.support
        if support.memories is not None:
            files["linker/memories.ld"] = "\n".join(_memories_script(board)) + "\n"
        if support.zephyr is not None and support.zephyr.nodes:
            files[f"zephyr/boards/{support.zephyr.overlay}"] = _devicetree_overlay(board, support.zephyr)
        if support.zephyr is not None and _zephyr_regions(board):
            files["zephyr/arm_model.ld"] = "\n".join(_zephyr_script(board, support.zephyr)) + "\n"
        if support.cmsis is not None:
            files["cmsis/arm_model.clayer.yml"] = (
                "\n".join(_cmsis_layer(board, support.cmsis, kernels, has_npu=has_npu)) + "\n"
            )
    return {name: text.encode() for name, text in files.items()}


def render_readme_section(board: FirmwareBoard | None) -> str:
    """Section of ``README.md`` on the board, in Markdown; "" without a board."""
    return "" if board is None else "\n".join(_readme_lines(board)) + "\n\n"


def _npu_reach_assertion(board: FirmwareBoard | None) -> Iterator[str]:
    """Yield a linker assertion that the NPU reaches its scratch.

    Yields nothing if the NPU reaches the whole memory of the scratch, if there is no board, or if no document describes
    this memory.
    """
    memory = None if board is None else board.memory(board.placement.scratch)
    if memory is not None and memory.npu_bytes is not None:
        end = memory.origin + memory.npu_bytes
        yield f"  ASSERT(ADDR(.arm_model_temp) + SIZEOF(.arm_model_temp) <= 0x{end:08x},\n"
        yield f'         "the NPU reaches {memory.name} up to 0x{end:08x}, and .arm_model_temp ends beyond it")\n\n'


def _memories_script(board: FirmwareBoard) -> Iterator[str]:
    memories = board.support.memories
    assert memories is not None
    yield "/* SPDX-License-Identifier: Apache-2.0"
    yield " *"
    yield f" * Memories of {board.title}."
    yield " * linker/arm_model.ld uses these names. INCLUDE this file in a linker script of the board that lacks them."
    yield " * Generated by arm_recipes. Source:"
    yield f" * {memories.source}"
    yield " */"
    yield "MEMORY"
    yield "{"
    for memory in memories.all():
        attributes = "rwx" if memory is memories.sram or memory is memories.dram else "rx"
        yield f"  {memory.name} ({attributes}) : ORIGIN = 0x{memory.origin:08x}, LENGTH = 0x{memory.size:08x}"
    yield "}"


def _cmake_presets(board: FirmwareBoard | None) -> dict[str, Any]:
    """CMake presets: the self-test on this machine, and the folder's libraries for the board's core."""
    folder = "${sourceParentDir}/${sourceDirName}-build"
    presets: list[dict[str, Any]] = [
        {"name": "host", "displayName": "Self-test on this machine", "binaryDir": f"{folder}/host"}
    ]
    if board is not None:
        flags = f"-mcpu={board.support.cpu} -mthumb -mfloat-abi=hard"
        presets.append(
            {
                "name": board.name,
                "displayName": f"Libraries for {board.title}",
                "description": "Needs EXECUTORCH_INCLUDE_DIR and ETHOSU_DRIVER_INCLUDE_DIR in the environment",
                "binaryDir": f"{folder}/{board.name}",
                "toolchainFile": "${sourceDir}/backend/cmake/cortex-m55.cmake",
                "cacheVariables": {
                    "CMAKE_C_FLAGS": flags,
                    "CMAKE_CXX_FLAGS": f"{flags} -fno-exceptions -fno-rtti",
                    "CMAKE_BUILD_TYPE": "Release",
                    "EXECUTORCH_INCLUDE_DIR": "$env{EXECUTORCH_INCLUDE_DIR}",
                    "ETHOSU_DRIVER_INCLUDE_DIR": "$env{ETHOSU_DRIVER_INCLUDE_DIR}",
                },
            }
        )
    builds = [{"name": preset["name"], "configurePreset": preset["name"]} for preset in presets]
    minimum = {"major": 3, "minor": 21, "patch": 0}
    return {"version": 3, "cmakeMinimumRequired": minimum, "configurePresets": presets, "buildPresets": builds}


def _devicetree_overlay(board: FirmwareBoard, zephyr: ZephyrBoard) -> str:
    return (
        "/* SPDX-License-Identifier: Apache-2.0\n"
        " *\n"
        f" * Devicetree overlay for {board.title}\n"
        f" * ({zephyr.target}): nodes that firmware for the NPU needs in addition to the board's devicetree.\n"
        " * Generated by arm_recipes. Source:\n"
        f" * {zephyr.source}\n"
        f" */\n{zephyr.nodes}"
    )


def _zephyr_regions(board: FirmwareBoard) -> dict[tuple[str, str], str]:
    """Section (macro, default name) -> memory region of Zephyr's linker script.

    Sections that Zephyr's linker script places by itself, without ``zephyr/arm_model.ld``, are omitted.
    """
    zephyr = board.support.zephyr
    if zephyr is None:
        return {}
    placement = board.placement
    program = zephyr.sram if placement.program == "sram" else zephyr.program
    scratch = zephyr.sram if placement.scratch == "sram" else zephyr.program
    regions = {**dict.fromkeys(_MODEL_SECTIONS, program), _SCRATCH_SECTION: scratch}
    regions[_FAST_SCRATCH_SECTION] = zephyr.sram
    return {section: region for section, region in regions.items() if region}


def _zephyr_name(default: str) -> str:
    """Name of a section for Zephyr: the default without its prefix ``.rodata`` or ``.bss``.

    Zephyr's linker script places ``.rodata.*`` and ``.bss.*`` before it includes ``zephyr/arm_model.ld``, so
    sections with these prefixes would not get the memory region that ``arm_model.ld`` specifies.
    """
    return default[default.index(".", 1) :]


def _zephyr_commands(board: FirmwareBoard | None) -> Iterator[str]:
    regions = {} if board is None else _zephyr_regions(board)
    if regions:
        yield "  zephyr_linker_sources(SECTIONS ${CMAKE_CURRENT_LIST_DIR}/arm_model.ld)"
        yield "  zephyr_library_compile_definitions("
        yield from (f'    {macro}="{_zephyr_name(default)}"' for macro, default in regions)
        yield "  )"


def _zephyr_script(board: FirmwareBoard, zephyr: ZephyrBoard) -> Iterator[str]:
    yield "/* SPDX-License-Identifier: Apache-2.0"
    yield " *"
    yield f" * Sections of the program in the memory regions of Zephyr's {zephyr.target}. Generated by arm_recipes."
    yield " */"
    for section, region in _zephyr_regions(board).items():
        name = _zephyr_name(section[1])
        is_constant = section in _MODEL_SECTIONS
        yield f"{name}{'' if is_constant else ' (NOLOAD)'} : ALIGN({16 if is_constant else 32})"
        yield "{"
        yield f"  {f'KEEP(*({name}))' if is_constant else f'*({name})'}"
        yield "  . = ALIGN(32);"
        yield f"}} > {region}"


def _cmsis_layer(board: FirmwareBoard, device: CmsisDevice, kernels: Kernels, *, has_npu: bool) -> Iterator[str]:
    driver = f"ARM::Machine Learning:NPU Support:Ethos-U Driver&Generic {board.family.removeprefix('ethos-').upper()}"
    operators = dict.fromkeys(name.partition("::")[2].partition(".")[0].lstrip("_") for name in kernels.portable)
    packs = ("ARM::CMSIS", device.pack, *("ARM::ethos-u-core-driver",) * has_npu, "PyTorch::ExecuTorch")
    components = (*_COMPONENTS, *(driver,) * has_npu)
    sources = (*_LAYER_SOURCES, *_LAYER_NPU_SOURCES * has_npu, *_LAYER_KERNELS * bool(kernels.cortex_m))
    yield "# SPDX-License-Identifier: Apache-2.0"
    yield f"# Layer of a CMSIS solution for {board.title}. Generated by arm_recipes. Device and packs:"
    yield f"# {device.source}"
    yield f"# {_PACK_SOURCE}"
    yield "layer:"
    yield "  type: arm_model"
    yield f"  for-device: {device.name}"
    yield "  packs:"
    yield from (f"    - pack: {pack}" for pack in packs)
    yield "  components:"
    yield from (f"    - component: {component}" for component in components)
    yield from (f"    - component: Machine Learning:ExecuTorch Operators:Portable {name}" for name in operators)
    yield "  add-path: [.., ../backend]"
    yield "  groups:"
    yield "    - group: arm_model"
    yield "      files:"
    yield from (f"        - file: ../{name}" for name in sources)


def _readme_lines(board: FirmwareBoard) -> Iterator[str]:
    support, placement = board.support, board.placement
    yield f"## {board.title}"
    yield ""
    yield "| Section | Memory | First address | Size |"
    yield "|---|---|---|---|"
    kinds: Mapping[str, str] = {
        ".arm_model_pte": placement.program,
        ".arm_model_temp": placement.scratch,
        **({".arm_model_fast_scratch": "sram"} if placement.scratch == "dram" else {}),
    }
    for section, kind in kinds.items():
        memory = board.memory(kind)
        cells = ("not published", "", "")
        if memory is not None:
            reached = "" if memory.npu_bytes is None else f"; the NPU reaches {format_bytes(memory.npu_bytes)}"
            cells = (f"`{memory.name}`", f"`0x{memory.origin:08x}`", f"{format_bytes(memory.size)}{reached}")
        yield f"| `{section}` | {' | '.join(cells)} |"
    yield ""
    if support.memories is not None:
        yield "- `linker/arm_model.ld` uses these names. `linker/memories.ld` defines the memories, for linker scripts"
        yield f"  that lack them ([source]({support.memories.source}))."
    name, core = board.name, support.cpu.replace("cortex-m", "Cortex-M")
    yield f"- `cmake --preset {name}` and `cmake --build --preset {name}` compile libraries for the {core} in a folder"
    yield "  beside this one. Set `EXECUTORCH_INCLUDE_DIR` and `ETHOSU_DRIVER_INCLUDE_DIR` in the environment."
    yield from _readme_zephyr(board)
    if support.cmsis is not None:
        yield f"- CMSIS solution: add the layer `cmsis/arm_model.clayer.yml`, for `{support.cmsis.name}`."


def _readme_zephyr(board: FirmwareBoard) -> Iterator[str]:
    zephyr = board.support.zephyr
    if zephyr is None:
        return
    overlay = f" -- -DEXTRA_DTC_OVERLAY_FILE=<this folder>/zephyr/boards/{zephyr.overlay}" if zephyr.nodes else ""
    yield f"- Zephyr: `west build -b {zephyr.target} <application>{overlay}`"
    yield f"  ([source]({zephyr.source}))."
    if _zephyr_regions(board).get(_MODEL_SECTIONS[0]):
        yield "  The addresses of the model (.pte) and of the code are far apart, so a binary image would be large:"
        yield "  set `CONFIG_BUILD_OUTPUT_BIN=n`, and load the ELF file."
