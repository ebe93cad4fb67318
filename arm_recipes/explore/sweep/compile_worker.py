"""Worker of a sweep: choose alternatives (``arm_backend_core.alternatives``) and run Vela for one configuration.

This module does not import PyTorch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.call_counts import multiply_estimates
from arm_backend_core.workers import vela
from arm_recipes.explore.sweep.rows import ProgramEstimates
from arm_recipes.report.ram import npu_ram_parts
from arm_recipes.runtime.ethosu_payload import read_scratch_size_and_io

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.backends.vela_estimates import VelaEstimates
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Version of the cached records; increase it when their format changes.
_CACHE_VERSION = 4


@dataclass(frozen=True)
class LoweredDelegate:
    """A delegate that is lowered to TOSA, but not yet compiled by Vela.

    Its flatbuffer and its graph are passed separately as arrays, because joblib shares arrays between tasks.

    Attributes:
        name: name of the delegate.
        digest: hash of the flatbuffer with default alternatives.
        graph_digest: hash of the graph before alternatives are chosen.
        result_bytes: size of each result in bytes.
        sources: (name of a TOSA operator, source line of the model) pairs, for error messages.
        calls: number of calls per inference.
    """

    name: str
    digest: str
    graph_digest: str
    result_bytes: tuple[int, ...]
    sources: tuple[tuple[str, str], ...]
    calls: int = 1


def cache_key(spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate]) -> str:
    """Return the cache key of a configuration's estimates: a hash of graphs, Vela's version, options and ``.ini``.

    The TOSA graphs reflect the model, its quantization and this compiler, except for the choice of alternatives. If
    alternatives are searched, the key therefore includes a hash of the compiler's sources.
    """
    configuration = spec.configuration
    parts = [
        str(_CACHE_VERSION),
        vela.version(),
        configuration.accelerator,
        configuration.system_config,
        configuration.options,
    ]
    parts += [spec.optimise, str(spec.sram_budget)]
    parts += [delegate.digest + f" x {delegate.calls}" * (delegate.calls > 1) for delegate in delegates]
    if spec.search_alternatives:
        from arm_recipes.pipeline.cache.key import source_digest

        parts += [source_digest(), *(delegate.graph_digest for delegate in delegates)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_delegates(
    index: int, spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate], *arrays: np.ndarray[Any, Any]
) -> tuple[int, ProgramEstimates | str]:
    """Compile the delegates of one configuration with Vela.

    Args:
        index: index of the configuration.
        arrays: flatbuffers with default alternatives, one for each delegate. The graphs of the delegates may follow. In
            this case, this function chooses alternatives for the graphs.

    Returns:
        The index, and the estimates or an error message.
    """
    from arm_backend_core import compilation_log
    from arm_backend_core.alternatives.alternatives_pass import choose_deferred
    from arm_backend_core.errors import ArmBackendError

    data = [array.tobytes() for array in arrays]
    default_flatbuffers, graphs = data[: len(delegates)], data[len(delegates) :]
    try:
        with (
            contextlib.suppress(Exception),
            compilation_log.open_log(),
        ):  # use the defaults if the search fails, as an export does
            if graphs:
                return index, _compile_all(spec, delegates, (choose_deferred(graph, spec) for graph in graphs))
        with compilation_log.open_log():
            return index, _compile_all(spec, delegates, default_flatbuffers)
    except ArmBackendError as error:
        return index, str(error)


def _compile_all(
    spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate], flatbuffers: Iterable[bytes]
) -> ProgramEstimates:
    from arm_backend_core.alternatives.size_or_speed import compile_best

    estimates, placements = [], []
    for delegate, flatbuffer in zip(delegates, flatbuffers, strict=True):

        def find_operator(text: str, delegate: LoweredDelegate = delegate) -> tuple[str, str] | None:
            return next((source for source in delegate.sources if source[0] in text.upper() and source[1]), None)

        payload, _ = compile_best(
            spec, flatbuffer, delegate=delegate.name, find_operator=find_operator, output_bytes=delegate.result_bytes
        )
        assert payload.vela is not None
        estimates.append(multiply_estimates(payload.vela, delegate.calls))
        scratch, inputs, outputs = read_scratch_size_and_io(payload.data)
        placements.append((scratch, *(tensor.offset for tensor in (*inputs, *outputs))))
    return replace(sum_estimates(estimates), placement=hashlib.sha256(repr(placements).encode()).hexdigest())


def sum_estimates(estimates: Sequence[VelaEstimates]) -> ProgramEstimates:
    """Add up the estimates of delegates that run in sequence.

    Times, bytes of DRAM and flash, and weights are summed. SRAM is working memory, which delegates use one after the
    other, so its maximum is taken.
    """
    ram = npu_ram_parts(estimates)
    return ProgramEstimates(
        cycles=sum(vela.total_cycles for vela in estimates),
        npu_cycles=sum(vela.npu_cycles for vela in estimates),
        milliseconds=1e3 * sum(vela.inference_seconds for vela in estimates),
        sram_bytes=max(vela.sram_bytes for vela in estimates),
        sram_exceeded=any(vela.sram_exceeded for vela in estimates),
        dram_bytes=sum(vela.dram_bytes for vela in estimates),
        flash_bytes=sum(vela.flash_bytes for vela in estimates),
        fast_scratch_bytes=max(vela.fast_scratch_bytes for vela in estimates),
        npu_ram_bytes=sum(part.bytes for part in ram),
        npu_sram_bytes=sum(part.bytes for part in ram if part.memory == "SRAM"),
        weight_bytes=sum(vela.weight_bytes for vela in estimates),
    )
