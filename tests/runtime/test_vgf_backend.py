"""The Vulkan backend on Mesa's CPU driver under Arm's emulation layer, against the TOSA reference model."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import nn

from arm_backend_core.backends.payload import CHECKSUM_KEY
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, export
from tests.runtime.cpp_build import ROOT, RUNTIME, executorch_directory, require, run

pytestmark = pytest.mark.xdist_group("vgf_backend")  # they share a build

#: Kept between test runs; the fetch script and CMake update them.
_HEADERS, _BUILD = ROOT / "build/vulkan-headers", ROOT / "build/vgf-tests"
_LOADER = Path("/usr/lib/chromium/libvulkan.so.1")
#: In the Debian package of the loader; the validation layer of Debian 12 supports neither of the two extensions.
_VALIDATION = _LOADER.parent / "libVkLayer_khronos_validation.so"
_DRIVERS = Path("/usr/share/vulkan/icd.d")


def _environment() -> dict[str, str]:
    """Variables for a process that uses Vulkan: the loader, Mesa's CPU driver, and the emulation layer's place."""
    drivers = sorted(_DRIVERS.glob("lvp_icd*.json"))
    assert drivers, "Mesa's CPU driver is missing: apt-get install mesa-vulkan-drivers"
    assert _LOADER.exists(), "a Vulkan loader of version 1.4 is missing: apt-get install chromium-common"
    assert find_spec("emulation_layer"), "pip install ai-ml-emulation-layer-for-vulkan"
    from emulation_layer.cli import get_deploy_paths

    paths = get_deploy_paths()
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{_LOADER.parent}:{paths['LD_LIBRARY_PATH']}",
        "VK_LAYER_PATH": paths["VK_LAYER_PATH"],
        "VK_DRIVER_FILES": str(drivers[0]),
        "PYTHONPATH": str(ROOT),
    }


def _library() -> Path:
    """The folder of Arm's VGF library, with headers and the static library."""
    spec = find_spec("vgf_lib")
    assert spec is not None, "pip install ai-ml-sdk-vgf-library"
    return Path(str(spec.origin)).parent / "binaries"


@pytest.fixture(scope="module")
def build() -> Path:
    """The plugin and the C++ tests."""
    run([str(RUNTIME / "cmake/fetch_vulkan_headers.sh"), str(_HEADERS)])
    source = RUNTIME / "tests/vgf"
    folders = {
        "EXECUTORCH_INCLUDE_DIR": executorch_directory() / "include",
        "VULKAN_HEADERS_DIR": _HEADERS,
        "VGF_LIBRARY_DIR": _library(),
    }
    definitions = [f"-D{name}={folder}" for name, folder in folders.items()]
    run([require("cmake", "cmake"), "-S", str(source), "-B", str(_BUILD), *definitions])
    run(["cmake", "--build", str(_BUILD)])
    return _BUILD


@dataclass(frozen=True)
class Model:
    """A program, its input, and the result of the reference model."""

    program: bytes
    array: np.ndarray
    expected: np.ndarray

    @property
    def vgf(self) -> bytes:
        """The delegate's payload."""
        start = self.program.index(b"VGF1")
        return self.program[start : start + struct.unpack_from("<I", self.program, start - 4)[0]]


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


def _export(recipe: ExportRecipe, array: np.ndarray) -> Model:
    result = export(_convolutions(), recipe, samples=[(torch.randn(1, 3, 8, 8),) for _ in range(4)])
    (delegate,) = result.report.delegates
    return Model(result.buffer, array, reference_model.run(delegate.tosa, [array])[0])


@pytest.fixture(scope="module")
def integer() -> Model:
    # Without the kernels that quantize at the boundary, the delegate is all of the program.
    recipe = ExportRecipe.get_recipe(ArmRecipeType.VGF_INT8, quantized_io=True)
    return _export(recipe, np.random.default_rng(0).integers(-128, 128, (1, 3, 8, 8), dtype=np.int8))


@pytest.fixture(scope="module")
def floating() -> Model:
    array = np.random.default_rng(0).normal(size=(1, 3, 8, 8)).astype(np.float32)
    return _export(ExportRecipe.get_recipe(ArmRecipeType.VGF_FP), array)


@pytest.fixture(scope="module")
def session(
    build: Path, integer: Model, floating: Model, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str], str]:
    """The folder of ``vgf_process``, its outcomes, and its log."""
    folder = tmp_path_factory.mktemp("vgf")
    # Without its checksum, so that the VGF reader has to detect the damage in copies of the small program.
    assert integer.program.count(CHECKSUM_KEY.encode()) == floating.program.count(CHECKSUM_KEY.encode()) == 1
    unchecked = integer.program.replace(CHECKSUM_KEY.encode(), b"payload_other")
    for name, program, array in [
        ("small", unchecked, integer.array),
        ("floating", floating.program, floating.array),
    ]:
        (folder / f"{name}.pte").write_bytes(program)
        np.save(folder / f"{name}.npy", array)
    command = [sys.executable, "-m", "tests.runtime.vgf_process", str(build / "libvgf_plugin.so"), str(folder)]
    log = run(command, env=_environment())
    return folder, json.loads((folder / "outcomes.json").read_text()), log


Session = tuple[Path, dict[str, str], str]


def test_int8_program_has_the_reference_models_bits(session: Session, integer: Model) -> None:
    output = np.load(session[0] / "small.out.npy")
    assert output.dtype == np.int8
    assert len(np.unique(output)) > 8
    np.testing.assert_array_equal(output, integer.expected)


def test_float_program_agrees_with_the_reference_model(session: Session, floating: Model) -> None:
    output = np.load(session[0] / "floating.out.npy")
    np.testing.assert_allclose(output, floating.expected, rtol=1e-5, atol=1e-6)


def test_damaged_payloads_raise(session: Session) -> None:
    folder, _, log = session
    attempts = json.loads((folder / "damaged.json").read_text())
    assert len(attempts) == 9 + 8 * 13
    # A section size beyond its contents, but not beyond the file, is harmless: those bytes are not read.
    harmless = {name for name, message in attempts.items() if not message}
    assert all(" size " in name for name in harmless), harmless
    assert len(harmless) <= 2 * 4
    assert all(re.search(r"error: 0x:(12|23|30)$", message) for message in attempts.values() if message)
    for cause in (
        "the payload of 0 bytes has no VGF header",
        "(0 modules, 1 sequence, 2 resources, 3 constants) is not",
    ):
        assert cause in log


def test_missing_driver_and_layer_raise(session: Session) -> None:
    _, outcomes, log = session
    assert outcomes["no driver"]
    assert outcomes["no layer"]
    assert "VgfBackend: vkCreateInstance (is there a Vulkan driver?" in log
    assert "failed with VK_ERROR_INCOMPATIBLE_DRIVER (-9)" in log
    assert "VgfBackend: no Vulkan device runs VK_ARM_tensors and VK_ARM_data_graph" in log


def test_wrong_inputs_raise(session: Session) -> None:
    assert session[1]["wrong dtype"]
    assert session[1]["wrong shape"]


@pytest.fixture(scope="module")
def files(integer: Model, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The integer model's VGF file, input and output as the C++ tests take them."""
    folder = tmp_path_factory.mktemp("vgf_files")
    contents = {"vgf": integer.vgf, "input": integer.array.tobytes(), "output": integer.expected.tobytes()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [str(folder / name) for name in contents]


def _count_cases() -> int:
    """The number of cases of ``backend_test``."""
    source = (ROOT / "runtime/tests/vgf/backend_test.cpp").read_text()
    return len(re.findall(r'\{"[^"]+", test_\w+\}', source))


@pytest.mark.verify
def test_backend_with_sanitizers(build: Path, files: list[str]) -> None:
    output = run([str(build / "backend_test"), *files], env=_environment())
    assert output.count(" ok\n") == _count_cases()


#: Findings of the validation layer about the CPU driver and the emulation layer, not about the backend.
_KNOWN_FINDINGS = {
    # Mesa's CPU driver has neither VK_KHR_maintenance5 nor VK_KHR_deferred_host_operations.
    "VUID-vkCreateDevice-ppEnabledExtensionNames-01387",
    # The SPIR-V validator inside of the layer was built without the instructions of TOSA.
    "VUID-VkShaderModuleCreateInfo-pCode-08737",
    # Arm's converter writes replicated composites, and its emulation layer runs them without saying that it does.
    "VUID-VkShaderModuleCreateInfo-pCode-08740",
    "VUID-VkShaderModuleCreateInfo-pCode-08742",
}


@pytest.mark.verify
def test_validation_layer_has_no_unknown_findings(build: Path, files: list[str], tmp_path: Path) -> None:
    """Khronos's validation layer, between the backend and the emulation layer."""
    name = "VK_LAYER_KHRONOS_validation"
    layer = {"name": name, "type": "GLOBAL", "library_path": str(_VALIDATION), "api_version": "1.4.0"}
    described = {**layer, "implementation_version": "1", "description": "validation"}
    manifest = {"file_format_version": "1.2.0", "layer": described}
    (tmp_path / "validation.json").write_text(json.dumps(manifest))
    environment = _environment()
    environment |= {
        "VK_LAYER_PATH": f"{environment['VK_LAYER_PATH']}:{tmp_path}",
        "VK_INSTANCE_LAYERS": name,
        "VK_LOADER_DEBUG": "layer",
    }
    # The excluded case leaves a device on purpose, for which the layer would end the process at exit.
    output = run([str(build / "backend_test"), *files, "memory in use is kept"], env=environment)
    assert output.count(" ok\n") == _count_cases() - 1
    assert re.search(rf'Insert instance layer "{name}"', output), output[:2000]
    found = re.findall(r"^Validation (?:Error|Warning): \[ (\S+) \].*(?:\n.+)*", output, re.MULTILINE)
    assert set(found) <= _KNOWN_FINDINGS, "\n".join(sorted(set(found) - _KNOWN_FINDINGS)) + output


@pytest.mark.verify
def test_every_flipped_bit_with_sanitizers(build: Path, files: list[str], integer: Model) -> None:
    output = run([str(build / "corrupted_file_test"), files[0]])
    counts = re.search(r"read: (\d+) of (\d+) lengths, (\d+) of (\d+) flips, (\d+) of (\d+) words\n$", output)
    assert counts, output[-2000:]
    lengths, _, flips, all_flips, words, _ = map(int, counts.groups())
    assert all_flips == 8 * len(integer.vgf)
    assert lengths == 0
    # Flips in weights and in the operators of the graph are read; only the driver could detect them.
    assert 0 < flips < all_flips * 0.35
    assert words > 0


def test_missing_loader_is_named(build: Path, files: list[str], tmp_path: Path) -> None:
    for name in ("libvulkan.so.1", "libvulkan.so"):  # found first, and no library
        (tmp_path / name).write_text("not a library")
    environment = {**_environment(), "LD_LIBRARY_PATH": str(tmp_path)}
    with pytest.raises(AssertionError, match=r"VgfBackend: there is no Vulkan loader \(libvulkan.so.1\)"):
        run([str(build / "backend_test"), *files], env=environment)


def test_second_copy_of_the_plugin_is_refused(build: Path, tmp_path: Path) -> None:
    copy = tmp_path / "libcopy.so"
    copy.write_bytes((build / "libvgf_plugin.so").read_bytes())
    code = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    log = run([sys.executable, "-c", code, str(build / "libvgf_plugin.so"), str(copy)])
    assert log.count("VgfBackend: another backend with this name is registered already") == 1
