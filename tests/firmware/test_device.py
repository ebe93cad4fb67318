"""Folders built and executed: on this machine by themselves, and for a Cortex-M55 in QEMU."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

import pytest

from arm_recipes import Firmware
from arm_recipes.runtime.method_memory import LOADED_DELEGATE_BYTES, TYPE_LAYOUTS
from tests.firmware import cortex_m_programs
from tests.firmware.programs import program, samples
from tests.firmware.qemu import BOARDS, build, execute
from tests.runtime.cpp_build import RUNTIME, require, run

pytestmark = pytest.mark.xdist_group("firmware")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all tests: each test overwrites the export of the previous one and rebuilds it incrementally."""
    return tmp_path_factory.mktemp("firmware")


def _saved(name: str, root: Path) -> Firmware:
    return program(name).save_firmware(root / "folder", samples(name))


def _built(root: Path, *definitions: str) -> list[str]:
    """The self-test on this machine."""
    directory = root / "here"
    options = [f"-DPython3_EXECUTABLE={sys.executable}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    options.append(f"-DARM_MODEL_DEFINITIONS={';'.join(definitions)}")
    run([require("cmake", "cmake"), "-S", str(root / "folder"), "-B", str(directory), *options])
    run(["cmake", "--build", str(directory), "-j", "2"])
    return [str(directory / "arm_model_self_test")]


# First without the kernels of the next.
@pytest.mark.verify
@pytest.mark.parametrize("name", ["quantized_u85", "external_u85", "fast_scratch_u65", "decoder_u85"])
def test_a_folder_builds_and_runs_by_itself(root: Path, name: str) -> None:
    """In ExecuTorch's runtime, with the emulator."""
    firmware = _saved(name, root)
    printed = run(_built(root))
    for method in firmware.pools.methods:
        size = method.method_allocator_64
        assert f"method {method.name} used {size} of {size} bytes of its method allocator" in printed
    assert f"of {firmware.pools.temp_64} bytes of the temp allocator" in printed
    assert printed.endswith(f"self-test: ok, {firmware.cases} cases\n")


@pytest.mark.verify
def test_a_pool_of_one_byte_less_fails_with_an_error(root: Path) -> None:
    """Macros of the build set the sizes of the pools."""
    pools = _saved("fast_scratch_u65", root).pools
    (method,) = pools.methods
    for name, size, what in (
        ("FORWARD_POOL_SIZE", method.method_allocator_64, "load"),
        ("FORWARD_PLANNED_SIZE", method.planned, "load"),
        ("FAST_SCRATCH_SIZE", pools.fast_scratch, "load"),
        ("TEMP_POOL_SIZE", pools.temp_64, "load"),
    ):
        with pytest.raises(AssertionError, match=f"cannot {what} the method forward: error 0x21"):
            run(_built(root, f"ARM_MODEL_{name}={size - 1}"))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("model.c", "arm_model_pte", "build or flash all files of one export"),
        ("model.c", "arm_model_ptd", "the data file in memory has CRC-32"),
        ("golden.c", "case1_output0", "case 1: output output0 differs from the output at export"),
    ],
)
def test_files_of_different_exports_are_detected(root: Path, name: str, array: str, message: str) -> None:
    """The self-test compares the program with model.h and results with golden.c. The test changes one byte."""
    _saved("external_weights_u55", root)
    path = root / "folder" / name
    text = path.read_text()
    first = re.search(rf"{array}\[[^{{]*{{\n(\d+)", text)
    assert first is not None
    path.write_text(f"{text[: first.start(1)]}{int(first[1]) ^ 1}{text[first.end(1) :]}")
    try:
        with pytest.raises(AssertionError, match=message):
            run(_built(root))
    finally:
        path.write_text(text)


@pytest.mark.parametrize("name", ["quantized_u85", "float_u55", "fast_scratch_u65", "external_weights_u55"])
def test_the_self_test_on_a_cortex_m55(tmp_path: Path, root: Path, name: str) -> None:
    """For the parts that are stubs, see runtime/tests/firmware/program_stub.cpp and runtime/README.md."""
    firmware = _saved(name, root)
    image = build(root / "folder", root / "device")
    ok, printed = execute(image, (root / "folder/model.pte").read_bytes(), tmp_path)
    assert ok, printed
    assert firmware.pools.shares_scratch  # what remains of the pool is for kernel look-ups, which the stubs do not do
    assert f"0 of {firmware.pools.temp} bytes of the temp allocator" in printed
    assert f"self-test: ok, {firmware.cases} cases\n" in printed
    assert f"used {LOADED_DELEGATE_BYTES[32]} of {firmware.pools.methods[0].method_allocator} bytes" in printed


def _run_on_cortex_m55(name: str, root: Path, directory: Path) -> str:
    """Save a program of int8 kernels, and run its self-test in QEMU."""
    result = cortex_m_programs.program(name)
    firmware = result.save_firmware(root / "folder", cortex_m_programs.samples(name))
    assert firmware.kernels.is_exact, firmware.kernels
    image = build(root / "folder", root / "device")
    ok, printed = execute(image, result.buffer, directory)
    assert ok, printed
    assert printed.startswith(f"self-test: Cortex-M55, mve, ExecuTorch {firmware.versions.executorch}\n")
    assert printed.endswith("self-test: ok, 2 cases\n")
    return printed


def test_int8_kernels_on_a_cortex_m55(tmp_path: Path, root: Path) -> None:
    """Byte-equal: the self-test has no tolerance. A changed byte of the expected outputs is an error."""
    _run_on_cortex_m55("small", root, tmp_path)
    path = root / "folder/golden.c"
    text = path.read_text()
    assert "TOLERANCE 0.0f" in (root / "folder/golden.h").read_text()
    first = re.search(r"case1_output1\[[^{]*{\n(?:\d+,){2}(\d+)", text)
    assert first is not None
    path.write_text(f"{text[: first.start(1)]}{int(first[1]) ^ 1}{text[first.end(1) :]}")
    try:
        program_bytes = cortex_m_programs.program("small").buffer
        ok, printed = execute(build(root / "folder", root / "device"), program_bytes, tmp_path)
    finally:
        path.write_text(text)
    assert not ok
    assert "case 1: output output1 differs from the output at export" in printed


@pytest.mark.verify
@pytest.mark.parametrize("name", ["ds_cnn", "resnet8", "mobilenet_v1_025", "spotter", "unet"])
def test_networks_of_int8_kernels_on_a_cortex_m55(tmp_path: Path, root: Path, name: str) -> None:
    _run_on_cortex_m55(name, root, tmp_path)


@pytest.mark.verify
@pytest.mark.parametrize(("cpu", "isa"), [("cortex-m4", "dsp"), ("cortex-m3", "scalar")])
def test_int8_kernels_on_processors_without_vectors(tmp_path: Path, cpu: str, isa: str) -> None:
    result, board = cortex_m_programs.program("small", cpu), BOARDS[isa]
    result.save_firmware(tmp_path / "folder", cortex_m_programs.samples("small"))
    image = build(tmp_path / "folder", tmp_path / "device", *board.definitions(tmp_path))
    ok, printed = execute(image, result.buffer, tmp_path, board.machine)
    assert ok, printed
    assert printed.startswith(f"self-test: {cpu.replace('c', 'C', 1).replace('m', 'M')}, {isa}, ")


def test_a_program_and_its_data_file_on_a_cortex_m55(tmp_path: Path, root: Path) -> None:
    """Commands and weights are in an array and a memory of their own; a changed data file is refused."""
    firmware = _saved("external_u85", root)
    image = build(root / "folder", root / "device")
    program_bytes = (root / "folder/model.pte").read_bytes()
    ok, printed = execute(image, program_bytes, tmp_path)
    assert ok, printed
    assert f"self-test: ok, {firmware.cases} cases\n" in printed
    (tmp_path / "log.txt").write_text(printed)
    report = program("external_u85").report.with_measurements(tmp_path / "log.txt")
    assert [run.case for run in report.measurements] == list(range(firmware.cases))
    for measured in report.measurements:
        assert measured.program_crc32 == f"{zlib.crc32(program_bytes):08x}"
        assert measured.npu_cycles is not None
        assert measured.cpu_cycles is not None
        assert measured.cpu_cycles > measured.npu_cycles > 0
        assert measured.counters == {"test_counter": 7}
    assert "by Vela's estimate" in str(report)
    kept = TYPE_LAYOUTS[32].named["executorch::runtime::FreeableBuffer"][0]
    used = LOADED_DELEGATE_BYTES[32] + kept
    assert f"used {used} of {firmware.pools.methods[0].method_allocator} bytes" in printed
    data_file = (root / "folder/model.ptd").read_bytes()
    changed = image.read_bytes().replace(data_file, data_file[:-100] + bytes([data_file[-100] ^ 1]) + data_file[-99:])
    image.write_bytes(changed)
    ok, printed = execute(image, program_bytes, tmp_path)
    assert not ok
    assert "the data file in memory has CRC-32" in printed
    image.unlink()


def test_planned_memories_on_a_cortex_m55(tmp_path: Path, root: Path) -> None:
    """The first planned memory is in the core's own memory, the second in memory that the NPU also reaches."""
    firmware = _saved("two_memories_u85", root)
    assert firmware.pools.methods[0].planned > 0
    assert all(size > 0 for size in firmware.pools.shared)
    image = build(root / "folder", root / "device", "-DPLANNED2=.npu")
    ok, printed = execute(image, (root / "folder/model.pte").read_bytes(), tmp_path)
    assert ok, printed
    assert f"self-test: ok, {firmware.cases} cases\n" in printed
    symbols = run(["arm-none-eabi-nm", "-C", str(image)])
    addresses = {
        name: int(line.split()[0], 16)
        for line in symbols.splitlines()
        for name in ("planned", "planned2")
        if line.endswith(f"::{name}")
    }
    assert addresses["planned"] >> 24 == 0x30
    assert addresses["planned2"] >> 24 == 0x31


def test_sections_of_the_folder_in_the_boards_linker_script(tmp_path: Path, root: Path) -> None:
    """The folder's sections precede those of the board, with their default names."""
    _saved("fast_scratch_u65", root)
    sections = (root / "folder/linker/arm_model.ld").read_text().replace("> FLASH_OR_DDR", "> SRAM")
    assert sections.count("> SRAM") == 4
    script = (RUNTIME / "tests/firmware/an547.ld").read_text()
    assert script.count("SECTIONS\n{\n") == 1
    (tmp_path / "board.ld").write_text(script.replace("SECTIONS\n{\n", f"SECTIONS\n{{\n{sections}\n"))
    image = build(root / "folder", root / "device", "-DPLACED=OFF", f"-DLINKER_SCRIPT={tmp_path / 'board.ld'}")
    ok, printed = execute(image, (root / "folder/model.pte").read_bytes(), tmp_path)
    assert ok, printed
    # Without these sections, the NPU of this board reaches neither program nor pools.
    image = build(root / "folder", root / "device", "-DPLACED=OFF")
    ok, printed = execute(image, (root / "folder/model.pte").read_bytes(), tmp_path)
    assert not ok
    assert "in memory that no NPU of this device can access" in printed
