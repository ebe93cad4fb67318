"""Fusion: chains of functions of one tensor become one TABLE; operators merge into a RESCALE."""

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
    """A recursive walk over 500 functions would exceed Python's recursion limit."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for index in range(250):
            x = torch.sin(x) if index % 2 else x * 1.5
            x = x + 0.01
        return x

    case = Case("chain", chain, (Input((8, 8)),))
    operators = _lower_to_one_delegate(case)
    assert operators == ("TABLE",)


class _Block(torch.nn.Module):
    """A convolution that absorbs a scale, two chains of functions of one tensor, and a sum of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        halved = self.conv(x) * 0.5
        swish = halved * torch.sigmoid(halved) + 1.0
        kept = torch.tanh(x)
        return torch.relu(swish + x), torch.exp(kept) - kept * 2.0, kept


def test_fusion_plan_of_a_graph() -> None:
    program = exported(_Block(), (torch.randn(1, 4, 5, 5),))
    graph = program.module(check_guards=False).graph
    records = {node: record for node in graph.nodes if (record := find_record(node)) is not None}
    plan = FusionPlan(records, constant_nodes(graph), lambda node: False, lambda node: False)
    assert {a.name: b.name for a, b in plan.fused_consumer_of.items()} == {"conv2d": "mul", "add_1": "relu"}
    # All operators of swish except the last. tanh is an output, so its readers start a new chain.
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
    """Only the ends of fused groups are quantized, and each group is one or two operators."""
    case = Case("block", _Block(), (Input((1, 4, 5, 5)),))
    operators = _lower_to_one_delegate(case)
    assert operators.count("TABLE") == 3
    assert "MUL" not in operators
    assert "CLAMP" not in operators


def test_a_mask_of_zeros_is_not_added() -> None:
    case = Case("masked", lambda x: x @ x.mT + torch.zeros(4, 4), (Input((2, 4, 8)),))
    operators = _lower_to_one_delegate(case)
    assert "MATMUL" in operators
    assert "ADD" not in operators


@pytest.mark.parametrize(
    "function",
    [
        # Not quantized between division and product: one function of x that oscillates.
        lambda x: 1e-4 * (torch.cos(x) + 2) / (1 / (x.abs() + 0.1)),
        # Quantized: int16 has the reciprocals, which span 1e-3 to 10, with a few steps for |x| around 1000.
        lambda x: (torch.cos(x) + 2) / (1 / (x.abs() + 0.1)),
        lambda x: torch.exp(-x.abs() / 500) * torch.sin(x) / torch.exp(-x / 500),
    ],
)
def test_an_oscillating_function_is_as_exact_as_the_quantized_graph(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Interpolation in one TABLE is thousands of steps off: 513 entries for 318 periods."""
    case = Case("oscillates", function, (Input((8, 64), -1000, 1000),))
    program = exported(quantize_case(case, int16=True), case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    expected = [program.module(check_guards=False)(*case.sample())]
    check_steps(lowered.run(case.sample()), expected, output_scales(program), 2)


@pytest.mark.parametrize(
    ("function", "min_sqnr"),
    [
        (lambda x: torch.relu(torch.sin(x * 150)), 45),
        (lambda x: x * torch.cos(x * 150), 45),
        (lambda x: torch.sin(x * 150) + torch.relu(torch.sin(x * 150)), 45),  # the sum has one variable
        (lambda x: (lambda wave: wave + torch.relu(wave))(torch.sin(x * 150)), 45),
        (lambda x: x**2 + torch.sin(x * 150), 45),
        (lambda x: torch.cos(x * 150) / (2 + x), 45),
        (lambda x: 1 - torch.cos(x * 0.05), 70),  # less than one period, which an int16 cosine would round away
        # The product merges with exp, without quantization parameters: interpolation in one TABLE misses the sine.
        (lambda x: torch.exp(x * torch.relu(torch.sin(x * 150))), 10),
    ],
)
def test_int16_sine_and_cosine_are_separate_tables(
    function: Callable[[torch.Tensor], torch.Tensor], min_sqnr: float
) -> None:
    """Interpolation between 513 points misses a function of a sine of many periods; a TABLE of the sine is exact."""
    case = Case("waves", function, (Input((8, 64), -1, 1),))
    module = quantize_case(case, int16=True)
    program = exported(module, case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    (found,) = lowered.run(case.sample())
    assert sqnr(function(*case.sample()), found) > min_sqnr
