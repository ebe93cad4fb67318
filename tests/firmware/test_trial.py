"""The program that runs firmware on this machine: with our warnings, under sanitizers, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from arm_recipes import RunError
from arm_recipes.firmware.host_run import Case, Sizes, trial
from arm_recipes.firmware.saving import gathered
from arm_recipes.runtime import build
from tests.firmware.programs import program, samples
from tests.runtime.building import (
    RUNTIME,
    SANITIZERS,
    compile_cpp,
    executorch_directory,
    executorch_include_flags,
    executorch_link_flags,
)

pytestmark = pytest.mark.xdist_group("firmware")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sources; a pool is a piece of the heap, so what goes beyond its last byte is seen."""
    sources = [RUNTIME / unit for unit in build._FIRMWARE_UNITS]
    flags = [*executorch_include_flags(), "-isystem", str(RUNTIME / "emulator/driver"), *SANITIZERS]
    kernels = ["-Wl,--no-as-needed", f"-L{executorch_directory() / 'lib'}"]
    kernels += ["-lexecutorch_kernels_optimized", "-lexecutorch_kernels_quantized"]
    output = tmp_path_factory.mktemp("trial") / "pools"
    return compile_cpp(output, sources, flags, link=[str(build.plugin()), *kernels, *executorch_link_flags()])


@pytest.mark.parametrize("name", ["fast_scratch_u65", "state_u55", "kernels_memory", "decoder_u85"])
def test_nothing_goes_beyond_a_pool(monkeypatch: pytest.MonkeyPatch, sanitized: Path, name: str) -> None:
    model = gathered(program(name), samples(name), name)
    monkeypatch.setattr(build, "firmware_trial", lambda: sanitized)
    seen = trial(model.program, model.pools.here(), model.golden.cases)
    assert seen.outputs == model.golden.outputs
    assert seen.temp <= model.pools.temp_64


def test_errors_have_the_sizes_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    content = program("quantized_u55").buffer
    sizes = Sizes(0, 64, (), (("forward", None, 196),))
    case = Case("forward", (bytes(192),), 1)
    with pytest.raises(RunError) as error:
        trial(content, sizes, [case])
    told = str(error.value)
    assert "for 'forward' enough of method allocator and 196 B, 64 B of temp allocator, 0 B of fast scratch" in told
    assert "1344 bytes of scratch are not to be had from the temp allocator, which has 64" in told
    assert "cannot execute the method forward" in told
    with pytest.raises(RunError, match="input of another size"):
        trial(content, Sizes(0, None, (), sizes.methods), [Case("forward", (bytes(191),), 1)])
    with pytest.raises(RunError, match="cannot load the program"):
        trial(content[:100], sizes, [case])
    monkeypatch.setattr(build, "firmware_trial", lambda: Path("/bin/false"))
    with pytest.raises(RunError, match="it ended with 1"):
        trial(content, sizes, [case])
