"""Optimization goal of Vela (``--optimise``): ``"auto"`` compiles for performance and for size, and keeps the better.

If the program for performance exceeds the SRAM, ``"auto"`` also compiles with arena limits. ``"ram"`` searches for the
program with the least RAM. Both searches are in ``less_ram.arena_limits``.

For size, Vela computes layers in stripes of rows. SRAM then holds only a part of each intermediate tensor. Weights
outside of SRAM are read again for each stripe. On U85, Vela for size also encodes weights in fewer bytes.

The zoo's int8 image models, compiled for size, compared with the same models compiled for performance:

* U85-256: 14 to 59% less SRAM; the cycles differ by at most 0.1%;
* U65-256: 3 to 25% fewer cycles, because more data fits in the 384 KiB of SRAM;
* U55-128: 15 to 76% less SRAM, 0 to 20% more cycles.

A cascade is a group of layers that Vela computes together in stripes. If activations are spilled to DRAM (U65), a third
program is compiled: for performance without cascades. Cascades reduce spilling, but with Vela 5.2 they leave less SRAM
to the other layers. Estimates for ResNet18, int8, U65-256: 14.26 million cycles for performance, 12.38 for size, 9.60
without cascades (Vela 5.1: 12.85, 10.98, 9.80).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

from arm_backend_core import events
from arm_backend_core.backends.compile import compile_payload
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload, VelaEstimates
from arm_backend_core.less_ram.arena_limits import (
    Program,
    find_least_ram,
    find_program_that_fits,
    try_compile,
)
from arm_backend_core.less_ram.derived_specs import disable_cascades, optimise_for_size
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.workers import vela

#: Relative difference of cycles that does not count: a program with less memory may take this much longer, and a
#: program without cascades must save more than this.
CYCLE_TOLERANCE = 0.005
#: Relative differences up to this one are not worth a note.
_MIN_NOTED_CHANGE = 0.01
#: Function that Vela's worker process calls to compile for both goals, as "module:function".
COMPILE_BOTH_FUNCTION = "arm_backend_core.alternatives.parallel_compile:compile_both"
#: If SRAM and weights both take fewer bytes, only the performance program is compiled: there is little to save.
_MIN_SRAM_OR_WEIGHT_BYTES = 16 << 10
#: Flatbuffers (mostly weights) from this size on are compiled in parallel for both goals. Vela takes 0.1 to 0.2 seconds
#: of CPU time for a megabyte.
_MIN_PARALLEL_FLATBUFFER_BYTES = 1 << 20
#: Flatbuffers from this size on are compiled for size only if the performance program exceeds the SRAM; otherwise Vela
#: would dominate the export time. The second limit applies if weights are in a slower memory than activations: few size
#: programs then meet the cycle tolerance.
_MAX_FLATBUFFER_BYTES, _MAX_FLATBUFFER_BYTES_SLOW_WEIGHTS = 16 << 20, 6 << 20


def compile_best(spec: ArmCompileSpec, flatbuffer: bytes, **compile_options: Any) -> tuple[Payload, ArmCompileSpec]:
    """Compile for each optimization goal that may help, and choose the best program.

    Args:
        compile_options: further arguments of ``compile_payload``.

    Returns:
        The payload and the spec that it was compiled for.

    Raises:
        CompileError: the compiler refused the flatbuffer or crashed.
    """
    if not isinstance(spec, EthosUCompileSpec) or spec.optimise not in ("auto", "ram"):
        return compile_payload(spec, flatbuffer, **compile_options), spec
    compile_options.pop("graph", None)  # Vela reads the flatbuffer
    if spec.optimise == "ram":
        return _compile_for_ram(spec, flatbuffer, compile_options)
    size, has_fast_weights = len(flatbuffer), _reads_weights_as_fast_as_activations(spec.configuration)
    max_bytes = _MAX_FLATBUFFER_BYTES if has_fast_weights else _MAX_FLATBUFFER_BYTES_SLOW_WEIGHTS
    if _MIN_PARALLEL_FLATBUFFER_BYTES <= size < max_bytes and hasattr(os, "fork"):
        size_spec = optimise_for_size(spec)
        fast, other = _compile_both(spec, size_spec, flatbuffer, compile_options)
    else:
        fast, other = compile_payload(spec, flatbuffer, **compile_options), None
    estimates = _vela_estimates(fast)
    is_worthwhile = (
        size < _MIN_PARALLEL_FLATBUFFER_BYTES
        and max(estimates.sram_bytes, estimates.weight_bytes) >= _MIN_SRAM_OR_WEIGHT_BYTES
    )
    if other is None and (is_worthwhile or _exceeds_sram(fast, spec)):
        size_spec = optimise_for_size(spec)
        other = try_compile(size_spec, flatbuffer, compile_options)
    best, chosen, method = fast, spec, ""
    if _exceeds_sram(fast, spec):
        compile_program = partial(try_compile, flatbuffer=flatbuffer, compile_options=compile_options)
        smaller = find_program_that_fits(Program(fast, spec), other, compile_program)
        if smaller.payload is not fast:
            best, chosen, method = _record_performance(fast, smaller), smaller.spec, _describe_goal(smaller.spec)
    elif other is not None and _is_better(fast, other):
        best, chosen, method = other, size_spec, _describe_goal(size_spec)
    if size < max_bytes and _spills_activations(estimates, spec):
        uncascaded = disable_cascades(spec)
        other = try_compile(uncascaded, flatbuffer, compile_options)
        # With activations in DRAM, the SRAM is a cache, so that only cycles count.
        if (
            other is not None
            and not _exceeds_sram(other, spec)
            and _cost_metrics(other)[0] < (1 - CYCLE_TOLERANCE) * _cost_metrics(best)[0]
        ):
            best, chosen, method = other, uncascaded, "compiled without cascades"
    saving = _describe_saving(fast, best)
    if saving:
        events.current().notes.append(f"'{compile_options['delegate']}' is {method}: {saving}")
    return best, chosen


def _compile_for_ram(
    spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any]
) -> tuple[Payload, ArmCompileSpec]:
    fast = Program(compile_payload(spec, flatbuffer, **compile_options), spec)
    best = find_least_ram(fast, partial(try_compile, flatbuffer=flatbuffer, compile_options=compile_options))
    if best is fast:
        return fast
    saving = _describe_saving(fast.payload, best.payload) or "cycles +0.0%"
    events.current().notes.append(f"'{compile_options['delegate']}' is {_describe_goal(best.spec)}: {saving}")
    return _record_performance(fast.payload, best), best.spec


def _describe_goal(spec: EthosUCompileSpec) -> str:
    """Describe how Vela optimised a program that replaces the program for performance."""
    if spec.optimise == "size":
        return "optimised for size"
    return f"compiled for an arena of {spec.configuration.arena_cache_size:,} bytes"


def _record_performance(fast: Payload, program: Program) -> Payload:
    """Record in a program with less RAM the figures of the program for performance."""
    cycles, sram, _ = _cost_metrics(fast)
    return replace(program.payload, vela=replace(program.vela, performance=(cycles, sram)))


def _spills_activations(estimates: VelaEstimates, spec: EthosUCompileSpec) -> bool:
    """Whether activations are in DRAM and more than half of the SRAM cache is used. Else, Vela emits no cascades."""
    limit = estimates.sram_limit or 0
    return spec.configuration.arena_on_second_port and 2 * estimates.sram_bytes > limit


def _reads_weights_as_fast_as_activations(configuration: vela.Configuration) -> bool:
    """Whether the memory of the weights is not slower than the memory of the activations."""
    return configuration.arena_on_second_port or configuration.const_memory not in ("OffChipFlash", "Dram")


def _compile_both(
    spec: EthosUCompileSpec, size_spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any]
) -> tuple[Payload, Payload | None]:
    others: list[Any] = []

    def compile_in_worker(content: bytes, configuration: vela.Configuration, timeout: float | None) -> tuple[Any, str]:
        request = COMPILE_BOTH_FUNCTION, size_spec.configuration.options
        (first, second), log = vela.compile_tosa(content, configuration, timeout, *request)
        others.append(second)
        return first, log

    fast = compile_ethosu(flatbuffer, spec, **compile_options, run_vela=compile_in_worker)
    if others[0] is None:
        return fast, None
    return fast, try_compile(size_spec, flatbuffer, compile_options, run_vela=lambda *_: (others[0], ""))


def _vela_estimates(payload: Payload) -> VelaEstimates:
    assert payload.vela is not None, "the payload is not for an Ethos-U"
    return payload.vela


def _exceeds_sram(payload: Payload, spec: EthosUCompileSpec) -> bool:
    return Program(payload, spec).exceeds_sram


def _is_better(fast: Payload, size_program: Payload) -> bool:
    """Whether the size program is better than the performance program, which fits the available SRAM.

    It must take at most 0.5% more cycles (``CYCLE_TOLERANCE``), and its product of cycles and bytes (SRAM and program)
    must be smaller.
    """
    (fast_cycles, *fast_bytes), (small_cycles, *small_bytes) = _cost_metrics(fast), _cost_metrics(size_program)
    is_fast_enough = small_cycles <= (1 + CYCLE_TOLERANCE) * fast_cycles
    return is_fast_enough and small_cycles * sum(small_bytes) < fast_cycles * sum(fast_bytes)


def _cost_metrics(payload: Payload) -> tuple[int, int, int]:
    """Return (cycles, bytes of SRAM, bytes of the program)."""
    estimates = _vela_estimates(payload)
    return estimates.total_cycles, estimates.sram_bytes, len(payload.data)


def _describe_saving(fast: Payload, chosen: Payload) -> str:
    """Describe the figures that differ by more than 1%, and the cycles; empty if none differs."""
    (fast_cycles, *fast_bytes), (cycles, *chosen_bytes) = _cost_metrics(fast), _cost_metrics(chosen)
    changed = [
        f"{name} {now:,} instead of {before:,} bytes, "
        for name, before, now in zip(("SRAM", "program"), fast_bytes, chosen_bytes, strict=True)
        if abs(now - before) > _MIN_NOTED_CHANGE * before
    ]
    change = cycles / max(fast_cycles, 1) - 1
    return f"{''.join(changed)}cycles {change:+.1%}" if changed or abs(change) > _MIN_NOTED_CHANGE else ""
