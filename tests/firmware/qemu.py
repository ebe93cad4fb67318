"""Builds a folder of ``save_firmware`` for a Cortex-M55 and runs it in QEMU; see ``runtime/tests/firmware/saved``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executorch.exir.schema import Tensor

from tests.runtime.cpp_build import RUNTIME, executorch_directory, require, run
from tests.runtime.firmware import _TOOLCHAIN, Firmware, start

#: Alignment of constants in a program, in bytes.
_CONSTANT_ALIGNMENT = 16
#: Compiler flags of runtime/cmake/cortex-m55.cmake.
TARGET = ["-mcpu=cortex-m55", "-mthumb", "-mfloat-abi=hard", "-fno-exceptions", "-fno-rtti"]


@dataclass(frozen=True)
class Board:
    """A board of QEMU with a processor other than the Cortex-M55.

    Attributes:
        machine: name in QEMU.
        flags: compiler flags of the processor.
    """

    machine: str
    flags: str

    def definitions(self, directory: Path) -> list[str]:
        """Return options for ``build``. Writes the linker script to a folder.

        Arm's MPS2 boards have 4 MiB of SRAM at the start of each of two memory regions.
        """
        script = (RUNTIME / "tests/firmware/an547.ld").read_text()
        regions = {
            "ITCM": "ORIGIN = 0x00000000, LENGTH = 4M",
            "DTCM": "ORIGIN = 0x20000000, LENGTH = 2M",
            "SRAM": "ORIGIN = 0x20200000, LENGTH = 2M",
        }
        for name, place in regions.items():
            script, count = re.subn(rf"({name} \(\w+\) : ).*", rf"\g<1>{place}", script)
            assert count == 1, name
        path = directory / "mps2.ld"
        path.write_text(script)
        flags = f"{self.flags} -mthumb"
        return [
            f"-DLINKER_SCRIPT={path}",
            f"-DCMAKE_C_FLAGS={flags}",
            f"-DCMAKE_CXX_FLAGS={flags} -fno-exceptions -fno-rtti",
        ]


#: Boards by instruction set of the kernels.
BOARDS = {
    "dsp": Board("mps2-an386", "-mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16"),
    "scalar": Board("mps2-an385", "-mcpu=cortex-m3 -mfloat-abi=soft"),
}


def build(folder: Path, directory: Path, *definitions: str) -> Path:
    """Compile and link the firmware of a folder."""
    require("arm-none-eabi-g++", _TOOLCHAIN)
    options = [
        f"-DMODEL_FOLDER={folder}",
        f"-DCMAKE_TOOLCHAIN_FILE={RUNTIME / 'cmake/cortex-m55.cmake'}",
        "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON",
        "-DPLACED=ON",
        f"-DLINKER_SCRIPT={RUNTIME / 'tests/firmware/an547.ld'}",
        f"-DEXECUTORCH={executorch_directory()}",
    ]
    source = str(RUNTIME / "tests/firmware/saved")
    run([require("cmake", "cmake"), "-S", source, "-B", str(directory), *options, *definitions])
    run(["cmake", "--build", str(directory), "-j", "2"])
    return directory / "arm_saved_firmware.elf"


def execute(image: Path, program: bytes, directory: Path, machine: str = "mps3-an547") -> tuple[bool, str]:
    """Run the self-test. A stub replaces ExecuTorch's loader and reads a test script."""
    (directory / "method").write_text("\n".join(_test_script(program, Firmware(image, program, directory))) + "\n")
    return start(image, directory, machine)


def _test_script(program: bytes, firmware: Firmware) -> Iterator[str]:
    """Yield the test script of the method, in the format of runtime/tests/firmware/program_stub.cpp."""
    places = [*_places(firmware), *_constants(program, firmware)]
    payloads = iter(firmware.payloads)
    for line in firmware.method_entries():
        what, *words = line.split(" ")
        if what in ("delegate", "input"):
            # Values precede their places, which precede the first delegate.
            yield from places
            places.clear()
        if what == "delegate":
            payload = next(payloads)
            yield " ".join([what, words[0], str(program.index(payload)), str(len(payload)), *words[2:]])
        elif what in ("input", "output"):
            yield f"{what} {words[0]}"
        else:
            yield line


def _constants(program: bytes, firmware: Firmware) -> Iterator[str]:
    for number, content in firmware.constants().items():
        offset = program.index(content)
        while offset % _CONSTANT_ALIGNMENT:
            offset = program.index(content, offset + 1)
        yield f"constant {number} {offset}"


def _places(firmware: Firmware) -> Iterator[str]:
    for number, value in enumerate(firmware.plan.values):
        place = value.val.allocation_info if isinstance(value.val, Tensor) else None
        if place is not None:
            yield f"place {number} {place.memory_id - 1} {place.memory_offset_low}"
