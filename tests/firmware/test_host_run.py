"""The host program that runs firmware on this machine: sanitizers, uint8 inputs and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arm_recipes import RunError
from arm_recipes.firmware.host_run import FirmwareTestCase, PoolSizes, run_on_host
from arm_recipes.firmware.saving import collect_firmware_data
from arm_recipes.runtime import build
from tests.firmware.programs import U55, program, samples
from tests.runtime.cpp_build import (
    RUNTIME,
    SANITIZERS,
    compile_cpp,
    executorch_directory,
    executorch_include_flags,
    executorch_link_flags,
)
from tests.runtime.host_programs import export_small

pytestmark = pytest.mark.xdist_group("firmware")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host program with sanitizers: pools are on the heap, so that accesses beyond their last byte are detected."""
    output = tmp_path_factory.mktemp("trial") / "pools"
    sources = [*(RUNTIME / unit for unit in build._MEASURE_POOLS_SOURCES), *build.list_kernel_sources()]
    sources = build.combine_kernels(sources, output.parent)
    flags = [*executorch_include_flags(), "-isystem", str(RUNTIME / "emulator/driver"), *SANITIZERS]
    kernels = ["-Wl,--no-as-needed", f"-L{executorch_directory() / 'lib'}"]
    kernels += ["-lexecutorch_kernels_optimized", "-lexecutorch_kernels_quantized"]
    return compile_cpp(output, sources, flags, link=[str(build.build_plugin()), *kernels, *executorch_link_flags()])


@pytest.mark.parametrize(
    "name", ["fast_scratch_u65", "state_u55", "kernels_memory", "decoder_u85", "uint8_u55", "pixels_u85"]
)
def test_no_access_is_beyond_a_pool(monkeypatch: pytest.MonkeyPatch, sanitized: Path, name: str) -> None:
    firmware = collect_firmware_data(program(name), samples(name), name)
    monkeypatch.setattr(build, "build_measure_pools", lambda: sanitized)
    seen = run_on_host(firmware.program, firmware.pools.host_sizes(), firmware.test_vectors.cases)
    assert seen.outputs == firmware.test_vectors.outputs
    assert seen.temp <= firmware.pools.temp_64


@pytest.mark.parametrize("name", ["uint8_u55", "pixels_u85"])
def test_uint8_inputs(name: str) -> None:
    """Firmware takes uint8 and returns what the program on this machine returns."""
    result, info = program(name), program(name).inputs[0]
    assert info.dtype == "uint8"
    pixels = torch.randint(0, 256, info.shape, generator=torch.Generator().manual_seed(7)).to(torch.uint8)
    firmware = collect_firmware_data(result, [(pixels,)], name)
    (case,) = firmware.test_vectors.cases
    assert case.inputs == (pixels.numpy().tobytes(),)
    seen = run_on_host(firmware.program, firmware.pools.host_sizes(), firmware.test_vectors.cases)
    assert seen.outputs == firmware.test_vectors.outputs == ((result.run(pixels).numpy().tobytes(),),)


def test_errors_have_the_sizes_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    content = export_small(U55, quantized_io=True, shared_scratch=False).buffer
    sizes = PoolSizes(0, 64, (), (("forward", None, 208),))
    case = FirmwareTestCase("forward", (bytes(192),), 1)
    with pytest.raises(RunError) as error:
        run_on_host(content, sizes, [case])
    told = str(error.value)
    assert "'forward': method allocator unlimited, planned memory 208 B, temp allocator 64 B, fast scratch 0 B" in told
    assert "cannot allocate 1344 bytes of scratch from the temp allocator, which has 64" in told
    assert "cannot execute the method forward" in told
    with pytest.raises(RunError, match="file of input 0 has another size"):
        run_on_host(content, PoolSizes(0, None, (), sizes.methods), [FirmwareTestCase("forward", (bytes(191),), 1)])
    with pytest.raises(RunError, match="cannot load the program"):
        run_on_host(content[:100], sizes, [case])
    monkeypatch.setattr(build, "build_measure_pools", lambda: Path("/bin/false"))
    with pytest.raises(RunError, match="exit code 1"):
        run_on_host(content, sizes, [case])
