"""What lowering computes as one: functions of one tensor."""

from __future__ import annotations

import torch

from tests.ops.runner import Case, Input, check_steps, lower, output_scales, quantized
from tests.ops.runner import export as exported


def test_a_long_chain_of_functions_is_one_table() -> None:
    """500 functions, one after the other, are more than Python's stack holds calls of."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for index in range(250):
            x = torch.sin(x) if index % 2 else x * 1.5
            x = x + 0.01
        return x

    case = Case("chain", chain, (Input((8, 8)),))
    module = quantized(case, wide=False)
    program = exported(module, case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    check_steps(lowered.run(case.sample()), [module(*case.sample())], output_scales(program), 1)
    (delegate,) = lowered.log.delegates
    assert delegate.tosa_operators == ("TABLE",)
