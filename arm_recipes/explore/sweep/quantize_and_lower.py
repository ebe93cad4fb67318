"""Quantization and lowering of a sweep.

A sweep quantizes the model once per precision. If quantization depends on the NPU, it quantizes the model once per
precision and NPU. It lowers each quantized program to TOSA graphs once per NPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_backend_core import compilation_log
from arm_backend_core.alternatives.deferred import DeferredTuningSpec
from arm_backend_core.delegate import delegate
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.quantization.hardware_dependencies import find_changed_dependencies
from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes._internal.compile_lock import compile_lock
from arm_recipes._internal.errors import ExportError
from arm_recipes.explore.sweep.compile_worker import LoweredDelegate
from arm_recipes.pipeline.pipeline import Pipeline
from arm_recipes.runtime.command_origins import main_origin
from arm_recipes.samples.call_inputs import Inputs

METHOD = "forward"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LoweredProgram:
    """A program lowered for one NPU, before Vela.

    Attributes:
        delegates: delegates of the program.
        flatbuffers: TOSA flatbuffers of the delegates, with default alternatives.
        graphs: serialized graphs of the delegates, before alternatives are chosen.
        cpu_operators: number of operators outside delegates.
    """

    delegates: tuple[LoweredDelegate, ...]
    flatbuffers: tuple[Array, ...]
    graphs: tuple[Array, ...]
    cpu_operators: int

    def arrays(self, spec: EthosUCompileSpec) -> tuple[Array, ...]:
        """Return the arrays that ``compile_delegates`` needs for a configuration."""
        return (*self.flatbuffers, *self.graphs) if spec.search_alternatives else self.flatbuffers


class QuantizedProgram:
    """A program quantized to one precision.

    Args:
        program: captured model.
        samples: calibration samples.
        recipe: any recipe of this precision: all have the same quantizer. For most models, the quantized program is
            valid for all NPUs, see ``is_valid_for``.

    Attributes:
        unlowered: the captured and quantized program.

    Raises:
        ExportError, ArmBackendError: the program cannot be quantized.
        ValueError: the samples or the calibration data do not fit the model.
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
        with compile_lock(), compilation_log.open_log():
            self.unlowered, copies = pipeline.quantize_programs()
        self._program_to_lower = copies[METHOD]
        self._lowered: dict[Target, LoweredProgram | str] = {}
        self._arrays: dict[str, Array] = {}

    @property
    def program(self) -> ExportedProgram:
        """The quantized program."""
        return self.unlowered.programs[METHOD]

    def is_valid_for(self, target: Target) -> bool:
        """Whether quantization for ``target`` would give this program."""
        return not find_changed_dependencies(self.unlowered.hardware_dependencies, target.hardware)

    def lower(self, target: Target) -> LoweredProgram | str:
        """Lower the program for an NPU. Returns an error message if this fails."""
        if target not in self._lowered:
            with compile_lock():
                lowered = lower_program(self._program_to_lower, target)
            if isinstance(lowered, LoweredProgram):
                flatbuffers = self._deduplicate((unit.digest for unit in lowered.delegates), lowered.flatbuffers)
                graphs = self._deduplicate((unit.graph_digest for unit in lowered.delegates), lowered.graphs)
                lowered = replace(lowered, flatbuffers=flatbuffers, graphs=graphs)
            self._lowered[target] = lowered
        return self._lowered[target]

    def _deduplicate(self, digests: Iterable[str], arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Replace arrays by equal arrays of earlier programs, to save memory."""
        return tuple(self._arrays.setdefault(name, array) for name, array in zip(digests, arrays, strict=True))


def lower_program(program: ExportedProgram, target: Target, loops: LoopRolling | None = None) -> LoweredProgram | str:
    """Lower a quantized program for an NPU. Returns an error message if this fails.

    Args:
        program: quantized program, after ``normalize_call_signature`` has removed its inputs that are Python constants.
            It does not change.
        target: NPU to lower for.
        loops: loop rolling option of the recipe. None: the default of recipes.
    """
    spec = DeferredTuningSpec(target)
    try:
        with compilation_log.open_log() as log:
            delegate((loops or LoopRolling()).roll_loops(program, spec), spec)
        if len(spec.graphs) != len(log.delegates):
            # A rolled loop of recurrent steps did not become a delegate: lower again without rolling loops.
            return lower_program(program, target, LoopRolling(None))
    except (ArmBackendError, ExportError) as error:
        return str(error)
    except Exception as error:  # report it in the row, and continue with the other configurations
        return f"{type(error).__name__}: {error}"
    if not log.delegates:
        reasons = dict.fromkeys(f"{refused.operator}: {refused.reason}" for refused in log.refused_operators)
        return f"{target.name} runs none of the model's operators: " + "; ".join(reasons)
    flatbuffers, graphs = (
        tuple(np.frombuffer(data, np.uint8) for data in each)
        for each in ([record.tosa for record in log.delegates], spec.graphs)
    )
    units = map(make_lowered_delegate, log.delegates, spec.graphs)
    return LoweredProgram(tuple(units), flatbuffers, graphs, len(log.refused_operators))


def make_lowered_delegate(record: compilation_log.DelegateRecord, graph: bytes = b"") -> LoweredDelegate:
    """Make a delegate for ``compile_delegates``. ``graph`` is its serialized graph, before alternatives are chosen."""
    return LoweredDelegate(
        name=record.name,
        graph_digest=hashlib.sha256(graph).hexdigest(),
        digest=hashlib.sha256(record.tosa).hexdigest(),
        result_bytes=tuple(int(np.prod(io.shape)) * DType(io.dtype).bytes for io in record.outputs),
        sources=tuple(
            dict.fromkeys((kind, main_origin(record, i).source) for i, kind in enumerate(record.tosa_operators))
        ),
        calls=record.calls,
    )
