"""A new NPU: one entry of the hardware table decides which operators are delegated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arm_backend_core import compilation_log
from arm_backend_core.delegate import delegate
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import _DEFAULT_CONFIGS, TosaCompileSpec
from arm_backend_core.targets.cortex_m import DEFAULT_HOST_CPU
from arm_backend_core.targets.hardware import ETHOS_U_FAMILIES, HARDWARE, Hardware
from arm_backend_core.targets.target import Target

NPU = Hardware(
    unsupported=frozenset({"TANH"}),
    first_operand_types={"MAX_POOL2D": (DType.INT8,)},
    limits={"MATMUL": lambda op: "more than 4 columns" if op.inputs[1].shape[2] > 4 else None},
    is_ethos_u=True,
    macs=(32,),
    macs_per_write=32,
)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> TosaCompileSpec:
    """A compile spec for the new NPU whose output is TOSA."""
    monkeypatch.setitem(HARDWARE, "newcomer", NPU)
    spec = TosaCompileSpec("TOSA-1.0+INT+FP+int16")
    spec.target = Target("newcomer-32", frozenset({"INT", "FP"}), frozenset({"int16"}), "newcomer", macs=32)
    return spec


class _Layer(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.bmm(x, y))


@pytest.mark.parametrize(
    ("columns", "refused"),
    [
        (4, {"aten.tanh.default": "newcomer-32 has no TANH in hardware"}),
        (5, {"aten.tanh.default": "TANH in hardware", "aten.bmm.default": "MATMUL with more than 4 columns"}),
    ],
)
def test_hardware_entry_decides_what_is_delegated(npu: TosaCompileSpec, columns: int, refused: dict[str, str]) -> None:
    samples = torch.ones(2, 3, 3), torch.ones(2, 3, columns)
    program = torch.export.export(_Layer(columns).eval(), samples)
    with compilation_log.open_log() as log:
        delegate(program, npu)
    found = {refused.operator: refused.reason for refused in log.refused_operators}
    assert found.keys() == refused.keys()
    assert all(refused[operator] in reason for operator, reason in found.items())


def test_unknown_npu_family_is_refused() -> None:
    with pytest.raises(ValueError, match="family: there is no hardware 'ethos-u00'"):
        Target("ethos-u00-8", frozenset({"INT"}), frozenset(), "ethos-u00", macs=8)


def test_each_npu_family_has_macs_default_configurations_and_a_host_cpu() -> None:
    """A recipe without an entry for the host CPU would leave operators outside delegates in floating point."""
    assert set(DEFAULT_HOST_CPU) == set(ETHOS_U_FAMILIES)
    assert set(_DEFAULT_CONFIGS) == set(ETHOS_U_FAMILIES)
    assert all(HARDWARE[family].macs for family in ETHOS_U_FAMILIES)
