"""Optimization goal of Vela (``--optimise``): ``"auto"`` compiles for performance and for size, and keeps the better.

The two results are the performance program and the size program. For very large flatbuffers and very small programs,
the size program is compiled only if the performance program exceeds the SRAM. ``"auto"`` also compiles with arena
limits (smaller values of Vela's option ``--arena-cache-size``) if the performance program exceeds the SRAM, or if the
size program needs much less RAM but is slow. ``"ram"`` searches for the program with the least RAM. Both searches are
in ``memory_reduction.vela_configuration_search``.

When Vela optimises for size, it computes layers in stripes of rows. SRAM then holds only a part of each intermediate
tensor. Weights outside of SRAM are read again for each stripe. On U85, Vela also encodes weights in fewer bytes.

Size programs of the int8 image models in ``tests/models/zoo.py``, compared with their performance programs:

* U85-256: 14 to 59% less SRAM; the cycles differ by at most 0.1%;
* U65-256: 3 to 25% fewer cycles, because more data fits in the 384 KiB of SRAM;
* U55-128: 15 to 76% less SRAM, 3 to 20% more cycles. With an arena limit, some need less SRAM in the same time: 446
  instead of 960 KiB for SqueezeNet 1.1, 245 instead of 539 KiB for Wav2Letter.

A cascade is a group of layers that Vela computes together in stripes. If activations are spilled to DRAM (U65), a third
program is compiled: for performance without cascades. Cascades reduce spilling, but with Vela 5.2 they leave less SRAM
to the other layers. Estimated cycles of ResNet18 in int8 on U65-256, in millions: performance program 14.26, size
program 12.38, without cascades 9.60 with Vela 5.2; 12.85, 10.98 and 9.80 with Vela 5.1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from arm_backend_core import compilation_log
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.backends.vela_tables import WEIGHT_COPY_USAGE
from arm_backend_core.memory_reduction.derived_specs import disable_cascades, optimise_for_size
from arm_backend_core.memory_reduction.vela_configuration_search import (
    Compile,
    CompiledCandidate,
    compile_for_less_ram,
    find_least_ram,
    find_program_that_fits,
    try_compile,
)
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.workers import vela

#: Relative difference of cycles that is ignored: a program with less memory may take up to 0.5% more cycles than the
#: performance program, and a program without cascades must save more than 0.5%.
CYCLE_TOLERANCE = 0.005
#: A program with at most 0.75 of the performance program's SRAM may take 1% more cycles.
_MUCH_LESS_SRAM, _CYCLE_TOLERANCE_FOR_MUCH_LESS_SRAM = 0.75, 0.01
#: The report notes only relative differences above this value.
_MIN_NOTED_CHANGE = 0.01
#: Function that Vela's worker process calls to compile for both goals, as "module:function".
COMPILE_BOTH_FUNCTION = "arm_backend_core.alternatives.parallel_compile:compile_both"
#: If SRAM and weights both take fewer bytes than this, and the performance program does not exceed the SRAM, only the
#: performance program is compiled: there is little to save.
_MIN_SRAM_OR_WEIGHT_BYTES = 16 << 10
#: Flatbuffers (mostly weights) from this size on are compiled in parallel for both goals. Vela takes 0.1 to 0.2 seconds
#: of CPU time for a megabyte.
_MIN_PARALLEL_FLATBUFFER_BYTES = 1 << 20
#: For flatbuffers from this size on, the size program is compiled only if the performance program exceeds the SRAM;
#: otherwise Vela would dominate the export time. The second limit applies if weights are in a slower memory than
#: activations: few size programs then meet the cycle tolerance.
_MAX_FLATBUFFER_BYTES, _MAX_FLATBUFFER_BYTES_SLOW_WEIGHTS = 16 << 20, 6 << 20


def compile_best(spec: ArmCompileSpec, flatbuffer: bytes, **compile_options: Any) -> tuple[Payload, ArmCompileSpec]:
    """Compile for each optimization goal that may help, and choose the best program.

    Args:
        compile_options: further arguments of ``compile_payload``.

    Returns:
        The payload and the spec that it was compiled for.

    Raises:
        CompileError, ArmBackendError: see ``compile_payload``.
    """
    if not isinstance(spec, EthosUCompileSpec) or spec.optimise not in ("auto", "ram"):
        return compile_payload(spec, flatbuffer, **compile_options), spec
    compile_options.pop("graph", None)  # Vela reads the flatbuffer
    compile_program = partial(try_compile, flatbuffer=flatbuffer, compile_options=compile_options)
    if spec.optimise == "ram":
        fast = CompiledCandidate(compile_payload(spec, flatbuffer, **compile_options), spec)
        smallest = find_least_ram(fast, compile_program)
        best = fast if smallest is fast else _record_performance(fast, smallest)
    else:
        fast, best = _compile_auto(spec, flatbuffer, compile_options, compile_program)
    saving = _describe_saving(fast.payload, best.payload)
    if saving or (spec.optimise == "ram" and best is not fast):
        delegate, goal = compile_options["delegate"], _describe_goal(fast.spec, best.spec)
        compilation_log.current_log().notes.append(f"'{delegate}' is {goal}: {saving or 'cycles +0.0%'}")
    return best.payload, best.spec


def _compile_auto(
    spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any], compile_program: Compile
) -> tuple[CompiledCandidate, CompiledCandidate]:
    """Return the performance program, and the best program for ``optimise="auto"``."""
    has_fast_weights = _reads_weights_as_fast_as_activations(spec.configuration)
    max_bytes = _MAX_FLATBUFFER_BYTES if has_fast_weights else _MAX_FLATBUFFER_BYTES_SLOW_WEIGHTS
    is_small_flatbuffer = len(flatbuffer) < max_bytes
    fast, small = _compile_for_both_goals(spec, flatbuffer, compile_options, is_small_flatbuffer)
    best = fast
    if fast.exceeds_sram:
        fitting = find_program_that_fits(fast, small and small.payload, compile_program)
        best = fast if fitting is fast else _record_performance(fast, fitting)
    elif small is not None:
        candidates = _list_smaller(fast, small, compile_program if is_small_flatbuffer else None)
        best = next((program for program in candidates if _is_better(fast, program)), fast)
    if is_small_flatbuffer and _spills_activations(fast):
        spec = disable_cascades(spec)
        payload = compile_program(spec)
        # With activations in DRAM, the SRAM is a cache, so that only cycles count.
        if payload is not None and not CompiledCandidate(payload, spec).exceeds_sram:
            uncascaded = CompiledCandidate(payload, spec)
            if uncascaded.vela.total_cycles < (1 - CYCLE_TOLERANCE) * best.vela.total_cycles:
                best = uncascaded
    return fast, best


def _compile_for_both_goals(
    spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any], is_small_flatbuffer: bool
) -> tuple[CompiledCandidate, CompiledCandidate | None]:
    """Return the performance program and the size program.

    The size program is None if its compilation is not worth the time, or fails.
    """
    size_spec = optimise_for_size(spec)
    small: Payload | None = None
    if is_small_flatbuffer and len(flatbuffer) >= _MIN_PARALLEL_FLATBUFFER_BYTES and hasattr(os, "fork"):
        payload, small = _compile_in_parallel(spec, size_spec, flatbuffer, compile_options)
    else:
        payload = compile_payload(spec, flatbuffer, **compile_options)
    fast = CompiledCandidate(payload, spec)
    is_worthwhile = (
        len(flatbuffer) < _MIN_PARALLEL_FLATBUFFER_BYTES
        and max(fast.vela.sram_bytes, fast.vela.weight_bytes) >= _MIN_SRAM_OR_WEIGHT_BYTES
    )
    if small is None and (is_worthwhile or fast.exceeds_sram):
        small = try_compile(size_spec, flatbuffer, compile_options)
    return fast, None if small is None else CompiledCandidate(small, size_spec)


def _list_smaller(
    fast: CompiledCandidate, small: CompiledCandidate, compile_program: Compile | None
) -> Iterator[CompiledCandidate]:
    """Yield the size program, then programs with arena limits, compiled on demand.

    Arena limits are tried if the size program needs much less RAM. They are not tried if the SRAM is a cache, or if the
    performance program copies weights from flash to unused SRAM: an arena limit would leave no SRAM for these copies,
    and the program would take more cycles.

    Args:
        fast, small: the performance program and the size program.
        compile_program: compiles for a spec; None to try no arena limits.
    """
    yield small
    needs_much_less = small.ram_bytes <= _MUCH_LESS_SRAM * fast.ram_bytes
    copies_weights = any(tensor.usage == WEIGHT_COPY_USAGE for tensor in fast.vela.placed)
    is_cache = fast.spec.configuration.arena_on_second_port
    if compile_program is not None and needs_much_less and not copies_weights and not is_cache:
        yield from compile_for_less_ram(fast, small, compile_program)


def _describe_goal(fast: EthosUCompileSpec, spec: EthosUCompileSpec) -> str:
    """Describe how Vela optimised the program for ``spec``; ``fast`` is the spec of the performance program."""
    if spec.optimise == "size":
        return "optimised for size"
    if spec.configuration.arena_cache_size != fast.configuration.arena_cache_size:
        return f"compiled for an arena of {spec.configuration.arena_cache_size:,} bytes"
    return "compiled without cascades"


def _record_performance(fast: CompiledCandidate, program: CompiledCandidate) -> CompiledCandidate:
    """Record the figures of the performance program in a program with less RAM."""
    figures = fast.vela.total_cycles, fast.vela.sram_bytes
    return program._replace(payload=replace(program.payload, vela=replace(program.vela, performance=figures)))


def _spills_activations(program: CompiledCandidate) -> bool:
    """Whether activations are in DRAM and over half of the SRAM cache is used.

    If less is used, Vela makes no cascades, so that disabling cascades changes nothing.
    """
    limit = program.vela.sram_limit or 0
    return program.spec.configuration.arena_on_second_port and 2 * program.vela.sram_bytes > limit


def _reads_weights_as_fast_as_activations(configuration: vela.VelaConfiguration) -> bool:
    """Whether the memory of the weights is at least as fast as the memory of the activations."""
    return configuration.arena_on_second_port or configuration.const_memory not in ("OffChipFlash", "Dram")


def _compile_in_parallel(
    spec: EthosUCompileSpec, size_spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any]
) -> tuple[Payload, Payload | None]:
    others: list[Any] = []

    def compile_in_worker(
        content: bytes, configuration: vela.VelaConfiguration, timeout: float | None
    ) -> tuple[Any, str]:
        request = COMPILE_BOTH_FUNCTION, size_spec.configuration.options
        (first, second), log = vela.compile_tosa(content, configuration, timeout, *request)
        others.append(second)
        return first, log

    fast = compile_ethosu(flatbuffer, spec, **compile_options, run_vela=compile_in_worker)
    if others[0] is None:
        return fast, None
    return fast, try_compile(size_spec, flatbuffer, compile_options, run_vela=lambda *_: (others[0], ""))


def _is_better(fast: CompiledCandidate, smaller: CompiledCandidate) -> bool:
    """Whether a program with less SRAM is better than the performance program, which fits the available SRAM.

    It must take at most 0.5% more cycles (``CYCLE_TOLERANCE``), or 1% if it needs at most three quarters of the SRAM,
    and its product of cycles and bytes (SRAM and program) must be smaller.
    """
    (fast_cycles, *fast_bytes), (small_cycles, *small_bytes) = (_cost_metrics(p.payload) for p in (fast, smaller))
    needs_much_less = small_bytes[0] <= _MUCH_LESS_SRAM * fast_bytes[0]
    tolerance = _CYCLE_TOLERANCE_FOR_MUCH_LESS_SRAM if needs_much_less else CYCLE_TOLERANCE
    is_fast_enough = small_cycles <= (1 + tolerance) * fast_cycles
    return is_fast_enough and small_cycles * sum(small_bytes) < fast_cycles * sum(fast_bytes)


def _cost_metrics(payload: Payload) -> tuple[int, int, int]:
    """Return (cycles, bytes of SRAM, bytes of the program)."""
    assert payload.vela is not None, "the payload is not for an Ethos-U"
    return payload.vela.total_cycles, payload.vela.sram_bytes, len(payload.data)


def _describe_saving(fast: Payload, chosen: Payload) -> str:
    """Describe the sizes that differ by over 1%, and the cycles; empty if nothing differs by over 1%."""
    (fast_cycles, *fast_bytes), (cycles, *chosen_bytes) = _cost_metrics(fast), _cost_metrics(chosen)
    changed = [
        f"{name} {now:,} instead of {before:,} bytes, "
        for name, before, now in zip(("SRAM", "program"), fast_bytes, chosen_bytes, strict=True)
        if abs(now - before) > _MIN_NOTED_CHANGE * before
    ]
    change = cycles / max(fast_cycles, 1) - 1
    return f"{''.join(changed)}cycles {change:+.1%}" if changed or abs(change) > _MIN_NOTED_CHANGE else ""
