"""Weights that several layers read: one copy in SRAM, equal results, and estimates like Vela's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arm_backend_core.backends import ethosu, ethosu_weight_cache
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.vela_estimates import VelaEstimates
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa_graphs import build_flatbuffer

CHANNELS, ROUNDS = 96, 5


def _steps(b: Builder, x: Value) -> Value:
    """Repeated convolutions with the same weights, with arithmetic and another convolution in between."""
    generator = np.random.default_rng(0)
    shape = (CHANNELS, 1, 1, CHANNELS)
    same, other = (b.const(generator.integers(-127, 128, shape), DType.INT8) for _ in range(2))
    bias, scale = b.const(generator.integers(-999, 999, CHANNELS), DType.INT32), generator.uniform(5e-4, 2e-3, CHANNELS)
    first = x
    for index in range(ROUNDS):
        x = b.rescale(b.conv2d(x, same, bias, pad=(0, 0, 0, 0)), DType.INT8, scale)
        x = b.rescale(b.mul(x, first), DType.INT8, 0.01)
        if index == 2:
            x = b.rescale(b.conv2d(x, other, bias, pad=(0, 0, 0, 0)), DType.INT8, scale)
    return x


FLATBUFFER = build_flatbuffer(_steps, ((1, 1, 1, CHANNELS), DType.INT8))
INPUTS = [np.random.default_rng(1).integers(-128, 128, (1, 1, 1, CHANNELS)).astype(np.int8)]


def _compiled(accelerator: str, *flags: str, memory_mode: str = "Shared_Sram") -> tuple[Payload, VelaEstimates]:
    spec = EthosUCompileSpec(accelerator, memory_mode=memory_mode, extra_flags=flags)
    payload = compile_ethosu(FLATBUFFER, spec, delegate="", find_operator=lambda _: None)
    assert payload.vela is not None
    return payload, payload.vela


@pytest.fixture
def without_copy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Payload, VelaEstimates]]:
    """``_compiled`` without the copy of weights."""

    def compiled(*arguments: str, **options: str) -> tuple[Payload, VelaEstimates]:
        with monkeypatch.context() as patch:
            patch.setattr(ethosu, "cache_weights_in_sram", lambda answer, configuration: None)
            return _compiled(*arguments, **options)

    return compiled


@pytest.mark.parametrize("accelerator", ["ethos-u55-32", "ethos-u55-128", "ethos-u55-256"])
def test_shared_weights_are_read_from_flash_once(
    accelerator: str, emulator: Emulator, without_copy: Callable[..., Any]
) -> None:
    """The estimate is close to Vela's for a program in SRAM, plus one fetch from flash."""
    payload, figures = _compiled(accelerator)
    (expected,) = reference_model.run(FLATBUFFER, INPUTS)
    (result,) = emulator.run(read_payload(payload.data), INPUTS, [("int8", expected.shape)])
    assert np.array_equal(result, expected)
    _, before = without_copy(accelerator)
    _, inside = without_copy(accelerator, memory_mode="Sram_Only")
    copied = read_payload(payload.data).scratch - before.sram_bytes
    assert 9_000 < copied < 12_000
    assert figures.sram_bytes == before.sram_bytes + copied
    assert inside.total_cycles < figures.total_cycles < inside.total_cycles + 2.2 * copied
    assert sum(layer.cycles for layer in figures.layers) == figures.total_cycles
    assert figures.total_cycles < before.total_cycles - (ROUNDS - 2) * copied / 1.2


def test_layers_have_the_offsets_of_the_changed_stream(without_copy: Callable[..., Any]) -> None:
    """Each layer is at the command that starts the same operation as in Vela's stream."""
    payload, figures = _compiled("ethos-u55-128")
    velas, before = without_copy("ethos-u55-128")

    def starts(payload: Payload, figures: VelaEstimates) -> list[int]:
        words = struct.unpack(f"<{(len(stream := read_payload(payload.data).commands) - 32) // 4}I", stream[32:])
        return [words[at // 4] for layer in figures.layers for at in layer.commands]

    assert starts(payload, figures) == starts(velas, before)
    assert [layer.commands for layer in figures.layers] != [layer.commands for layer in before.layers]


@pytest.mark.parametrize(
    ("accelerator", "flags", "memory_mode"),
    [
        ("ethos-u55-128", ["--optimise=Size"], "Shared_Sram"),
        ("ethos-u55-128", ["--arena-cache-size=8000"], "Shared_Sram"),
        ("ethos-u55-128", [], "Sram_Only"),
        ("ethos-u65-256", [], "Shared_Sram"),  # reads flash as fast as it multiplies
        ("ethos-u65-256", [], "Dedicated_Sram"),
        ("ethos-u85-256", [], "Shared_Sram"),
    ],
)
def test_programs_of_other_configurations_are_unchanged(
    accelerator: str, flags: list[str], memory_mode: str, without_copy: Callable[..., Any]
) -> None:
    payload, figures = _compiled(accelerator, *flags, memory_mode=memory_mode)
    assert (payload, figures) == without_copy(accelerator, *flags, memory_mode=memory_mode)


def test_copied_weights_fit_the_arena_limit() -> None:
    _, figures = _compiled("ethos-u55-128", "--arena-cache-size=16000")
    assert 9_000 < figures.sram_bytes <= 16_000


def test_weights_of_two_cores_are_copied(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test forces the copy, which costs cycles on this NPU."""
    monkeypatch.setattr(
        ethosu_weight_cache, "_update_tables_if_profitable", lambda answer, flash, layers, length: bool(layers)
    )
    payload, _ = _compiled("ethos-u65-512")
    (expected,) = reference_model.run(FLATBUFFER, INPUTS)
    (result,) = emulator.run(read_payload(payload.data), INPUTS, [("int8", expected.shape)])
    assert np.array_equal(result, expected)
    assert read_payload(payload.data).scratch > 9_000
