"""Run one stage of the pipeline, and convert exceptions to errors that name the stage and the module or operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from executorch.export import StageType
from executorch.export.stages import PipelineArtifact, Stage
from torch.fx import Graph

from arm_recipes._internal.error_location import describe_error, is_argument_error
from arm_recipes._internal.errors import ExportError

#: Verb of each stage in error messages, as in "quantizing 'forward'".
_STAGE_VERBS = {
    StageType.SOURCE_TRANSFORM: "transforming",
    StageType.QUANTIZE: "quantizing",
    StageType.TORCH_EXPORT: "capturing",
    StageType.TO_EDGE_TRANSFORM_AND_LOWER: "lowering",
    StageType.TO_EDGE: "lowering",
    StageType.TO_BACKEND: "lowering",
    StageType.EDGE_PROGRAM_MANAGER_TRANSFORM: "preparing the boundary of",
    StageType.TO_EXECUTORCH: "writing the program of",
}


def run_stage(
    kind: StageType,
    stage: Stage,
    artifact: PipelineArtifact,
    methods: Collection[str],
    list_error_sources: Callable[[], tuple[list[torch.nn.Module], Sequence[Graph]]],
) -> None:
    """Run a stage.

    Args:
        kind: type of the stage.
        stage: the stage.
        artifact: input of the stage.
        methods: names of the methods.
        list_error_sources: returns the modules and the graphs in which an error may have its origin.

    Raises:
        ExportError: the stage failed. The message names the stage, and the module or operator.
        ArmBackendError: the compiler failed.
        ValueError, TypeError: an argument of the user is wrong.
    """
    from arm_backend_core.errors import ArmBackendError

    try:
        stage.run(artifact)
    except (ArmBackendError, ExportError):
        raise
    except Exception as error:
        if is_argument_error(error):
            raise
        modules, graphs = list_error_sources()
        names = ", ".join(f"'{name}'" for name in methods)
        raise ExportError(describe_error(f"{_STAGE_VERBS[kind]} {names}", error, modules, graphs)) from error
