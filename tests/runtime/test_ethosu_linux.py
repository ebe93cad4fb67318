"""The backend for Ethos-U85 in Direct Drive on Linux, with a fake of the driver library in place of an NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe

from arm_recipes import ArmRecipeType, export
from tests.runtime.cpp_build import RUNTIME, executorch_directory, require, run

pytestmark = pytest.mark.xdist_group("ethosu_linux")  # one build

DIRECT_DRIVE = ["--cop-format=COP2", "--separate-io-regions"]


@pytest.fixture(scope="module")
def backend_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CMake target and the fake driver, linked into the program of the C++ tests, with sanitizers."""
    build = tmp_path_factory.mktemp("ethosu_linux")
    cmake = require("cmake", "cmake")
    include = executorch_directory() / "include"
    source = RUNTIME / "tests/ethosu_linux"
    run([cmake, "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Debug", f"-DEXECUTORCH_INCLUDE_DIR={include}"])
    run([cmake, "--build", str(build)])
    return build / "backend_test"


def test_cpp_tests_of_the_backend_pass(backend_test: Path) -> None:
    output = run([str(backend_test)])
    assert output.count(" ok\n") == 14


class TwoOutputs(torch.nn.Module):
    """Vela places its second output before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, image: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.conv(image)
        return torch.relu(features), features + offset


@pytest.mark.parametrize(
    "options",
    [{"quantized_io": True, "direct_drive": True}, {"extra_flags": DIRECT_DRIVE, "algorithms": False}],
    ids=["integers", "floats"],
)
def test_exported_program(backend_test: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """A program for Direct Drive runs in ExecuTorch's runtime, and its tensors are at Vela's offsets."""
    torch.manual_seed(0)
    inputs = [(torch.randn(1, 3, 8, 8), torch.randn(1, 8, 8, 8)) for _ in range(2)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, **options)
    result = export(TwoOutputs().eval(), recipe, samples=inputs)
    # The package's runtime has no such kernel: runtime/kernels/cortex_m_kernels.cpp does.
    assert (b"cortex_m::quantize_per_tensor" in result.buffer) is ("quantized_io" not in options)
    result.save(tmp_path / "model.pte")
    assert run([str(backend_test), str(tmp_path / "model.pte")]) == "ok\n"


def test_missing_driver_header_is_named(tmp_path: Path) -> None:
    include = executorch_directory() / "include"
    command = [require("cmake", "cmake"), "-S", str(RUNTIME), "-B", str(tmp_path / "build")]
    command += ["-DARM_RUNTIME_ETHOSU_LINUX=ON", f"-DETHOSU_LINUX_DRIVER_DIR={tmp_path}"]
    with pytest.raises(AssertionError, match=r"neither\s+include/ethosu.hpp nor\s+driver_library/include/ethosu.hpp"):
        run([*command, f"-DEXECUTORCH_INCLUDE_DIR={include}"])
