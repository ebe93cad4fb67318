"""What a worker process of a sweep does: forms and Vela for one configuration. It imports no PyTorch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arm_backend_core.backends.call_counts import times
from arm_backend_core.workers import vela
from arm_recipes.explore.sweep.rows import Figures

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.backends.payload import VelaFigures
    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Counted up when the same graphs and options would give a record of another form.
_FORM = 2


@dataclass(frozen=True)
class LoweredDelegate:
    """A delegate that is lowered and not compiled.

    Attributes:
        name: the delegate's name.
        digest: of its flatbuffer in the usual forms, which travels beside this as an array: joblib shares and scatters
            arrays. ``graph_digest``: of its graph before forms are chosen, which is another.
        result_bytes: size of each result.
        sources: TOSA operator and source line of each operator, for errors.
        calls: how often one inference calls it.
    """

    name: str
    digest: str
    graph_digest: str
    result_bytes: tuple[int, ...]
    sources: tuple[tuple[str, str], ...]
    calls: int = 1


def cache_key(spec: EthosUCompileSpec, units: Sequence[LoweredDelegate]) -> str:
    """By what a configuration's figures are kept: graphs, Vela's options and ``.ini``, Vela's version.

    The TOSA graphs hold all of the model, its quantization and our own compiler that Vela sees, but for what chooses
    forms, which is told by its sources.
    """
    chosen = spec.configuration
    parts = [str(_FORM), vela.version(), chosen.accelerator, chosen.system_config, chosen.options]
    parts += [spec.optimise, str(spec.sram_budget)]
    parts += [unit.digest + f" x {unit.calls}" * (unit.calls > 1) for unit in units]
    if spec.search_alternatives:
        from arm_recipes.pipeline.cache.key import sources

        parts += [sources(), *(unit.graph_digest for unit in units)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def compile_delegates(
    index: int, spec: EthosUCompileSpec, units: Sequence[LoweredDelegate], *arrays: np.ndarray[Any, Any]
) -> tuple[int, Figures | str]:
    """Compile the delegates of one configuration: its number with its figures, or with the error in words.

    Args:
        arrays: flatbuffers in the usual forms and, with ``spec.search_alternatives``, as many graphs to choose forms
            of.
    """
    from arm_backend_core import events
    from arm_backend_core.alternatives.chooser import chosen
    from arm_backend_core.errors import ArmBackendError

    data = [array.tobytes() for array in arrays]
    usual, graphs = data[: len(units)], data[len(units) :]
    try:
        with contextlib.suppress(Exception), events.record():  # an export does without forms where they fail, too
            if graphs:
                return index, _compiled(spec, units, (chosen(graph, spec) for graph in graphs))
        with events.record():
            return index, _compiled(spec, units, usual)
    except ArmBackendError as error:
        return index, str(error)


def _compiled(spec: EthosUCompileSpec, units: Sequence[LoweredDelegate], flatbuffers: Iterable[bytes]) -> Figures:
    from arm_backend_core.alternatives.size_or_speed import compile_best

    found = []
    for unit, flatbuffer in zip(units, flatbuffers, strict=True):

        def locate(text: str, unit: LoweredDelegate = unit) -> tuple[str, str] | None:
            return next((named for named in unit.sources if named[0] in text.upper() and named[1]), None)

        payload, _ = compile_best(spec, flatbuffer, delegate=unit.name, locate=locate, results=unit.result_bytes)
        assert payload.vela is not None
        found.append(times(payload.vela, unit.calls))
    return sum_figures(found)


def sum_figures(delegates: Sequence[VelaFigures]) -> Figures:
    """Delegates run one after the other: time and constants add up, working memory in the SRAM does not."""
    return Figures(
        cycles=sum(vela.total_cycles for vela in delegates),
        npu_cycles=sum(vela.npu_cycles for vela in delegates),
        milliseconds=1e3 * sum(vela.inference_seconds for vela in delegates),
        sram_bytes=max(vela.sram_bytes for vela in delegates),
        sram_exceeded=any(vela.sram_exceeded for vela in delegates),
        dram_bytes=sum(vela.dram_bytes for vela in delegates),
        flash_bytes=sum(vela.flash_bytes for vela in delegates),
        fast_scratch_bytes=max(vela.fast_scratch_bytes for vela in delegates),
        weight_bytes=sum(vela.weight_bytes for vela in delegates),
    )
