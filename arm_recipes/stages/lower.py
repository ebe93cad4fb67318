"""Lowering: the lowering recipe, and a lowering stage that skips decomposition if no operator needs it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.program._program import _generate_edge_program
from executorch.export import LoweringRecipe
from executorch.export.stages import (
    EdgeTransformAndLowerStage,
    PipelineArtifact,
    _add_delegation_info_context,
    validation_disabled,
)
from torch.export import ExportedProgram

from arm_backend_core.cortex_m.kernels.registry import NAMESPACE

_QUANTIZED_DECOMPOSED = torch.ops.quantized_decomposed
_ATEN = torch.ops.aten
#: Data movement that lowering to Cortex-M kernels emits.
_DATA_MOVEMENT = (
    *(_ATEN.view_copy.default, _ATEN.expand_copy.default, _ATEN.permute_copy.default, _ATEN.cat.default),
    *(_ATEN.slice_copy.Tensor, _ATEN.select_copy.int, _ATEN.clone.default),
)
#: Targets of call_function nodes that ExecuTorch's decompositions leave unchanged.
_NOT_DECOMPOSED = (
    executorch_call_delegate,
    operator.getitem,
    *_DATA_MOVEMENT,
    torch.ops.higher_order.scan,  # the bodies of remaining scans call delegates
    _QUANTIZED_DECOMPOSED.quantize_per_tensor.default,
    _QUANTIZED_DECOMPOSED.dequantize_per_tensor.default,
)


def make_lowering_recipe(
    partitioner: Partitioner, edge_manager_passes: list[Callable[[EdgeProgramManager], Any]]
) -> LoweringRecipe:
    """Build the lowering part of a recipe: delegate with ``partitioner``, then apply ``edge_manager_passes``.

    ExecuTorch's XNNPACK recipes have the same compile config, so ``ExportRecipe.combine`` accepts both recipes.
    """
    return LoweringRecipe(
        partitioners=[partitioner],
        edge_manager_transform_passes=edge_manager_passes,
        edge_compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )


class FastLowerStage(EdgeTransformAndLowerStage):
    """ExecuTorch's lowering stage, but programs without operators to decompose are not retraced.

    ExecuTorch retraces every program to decompose the operators outside of delegates. The retrace takes half of the
    export time of a small model. This stage skips it if only operators without decompositions remain in all methods:
    delegate calls, Cortex-M kernels, data movement, scans, quantize and dequantize. Recipes with transform passes, an
    ETRecord, several partitioners, or a partitioner of another package run in ExecuTorch's stage.
    """

    _partitioners: Any

    def run(self, artifact: PipelineArtifact) -> None:
        """Lower every method."""
        partitioners = self._partitioners
        if (
            self._transform_passes
            or not _is_single_arm_partitioner(partitioners)
            or artifact.get_context("generate_etrecord", False)
        ):
            super().run(artifact)
            return
        (partitioner,) = partitioners
        programs = _delegate_methods(partitioner, artifact.data)
        self._partitioners = [_NoOpPartitioner()]
        if all(map(_needs_no_decomposition, programs.values())):
            manager = self._build_manager(programs, artifact.get_context("constant_methods"))
            self._artifact = artifact.copy_with_new_data(manager)
            _add_delegation_info_context(self._artifact, manager)
        else:
            super().run(artifact.copy_with_new_data(programs))

    def _build_manager(
        self, programs: Mapping[str, ExportedProgram], constants: Mapping[str, Any] | None
    ) -> EdgeProgramManager:
        config = self._compile_config or EdgeCompileConfig()
        with validation_disabled():
            edge_programs = {method: _generate_edge_program(config, program) for method, program in programs.items()}
            return EdgeProgramManager(edge_programs, constants, config, []).to_backend(_NoOpPartitioner())


def _delegate_methods(partitioner: Any, programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Partition and delegate every method. If this fails with the chosen alternatives, try again without a search.

    An alternative is another lowering of a region. The cost model of the search compiles single regions with Vela, so
    Vela may still fail on the whole graph.
    """
    from arm_backend_core import compilation_log
    from arm_backend_core.errors import CompileError

    def delegate_with(candidate: Any) -> dict[str, ExportedProgram]:
        return {method: candidate.transform_for_pre_decomposition(program) for method, program in programs.items()}

    log = compilation_log.current_log()
    if not getattr(partitioner.compile_spec, "search_alternatives", False):
        return delegate_with(partitioner)
    try:
        with compilation_log.open_log() as attempt_log:
            delegated = delegate_with(partitioner)
    except CompileError as error:
        fallback = copy.copy(partitioner)
        fallback.compile_spec = copy.copy(partitioner.compile_spec)
        fallback.compile_spec.search_alternatives = False
        try:
            delegated = delegate_with(fallback)
        except CompileError:
            raise error from None
        log.notes.append(f"search_alternatives is disabled, because Vela fails on the alternatives: {error.reason}")
        return delegated
    log.delegates += attempt_log.delegates
    log.refused_operators += attempt_log.refused_operators
    log.notes += attempt_log.notes
    return delegated


class _NoOpPartitioner(Partitioner):
    """Partitioner that tags nothing, for programs that are already delegated."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


def _is_single_arm_partitioner(partitioners: Any) -> bool:
    from arm_backend_core.partitioner import ArmPartitioner

    return isinstance(partitioners, list) and len(partitioners) == 1 and isinstance(partitioners[0], ArmPartitioner)


def _needs_no_decomposition(program: ExportedProgram) -> bool:
    return all(node.op != "call_function" or _is_not_decomposed(node.target) for node in program.graph.nodes)


def _is_not_decomposed(target: Any) -> bool:
    return target in _NOT_DECOMPOSED or getattr(target, "namespace", None) == NAMESPACE
