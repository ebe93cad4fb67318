"""The lowering part of a recipe, and a stage that lowers faster than ExecuTorch's what is delegated whole."""

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

_Q = torch.ops.quantized_decomposed
#: What ExecuTorch's decompositions leave as it is.
_WHOLE = (
    executorch_call_delegate,
    operator.getitem,
    torch.ops.higher_order.scan,  # what is left of these calls delegates (stages/loops)
    _Q.quantize_per_tensor.default,
    _Q.dequantize_per_tensor.default,
)


def lowering_recipe(
    partitioner: Partitioner, edge_manager_passes: list[Callable[[EdgeProgramManager], Any]]
) -> LoweringRecipe:
    """Delegate with ``partitioner``, then apply ``edge_manager_passes`` to what is left.

    The compile config is that of ExecuTorch's XNNPACK recipes: ``ExportRecipe.combine`` accepts both.
    """
    return LoweringRecipe(
        partitioners=[partitioner],
        edge_manager_transform_passes=edge_manager_passes,
        edge_compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )


class FastLowerStage(EdgeTransformAndLowerStage):
    """ExecuTorch's stage, which traces every program again to decompose what a partitioner of ours has left.

    Where nothing is left but calls of delegates, and quantize and dequantize around them, there is nothing to
    decompose: that is half of the time of exporting a small model.
    """

    _partitioners: Any

    def run(self, artifact: PipelineArtifact) -> None:
        """Lower every method."""
        partitioners = self._partitioners
        if self._transform_passes or not _is_ours(partitioners) or artifact.get_context("generate_etrecord", False):
            super().run(artifact)
            return
        (partitioner,) = partitioners
        programs = _delegated(partitioner, artifact.data)
        self._partitioners = [_Delegated()]
        if all(map(_is_whole, programs.values())):
            manager = self._manager(programs, artifact.get_context("constant_methods"))
            self._artifact = artifact.copy_with_new_data(manager)
            _add_delegation_info_context(self._artifact, manager)
        else:
            super().run(artifact.copy_with_new_data(programs))

    def _manager(
        self, programs: Mapping[str, ExportedProgram], constants: Mapping[str, Any] | None
    ) -> EdgeProgramManager:
        config = self._compile_config or EdgeCompileConfig()
        with validation_disabled():
            edge = {method: _generate_edge_program(config, program) for method, program in programs.items()}
            return EdgeProgramManager(edge, constants, config, []).to_backend(_Delegated())


def _delegated(partitioner: Any, programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Every method after a partitioner of ours; in the usual forms where Vela fails on those chosen by their price.

    Parts were priced one by one: that Vela takes each of them is no proof that it takes them together.
    """
    from arm_backend_core import events
    from arm_backend_core.errors import CompileError

    def each(chosen: Any) -> dict[str, ExportedProgram]:
        return {method: chosen.transform_for_pre_decomposition(program) for method, program in programs.items()}

    log = events.current()
    if not getattr(partitioner.compile_spec, "search_alternatives", False):
        return each(partitioner)
    try:
        with events.record() as tried:
            found = each(partitioner)
    except CompileError as error:
        usual = copy.copy(partitioner)
        usual.compile_spec = copy.copy(partitioner.compile_spec)
        usual.compile_spec.search_alternatives = False
        try:
            found = each(usual)
        except CompileError:
            raise error from None
        log.notes.append(f"no forms are chosen by their price, as Vela fails on all of them together: {error.reason}")
        return found
    log.delegates += tried.delegates
    log.rejected += tried.rejected
    log.notes += tried.notes
    return found


class _Delegated(Partitioner):
    """Of programs that are delegated already."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


def _is_ours(partitioners: Any) -> bool:
    from arm_backend_core.partitioner import EthosUPartitioner, TOSAPartitioner, VgfPartitioner

    ours = (EthosUPartitioner, TOSAPartitioner, VgfPartitioner)
    return isinstance(partitioners, list) and len(partitioners) == 1 and isinstance(partitioners[0], ours)


def _is_whole(program: ExportedProgram) -> bool:
    return all(node.op != "call_function" or node.target in _WHOLE for node in program.graph.nodes)
