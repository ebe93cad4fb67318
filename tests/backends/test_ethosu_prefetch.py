"""Prefetch of weights to SRAM before their layer: equal results in less time, without more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from arm_backend_core.backends import ethosu, ethosu_prefetch
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.ethosu_accesses import MemoryAccess
from arm_backend_core.backends.ethosu_commands import decode_commands
from arm_backend_core.backends.ethosu_liveness import Liveness, _merge_ranges, analyze_liveness
from arm_backend_core.backends.ethosu_prefetch_plan import Costs, CyclesPerByte, PrefetchPlanner, Slot, WeightCopy
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.vela_estimates import VelaEstimates
from arm_backend_core.backends.vela_tables import WEIGHT_COPY_USAGE
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied
from arm_recipes.runtime.ethosu_stream import StreamError
from tests.runtime.ethosu_emulator import Emulator, read_payload
from tests.tosa_graphs import Body, build_flatbuffer

_SHAPE = (1, 24, 24, 16)
_OFM_BASE = 0x410


def _convolution(b: Builder, x: Value, channels: int, size: int, seed: int, **options: Any) -> Value:
    generator = np.random.default_rng(seed)
    weight = b.const(generator.integers(-127, 128, (channels, size, size, x.shape[3])), DType.INT8)
    bias = b.const(generator.integers(-999, 999, channels), DType.INT32)
    pad = (size // 2,) * 4
    scale = generator.uniform(0.5, 2.0, channels) / (30 * size * x.shape[3])
    return b.rescale(b.conv2d(x, weight, bias, pad=pad, **options), DType.INT8, scale)


def _classifier(*widths: int) -> Body:
    """Convolutions of an image, then layers of one pixel, whose weights take longer to read than to multiply."""

    def body(b: Builder, x: Value) -> Value:
        for seed in range(4):
            x = _convolution(b, x, 32, 3, seed)
        for _ in range(2):  # flash is idle
            x = b.max_pool2d(x, (3, 3), stride=(1, 1), pad=(1, 1, 1, 1))
        x = b.max_pool2d(x, (24, 24), stride=(24, 24), pad=(0, 0, 0, 0))
        for seed, width in enumerate(widths):
            x = _convolution(b, x, width, 1, 10 + seed)
            if not seed:  # a table is loaded by DMA, too
                x = b.table(x, np.arange(-128, 128)[::-1])
        return x

    return body


#: The weights of all layers fit the scratch, or those of the last one only in slices.
WHOLE = build_flatbuffer(_classifier(64, 128), (_SHAPE, DType.INT8))
SLICED = build_flatbuffer(_classifier(64, 1000), (_SHAPE, DType.INT8))
#: U65 reads the DRAM of its default system faster than it multiplies.
_SLOW_FLASH = {"ethos-u65-": {"system_config": "Ethos_U65_Embedded"}}
INPUTS = [np.random.default_rng(1).integers(-128, 128, _SHAPE).astype(np.int8)]


def _compiled(flatbuffer: bytes, accelerator: str, **options: Any) -> tuple[Payload, VelaEstimates]:
    options = {"memory_mode": "Shared_Sram", **_SLOW_FLASH.get(accelerator[:10], {}), **options}
    spec = EthosUCompileSpec(accelerator, **options)
    payload = compile_ethosu(flatbuffer, spec, delegate="", find_operator=lambda _: None)
    assert payload.vela is not None
    return payload, payload.vela


@pytest.fixture
def without_prefetch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Payload, VelaEstimates]]:
    """``_compiled`` without the prefetch."""

    def compiled(*arguments: Any, **options: Any) -> tuple[Payload, VelaEstimates]:
        with monkeypatch.context() as patch:
            patch.setattr(ethosu, "prefetch_weights", lambda result, configuration: None)
            return _compiled(*arguments, **options)

    return compiled


def _matches_reference(emulator: Emulator, flatbuffer: bytes, payload: Payload) -> bool:
    (expected,) = reference_model.run(flatbuffer, INPUTS)
    (result,) = emulator.run(read_payload(payload.data), INPUTS, [("int8", expected.shape)])
    return np.array_equal(result, expected)


@pytest.mark.parametrize(
    "accelerator", ["ethos-u55-32", "ethos-u55-128", "ethos-u55-256", "ethos-u65-256", "ethos-u65-512"]
)
@pytest.mark.parametrize("flatbuffer", [WHOLE, SLICED], ids=["whole", "sliced"])
def test_prefetch_reduces_cycles_in_the_same_sram(
    accelerator: str, flatbuffer: bytes, emulator: Emulator, without_prefetch: Callable[..., Any]
) -> None:
    """The results are equal, and the estimates of layers and memories add up."""
    payload, figures = _compiled(flatbuffer, accelerator)
    assert _matches_reference(emulator, flatbuffer, payload)
    _, before = without_prefetch(flatbuffer, accelerator)
    assert figures.sram_bytes == before.sram_bytes
    assert figures.total_cycles < before.total_cycles - 2_000
    assert sum(layer.cycles for layer in figures.layers) == figures.total_cycles
    for memory in figures.memories:
        assert sum(dict(layer.memory_cycles)[memory.name] for layer in figures.layers) == memory.access_cycles
    copies = [tensor for tensor in figures.placed if tensor.usage == WEIGHT_COPY_USAGE]
    assert copies
    assert all(tensor.address + tensor.bytes <= figures.sram_bytes for tensor in copies)


def _convolutions(payload: Payload) -> int:
    return sum(number == 2 for _, number, _ in decode_commands(read_payload(payload.data).commands))


def test_only_large_weights_are_split(without_prefetch: Callable[..., Any]) -> None:
    def growth(flatbuffer: bytes) -> int:
        after, before = (compiled(flatbuffer, "ethos-u55-128")[0] for compiled in (_compiled, without_prefetch))
        return _convolutions(after) - _convolutions(before)

    assert growth(WHOLE) == 0
    assert growth(SLICED) > 1


def test_layers_have_the_offsets_of_the_changed_stream(without_prefetch: Callable[..., Any]) -> None:
    """Each layer is at the command that starts the same operation as in Vela's stream."""

    def starts(payload: Payload, figures: VelaEstimates) -> list[set[int]]:
        stream = read_payload(payload.data).commands
        numbers = {4 * index: number for index, number, _ in decode_commands(stream)}
        return [{numbers[at] for at in layer.commands} for layer in figures.layers]

    assert starts(*_compiled(SLICED, "ethos-u55-128")) == starts(*without_prefetch(SLICED, "ethos-u55-128"))


@pytest.mark.parametrize(
    ("accelerator", "memory_mode"),
    [("ethos-u55-128", "Sram_Only"), ("ethos-u65-256", "Dedicated_Sram"), ("ethos-u85-256", "Shared_Sram")],
)
def test_programs_of_other_memory_modes_are_unchanged(
    accelerator: str, memory_mode: str, without_prefetch: Callable[..., Any]
) -> None:
    options = {"memory_mode": memory_mode, "system_config": None}
    assert _compiled(WHOLE, accelerator, **options) == without_prefetch(WHOLE, accelerator, **options)


def test_a_copy_over_live_data_changes_the_result(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison detects an analysis that misses live data."""

    def ignore_live_data(*arguments: Any) -> Liveness:
        found = analyze_liveness(*arguments)
        return found._replace(busy=np.zeros_like(found.busy))

    monkeypatch.setattr(ethosu_prefetch, "analyze_liveness", ignore_live_data)
    payload, _ = _compiled(WHOLE, "ethos-u55-128")
    assert not _matches_reference(emulator, WHOLE, payload)


def test_emulator_detects_overwritten_weights(emulator: Emulator) -> None:
    """The emulator compares the weights that a convolution reads with the constants."""
    compiled, figures = _compiled(WHOLE, "ethos-u55-128")
    address = next(t.address for t in figures.placed[::-1] if t.usage == WEIGHT_COPY_USAGE)
    payload = read_payload(compiled.data)
    starts = [8 + at for at, number, _ in decode_commands(payload.commands) if number == _OFM_BASE]
    words = np.frombuffer(payload.commands, np.uint32).copy()
    words[starts[-2] + 1] = address  # the result of the layer before
    with pytest.raises(StreamError, match="are not the weights that DMAs have copied there"):
        emulator.run(
            replace(payload, commands=words.tobytes()), INPUTS, [("int8", (1, 1, 1, 128))], fatal_findings=None
        )


def test_weights_stay_whole_if_the_encoder_fails(monkeypatch: pytest.MonkeyPatch, emulator: Emulator) -> None:
    """Slices need Vela's weight encoder, which crashes here."""

    def fail(requests: Any) -> Any:
        raise WorkerDied("crashed with SIGSEGV", "")

    monkeypatch.setattr(vela, "split_weights", fail)
    payload, _ = _compiled(SLICED, "ethos-u55-128")
    assert _matches_reference(emulator, SLICED, payload)


def test_equal_orders_of_weights_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights have at most two orders, whatever the number of limits between classes of weights."""
    orders: list[tuple[int, ...]] = []
    place = PrefetchPlanner._place

    def record(self: PrefetchPlanner, readers: tuple[int, ...]) -> list[WeightCopy]:
        orders.append(tuple(readers))
        return place(self, readers)

    monkeypatch.setattr(PrefetchPlanner, "_place", record)
    reads = [Slot((i,), None, Costs(cost, 1_000, cost, 0), 0, ((0, 4_096),)) for i, cost in enumerate((9_000, 30_000))]
    compute = Slot((0,), None, Costs(50_000, 50_000, 0, 0), 0)
    slots = [compute, reads[0], compute, reads[1]]
    planner = PrefetchPlanner(slots, np.zeros((4, 1_024), bool), 16, CyclesPerByte(1.0, 1 / 8))
    assert {copy.reader for copy in planner.choose_copies()} == {1, 3}
    assert len(orders) == len(set(orders)) == 2


@pytest.mark.parametrize(
    ("spans", "merged"),
    [
        ([(0, 100), (100, 120), (160, 170)], ((0, 120), (160, 170))),
        ([(0, 100), (80, 120)], ((0, 120),)),
        ([(0, 100), (10, 20)], ((0, 100),)),
    ],
)
def test_adjacent_and_overlapping_ranges_are_merged(
    spans: list[tuple[int, int]], merged: tuple[tuple[int, int], ...]
) -> None:
    assert _merge_ranges([MemoryAccess(0, start, end, False) for start, end in spans]) == merged
