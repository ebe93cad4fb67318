"""Search for Vela options with which a program needs less RAM: optimization for size, or arena limits.

With ``--optimise Size``, Vela cascades every layer that it can. The result is called the size program below. With
``--optimise Performance`` and an arena limit (``--arena-cache-size``), Vela cascades layers until the program fits the
limit. This program often needs about as much RAM as the size program, but fewer cycles. The result of ``--optimise
Performance`` without an arena limit is called the performance program. The table shows scratch in KiB, and cycles
relative to the performance program (int8, U55-128, Vela 5.2):

| model | performance | size | arena limit |
|---|---|---|---|
| SqueezeNet 1.1 | 960 | 425, +12.0% | 446, +0.0% |
| Wav2Letter | 539 | 219, +37.4% | 245, +0.0% |
| detector at 224x224 | 349 | 207, +39.6% | 216, +0.8% |
| MobileNetV3-Small | 344 | 294, +3.6% | 294, +1.4% |
| EfficientNet-B0 | 1,474 | 763, +3.7% | 737, +3.7% |
| MobileNetV2 | 1,474 | 354, +16.2% | 363, +16.2% |

For the last three models, the performance program has free space in its scratch, into which weights are prefetched
(``ethosu_prefetch``). The smaller programs lack this space and take more cycles.

Vela also returns a program if it cannot meet a limit. Lowering such a limit further may then give a slower or a faster
program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.vela_estimates import VelaEstimates
from arm_backend_core.errors import CompileError
from arm_backend_core.memory_reduction.derived_specs import limit_arena, optimise_for_size
from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Compiles a program for a spec; None if Vela fails.
Compile = Callable[[EthosUCompileSpec], Payload | None]
#: Arena limits that are tried, as fractions of the least RAM that a program has needed so far.
_LIMITS_FOR_LEAST_RAM = (1.0, 0.9, 0.75, 0.5)
#: Arena limits that are tried, as fractions of the available SRAM. A program often needs less than its limit.
#: Therefore, a limit above the available SRAM may give the fastest program that fits.
_LIMITS_TO_FIT = (1.05, 1.0, 0.9)
#: An arena limit, as a fraction of the size program's RAM. The program with this limit usually takes only a few more
#: cycles than the performance program.
_LIMIT_NEAR_SIZE = 1.05
#: Maximum number of rounds of the search for the least RAM. Each round starts from the best program so far.
_MAX_ROUNDS = 4


class CompiledCandidate(NamedTuple):
    """A compiled program, and the spec that it was compiled for."""

    payload: Payload
    spec: EthosUCompileSpec

    @property
    def vela(self) -> VelaEstimates:
        """Vela's estimates."""
        assert self.payload.vela is not None, "the payload is not for an Ethos-U"
        return self.payload.vela

    @property
    def ram_bytes(self) -> int:
        """Bytes of working memory: scratch and fast scratch."""
        return self.vela.scratch_bytes + self.vela.fast_scratch_bytes

    @property
    def constant_sram_bytes(self) -> int:
        """Bytes of constants in SRAM, which Vela calls on-chip flash."""
        return self.vela.constant_bytes if self.vela.constant_memory == "OnChipFlash" else 0

    @property
    def exceeds_sram(self) -> bool:
        """Whether the program needs more SRAM than the memory mode or the budget of its spec has."""
        budget, needed = self.spec.sram_budget, self.vela.sram_bytes + self.constant_sram_bytes
        return self.vela.sram_exceeded or (budget is not None and needed > budget)


def find_least_ram(fast: CompiledCandidate, compile_program: Compile) -> CompiledCandidate:
    """Find the program with the least RAM, and among programs with equal RAM the one with the fewest cycles.

    If the activations are in DRAM, the SRAM is a cache whose size the memory mode sets. Then only the size program
    is tried.

    Args:
        fast: the performance program.
        compile_program: compiles for a spec.
    """
    best = min([fast, *_compile_all(compile_program, fast, [optimise_for_size(fast.spec)])], key=_ram_and_cycles)
    if fast.spec.configuration.arena_on_second_port:
        return best
    for _ in range(_MAX_ROUNDS):
        limits = [int(best.ram_bytes * fraction) for fraction in _LIMITS_FOR_LEAST_RAM]
        tried = _compile_all(compile_program, fast, [limit_arena(fast.spec, limit) for limit in limits])
        previous, best = best, min([best, *tried], key=_ram_and_cycles)
        if best.ram_bytes == previous.ram_bytes:
            break
    return best


def find_program_that_fits(
    fast: CompiledCandidate, small: Payload | None, compile_program: Compile
) -> CompiledCandidate:
    """Find the program with the fewest cycles that fits the available SRAM.

    Args:
        fast: the performance program, which does not fit.
        small: the size program; None if it was not compiled, or if Vela failed.
        compile_program: compiles for a spec.

    Returns:
        The program with the fewest cycles among the compiled ones that fit. If none fits and the spec has a budget, the
        program with the least RAM: the caller then computes in patches or reports the exceeded budget. If none fits and
        there is no budget, ``fast``.
    """
    available, budget = available_arena_bytes(fast), fast.spec.sram_budget
    limits = (int(available * fraction) for fraction in _LIMITS_TO_FIT)
    specs = [limit_arena(fast.spec, limit) for limit in limits if 0 < limit != fast.spec.configuration.arena_cache_size]
    programs = _compile_all(compile_program, fast, specs)
    if small is not None:
        programs.append(CompiledCandidate(small, optimise_for_size(fast.spec)))
    fitting = [program for program in programs if not program.exceeds_sram]
    if fitting:
        return min(fitting, key=lambda program: program.vela.total_cycles)
    return min([fast, *programs], key=_ram_and_cycles) if budget is not None else fast


def compile_for_less_ram(
    fast: CompiledCandidate, small: CompiledCandidate, compile_program: Compile
) -> Iterator[CompiledCandidate]:
    """Compile with two arena limits: near the RAM of ``small``, and half the RAM of ``fast``.

    Each program is compiled when the caller requests it from the iterator.

    Args:
        fast: the performance program.
        small: the size program.
        compile_program: compiles for a spec.
    """
    for limit in (int(_LIMIT_NEAR_SIZE * small.ram_bytes), fast.ram_bytes // 2):
        yield from _compile_all(compile_program, fast, [limit_arena(fast.spec, limit)])


def available_arena_bytes(program: CompiledCandidate) -> int:
    """Bytes of SRAM for activations: the arena cache size, but at most the budget minus the constants in SRAM.

    Args:
        program: a compiled program. Its estimates give the size of the constants. Its spec gives the arena cache size,
            and the budget if there is one.
    """
    configuration, budget = program.spec.configuration, program.spec.sram_budget
    limit = configuration.arena_cache_size
    return limit if budget is None else max(min(limit, budget - program.constant_sram_bytes), 0)


def _compile_all(
    compile_program: Compile, fast: CompiledCandidate, specs: Sequence[EthosUCompileSpec]
) -> list[CompiledCandidate]:
    """Compile for each spec, and return the programs of those for which Vela succeeds.

    The programs' estimates have the SRAM limit of ``fast``, because an arena limit is a goal for Vela and not the size
    of the SRAM.
    """
    programs = []
    for spec in specs:
        payload = compile_program(spec)
        if payload is not None and payload.vela is not None:
            estimates = replace(payload.vela, sram_limit=fast.vela.sram_limit)
            programs.append(CompiledCandidate(replace(payload, vela=estimates), spec))
    return programs


def _ram_and_cycles(program: CompiledCandidate) -> tuple[int, int]:
    return program.ram_bytes, program.vela.total_cycles


def try_compile(
    spec: EthosUCompileSpec, flatbuffer: bytes, compile_options: dict[str, Any], **options: Any
) -> Payload | None:
    """Compile; None if Vela fails. A failure is not an error, because the performance program exists."""
    try:
        return compile_ethosu(flatbuffer, spec, **compile_options, **options)
    except CompileError as error:
        if error.artifact:
            Path(error.artifact).unlink(missing_ok=True)
        return None
