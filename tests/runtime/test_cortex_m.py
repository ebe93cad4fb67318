"""The Cortex-M backend: cross-compiled for a Cortex-M55, and executed on this machine with a fake driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.backends.payload import CHECKSUM_KEY
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_recipes import ArmRecipeType, export
from tests.backends.tosa_programs import conv2d
from tests.runtime.cpp_build import RUNTIME, executorch_directory, require, run

_DRIVER_HEADER = RUNTIME / "emulator/driver"
#: Symbols of the C and C++ libraries that allocate, throw or unwind.
_FORBIDDEN = (
    "malloc",
    "calloc",
    "realloc",
    "aligned_alloc",
    "_Znw",
    "_Zna",
    "__cxa_throw",
    "__cxa_allocate",
    "_Unwind",
)


def _configure(build: Path, *definitions: str) -> list[str]:
    options = ["-DARM_RUNTIME_ETHOSU_CORTEX_M=ON", f"-DPython3_EXECUTABLE={sys.executable}", *definitions]
    return [require("cmake", "cmake"), "-S", str(RUNTIME), "-B", str(build), *options]


@pytest.mark.parametrize("checks", [True, False])
def test_cross_compiles_without_heap_and_exceptions(tmp_path: Path, checks: bool) -> None:
    require("arm-none-eabi-g++", "gcc-arm-none-eabi libnewlib-arm-none-eabi libstdc++-arm-none-eabi-newlib")
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={RUNTIME / 'cmake/cortex-m55.cmake'}"
    driver = f"-DETHOSU_DRIVER_INCLUDE_DIR={_DRIVER_HEADER}"
    option = f"-DARM_RUNTIME_CHECK_PAYLOADS={'ON' if checks else 'OFF'}"
    run(_configure(tmp_path, toolchain, driver, option, "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"))
    run(["cmake", "--build", str(tmp_path)])
    assert (CHECKSUM_KEY.encode() in (tmp_path / "libarm_runtime_ethosu.a").read_bytes()) is checks
    undefined: set[str] = set()
    for library in ("libarm_runtime_payload.a", "libarm_runtime_ethosu.a"):
        attributes = run([require("arm-none-eabi-readelf", "binutils-arm-none-eabi"), "-A", str(tmp_path / library)])
        assert "Tag_CPU_arch: v8.1-M.mainline" in attributes
        listing = run(["arm-none-eabi-nm", "--undefined-only", "--format=posix", str(tmp_path / library)])
        undefined |= {line.split()[0] for line in listing.splitlines() if " " in line}
    assert {"ethosu_invoke_v3", "ethosu_reserve_driver", "ethosu_flush_dcache", "memcpy"} <= undefined
    assert "_GLOBAL_OFFSET_TABLE_" not in undefined  # of position-independent code, which boards do not link
    assert not [symbol for symbol in undefined if symbol.startswith(_FORBIDDEN)]


@pytest.mark.parametrize(
    ("definitions", "variable"),
    [
        ([], "ETHOSU_DRIVER_INCLUDE_DIR"),
        (["-DETHOSU_DRIVER_INCLUDE_DIR=/nowhere"], "ETHOSU_DRIVER_INCLUDE_DIR"),
        (["-DEXECUTORCH_INCLUDE_DIR=/nowhere"], "EXECUTORCH_INCLUDE_DIR"),
        ([f"-DETHOSU_DRIVER_INCLUDE_DIR={_DRIVER_HEADER}", "-DARM_RUNTIME_ETHOSU_LINUX=ON"], "ETHOSU_LINUX_DRIVER_DIR"),
        ([f"-DETHOSU_DRIVER_INCLUDE_DIR={_DRIVER_HEADER}", "-DARM_RUNTIME_VGF=ON"], "VULKAN_HEADERS_DIR"),
    ],
)
def test_a_missing_path_is_named(tmp_path: Path, definitions: list[str], variable: str) -> None:
    with pytest.raises(AssertionError, match=rf"Set\s+it\s+with\s+-D{variable}=<folder>"):
        run(_configure(tmp_path, *definitions))


class _SeveralOutputs(nn.Module):
    """Two inputs, three outputs of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.relu(self.first(x))
        narrow = self.second(wide)
        return wide, narrow + y, narrow.mean((2, 3))


def _export(folder: Path) -> list[Path]:
    """A program that is one delegate and nothing else, its payload, and a payload for Direct Drive."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 3, 8, 8), (1, 4, 8, 8)
    samples = [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(2)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, quantized_io=True)
    buffer = export(_SeveralOutputs().eval(), recipe, samples=samples).buffer
    program = deserialize_pte_binary(buffer).program
    plan = program.execution_plan[0]
    assert not plan.operators
    payload = program.backend_delegate_data[plan.delegates[0].processed.index].data
    direct_drive = EthosUCompileSpec("ethos-u85-256", extra_flags=["--cop-format=COP2"])
    cop2 = compile_payload(direct_drive, conv2d(), delegate="delegate", find_operator=lambda text: None).data
    files = {"program.pte": buffer, "payload": payload, "cop2": cop2}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def test_backend_with_a_driver_double(tmp_path: Path) -> None:
    """See runtime/tests/ethosu/backend_test.cpp, which is compiled with AddressSanitizer and UBSan."""
    files = _export(tmp_path)
    build = tmp_path / "build"
    driver = f"-DETHOSU_DRIVER_INCLUDE_DIR={_DRIVER_HEADER}"
    include = f"-DEXECUTORCH_INCLUDE_DIR={executorch_directory() / 'include'}"
    run(_configure(build, driver, include, "-DARM_RUNTIME_TESTS=ON", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"))
    run(["cmake", "--build", str(build)])
    for driver_kind in ("single", "several", "plain", "old"):
        test = build / f"tests/ethosu/ethosu_backend_test_{driver_kind}"
        assert run([str(test), *map(str, files)]) == "ok\n"
