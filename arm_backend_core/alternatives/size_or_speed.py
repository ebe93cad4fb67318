"""Optimization goal of Vela (``--optimise``): compile for performance and for size, take the better (``"auto"``).

For size, Vela computes layers in stripes so that less data is in SRAM at a time, and on U85 encodes weights in fewer
bytes. Weights outside of SRAM are then read again for each stripe. Size relative to performance, int8 image models of
the zoo: U85-256: 14 to 59% less SRAM, cycles equal to 0.1%; U65-256: 3 to 25% fewer cycles, because more data fits in
its 384 KiB; U55-128: 15 to 76% less SRAM for 0 to 20% more cycles.

If activations are spilled to DRAM (U65), a third program is compiled: for performance without cascades (layers computed
together in stripes). Vela cascades to spill less, and 5.2 then leaves less SRAM to the other layers. ResNet18, int8,
U65-256, estimated: 14.26 million cycles for performance, 12.38 for size, 9.60 without cascades (5.1: 12.85, 10.98,
9.80).
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from arm_backend_core import events
from arm_backend_core.backends.compile import compile_payload
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload, VelaEstimates
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.workers import vela

#: Largest accepted relative increase of cycles for less memory.
MAX_CYCLE_INCREASE = 0.005
#: Request to Vela's worker process.
COMPILE_BOTH_REQUEST = "arm_backend_core.alternatives.parallel_compile:compile_both"
#: Bytes of SRAM and of weights below which only the performance program is compiled: there is little to save.
_MIN_BYTES = 16 << 10
#: Bytes of flatbuffer (mostly weights) from which both programs are compiled in parallel: Vela takes 0.1 to 0.2 seconds
#: of CPU time for a megabyte.
_MIN_PARALLEL_BYTES = 1 << 20
#: Bytes of flatbuffer from which the size program is not compiled, because Vela would dominate the export time. The
#: second limit is for weights in a slower memory than the rest: few size programs are then within the cycle limit.
_MAX_BYTES, _MAX_BYTES_SLOW = 16 << 20, 6 << 20


def compile_best(spec: ArmCompileSpec, flatbuffer: bytes, **rest: Any) -> tuple[Payload, ArmCompileSpec]:
    """Compile for each optimization goal that may help, and choose the best program.

    Args:
        rest: further arguments of ``compile_payload``.

    Returns:
        The payload and the spec that it was compiled for.

    Raises:
        CompileError: the compiler refused the flatbuffer or died on it.
    """
    if not isinstance(spec, EthosUCompileSpec) or spec.optimise != "auto":
        return compile_payload(spec, flatbuffer, **rest), spec
    rest.pop("graph", None)  # Vela reads the flatbuffer
    size, most = len(flatbuffer), _MAX_BYTES if _has_fast_weight_memory(spec.configuration) else _MAX_BYTES_SLOW
    if _MIN_PARALLEL_BYTES <= size < most and hasattr(os, "fork"):
        small = optimise_for_size(spec)
        fast, other = _compile_both(spec, small, flatbuffer, rest)
    else:
        fast, other = compile_payload(spec, flatbuffer, **rest), None
    figures = _vela_figures(fast)
    worth_it = size < _MIN_PARALLEL_BYTES and max(figures.sram_bytes, figures.weight_bytes) >= _MIN_BYTES
    if other is None and (worth_it or _exceeds_sram(fast, spec)):
        small = optimise_for_size(spec)
        other = _try_compile(small, flatbuffer, rest)
    best, chosen, method = fast, spec, ""
    if other is not None and _is_better(fast, other, spec):
        best, chosen, method = other, small, "optimised for size"
    if size < most and _spills_activations(figures, spec):
        uncascaded = disable_cascades(spec)
        other = _try_compile(uncascaded, flatbuffer, rest)
        # Available SRAM costs nothing when it is a cache.
        if (
            other is not None
            and not _exceeds_sram(other, spec)
            and _costs(other)[0] < (1 - MAX_CYCLE_INCREASE) * _costs(best)[0]
        ):
            best, chosen, method = other, uncascaded, "compiled without cascades"
    if method:
        events.current().notes.append(f"'{rest['delegate']}' is {method}: {_describe_saving(fast, best)}")
    return best, chosen


def _spills_activations(figures: VelaEstimates, spec: EthosUCompileSpec) -> bool:
    """Whether activations are in DRAM and more than half of the SRAM cache is used; else Vela builds no cascades."""
    limit = figures.sram_limit or 0
    return spec.configuration.arena_on_second_port and 2 * figures.sram_bytes > limit


def _has_fast_weight_memory(configuration: vela.Configuration) -> bool:
    return configuration.arena_on_second_port or configuration.const_memory not in ("OffChipFlash", "Dram")


def optimise_for_size(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec with ``--optimise Size``."""
    return _derive_spec(spec, (), "size")


def disable_cascades(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """Return a copy of the spec for performance with ``--disable-cascading``."""
    return _derive_spec(spec, ("--disable-cascading",), "performance")


def _derive_spec(spec: EthosUCompileSpec, flags: tuple[str, ...], optimise: str) -> EthosUCompileSpec:
    arguments = spec.accelerator, spec.system_config, spec.memory_mode, (*spec.extra_flags, *flags), spec.config_ini
    new = EthosUCompileSpec(*arguments, optimise=optimise)
    result = copy.copy(spec)  # keeps the folder of intermediate files
    result.configuration, result.compiler_flags, result.optimise = new.configuration, new.compiler_flags, new.optimise
    return result


def _compile_both(
    spec: EthosUCompileSpec, small: EthosUCompileSpec, flatbuffer: bytes, rest: dict[str, Any]
) -> tuple[Payload, Payload | None]:
    others: list[Any] = []

    def ask(content: bytes, configuration: vela.Configuration, timeout: float | None) -> tuple[Any, str]:
        request = COMPILE_BOTH_REQUEST, small.configuration.options
        (first, second), log = vela.compile_tosa(content, configuration, timeout, *request)
        others.append(second)
        return first, log

    fast = compile_ethosu(flatbuffer, spec, **rest, run_vela=ask)
    if others[0] is None:
        return fast, None
    return fast, _try_compile(small, flatbuffer, rest, run_vela=lambda *_: (others[0], ""))


def _try_compile(spec: EthosUCompileSpec, flatbuffer: bytes, rest: dict[str, Any], **options: Any) -> Payload | None:
    """Compile; None if Vela fails, which is no error because the other program exists."""
    try:
        return compile_ethosu(flatbuffer, spec, **rest, **options)
    except CompileError as error:
        if error.artifact:
            Path(error.artifact).unlink(missing_ok=True)
        return None


def _vela_figures(payload: Payload) -> VelaEstimates:
    assert payload.vela is not None, "of an Ethos-U"
    return payload.vela


def _exceeds_sram(payload: Payload, spec: EthosUCompileSpec) -> bool:
    figures = _vela_figures(payload)
    return figures.sram_exceeded or (spec.sram_budget is not None and figures.sram_bytes > spec.sram_budget)


def _is_better(fast: Payload, small: Payload, spec: EthosUCompileSpec) -> bool:
    """Whether the size program is better than the performance program.

    It must take at most 0.5% more cycles and save a larger share of bytes (SRAM and program) than it adds of cycles. If
    only the performance program exceeds the available SRAM, the size program is better in any case.
    """
    if _exceeds_sram(fast, spec):
        return not _exceeds_sram(small, spec)
    (fast_cycles, *fast_bytes), (small_cycles, *small_bytes) = _costs(fast), _costs(small)
    is_fast_enough = small_cycles <= (1 + MAX_CYCLE_INCREASE) * fast_cycles
    return is_fast_enough and small_cycles * sum(small_bytes) < fast_cycles * sum(fast_bytes)


def _costs(payload: Payload) -> tuple[int, int, int]:
    """Return cycles, bytes of SRAM and bytes of the program."""
    figures = _vela_figures(payload)
    return figures.total_cycles, figures.sram_bytes, len(payload.data)


def _describe_saving(fast: Payload, small: Payload) -> str:
    (fast_cycles, fast_sram, fast_size), (cycles, sram, size) = _costs(fast), _costs(small)
    change = 100 * (cycles / max(fast_cycles, 1) - 1)
    return (
        f"SRAM {sram:,} instead of {fast_sram:,} bytes, program {size:,} instead of {fast_size:,} bytes, "
        f"cycles {change:+.1f}%"
    )
