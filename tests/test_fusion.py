"""What is computed as one: functions of one tensor, and what merges into a rescale."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from arm_backend_core.fusion.plan import FusionPlan
from arm_backend_core.nodes import constant_nodes
from arm_backend_core.ops.catalog import find_record
from tests.ops.runner import Case, Input, check_steps, lower, output_scales, quantize_case
from tests.ops.runner import export as exported
from tests.sqnr import sqnr


def _lower_to_one_delegate(case: Case) -> tuple[str, ...]:
    """Quantize to int8 and compare with the quantized graph; return the TOSA operators of the delegate."""
    module = quantize_case(case, int16=False)
    program = exported(module, case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    expected = module(*case.sample())
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    check_steps(lowered.run(case.sample()), expected, output_scales(program), 1)
    (delegate,) = lowered.log.delegates
    return delegate.tosa_operators


def test_a_long_chain_of_functions_is_one_table() -> None:
    """500 functions, one after the other, are more than Python's stack holds calls of."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for index in range(250):
            x = torch.sin(x) if index % 2 else x * 1.5
            x = x + 0.01
        return x

    case = Case("chain", chain, (Input((8, 8)),))
    operators = _lower_to_one_delegate(case)
    assert operators == ("TABLE",)


class _Block(torch.nn.Module):
    """A convolution with what merges into it, a function of one tensor in several steps, and what is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        halved = self.conv(x) * 0.5
        swish = halved * torch.sigmoid(halved) + 1.0
        kept = torch.tanh(x)
        return torch.relu(swish + x), torch.exp(kept) - kept * 2.0, kept


def test_plan_of_a_graph() -> None:
    program = exported(_Block(), (torch.randn(1, 4, 5, 5),))
    graph = program.module(check_guards=False).graph
    records = {node: record for node in graph.nodes if (record := find_record(node)) is not None}
    plan = FusionPlan(records, constant_nodes(graph), lambda node: False, lambda node: False)
    assert {a.name: b.name for a, b in plan.merged_into.items()} == {"conv2d": "mul", "add_1": "relu"}
    # swish's steps but the last; tanh is an output, so what is computed of it starts anew.
    assert {node.name for node in plan.fused} == {"conv2d", "sigmoid", "mul_1", "add_1", "exp", "mul_2"}
    origins = {node.name: base.name for node, base in plan.chain_base.items()}
    assert origins == {
        **dict.fromkeys(("sigmoid", "mul_1", "add"), "mul"),
        "tanh": "x",
        **dict.fromkeys(("exp", "mul_2", "sub"), "tanh"),
    }
    chains = [[node.name for node in functions] for functions in plan.fused_chains()]
    assert chains == [["sigmoid", "mul_1", "add"], ["exp", "mul_2", "sub"]]  # a single function needs no plan


def test_the_lowering_fuses_what_the_quantizer_planned() -> None:
    """Nothing but the ends of fused groups is quantized, and each group is one operator or two."""
    case = Case("block", _Block(), (Input((1, 4, 5, 5)),))
    operators = _lower_to_one_delegate(case)
    assert operators.count("TABLE") == 3
    assert "MUL" not in operators
    assert "CLAMP" not in operators


def test_a_mask_that_hides_nothing_is_not_added() -> None:
    case = Case("masked", lambda x: x @ x.mT + torch.zeros(4, 4), (Input((2, 4, 8)),))
    operators = _lower_to_one_delegate(case)
    assert "MATMUL" in operators
    assert "ADD" not in operators


@pytest.mark.parametrize(
    ("waves", "least"),
    [
        (lambda x: torch.relu(torch.sin(x * 150)), 45),
        (lambda x: x * torch.cos(x * 150), 45),
        (lambda x: torch.sin(x * 150) + torch.relu(torch.sin(x * 150)), 45),  # another's operand is a function of it
        (lambda x: (lambda wave: wave + torch.relu(wave))(torch.sin(x * 150)), 45),
        (lambda x: x**2 + torch.sin(x * 150), 45),
        (lambda x: torch.cos(x * 150) / (2 + x), 45),
        (lambda x: 1 - torch.cos(x * 0.05), 70),  # of few turns, which an int16 result between would round away
        # What a function merges with its reader has no parameters of its own: one TABLE, whose lines miss it.
        (lambda x: torch.exp(x * torch.relu(torch.sin(x * 150))), 10),
    ],
)
def test_waves_of_int16_are_tables_of_their_own(waves: Callable[[torch.Tensor], torch.Tensor], least: float) -> None:
    """Lines between 513 points miss functions of waves of many turns, which the wave itself has exact points for."""
    case = Case("waves", waves, (Input((8, 64), -1, 1),))
    module = quantize_case(case, int16=True)
    program = exported(module, case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    (found,) = lowered.run(case.sample())
    assert sqnr(waves(*case.sample()), found) > least
