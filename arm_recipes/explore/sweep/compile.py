"""Worker of a sweep: choose alternatives and run Vela for one configuration. It does not import PyTorch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.call_counts import multiply_figures
from arm_backend_core.workers import vela
from arm_recipes.explore.sweep.rows import Figures
from arm_recipes.report.ram import npu_parts

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.backends.payload import VelaEstimates
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Version of the cached records; increase it when their format changes.
_CACHE_VERSION = 3


@dataclass(frozen=True)
class LoweredDelegate:
    """A delegate that is lowered to TOSA and not compiled yet.

    The flatbuffer and the graph are passed separately as arrays, which joblib shares between tasks and scatters.

    Attributes:
        name: name of the delegate.
        digest: hash of its flatbuffer with default alternatives.
        graph_digest: hash of its graph before alternatives are chosen.
        result_bytes: size of each result in bytes.
        sources: TOSA operator and source line of each operator, for error messages.
        calls: number of calls per inference.
    """

    name: str
    digest: str
    graph_digest: str
    result_bytes: tuple[int, ...]
    sources: tuple[tuple[str, str], ...]
    calls: int = 1


def cache_key(spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate]) -> str:
    """Return the cache key of a configuration's figures: graphs, Vela's version, options and ``.ini``.

    The TOSA graphs capture the model, its quantization and the effect of our compiler. Only the choice of
    alternatives is not in them; the hash of its sources stands for it.
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
        from arm_recipes.pipeline.cache.key import sources

        parts += [sources(), *(delegate.graph_digest for delegate in delegates)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_delegates(
    index: int, spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate], *arrays: np.ndarray[Any, Any]
) -> tuple[int, Figures | str]:
    """Compile the delegates of one configuration with Vela.

    Args:
        index: index of the configuration.
        arrays: flatbuffers with default alternatives; with ``spec.search_alternatives`` also the graphs for which
            alternatives are chosen, one per delegate.

    Returns:
        The index, and the figures or an error message.
    """
    from arm_backend_core import events
    from arm_backend_core.alternatives.chooser import choose_deferred
    from arm_backend_core.errors import ArmBackendError

    data = [array.tobytes() for array in arrays]
    defaults, graphs = data[: len(delegates)], data[len(delegates) :]
    try:
        with contextlib.suppress(Exception), events.record():  # as in an export, use the defaults if the search fails
            if graphs:
                return index, _compile_all(spec, delegates, (choose_deferred(graph, spec) for graph in graphs))
        with events.record():
            return index, _compile_all(spec, delegates, defaults)
    except ArmBackendError as error:
        return index, str(error)


def _compile_all(
    spec: EthosUCompileSpec, delegates: Sequence[LoweredDelegate], flatbuffers: Iterable[bytes]
) -> Figures:
    from arm_backend_core.alternatives.size_or_speed import compile_best

    figures = []
    for lowered, flatbuffer in zip(delegates, flatbuffers, strict=True):

        def locate(text: str, lowered: LoweredDelegate = lowered) -> tuple[str, str] | None:
            return next((source for source in lowered.sources if source[0] in text.upper() and source[1]), None)

        payload, _ = compile_best(spec, flatbuffer, delegate=lowered.name, locate=locate, results=lowered.result_bytes)
        assert payload.vela is not None
        figures.append(multiply_figures(payload.vela, lowered.calls))
    return sum_figures(figures)


def sum_figures(delegates: Sequence[VelaEstimates]) -> Figures:
    """Sum up delegates that run in sequence: add time and constants; take the maximum of working memory in SRAM."""
    ram = npu_parts(delegates)
    return Figures(
        cycles=sum(vela.total_cycles for vela in delegates),
        npu_cycles=sum(vela.npu_cycles for vela in delegates),
        milliseconds=1e3 * sum(vela.inference_seconds for vela in delegates),
        sram_bytes=max(vela.sram_bytes for vela in delegates),
        sram_exceeded=any(vela.sram_exceeded for vela in delegates),
        dram_bytes=sum(vela.dram_bytes for vela in delegates),
        flash_bytes=sum(vela.flash_bytes for vela in delegates),
        fast_scratch_bytes=max(vela.fast_scratch_bytes for vela in delegates),
        npu_ram_bytes=sum(part.bytes for part in ram),
        npu_sram_bytes=sum(part.bytes for part in ram if part.memory == "SRAM"),
        weight_bytes=sum(vela.weight_bytes for vela in delegates),
    )
