"""Partitioners for ``to_edge_transform_and_lower``.

Delegation happens before ExecuTorch decomposes the program (``transform_for_pre_decomposition``): composite operators
are still whole, and the edge stages find only the delegates. What a target supports is asked of the operator records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import executorch.kernels.quantized  # noqa: F401  (how quantize and dequantize at the boundary are emitted)
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from torch.export import ExportedProgram

from arm_backend_core.delegate import Predicate, delegate
from arm_backend_core.errors import ArmBackendError
from arm_backend_core.recurrent.roll_recurrent_loops import LoopRolling
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec, TosaCompileSpec, VgfCompileSpec


class _ArmPartitioner(Partitioner):
    """Delegates every operator that the target can run.

    Args:
        compile_spec: the target.
        keep_on_cpu: predicates; a node for which one holds is not delegated.
        require_full_delegation: raise ``FullDelegationError`` if an operator stays on the CPU.
        steps_per_call: how many steps of a recurrent layer one call of a loop's delegate computes; "auto" chooses for
            long layers, None leaves all layers unrolled.
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
        super().__init__({})  # the default cannot be copied or pickled
        if not isinstance(compile_spec, self.spec_class):
            raise TypeError(
                f"compile_spec: {type(self).__name__} takes a {self.spec_class.__name__}, "
                f"got {type(compile_spec).__name__}"
            )
        self.compile_spec = compile_spec
        self.keep_on_cpu = tuple(keep_on_cpu)
        self.require_full_delegation = require_full_delegation
        self.loops = LoopRolling(steps_per_call)
        self._delegated = False

    def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
        """Called by ``to_edge_transform_and_lower`` on the ATen program."""
        self._delegated = True
        return delegate(
            self.loops.roll_loops(exported_program, self.compile_spec, self.keep_on_cpu),
            self.compile_spec,
            keep_on_cpu=self.keep_on_cpu,
            require_full_delegation=self.require_full_delegation,
        )

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Nothing is left to do once the program went through ``transform_for_pre_decomposition``.

        Raises:
            ArmBackendError: it did not, because ``to_backend`` was called directly.
        """
        if not self._delegated:
            raise ArmBackendError(
                f"{type(self).__name__} delegates before decomposition: call "
                "to_edge_transform_and_lower(program, partitioner=[...]) instead of to_edge(...).to_backend(...)"
            )
        return PartitionResult(tagged_exported_program=exported_program, partition_tags={})


class TOSAPartitioner(_ArmPartitioner):
    """Delegates to ``TOSABackend``; takes a ``TosaCompileSpec``."""

    spec_class = TosaCompileSpec


class EthosUPartitioner(_ArmPartitioner):
    """Delegates to ``EthosUBackend``; takes an ``EthosUCompileSpec``."""

    spec_class = EthosUCompileSpec


class VgfPartitioner(_ArmPartitioner):
    """Delegates to ``VgfBackend``; takes a ``VgfCompileSpec``."""

    spec_class = VgfCompileSpec
