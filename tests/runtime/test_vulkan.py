"""Choice of the Vulkan loader and driver for VGF programs, and errors without one. Each case has its own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arm_recipes import ArmRecipeType, RuntimeUnavailable
from arm_recipes.runtime import vulkan as product
from tests.runtime import child_processes
from tests.runtime.child_processes import run_in_child
from tests.runtime.cpp_build import require, run
from tests.runtime.host_programs import export_small, remove_checksums, remove_file_checksum
from tests.small_models import images

#: The tests run in one xdist worker, so that they share worker processes and exported programs.
pytestmark = pytest.mark.xdist_group("child_processes")

VGF, TOSA = ArmRecipeType.VGF_INT8, ArmRecipeType.TOSA_INT8
LOADER = product.LOADER_VARIABLE
ADVICE = (
    r"apt-get install mesa-vulkan-drivers chromium-common.*ARM_RECIPES_VULKAN_LOADER.*run\(\.\.\., backend='tosa'\)"
)

_FAKE_LOADER_SOURCE = """
#include <cstdint>
#include <cstring>
#ifdef IN_FUNCTION_THAT_VULKAN_1_0_LACKS
extern "C" int32_t vkEnumerateInstanceVersion(uint32_t* version) { *version = VERSION; return 0; }
#endif
static const char* const kExtensions[] = {"VK_ARM_tensors", "VK_ARM_data_graph", "VK_KHR_other"};
struct Extension { char name[256]; uint32_t version; };
extern "C" {
int32_t vkCreateInstance(const void*, const void*, void** instance) {
  *instance = reinterpret_cast<void*>(1);
  return INSTANCE;
}
void vkDestroyInstance(void*, const void*) {}
int32_t vkEnumeratePhysicalDevices(void*, uint32_t* count, void** devices) {
  if (devices == nullptr) *count = DEVICES;
  for (uint32_t i = 0; devices != nullptr && i < *count; ++i) devices[i] = reinterpret_cast<void*>(i + 1ul);
  return 0;
}
int32_t vkEnumerateDeviceExtensionProperties(void* device, const char*, uint32_t* count, Extension* found) {
  if (found == nullptr) *count = device == reinterpret_cast<void*>(DEVICES + 0ul) ? EXTENSIONS : 1;
  for (uint32_t i = 0; found != nullptr && i < *count; ++i) {
    std::memset(found[i].name, 0, sizeof found[i].name);
    std::strcpy(found[i].name, kExtensions[i]);
  }
  return 0;
}
}
"""


def _build_fake_loader(
    folder: Path, *, version: tuple[int, int] = (1, 4), instance: int = 0, devices: int = 0, arm: int = 0
) -> str:
    """Compile a Vulkan loader with ``devices`` devices, of which the last has ``arm`` extensions."""
    source, library = folder / "fake.cpp", folder / f"libfake{version[1]}_{devices}_{arm}_{-instance}.so"
    source.write_text(
        _FAKE_LOADER_SOURCE.replace("IN_FUNCTION_THAT_VULKAN_1_0_LACKS", "__linux__" if version[1] else "__none__")
    )
    flags = {"VERSION": f"{(version[0] << 22) | (version[1] << 12)}u", "INSTANCE": instance}
    flags |= {"DEVICES": devices, "EXTENSIONS": arm}
    defines = [f"-D{name}={value}" for name, value in flags.items()]
    run([require("g++", "g++"), "-shared", "-fPIC", *defines, str(source), "-o", str(library)])
    return str(library)


def test_default_loader_runs_a_vgf_program() -> None:
    (x,) = images(1)[0]
    (here,) = run_in_child(child_processes.run, export_small(VGF).buffer, x)
    (reference,) = run_in_child(child_processes.run, export_small(TOSA).buffer, x)
    assert np.array_equal(here, reference)


def test_vulkan_variables_of_the_user_are_kept() -> None:
    present = {"VK_LAYER_PATH": "/mine", "VK_INSTANCE_LAYERS": None}
    _, emulated, after = run_in_child(child_processes.find_vulkan_loader, environment=present)
    if emulated:
        assert str(after["VK_LAYER_PATH"]).endswith(":/mine")
        assert after["VK_INSTANCE_LAYERS"] == "VK_LAYER_ML_Graph_Emulation:VK_LAYER_ML_Tensor_Emulation"


def test_missing_loader_is_an_error_with_advice() -> None:
    with pytest.raises(
        RuntimeUnavailable,
        match=r"'forward' cannot be run: There is no usable Vulkan loader: /nowhere/libvulkan.so: .*" + ADVICE,
    ):
        run_in_child(
            child_processes.run, export_small(VGF).buffer, *images(1)[0], environment={LOADER: "/nowhere/libvulkan.so"}
        )


@pytest.mark.parametrize(("version", "text"), [((1, 3), "1.3.0"), ((0, 9), "0.9.0"), ((1, 0), "1.0.0")])
def test_old_loader_is_refused(version: tuple[int, int], text: str, tmp_path: Path) -> None:
    old = _build_fake_loader(tmp_path, version=version)
    with pytest.raises(RuntimeUnavailable, match=rf"no usable Vulkan loader: {old} has version {text}\. .*{ADVICE}"):
        run_in_child(child_processes.find_vulkan_loader, environment={LOADER: old})


def test_library_that_is_no_loader_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.cpp").write_text("int nothing;")
    library = tmp_path / "none.so"
    run([require("g++", "g++"), "-shared", "-fPIC", str(tmp_path / "none.cpp"), "-o", str(library)])
    with pytest.raises(RuntimeUnavailable, match=rf"no usable Vulkan loader: {library} has version 1.0.0\. .*{ADVICE}"):
        run_in_child(child_processes.find_vulkan_loader, environment={LOADER: str(library)})


def test_next_loader_is_used_if_the_first_is_too_old(tmp_path: Path) -> None:
    (x,) = images(1)[0]
    good, _, _ = run_in_child(child_processes.find_vulkan_loader)
    loaders = ["/nowhere/libvulkan.so", _build_fake_loader(tmp_path, version=(1, 3)), good]
    chosen, (output,) = run_in_child(child_processes.run_with_loaders, loaders, export_small(VGF).buffer, x)
    assert chosen == good
    assert np.array_equal(output, run_in_child(child_processes.run, export_small(TOSA).buffer, x)[0])


@pytest.mark.parametrize("instance", [0, -9])
def test_loader_without_driver_is_refused(instance: int, tmp_path: Path) -> None:
    loader = _build_fake_loader(tmp_path, instance=instance)
    with pytest.raises(RuntimeUnavailable, match=rf"The Vulkan loader '{loader}' finds no driver\. .*{ADVICE}"):
        run_in_child(child_processes.find_vulkan_loader, environment={LOADER: loader})


def test_driver_with_both_extensions_is_used_without_emulation_layer(tmp_path: Path) -> None:
    loader = _build_fake_loader(tmp_path, devices=3, arm=2)
    before = {"VK_LAYER_PATH": None, "VK_INSTANCE_LAYERS": "mine", "VK_DRIVER_FILES": None}
    assert run_in_child(child_processes.find_vulkan_loader, environment={LOADER: loader, **before}) == (
        loader,
        False,
        before,
    )
    with pytest.raises(RuntimeUnavailable, match="has Arm's ML extensions, and the emulation layer is not installed"):
        # One of the two extensions does not suffice.
        run_in_child(
            child_processes.find_vulkan_loader,
            environment={LOADER: _build_fake_loader(tmp_path, devices=3, arm=1)},
            without=["emulation_layer.cli"],
        )


def test_tosa_programs_still_run_after_a_missing_driver() -> None:
    """The process keeps the first failure, which does not affect TOSA programs."""
    (x,) = images(1)[0]
    messages, (output,) = run_in_child(
        child_processes.run_after_failure,
        export_small(VGF).buffer,
        export_small(TOSA).buffer,
        x,
        environment={"VK_DRIVER_FILES": "/nowhere/icd.json"},
    )
    assert len(messages) == 2
    for text in messages:
        assert text.startswith("RuntimeUnavailable from RuntimeUnavailable: 'forward' cannot be run: The Vulkan loader")
        assert "finds no driver. Install Mesa's CPU driver and a Vulkan loader of at least version 1.4" in text
    assert output.shape == (1, 4)


def test_missing_driver_is_an_error_for_a_payload_without_checksum() -> None:
    """The payload is tried in another process, which reports the missing driver."""
    with pytest.raises(RuntimeUnavailable, match=f"finds no driver.*{ADVICE}"):
        run_in_child(
            child_processes.run,
            remove_checksums(export_small(VGF).buffer),
            *images(1)[0],
            environment={"VK_DRIVER_FILES": "/nowhere/icd.json"},
        )


def test_missing_emulation_layer_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable, match=r"pip install 'arm-recipes\[vgf\]'"):
        run_in_child(child_processes.run, export_small(VGF).buffer, *images(1)[0], without=["emulation_layer.cli"])
    with pytest.raises(RuntimeUnavailable, match=r"is installed without 'libVkLayer_Tensor\.so': install it again"):
        run_in_child(child_processes.run_without_layer_library, str(tmp_path), export_small(VGF).buffer, *images(1)[0])


def test_missing_scenario_runner_is_an_error_with_advice() -> None:
    with pytest.raises(
        RuntimeUnavailable,
        match=r"needs the package ai-ml-sdk-scenario-runner: .*scenario_runner_py.*pip install 'arm-recipes\[vgf\]'",
    ):
        run_in_child(child_processes.run, export_small(VGF).buffer, *images(1)[0], without=["scenario_runner_py"])


def test_loader_variable_selects_the_loader() -> None:
    good, emulated, _ = run_in_child(child_processes.find_vulkan_loader)
    assert run_in_child(child_processes.find_vulkan_loader, environment={LOADER: good})[:2] == (good, emulated)


def test_program_without_file_checksum_runs_on_vulkan() -> None:
    """Its payload still has a checksum."""
    (x,) = images(1)[0]
    assert np.array_equal(
        run_in_child(child_processes.run, remove_file_checksum(export_small(VGF).buffer), x)[0],
        run_in_child(child_processes.run, export_small(TOSA).buffer, x)[0],
    )
