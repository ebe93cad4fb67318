"""Call counts: additive estimates are multiplied by the number of calls, peaks and sizes are not."""

from __future__ import annotations

from dataclasses import replace

from arm_backend_core.backends.call_counts import multiply_estimates
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from tests.backends.tosa_programs import conv2d


def test_estimates_of_three_calls() -> None:
    spec = EthosUCompileSpec("ethos-u55-128")
    one = compile_payload(spec, conv2d(), delegate="delegate_0", find_operator=lambda text: None).vela
    assert one is not None
    three = multiply_estimates(one, 3)
    for name in ("npu_cycles", "total_cycles", "inference_seconds", "macs"):
        assert getattr(three, name) == 3 * getattr(one, name) > 0
    for name in ("sram_bytes", "flash_bytes", "weight_bytes", "npu_operators", "core_clock", "placed"):
        assert getattr(three, name) == getattr(one, name)
    for before, after in zip(one.layers, three.layers, strict=True):
        assert (after.cycles, after.macs, after.staging_bytes) == (
            3 * before.cycles,
            3 * before.macs,
            before.staging_bytes,
        )
        assert after.memory_cycles == tuple((memory, 3 * cycles) for memory, cycles in before.memory_cycles)
    for use, uses in zip(one.memories, three.memories, strict=True):
        assert uses.peak_bytes == use.peak_bytes
        assert (uses.bytes_read, uses.bytes_written) == (3 * use.bytes_read, 3 * use.bytes_written)


def test_cycles_of_the_performance_program_are_multiplied_too() -> None:
    """The report compares them with the cycles of the program that replaces it."""
    spec = EthosUCompileSpec("ethos-u55-128")
    one = compile_payload(spec, conv2d(), delegate="delegate_0", find_operator=lambda text: None).vela
    assert one is not None
    three = multiply_estimates(replace(one, performance=(1000, 2048)), 3)
    assert three.performance == (3000, 2048)
