"""Vela's ``--optimise``: a program for size or for performance, whichever is better (``optimise="auto"``).

For size Vela computes layers in parts so that less lies in SRAM at a time, and on U85 encodes weights to fewer bytes.
Weights that are not in SRAM are then read again for each part. Of the zoo's models of images in int8, size beside
performance: on U85-256 14 to 59% less SRAM for the same cycles to 0.1%; on U65-256, whose 384 KiB then hold more, 3 to
25% fewer cycles; on U55-128 15 to 76% less SRAM for 0 to 20% more cycles.

Where activations are spilled to DRAM (U65), a third is tried, for performance without cascades, which are layers
computed together in stripes. Vela cascades to spill less, and 5.2 then has less SRAM for the layers beside: ResNet18 in
int8 on U65-256 is estimated at 14.26 million cycles for performance, 12.38 for size and 9.60 without cascades (5.1:
12.85, 10.98, 9.80).
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from arm_backend_core import events
from arm_backend_core.backends.compile import compile_payload
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload, VelaFigures
from arm_backend_core.errors import CompileError
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec
from arm_backend_core.workers import vela

#: Share of the cycles that less memory may cost.
MOST_CYCLES = 0.005
#: The request to Vela's process.
BOTH = "arm_backend_core.alternatives.parallel_compile:compile_both"
#: Bytes of SRAM and of weights below which a program for performance stays: there is nothing to save.
_LEAST = 16 << 10
#: Bytes of flatbuffer, which is weights but for some kilobytes, from which both are compiled at once: Vela takes 0.1 to
#: 0.2 seconds of a processor for a megabyte of them.
_LONG = 1 << 20
#: Bytes of flatbuffer from which size is not tried: for weights so large Vela takes most of an export. For weights that
#: come from a slower memory than all else does, few programs for size are within the limit.
_MOST, _MOST_OF_SLOW = 16 << 20, 6 << 20


def compile_best(spec: ArmCompileSpec, flatbuffer: bytes, **rest: Any) -> tuple[Payload, ArmCompileSpec]:
    """What ``compile_payload`` makes with these arguments, and what it was compiled for: ``spec``, or that for size.

    Raises:
        CompileError: the compiler refused the flatbuffer or died on it.
    """
    if not isinstance(spec, EthosUCompileSpec) or spec.optimise != "auto":
        return compile_payload(spec, flatbuffer, **rest), spec
    rest.pop("graph", None)  # Vela reads the flatbuffer
    size, most = len(flatbuffer), _MOST if _reads_it_fast(spec.configuration) else _MOST_OF_SLOW
    if _LONG <= size < most and hasattr(os, "fork"):
        small = for_size(spec)
        fast, other = _both(spec, small, flatbuffer, rest)
    else:
        fast, other = compile_payload(spec, flatbuffer, **rest), None
    figures = _figures(fast)
    worth_it = size < _LONG and max(figures.sram_bytes, figures.weight_bytes) >= _LEAST
    if other is None and (worth_it or _exceeds(fast, spec)):
        small = for_size(spec)
        other = _tried(small, flatbuffer, rest)
    best, chosen, how = fast, spec, ""
    if other is not None and _better(fast, other, spec):
        best, chosen, how = other, small, "optimised for size"
    if size < most and _spills(figures, spec):
        apart = without_cascades(spec)
        other = _tried(apart, flatbuffer, rest)
        # SRAM that there is costs nothing where it is a cache.
        if other is not None and not _exceeds(other, spec) and _costs(other)[0] < (1 - MOST_CYCLES) * _costs(best)[0]:
            best, chosen, how = other, apart, "compiled without cascades"
    if how:
        events.current().notes.append(f"'{rest['delegate']}' is {how}: {_told(fast, best)}")
    return best, chosen


def _spills(figures: VelaFigures, spec: EthosUCompileSpec) -> bool:
    """Whether activations are in DRAM and more than half of the SRAM cache is used: else Vela builds no cascades."""
    limit = figures.sram_limit or 0
    return spec.configuration.arena_on_second_port and 2 * figures.sram_bytes > limit


def _reads_it_fast(configuration: vela.Configuration) -> bool:
    return configuration.arena_on_second_port or configuration.const_memory not in ("OffChipFlash", "Dram")


def for_size(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """The same with ``--optimise Size``."""
    return _with(spec, (), "size")


def without_cascades(spec: EthosUCompileSpec) -> EthosUCompileSpec:
    """The same for performance, with ``--disable-cascading``."""
    return _with(spec, ("--disable-cascading",), "performance")


def _with(spec: EthosUCompileSpec, flags: tuple[str, ...], optimise: str) -> EthosUCompileSpec:
    given = spec.accelerator, spec.system_config, spec.memory_mode, (*spec.extra_flags, *flags), spec.config_ini
    made = EthosUCompileSpec(*given, optimise=optimise)
    found = copy.copy(spec)  # with where it writes intermediate files
    found.configuration, found.compiler_flags, found.optimise = made.configuration, made.compiler_flags, made.optimise
    return found


def _both(
    spec: EthosUCompileSpec, small: EthosUCompileSpec, flatbuffer: bytes, rest: dict[str, Any]
) -> tuple[Payload, Payload | None]:
    others: list[Any] = []

    def ask(content: bytes, configuration: vela.Configuration, timeout: float | None) -> tuple[Any, str]:
        request = BOTH, small.configuration.options
        (first, second), log = vela.compile_tosa(content, configuration, timeout, *request)
        others.append(second)
        return first, log

    fast = compile_ethosu(flatbuffer, spec, **rest, run_vela=ask)
    if others[0] is None:
        return fast, None
    return fast, _tried(small, flatbuffer, rest, run_vela=lambda *_: (others[0], ""))


def _tried(spec: EthosUCompileSpec, flatbuffer: bytes, rest: dict[str, Any], **how: Any) -> Payload | None:
    """None where Vela fails, which is no error: there is the other program."""
    try:
        return compile_ethosu(flatbuffer, spec, **rest, **how)
    except CompileError as error:
        if error.artifact:
            Path(error.artifact).unlink(missing_ok=True)
        return None


def _figures(payload: Payload) -> VelaFigures:
    assert payload.vela is not None, "of an Ethos-U"
    return payload.vela


def _exceeds(payload: Payload, spec: EthosUCompileSpec) -> bool:
    figures = _figures(payload)
    return figures.sram_exceeded or (spec.sram_budget is not None and figures.sram_bytes > spec.sram_budget)


def _better(fast: Payload, small: Payload, spec: EthosUCompileSpec) -> bool:
    """Whether it has all but as few cycles for size, and saves a larger share of all bytes than it takes of cycles.

    Where it needs no more SRAM than there is, and the other one does, it is in any case.
    """
    if _exceeds(fast, spec):
        return not _exceeds(small, spec)
    (before, *had), (after, *has) = _costs(fast), _costs(small)
    return after <= (1 + MOST_CYCLES) * before and after * sum(has) < before * sum(had)


def _costs(payload: Payload) -> tuple[int, int, int]:
    """Cycles, bytes of SRAM, and of the program."""
    figures = _figures(payload)
    return figures.total_cycles, figures.sram_bytes, len(payload.data)


def _told(fast: Payload, small: Payload) -> str:
    (before, had, stored), (after, has, stores) = _costs(fast), _costs(small)
    cycles = 100 * (after / max(before, 1) - 1)
    return f"{has:,} bytes of SRAM for {had:,}, {stores:,} of program for {stored:,}, cycles {cycles:+.1f}%"
