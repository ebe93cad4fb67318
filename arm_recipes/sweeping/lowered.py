"""The part of a sweep that comes before Vela: one quantized program a precision, TOSA graphs for each NPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_backend_core import events
from arm_backend_core.delegate import delegate
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes.messages import ExportError
from arm_recipes.pipeline import Pipeline
from arm_recipes.runtime.ethosu_origins import main_origin
from arm_recipes.sample import Inputs
from arm_recipes.sweeping.compiling import Unit

METHOD = "forward"


@dataclass(frozen=True)
class Lowered:
    """A program for one NPU, before Vela.

    Attributes:
        units: its delegates; ``flatbuffers``: their TOSA graphs.
        cpu_operators: how many operators no delegate takes.
    """

    units: tuple[Unit, ...]
    flatbuffers: tuple[np.ndarray[Any, Any], ...]
    cpu_operators: int


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
        programs, simplified = pipeline.quantized()
        self.program, self._simplified = programs[METHOD], simplified[METHOD]
        self._lowered: dict[Target, Lowered | str] = {}
        self._flatbuffers: dict[str, np.ndarray[Any, Any]] = {}

    def lowered(self, target: Target) -> Lowered | str:
        """The program for an NPU, or why there is none."""
        if target not in self._lowered:
            below = lowered(self._simplified, target)
            if isinstance(below, Lowered):
                pairs = zip(below.units, below.flatbuffers, strict=True)
                arrays = tuple(self._flatbuffers.setdefault(unit.digest, array) for unit, array in pairs)
                below = replace(below, flatbuffers=arrays)
            self._lowered[target] = below
        return self._lowered[target]


def lowered(program: ExportedProgram, target: Target) -> Lowered | str:
    """A quantized program, as lowering takes it, for an NPU; or why there is none."""
    spec = TosaCompileSpec()  # the payload is the flatbuffer: what Vela would be given
    spec.target = target
    try:
        with events.record() as log:
            delegate(program, spec)
    except (ArmBackendError, ExportError) as error:
        return str(error)
    except Exception as error:  # a row tells it, and the others go on
        return f"{type(error).__name__}: {error}"
    if not log.delegates:
        reasons = dict.fromkeys(f"{refused.operator}: {refused.reason}" for refused in log.rejected)
        return f"{target.name} runs none of the model's operators: " + "; ".join(reasons)
    arrays = tuple(np.frombuffer(record.tosa, np.uint8) for record in log.delegates)
    return Lowered(tuple(map(unit_of, log.delegates)), arrays, len(log.rejected))


def unit_of(record: events.Delegate) -> Unit:
    """What a worker is told of a delegate."""
    return Unit(
        name=record.name,
        digest=hashlib.sha256(record.tosa).hexdigest(),
        result_bytes=tuple(int(np.prod(io.shape)) * DType(io.dtype).bytes for io in record.outputs),
        sources=tuple(
            dict.fromkeys((kind, main_origin(record, i).source) for i, kind in enumerate(record.tosa_operators))
        ),
    )
