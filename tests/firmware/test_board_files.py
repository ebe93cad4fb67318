"""Files for boards: names and addresses, and that linker, CMake, devicetree and YAML tools accept them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from arm_recipes import Firmware
from arm_recipes.recipe.board_support import SUPPORT
from tests.firmware.programs import program, samples
from tests.firmware.qemu import build, execute
from tests.firmware.zephyr_module import build_zephyr_library
from tests.runtime.cpp_build import RUNTIME, executorch_directory, require, run

pytestmark = pytest.mark.xdist_group("firmware")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Firmware]:
    root = tmp_path_factory.mktemp("boards")
    names = ("quantized_u55", "corstone_300", "corstone_315", "corstone_320", "alif_e8", "himax", "nuvoton")
    return {name: program(name).save_firmware(root / name, samples(name)) for name in names}


def _text(firmware: Firmware, name: str) -> str:
    return (Path(firmware.folder) / name).read_text()


def _placed(firmware: Firmware, name: str = "linker/arm_model.ld") -> dict[str, str]:
    """Output section -> memory."""
    found = re.findall(r"^ *(\.\w+)(?: \(NOLOAD\))? : ALIGN.*?^ *} > (\w+)$", _text(firmware, name), re.M | re.S)
    return dict(found)


@pytest.mark.parametrize(
    ("name", "program_memory", "scratch", "fast"),
    [
        ("quantized_u55", "FLASH_OR_DDR", "SRAM", "SRAM"),
        ("corstone_300", "DDR", "SRAM", "SRAM"),
        ("corstone_315", "DDR", "DDR", "SRAM"),  # Dedicated_Sram_384KB
        ("corstone_320", "SRAM", "SRAM", "SRAM"),  # Sram_Only
        ("alif_e8", "MRAM", "SRAM0", "SRAM0"),
        ("himax", "FLASH_OR_DDR", "CM55M_S_SRAM", "CM55M_S_SRAM"),
        ("nuvoton", "FLASH", "SRAM012", "SRAM012"),
    ],
)
def test_sections_are_in_the_memories_of_the_board(
    saved: dict[str, Firmware], name: str, program_memory: str, scratch: str, fast: str
) -> None:
    placed = _placed(saved[name])
    assert placed[".arm_model_pte"] == placed[".arm_model_ptd"] == program_memory
    assert (placed[".arm_model_temp"], placed[".arm_model_fast_scratch"]) == (scratch, fast)
    text = _text(saved[name], "linker/arm_model.ld")
    assert ("replace the" in text) == (name in ("quantized_u55", "himax"))


def test_without_a_board_there_is_a_preset_for_this_machine_only(saved: dict[str, Firmware]) -> None:
    firmware = saved["quantized_u55"]
    assert firmware.board == ""
    assert not [name for name in firmware.files if name.startswith(("cmsis/", "zephyr/boards/", "linker/memories"))]
    presets = json.loads(_text(firmware, "CMakePresets.json"))["configurePresets"]
    assert [preset["name"] for preset in presets] == ["host"]


def test_the_board_is_shown(saved: dict[str, Firmware]) -> None:
    firmware = saved["corstone_300"]
    assert "board               corstone-300" in str(firmware)
    assert json.loads(_text(firmware, "firmware.json"))["board"] == "corstone-300"
    text = _text(firmware, "README.md")
    assert "| `.arm_model_temp` | `SRAM` | `0x31000000` | 2,048.0 KiB |" in text
    assert "the NPU reaches 1,024.0 KiB" in _text(saved["nuvoton"], "README.md")
    assert "| `.arm_model_pte` | not published |" in _text(saved["himax"], "README.md")


@pytest.mark.verify
def test_a_program_in_the_memories_of_corstone_300_runs_on_a_cortex_m55(
    saved: dict[str, Firmware], tmp_path: Path
) -> None:
    """QEMU's mps3-an547 has the same memories: program in DDR, scratch in SRAM. The core's stack is in DDR, too."""
    folder = Path(saved["corstone_300"].folder)
    script = (RUNTIME / "tests/firmware/an547.ld").read_text()
    own = re.sub(r"^  (DATA|SRAM) \(.*\n", "", script, flags=re.M)
    own = own.replace("LENGTH = 512K\n}", "LENGTH = 512K\n  TOP (rw) : ORIGIN = 0x71000000, LENGTH = 1M\n}", 1)
    own = re.sub(r"> (?:DATA|SRAM)$", "> TOP", own, flags=re.M)
    own = own.replace("ORIGIN(SRAM) + LENGTH(SRAM)", "ORIGIN(TOP) + LENGTH(TOP)").replace(
        "ORIGIN(DATA)", "ORIGIN(SRAM)"
    )
    pieces = (folder / "linker/arm_model.ld").read_text()
    assert own.count("SECTIONS\n{\n") == 1
    own = own.replace("SECTIONS\n{\n", f"SECTIONS\n{{\n{pieces}\n")
    (tmp_path / "board.ld").write_text(f"INCLUDE {folder / 'linker/memories.ld'}\n{own}")
    image = build(folder, tmp_path / "device", "-DPLACED=OFF", f"-DLINKER_SCRIPT={tmp_path / 'board.ld'}")
    ok, printed = execute(image, (folder / "model.pte").read_bytes(), tmp_path)
    assert ok, printed
    assert "self-test: ok" in printed
    sections = run(["arm-none-eabi-objdump", "-h", str(image)])
    starts = dict(re.findall(r"^ +\d+ (\.arm_model_\w+) +\w+ +(\w+)", sections, re.M))
    assert starts[".arm_model_pte"] == "70000000"
    assert starts[".arm_model_temp"] == "31000000"


def test_the_link_fails_if_the_npu_does_not_reach_its_scratch(saved: dict[str, Firmware], tmp_path: Path) -> None:
    """The NPU of the M55M1 reaches the first MiB of its SRAM."""
    folder = Path(saved["nuvoton"].folder)
    script = f"INCLUDE {folder / 'linker/memories.ld'}\nSECTIONS\n{{\n  .before : {{ . += SIZE; }} > SRAM012\n"
    script += (folder / "linker/arm_model.ld").read_text() + "}\n"
    (tmp_path / "board.ld").write_text(script)
    source = 'char temp[64] __attribute__((section(".bss.arm_model_temp"), used));\n'
    (tmp_path / "temp.c").write_text(source)
    command = [require("arm-none-eabi-gcc", "gcc-arm-none-eabi"), "-nostdlib", "-Wl,-e,0", str(tmp_path / "temp.c")]
    command += ["-T", str(tmp_path / "board.ld"), "-o", str(tmp_path / "image.elf")]
    run([*command, "-Wl,--defsym=SIZE=0x1000"])
    with pytest.raises(AssertionError, match="the NPU reaches SRAM012 up to 0x20200000"):
        run([*command, "-Wl,--defsym=SIZE=0xfffe0"])


@pytest.mark.verify
def test_the_preset_builds_the_libraries_of_the_board(
    saved: dict[str, Firmware], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("arm-none-eabi-g++", "gcc-arm-none-eabi")
    folder = saved["corstone_300"].folder
    monkeypatch.setenv("EXECUTORCH_INCLUDE_DIR", f"{executorch_directory()}/include")
    monkeypatch.setenv("ETHOSU_DRIVER_INCLUDE_DIR", str(RUNTIME / "emulator/driver"))
    run([require("cmake", "cmake"), "-S", folder, "-B", str(tmp_path), "--preset", "corstone-300"])
    run(["cmake", "--build", str(tmp_path), "-j", "2"])
    library = run(["arm-none-eabi-readelf", "-A", str(tmp_path / "libarm_model_self_test.a")])
    assert "Tag_CPU_arch: v8.1-M.mainline" in library
    assert "Tag_ABI_VFP_args: VFP registers" in library
    assert list((tmp_path / "backend").glob("*.a"))


def test_the_preset_has_the_core_of_the_board(saved: dict[str, Firmware]) -> None:
    for name, cpu in (("corstone_300", "cortex-m55"), ("corstone_320", "cortex-m85")):
        presets = json.loads(_text(saved[name], "CMakePresets.json"))["configurePresets"]
        assert f"-mcpu={cpu} " in presets[1]["cacheVariables"]["CMAKE_CXX_FLAGS"]


@pytest.mark.parametrize("name", ["corstone_300", "corstone_315", "corstone_320", "alif_e8"])
def test_zephyr_places_the_sections_that_its_linker_script_does_not(
    saved: dict[str, Firmware], tmp_path: Path, name: str
) -> None:
    """The sections have names that Zephyr's own patterns ``.rodata.*`` and ``.bss.*`` do not match."""
    firmware = saved[name]
    placed = _placed(firmware, "zephyr/arm_model.ld")
    zephyr = SUPPORT[firmware.board].zephyr
    assert zephyr is not None
    assert set(placed.values()) <= {zephyr.sram, zephyr.program}
    fragments, library = build_zephyr_library(firmware, tmp_path)
    assert fragments == [Path(firmware.folder) / "zephyr/arm_model.ld"]
    headers = run(["arm-none-eabi-objdump", "-h", str(library)])
    sections = set(re.findall(r"^ *\d+ (\S*arm_model_(?:pte|temp|fast_scratch)) ", headers, re.M))
    absent = {".arm_model_ptd", *([] if firmware.pools.fast_scratch else [".arm_model_fast_scratch"])}
    default = {"alif_e8": {".rodata.arm_model_pte"}}.get(name, set())
    assert sections == (set(placed) - absent) | default


@pytest.mark.parametrize("board", [name for name, support in SUPPORT.items() if support.zephyr is not None])
def test_overlays_are_devicetree_source(board: str) -> None:
    """The test checks braces and statements, since no devicetree compiler is installed."""
    zephyr = SUPPORT[board].zephyr
    assert zephyr is not None
    depth = 0
    for line in zephyr.nodes.splitlines():
        text = line.strip()
        assert not text or text.endswith(("{", ";")), line
        depth += text.endswith("{")
        depth -= text == "};"
        assert line == "" or len(line) - len(line.lstrip("\t")) == depth - text.endswith("{"), line
    assert depth == 0
    labels = re.findall(r"(\w+): \w+@(\w+) {\n(?:.*\n)*?\t*reg = <0x0*(\w+) ", zephyr.nodes)
    assert all(unit == start for _, unit, start in labels)


@pytest.mark.parametrize("name", ["corstone_300", "corstone_315", "corstone_320", "alif_e8"])
def test_the_layer_names_packs_and_files_of_the_folder(saved: dict[str, Firmware], name: str) -> None:
    firmware = saved[name]
    layer = yaml.safe_load(_text(firmware, "cmsis/arm_model.clayer.yml"))["layer"]
    cmsis = SUPPORT[firmware.board].cmsis
    assert cmsis is not None
    assert layer["for-device"] == cmsis.name
    assert {pack["pack"] for pack in layer["packs"]} >= {cmsis.pack, "ARM::ethos-u-core-driver", "PyTorch::ExecuTorch"}
    npu = firmware.versions.npu.split("-")[1]
    assert {"component": f"ARM::Machine Learning:NPU Support:Ethos-U Driver&Generic {npu}"} in layer["components"]
    (group,) = layer["groups"]
    for entry in group["files"]:
        assert (Path(firmware.folder) / "cmsis" / entry["file"]).is_file(), entry


def test_the_layer_has_the_portable_kernels_of_the_program(tmp_path: Path) -> None:
    firmware = program("cpu_between_board").save_firmware(tmp_path / "firmware")
    layer = yaml.safe_load(_text(firmware, "cmsis/arm_model.clayer.yml"))["layer"]
    assert {"component": "Machine Learning:ExecuTorch Operators:Portable topk"} in layer["components"]
