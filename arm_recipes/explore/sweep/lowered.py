"""The part of a sweep that comes before configurations: one quantized program a precision, graphs for each NPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_backend_core import events
from arm_backend_core.alternatives.deferred import DeferredTuningSpec
from arm_backend_core.delegate import delegate
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes._internal.messages import ExportError
from arm_recipes.explore.sweep.compile import Unit
from arm_recipes.pipeline.pipeline import Pipeline
from arm_recipes.runtime.ethosu_origins import main_origin
from arm_recipes.samples.sample import Inputs

METHOD = "forward"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Lowered:
    """A program for one NPU, before Vela.

    Attributes:
        units: its delegates; ``flatbuffers``: their TOSA graphs in the usual forms; ``graphs``: without forms.
        cpu_operators: how many operators no delegate takes.
    """

    units: tuple[Unit, ...]
    flatbuffers: tuple[Array, ...]
    graphs: tuple[Array, ...]
    cpu_operators: int

    def arrays(self, spec: EthosUCompileSpec) -> tuple[Array, ...]:
        """What ``compile_units`` takes for a configuration."""
        return (*self.flatbuffers, *self.graphs) if spec.search_alternatives else self.flatbuffers


class Precision:
    """A program quantized to one precision.

    Args:
        program: the model, captured.
        recipe: any of this precision: its quantizer is the same for every NPU.

    Attributes:
        program: quantized.

    Raises:
        ExportError, ArmBackendError: it cannot be quantized.
        ValueError: the samples or the calibration data are not what the model takes.
    """

    def __init__(self, program: ExportedProgram, samples: Sequence[Inputs], recipe: ExportRecipe) -> None:
        pipeline = Pipeline(
            recipe,
            {METHOD: program},
            {METHOD: list(samples)},
            dynamic_shapes=None,
            constant_methods=None,
            strict=None,
            progress=False,
        )
        programs, simplified = pipeline.quantize_programs()
        self.program, self._simplified = programs[METHOD], simplified[METHOD]
        self._lowered: dict[Target, Lowered | str] = {}
        self._arrays: dict[str, Array] = {}

    def lowered(self, target: Target) -> Lowered | str:
        """The program for an NPU, or why there is none."""
        if target not in self._lowered:
            below = lowered(self._simplified, target)
            if isinstance(below, Lowered):
                flatbuffers = self._shared((unit.digest for unit in below.units), below.flatbuffers)
                graphs = self._shared((unit.unchosen for unit in below.units), below.graphs)
                below = replace(below, flatbuffers=flatbuffers, graphs=graphs)
            self._lowered[target] = below
        return self._lowered[target]

    def _shared(self, digests: Iterable[str], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Those that were there before, where these are equal."""
        return tuple(self._arrays.setdefault(name, array) for name, array in zip(digests, arrays, strict=True))


def lowered(program: ExportedProgram, target: Target, loops: LoopRolling | None = None) -> Lowered | str:
    """A quantized program, as lowering takes it, for an NPU; or why there is none.

    Args:
        loops: those of the recipe; by default as recipes have them.
    """
    spec = DeferredTuningSpec(target)
    try:
        with events.record() as log:
            delegate((loops or LoopRolling()).looped(program, spec), spec)
        if len(spec.graphs) != len(log.delegates):  # a chunk of steps that is no delegate
            return lowered(program, target, LoopRolling(None))
    except (ArmBackendError, ExportError) as error:
        return str(error)
    except Exception as error:  # a row tells it, and the others go on
        return f"{type(error).__name__}: {error}"
    if not log.delegates:
        reasons = dict.fromkeys(f"{refused.operator}: {refused.reason}" for refused in log.rejected)
        return f"{target.name} runs none of the model's operators: " + "; ".join(reasons)
    flatbuffers, graphs = (
        tuple(np.frombuffer(data, np.uint8) for data in each)
        for each in ([record.tosa for record in log.delegates], spec.graphs)
    )
    units = map(unit_of, log.delegates, spec.graphs)
    return Lowered(tuple(units), flatbuffers, graphs, len(log.rejected))


def unit_of(record: events.Delegate, graph: bytes = b"") -> Unit:
    """What a worker is told of a delegate, and of the graph to choose forms of, if it gets one."""
    return Unit(
        name=record.name,
        unchosen=hashlib.sha256(graph).hexdigest(),
        digest=hashlib.sha256(record.tosa).hexdigest(),
        result_bytes=tuple(int(np.prod(io.shape)) * DType(io.dtype).bytes for io in record.outputs),
        sources=tuple(
            dict.fromkeys((kind, main_origin(record, i).source) for i, kind in enumerate(record.tosa_operators))
        ),
        calls=record.calls,
    )
