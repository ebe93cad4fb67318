"""Every operator on every target: one runner, a row of ``cases`` each."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float(case: Case) -> None:
    inputs = case.sample()
    lowered = runner.lower(runner.export(case.module(), inputs), "fp")
    if _delegated(case, lowered, "fp"):
        runner.check_close(case, lowered.run(inputs), runner.flat(case.module()(*inputs)))
        runner.validate(lowered.log.delegates[0].tosa, "FP")


@pytest.mark.parametrize("wide", [False, True], ids=["int8", "a16w8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quantized(case: Case, wide: bool) -> None:
    inputs = case.sample()
    module = runner.quantized(case, wide=wide)
    program = runner.export(module, inputs)
    lowered = runner.lower(program, "int")
    if _delegated(case, lowered, "a16w8" if wide else "int8"):
        runner.check_steps(
            case, lowered.run(inputs), runner.flat(module(*inputs)), runner.output_scales(program)
        )
        runner.validate(lowered.log.delegates[0].tosa, "INT")
    if not wide:
        for target in ("u55", "u85"):
            _delegated(case, runner.lower(program, target), target)
