"""Refusals of operators: the reasons, and what users can do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arm_backend_core import compilation_log
from arm_backend_core.delegate import delegate
from arm_backend_core.errors import CompileError, FullDelegationError, ModelError
from arm_backend_core.ops.catalog import aten_entries
from arm_backend_core.ops.registry import op
from arm_backend_core.selection import select_operators
from tests.ops import runner
from tests.ops.runner import Case, Input, dequantize_rows, qdq

X = Input((1, 4, 8, 8))


def _reasons(program: torch.export.ExportedProgram, target: str) -> str:
    return "\n".join(f"{r.operator}: {r.reason}" for r in runner.lower(program, target).log.refused_operators)


_FLOAT: dict[str, tuple[Callable[..., Any], Sequence[Input], str]] = {
    "index_add_scalar": (
        lambda x, y: torch.index_add(x, 0, torch.tensor([0]), y),
        [Input(()), Input(())],
        "index_add on a scalar; add the number",
    ),
    "grid_sample_bicubic": (
        lambda x, g: F.grid_sample(x, g, "bicubic", align_corners=False),
        [X, Input((1, 2, 2, 2))],
        "grid_sample with bicubic interpolation; use bilinear",
    ),
    "scatter_reduce_integers": (
        lambda x, i: x.scatter_reduce(0, i, x, "amax"),
        [Input((3,), 0, 9, torch.int32), Input((3,), 0, 3, torch.int64)],
        "scatter_reduce 'amax'",
    ),
    "scatter_scalar": (
        lambda x: x.scatter(0, torch.tensor(0), 2.0),
        [Input(())],
        "scatter into a scalar; write it with torch.where",
    ),
    "index_put_of_rows_by_mask": (
        lambda x, y: x.index_put((x[:, 0] > -9,), y),
        [Input((2, 8)), Input((2, 8))],
        "index_put of several values by a mask of some dimensions; write it with torch.where",
    ),
    "index_put_by_an_index_and_a_mask": (
        lambda x: x.index_put((torch.tensor([1]), torch.tensor([True, False, True, False])), torch.tensor(5.0)),
        [Input((3, 4))],
        "index_put of several values by a mask of some dimensions; write it with torch.where",
    ),
    "empty_tensor": (
        lambda x: torch.relu(x[:, :0]),
        [X],
        "TOSA has no tensors without elements",
    ),
    "power_of_integers": (
        torch.pow,
        [Input((3,), 1, 4, torch.int32)] * 2,
        "TOSA has no power of integers; convert them with .to(torch.float32)",
    ),
    "large_int64": (
        lambda x: x < torch.tensor([2**40]),
        [Input((3,), 0, 9, torch.int64)],
        "int64 constant 'lift_fresh_copy' has values that int32 cannot hold",
    ),
    "rrelu_training": (
        lambda x: F.rrelu(x, training=True),
        [X],
        "rrelu in training mode; call model.eval() before exporting",
    ),
    "recurrent_dropout_training": (
        nn.LSTM(5, 4, 2, dropout=0.5).forward,
        [Input((3, 2, 5))],
        "dropout between the layers in training mode; call model.eval() before exporting",
    ),
    "dropout_training": (
        lambda x: torch.ops.aten.dropout(x, 0.5, True),
        [X],
        "dropout in training mode; call model.eval() before exporting",
    ),
    "random_numbers": (
        lambda x: x[torch.randint(0, 4, (2,))],
        [Input((4, 3))],
        "aten.randint.low: it draws random numbers, which no target does; give them as an input",
    ),
    "float64": (lambda x: x * 2, [Input((3,), dtype=torch.float64)], "TOSA has no element type for torch.float64"),
    "complex": (
        lambda x: torch.acosh(torch.fft.fft(x)).real,
        [Input((8,))],
        "TOSA has no complex numbers",
    ),
    "gamma": (torch.lgamma, [Input((8,), 1, 2)], "TOSA has no floating-point formula for aten.lgamma.default"),
    "variance_of_one": (lambda x: x.var(1), [Input((3, 1))], "variance of 1 element with a correction of 1"),
}


@pytest.mark.parametrize("name", _FLOAT)
def test_float_refusals(name: str) -> None:
    function, inputs, reason = _FLOAT[name]
    case = Case(name, function, inputs)
    assert reason in _reasons(runner.export(case.module(), case.sample()), "fp")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().as_strided((2, 2), (1, 1), 0),
        lambda x: x[1].as_strided((2, 2), (1, 2), 0),
        lambda x: torch.as_strided_scatter(x[1], x[0, :1], (1,), (1,), 0),
    ],
)
def test_as_strided_beyond_a_view_is_refused(function: Callable[..., Any]) -> None:
    """On the CPU, as_strided would read a copy of the view, and thus other values."""
    case = Case("view", function, [Input((4, 6))])
    program = runner.export(case.module(), case.sample())
    with pytest.raises(ModelError, match=r"aten.as_strided.* \('as_strided.*', .* index the larger tensor instead"):
        runner.lower(program, "fp")


#: Quantized rows, for targets that run integers only.
_INTEGER: dict[str, tuple[Callable[..., Any], Sequence[Input], str, str]] = {
    "gather": (
        nn.Embedding(6000, 4),
        [Input((3,), 0, 8, torch.int32)],
        "u55",
        "ethos-u55-128 has no GATHER in hardware",
    ),
    "gather_of_many_runs": (
        lambda x: x[torch.arange(2000) * 7 % 2003],
        [Input((2003,))],
        "u55",
        "2000 runs of elements (at most 1024 without GATHER); leave it to the CPU",
    ),
    "shift": (
        lambda x, y: torch.bitwise_and(x, y),
        [Input((3,), 0, 9, torch.int32)] * 2,
        "u55",
        "has no BITWISE_AND in hardware",
    ),
    "nan": (
        lambda x, y: torch.where(x < y, x, math.nan),
        [Input((3, 4), -2, -1), Input((3, 4), 1, 2)],
        "int",
        "is not a number (nan)",
    ),
    "alpha_zero": (lambda x, y: torch.add(x, y, alpha=0), [Input((3, 4))] * 2, "int", "alpha=0"),
}


@pytest.mark.parametrize("name", _INTEGER)
def test_integer_refusals(name: str) -> None:
    function, inputs, target, reason = _INTEGER[name]
    case = Case(name, function, inputs)
    assert reason in _reasons(runner.export(runner.quantize_case(case, int16=False), case.sample()), target)


_ROWS, _PIXELS = Input((2, 4)), Input((4, 3))
_BYTES = Input((2, 4), -100, 100, torch.int8)
#: Quantized graphs with combinations of parameters that this project's quantizers do not write.
_QUANTIZED_GRAPHS: dict[str, tuple[Callable[..., Any], Sequence[Input], str]] = {
    "conv_weight": (
        lambda x: qdq(F.conv2d(qdq(x), torch.ones(2, 4, 3, 3))),
        [X],
        "aten.conv2d.default: its input is quantized but its weight is not",
    ),
    "conv_transpose_axis": (
        lambda x: qdq(F.conv_transpose2d(qdq(x), dequantize_rows(torch.ones(4, 2, 3, 3, dtype=torch.int8)))),
        [X],
        "transposed convolution whose weight is not quantized along its output channels (axis 1)",
    ),
    "linear_weight": (
        lambda x: qdq(F.linear(qdq(x), torch.ones(3, 4))),
        [_ROWS],
        "aten.linear.default: its input is quantized but its weight is not",
    ),
    "matmul_with_one_quantized_operand": (
        lambda x, y: qdq(torch.mm(qdq(x), y)),
        [_ROWS, _PIXELS],
        "one of its operands is quantized and the other is not; annotate both (set_global)",
    ),
    "matmul_of_int8_and_int16": (
        lambda x, y: qdq(torch.mm(qdq(x), qdq(y, int16=True))),
        [_ROWS, _PIXELS],
        "matrix product of an int8 and an int16 operand",
    ),
    "linear_of_too_many_products": (
        lambda x: qdq(F.linear(qdq(x), dequantize_rows(torch.full((1, 140000), 127, dtype=torch.int8)))),
        [Input((1, 140000))],
        "a sum of 140000 products, which may exceed int32; split the channels",
    ),
    "matmul_of_too_many_products": (
        lambda x, y: qdq(torch.mm(qdq(x), qdq(y))),
        [Input((1, 140000)), Input((140000, 1))],
        "a matrix product over 140000 elements, which may exceed int32; split it",
    ),
    "cat_with_one_quantized_operand": (
        lambda x, y: qdq(torch.cat((qdq(x), y))),
        [_ROWS, _ROWS],
        "some of its operands are quantized and others are not",
    ),
    "add_with_one_quantized_operand": (
        lambda x, y: qdq(qdq(x) + y),
        [_ROWS, _ROWS],
        "aten.add.Tensor: one of its operands is quantized and the other is not; annotate both (set_global)",
    ),
    "add_with_int32": (
        lambda x, y: qdq(qdq(x) + y),
        [_ROWS, Input((2, 4), 0, 9, torch.int32)],
        "an int32 operand beside a quantized one; convert it with .to(torch.float32)",
    ),
    "add_per_channel": (
        lambda x, y: qdq(qdq(x) + dequantize_rows(y)),
        [_ROWS, _BYTES],
        "an operand has per-channel scales, which only weights can have; quantize it per tensor",
    ),
    "comparison_with_nan": (
        lambda x: qdq(x) > math.nan,
        [_ROWS],
        "one of its operands is NaN, which integers cannot represent",
    ),
    "function_read_unquantized": (
        lambda x, y: qdq(torch.sigmoid(qdq(x)) + qdq(y)),
        [_ROWS, _ROWS],
        "one of its operands is quantized and the other is not; annotate both",
    ),
}


@pytest.mark.parametrize("name", _QUANTIZED_GRAPHS)
def test_refusals_of_quantized_graphs(name: str) -> None:
    function, inputs, reason = _QUANTIZED_GRAPHS[name]
    case = Case(name, function, inputs)
    program = runner.export(case.module(), case.sample())
    lowered = runner.lower(program, "mixed")
    assert reason in "\n".join(f"{r.operator}: {r.reason}" for r in lowered.log.refused_operators)
    expected = runner.flatten_tensors(case.module()(*case.sample()))
    for ours, theirs in zip(lowered.run(case.sample()), expected, strict=True):  # the other operators are correct
        torch.testing.assert_close(ours, theirs)


def _computed_scale(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    zero_point = torch.tensor(0)
    quantized: torch.Tensor = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor(
        x, scale.abs(), zero_point, -128, 127, torch.int8
    )
    return quantized


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda x: dequantize_rows(x, 1), [_BYTES], "per-channel parameters with a zero point other than 0"),
        (_computed_scale, [_BYTES, Input(())], "quantization parameters are computed while the program runs"),
    ],
)
def test_refusals_of_boundary_operators(function: Callable[..., Any], inputs: Sequence[Input], reason: str) -> None:
    """The report lists no boundary operators, so that the reason is read from the selection."""
    case = Case("boundary", function, inputs)
    program = runner.export(case.module(), case.sample())
    refusals = select_operators(program, runner.make_compile_spec("int").target, []).refusals
    assert any(reason in refusal.reason for refusal in refusals.values()), refusals


@pytest.mark.parametrize("target", ["int", "u55", "u85"])
def test_integer_targets_refuse_unquantized_operators(target: str) -> None:
    case = Case("relu", F.relu, [Input((2, 3))])
    reasons = _reasons(runner.export(case.module(), case.sample()), target)
    assert "it is not quantized" in reasons
    assert f"{runner.make_compile_spec(target).target.name} runs integers only" in reasons


def test_dynamic_shapes_are_refused() -> None:
    batch = {0: torch.export.Dim("batch", min=2, max=8)}
    program = torch.export.export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),), dynamic_shapes=(batch,))
    reasons = _reasons(program, "fp")
    assert "which is not known before the program runs" in reasons
    assert "export without dynamic_shapes" in reasons


def test_keep_on_cpu_is_a_reason() -> None:
    program = runner.export(nn.Linear(4, 3).eval(), (torch.randn(2, 4),))
    with compilation_log.open_log() as log:
        delegate(program, runner.make_compile_spec("fp"), keep_on_cpu=[lambda node: "linear" in node.name])
    assert [r.reason for r in log.refused_operators] == ["kept on the CPU as asked"]


def test_an_exception_of_a_pass_names_the_delegate(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")
    monkeypatch.setattr("arm_backend_core.tosa.passes.pipeline.run", broken)
    program = runner.export(Case("relu", F.relu, ()).module(), (torch.rand(3),))
    with pytest.raises(CompileError, match="optimizing delegate 'arm_0' raised ValueError: broken"):
        delegate(program, runner.make_compile_spec("fp"))


@pytest.mark.parametrize(
    ("overload", "error", "words"),
    [
        (torch.ops.aten.add, TypeError, "register an overload such as aten.add.Tensor"),
        (torch.ops.aten.add.Tensor, ValueError, "aten.add.Tensor is registered twice"),
    ],
)
def test_op_refuses_overload_packets_and_registered_overloads(
    overload: Any, error: type[Exception], words: str
) -> None:
    before = dict(aten_entries())
    with pytest.raises(error, match=words):
        op(overload)(lambda cx, x, y: x.value)
    assert dict(aten_entries()) == before


def test_require_full_delegation_raises_with_the_reason() -> None:
    program = runner.export(Case("gamma", torch.lgamma, ()).module(), (torch.rand(3),))
    with pytest.raises(FullDelegationError, match=r"1 operator cannot run on TOSA-1.0\+FP:\n.*no floating-point"):
        delegate(program, runner.make_compile_spec("fp"), require_full_delegation=True)
