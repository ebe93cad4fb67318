"""Some operators through ExecuTorch's whole pipeline: partitioning, edge dialect, execution of the delegates."""

from __future__ import annotations

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner

from arm_backend_core import compilation_log
from arm_backend_core.partitioner import EthosUPartitioner, TOSAPartitioner
from arm_backend_core.targets.compile_spec import EthosUCompileSpec, TosaCompileSpec
from tests.ops import runner
from tests.ops.cases import CASES
from tests.ops.runner import Case

_CASE_NAMES = ["conv2d_relu", "sdpa_causal", "gelu", "embedding", "split", "upsample_bilinear", "add_"]


def _lowered(case: Case, program: torch.export.ExportedProgram, partitioner: Partitioner) -> list[torch.Tensor]:
    with compilation_log.open_log() as log:
        edge = to_edge_transform_and_lower(
            program,
            partitioner=[partitioner],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    lowered = edge.exported_program()
    runner.DelegatedProgram(lowered, log).check_delegated()
    return runner.flatten_tensors(lowered.module()(*case.sample()))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in _CASE_NAMES], ids=lambda case: case.name)
def test_float(case: Case) -> None:
    inputs = case.sample()
    program = runner.export(case.module(), inputs)
    got = _lowered(case, program, TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))
    runner.check_close(case, got, runner.flatten_tensors(case.module()(*inputs)))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in _CASE_NAMES[:3]], ids=lambda case: case.name)
def test_ethos_u(case: Case) -> None:
    module = runner.quantize_case(case, int16=False)
    program = runner.export(module, case.sample())
    got = _lowered(case, program, EthosUPartitioner(EthosUCompileSpec("ethos-u85-256")))
    runner.check_steps(got, runner.flatten_tensors(module(*case.sample())), runner.output_scales(program), case.steps)
