"""The Cortex-M backend and kernels in a firmware for a Cortex-M55, which QEMU executes; see runtime/tests/firmware."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from arm_recipes import ArmRecipeType, ExportResult
from tests.runtime import firmware
from tests.runtime.cpp_build import RUNTIME, compile_cpp, run
from tests.runtime.firmware import Firmware
from tests.runtime.host_programs import export_small, export_striped
from tests.small_models import images

#: The tests run in one xdist worker, so that they share the image and exported programs.
pytestmark = pytest.mark.xdist_group("host_programs")

_EVENTS = ["EthosUBackend load", "EthosUBackend npu: npu_cycles=12345678901", "EthosUBackend execute"]
U55, U65, U85 = (ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The linked firmware."""
    return firmware.build(tmp_path_factory.mktemp("firmware"))


def _equal(result: ExportResult, device: Firmware, *inputs: Tensor) -> bool:
    """Whether the device returns the bits of the emulator on this machine and of the TOSA reference model."""
    done = device.run(*inputs)
    assert done.ok, done.printed
    assert [line.partition(": copied_bytes=")[0] for line in done.printed.splitlines()] == _EVENTS
    for backend in (None, "tosa"):
        expected = result.run(*inputs, backend=backend)
        expected = (expected,) if isinstance(expected, Tensor) else expected
        assert all(output.unique().numel() > 1 for output in expected)
        if not all(map(torch.equal, done.outputs, expected)):
            return False
    return True


@pytest.mark.parametrize("quantized_io", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("recipe", [U55, U85, ArmRecipeType.ETHOSU_U85_A16W8], ids=lambda recipe: recipe.name)
def test_the_device_gives_the_numbers_of_this_machine(
    image: Path, tmp_path: Path, recipe: ArmRecipeType, quantized_io: bool
) -> None:
    """Float inputs and outputs go through the kernels."""
    result = export_small(recipe, quantized_io=quantized_io, shared_scratch=False)
    device = Firmware(image, result.buffer, tmp_path)
    (x,) = images(1)[0]
    assert _equal(result, device, result.inputs[0].quantize(x * 2) if quantized_io else x * 2)


def test_program_with_fast_scratch_runs_on_the_device(image: Path, tmp_path: Path) -> None:
    """Several operations in stripes, with the fast scratch buffer of the firmware."""
    result, x = export_striped(U65, shared_scratch=False)
    vela = result.report.delegates[0].vela
    assert vela is not None
    assert vela.fast_scratch_bytes > 10_000
    assert _equal(result, Firmware(image, result.buffer, tmp_path), x)


def test_errors_are_printed(image: Path, tmp_path: Path) -> None:
    """The C library for small targets formats the messages."""
    (x,) = images(1)[0]
    device = Firmware(image, export_small(U55, shared_scratch=False).buffer, tmp_path)
    payload = device.payloads[0]
    device.payloads[0] = payload[:-33] + bytes([payload[-33] ^ 1]) + payload[-32:]
    done = device.run(x)
    assert not done.ok
    assert f"EthosUBackend: the payload of {len(payload)} bytes has changed since it was exported" in done.printed
    device.payloads[0] = payload
    device.npu = 0, 5
    done = device.run(x)
    assert not done.ok
    assert "the program was compiled for Ethos-U55-128, and the NPU has 32 multiply-accumulates" in done.printed


def test_128_bit_arithmetic_without_a_compiler_type(tmp_path: Path) -> None:
    """See runtime/tests/firmware/int128_test.cpp."""
    source = RUNTIME / "tests/firmware/int128_test.cpp"
    test = compile_cpp(tmp_path / "int128_test", [source], ["-g", "-O1", "-fsanitize=undefined"])
    assert run([str(test)]) == "ok\n"
