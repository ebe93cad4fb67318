"""Partitioners for ``to_edge_transform_and_lower``.

Delegation happens before ExecuTorch decomposes the program (``transform_for_pre_decomposition``). The program
then still contains composite operators, and ExecuTorch decomposes and transforms only the operators that stay on the
CPU. The operator records (``ops/registry.py``) and the limits of the target decide what is delegated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import executorch.kernels.quantized  # noqa: F401  (registers the out variants of quantize and dequantize)
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from torch.export import ExportedProgram

from arm_backend_core.delegate import Predicate, delegate
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_backend_core.targets.compile_spec import (
    ArmCompileSpec,
    CortexMCompileSpec,
    EthosUCompileSpec,
    TosaCompileSpec,
    VgfCompileSpec,
)


class ArmPartitioner(Partitioner):
    """Delegates every operator that the target can run.

    Args:
        compile_spec: the target and the options of its compiler.
        keep_on_cpu: predicates; a node for which any of them is true is not delegated. Without effect for Cortex-M.
        require_full_delegation: raise ``FullDelegationError`` if an operator other than quantize and dequantize is not
            delegated.
        steps_per_call: maximum number of time steps of a recurrent layer that one delegate call computes. A layer with
            more steps becomes a loop of delegate calls. With "auto", the partitioner chooses the number. A layer then
            becomes a loop if it has many steps, or if all layers of the program together have many steps. With None,
            all layers stay unrolled.
    """

    spec_class: type[ArmCompileSpec]

    def __init__(
        self,
        compile_spec: ArmCompileSpec,
        keep_on_cpu: Sequence[Predicate] = (),
        *,
        require_full_delegation: bool = False,
        steps_per_call: int | Literal["auto"] | None = None,
    ) -> None:
        super().__init__({})  # the default value of this argument cannot be copied or pickled
        if not isinstance(compile_spec, self.spec_class):
            raise TypeError(
                f"compile_spec: {type(self).__name__} takes a {self.spec_class.__name__}, "
                f"got {type(compile_spec).__name__}"
            )
        self.compile_spec = compile_spec
        self.keep_on_cpu = tuple(keep_on_cpu)
        self.require_full_delegation = require_full_delegation
        self.loop_rolling = LoopRolling(steps_per_call)
        self._has_delegated = False

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Delegate the ATen program; ``to_edge_transform_and_lower`` calls this before it decomposes."""
        self._has_delegated = True
        return delegate(
            self.loop_rolling.roll_loops(exported_program, self.compile_spec, self.keep_on_cpu),
            self.compile_spec,
            keep_on_cpu=self.keep_on_cpu,
            require_full_delegation=self.require_full_delegation,
        )

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tag nothing: ``transform_for_pre_decomposition`` has delegated the program already.

        Raises:
            ArmBackendError: ``transform_for_pre_decomposition`` did not run, because the caller used ``to_backend``.
        """
        if not self._has_delegated:
            raise ArmBackendError(
                f"{type(self).__name__} delegates before decomposition: call "
                "to_edge_transform_and_lower(program, partitioner=[...]) instead of to_edge(...).to_backend(...)"
            )
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


class TOSAPartitioner(ArmPartitioner):
    """Delegates to ``TOSABackend``; takes a ``TosaCompileSpec``."""

    spec_class = TosaCompileSpec


class EthosUPartitioner(ArmPartitioner):
    """Delegates to ``EthosUBackend``; takes an ``EthosUCompileSpec``."""

    spec_class = EthosUCompileSpec


class VgfPartitioner(ArmPartitioner):
    """Delegates to ``VgfBackend``; takes a ``VgfCompileSpec``."""

    spec_class = VgfCompileSpec


class CortexMPartitioner(ArmPartitioner):
    """Lowers to int8 kernels instead of delegating; takes a ``CortexMCompileSpec``."""

    spec_class = CortexMCompileSpec
