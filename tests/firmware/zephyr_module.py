"""Compiles the Zephyr module of a folder as one library, with stubs of Zephyr's CMake functions."""

from __future__ import annotations

import re
from pathlib import Path

from arm_recipes import Firmware
from tests.runtime.cpp_build import RUNTIME, executorch_include_flags, require, run


def read_sizes(kconfig: str) -> list[tuple[str, str]]:
    """Return name and default of each memory size."""
    return re.findall(r"^config (ARM_MODEL_\w+_SIZE)\n(?:\t.*\n)*?\tdefault (\d+)\n", kconfig, re.M)


def build_zephyr_library(firmware: Firmware, directory: Path) -> tuple[list[Path], Path]:
    """Return the linker script fragments and the library of the module."""
    folder = Path(firmware.folder)
    sizes = read_sizes((folder / "zephyr/Kconfig").read_text())
    options = [f"-DCONFIG_{name}={size}" for name, size in sizes]
    options += [f"-DCONFIG_ARM_MODEL{name}=y" for name in ("", "_SELF_TEST", "_CORTEX_M_KERNELS")]
    options += [f"-DMODULE={folder / 'zephyr'}", f"-DRUNTIME={RUNTIME}"]
    options += [f"-DCMAKE_TOOLCHAIN_FILE={RUNTIME / 'cmake/cortex-m55.cmake'}"]
    options += [f"-DINCLUDE={executorch_include_flags()[2]}"]
    source = Path(__file__).parent / "zephyr"
    printed = run([require("cmake", "cmake"), "-S", str(source), "-B", str(directory), *options])
    run(["cmake", "--build", str(directory), "-j", "2"])
    fragments = [Path(path) for path in re.findall(r"^-- linker fragment: (.*)$", printed, re.M)]
    return fragments, directory / "libarm_model.a"
