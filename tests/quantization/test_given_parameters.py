"""Quantized graphs keep their parameters (such as those of training), including ranges narrower than the type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.ops.runner import (
    Case,
    Input,
    check_steps,
    dequantize_rows,
    lower,
    output_scales,
    qdq,
    quantize_case,
)
from tests.ops.runner import export as exported

_IMAGE, _ROWS = Input((1, 4, 6, 6)), Input((6, 8))
OPERATORS: dict[str, tuple[Callable[..., Tensor], list[Input]]] = {
    "conv2d": (nn.Conv2d(4, 4, 3), [_IMAGE]),
    "relu merged": (nn.Sequential(nn.Linear(8, 8), nn.ReLU()), [_ROWS]),
    "add": (lambda x, y: x + y, [_ROWS, _ROWS]),
    "mul": (lambda x, y: x * y, [_ROWS, _ROWS]),
    "matmul": (lambda x, y: x @ y.t(), [_ROWS, _ROWS]),
    "table": (lambda x: torch.sigmoid(x) * x, [_ROWS]),
    "relu": (lambda x: F.relu(x), [_ROWS]),
    "scaled": (lambda x: x * 3.0, [_ROWS]),
    "mean": (lambda x: x.mean((2, 3)), [_IMAGE]),
    "softmax": (lambda x: torch.softmax(x, -1), [_ROWS]),
    "layer_norm": (nn.LayerNorm(8), [_ROWS]),
}


@pytest.mark.parametrize("int16", [False, True], ids=["int8", "int16"])
@pytest.mark.parametrize("name", OPERATORS)
def test_results_saturate_to_the_range_of_their_parameters(name: str, int16: bool) -> None:
    case = Case(name, *OPERATORS[name])
    module = quantize_case(case, int16=int16)
    assert isinstance(module, GraphModule)
    bound = 2000 if int16 else 12
    (dequantize,) = module.graph.output_node().all_input_nodes
    (quantize,) = dequantize.all_input_nodes
    zero_point = quantize.args[2]
    assert isinstance(zero_point, int)
    limits = max(zero_point - bound, -32768 if int16 else -128), zero_point + bound
    for node in (quantize, dequantize):
        node.args = (*node.args[:3], *limits, *node.args[5:])
    module.recompile()
    program = exported(module, case.sample())
    lowered = lower(program, "int")
    lowered.check_delegated()
    expected = module(*case.sample())
    (scale,) = output_scales(program)
    assert scale is not None
    assert float(expected.abs().max()) == pytest.approx(bound * scale)  # the bound is met
    (result,) = lowered.run(case.sample())
    assert float(result.abs().max()) <= bound * scale * 1.0001
    check_steps([result], [expected], [scale], 3 if int16 else 1)


_INTEGERS = torch.arange(-2, 2, dtype=torch.int8)
#: Partly quantized graphs, for targets with integers and floating point.
PARTLY_QUANTIZED: dict[str, tuple[Callable[..., Tensor], list[Input]]] = {
    "results in two scales": (
        lambda x: (lambda y: qdq(y) + qdq(y, 0.2) * 3)(qdq(x) * qdq(x, 0.3)),
        [_ROWS],
    ),
    "constant operand": (lambda x: torch.mm(qdq(x), dequantize_rows(_INTEGERS.repeat(8, 2))), [_ROWS]),
    "function of a constant": (
        lambda x: qdq(qdq(x) + qdq(torch.sigmoid(dequantize_rows(_INTEGERS)))),
        [Input((6, 4))],
    ),
    "rows of batch_norm": (
        lambda x: qdq(F.batch_norm(qdq(x), torch.zeros(8), torch.ones(8))),
        [_ROWS],
    ),
    "clamped integers": (lambda x: x.clamp(-3, 5), [Input((3, 4), -9, 9, torch.int8)]),
}


@pytest.mark.parametrize("name", PARTLY_QUANTIZED)
def test_partly_quantized_programs_equal_pytorch(name: str) -> None:
    case = Case(name, *PARTLY_QUANTIZED[name])
    lowered = lower(exported(case.module(), case.sample()), "mixed")
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run(case.sample())[0], case.module()(*case.sample()), rtol=1e-5, atol=1e-5)
