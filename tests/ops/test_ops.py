"""Every operator on every target: one runner, a row of ``cases`` each."""

from __future__ import annotations

import pytest
import torch

from arm_backend_core import TosaCompileSpec, events
from arm_backend_core.delegate import delegate
from tests.graphs import validate
from tests.ops import runner
from tests.ops.cases import CASES
from tests.ops.runner import Case, Lowered


def _delegated(case: Case, lowered: Lowered, target: str) -> bool:
    """False where the row expects the target to refuse, which is checked."""
    if target in case.refused:
        lowered.check_refused(case.refused[target])
        return False
    lowered.check_delegated()
    return True


def _rows(*profiles: str) -> list[object]:
    return [
        pytest.param(case, *rest, id="-".join([case.name, *rest]))
        for case in CASES
        for profile in profiles
        if profile in case.profiles
        for rest in ([profile] if len(profiles) > 1 else [],)
    ]


@pytest.mark.parametrize("case", _rows("fp"))
def test_float(case: Case) -> None:
    inputs = case.sample()
    lowered = runner.lower(runner.export(case.module(), inputs), "fp")
    if _delegated(case, lowered, "fp"):
        runner.check_close(case, lowered.run(inputs), runner.flat(case.module()(*inputs)))
        validate(lowered.log.delegates[0].tosa, "TOSA-1.0+FP")


@pytest.mark.parametrize(("case", "profile"), _rows("int8", "a16w8"))
def test_quantized(case: Case, profile: str) -> None:
    inputs = case.sample()
    module = runner.quantized(case, wide=profile == "a16w8")
    program = runner.export(module, inputs)
    lowered = runner.lower(program, "int")
    if _delegated(case, lowered, profile):
        expected, scales = runner.flat(module(*inputs)), runner.output_scales(program)
        error: torch.Tensor | float = 0.0
        if case.tabulated and profile == "a16w8" and scales[0] is not None:
            error = runner.interpolation_error(case, program, inputs[0], scales[0])
        steps = case.wide_steps if profile == "a16w8" else case.steps
        runner.check_steps(lowered.run(inputs), expected, scales, steps, error)
        validate(lowered.log.delegates[0].tosa, "TOSA-1.0+INT+int16+int4+doubleround+inexactround")
    if profile == "int8":
        for target in ("u55", "u85"):
            _delegated(case, runner.lower(program, target), target)


def test_bf16_matrix_product() -> None:
    """TOSA sums it in FP32; the result is cast back."""
    inputs = (torch.randn(2, 3).bfloat16(), torch.randn(3, 4).bfloat16())
    program = runner.export(Case("mm", torch.mm, ()).module(), inputs)
    with events.record() as log:
        delegate(program, TosaCompileSpec("TOSA-1.0+FP+bf16"))
    assert not log.rejected
    validate(log.delegates[0].tosa, "TOSA-1.0+FP+bf16")
