"""Delegation of ATen programs: partitions, dtypes at the boundary of a delegate, and faulty lowering rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch.export import ExportedProgram

from arm_backend_core import TosaCompileSpec, compilation_log
from arm_backend_core.delegate import delegate, prepare_program
from arm_backend_core.dtype import DType
from arm_backend_core.errors import InternalError
from arm_backend_core.nodes import REFUSAL_REASON
from arm_backend_core.ops import registry
from arm_backend_core.ops.catalog import aten_entries
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.program import copy_program
from arm_backend_core.selection import select_operators
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
FP = TosaCompileSpec("TOSA-1.0+FP")
FP_INT = TosaCompileSpec("TOSA-1.0+FP+INT")


class _FunctionModule(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.table = torch.nn.Embedding(100, 4)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


def _export_function(function: Callable[..., Any], *inputs: torch.Tensor) -> ExportedProgram:
    return torch.export.export(_FunctionModule(function).eval(), inputs)


def _on_cpu(program: ExportedProgram) -> list[str]:
    targets = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return [name for name in targets if name.startswith("aten.") and "_to_copy" not in name]


def _check(
    function: Callable[..., Any], *inputs: torch.Tensor, cpu: list[str], spec: TosaCompileSpec = FP
) -> ExportedProgram:
    """Run the delegated program on ``inputs``; the operators on the CPU must be ``cpu``."""
    program = _export_function(function, *inputs)
    delegated = delegate(program, spec)
    results, expected = delegated.module()(*inputs), program.module()(*inputs)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype is wanted.dtype
        torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-6)
    assert _on_cpu(delegated) == cpu
    return delegated


IDS = torch.tensor([[3, 5, 7]])


def test_an_int64_input_that_is_returned_keeps_its_type() -> None:
    _check(lambda m, i: (i, m.table(i)), IDS, cpu=[])


def test_int64_result_of_the_cpu_is_returned_and_read_by_a_delegate() -> None:
    def indices(m: Any, x: torch.Tensor) -> Any:
        best = torch.topk(torch.cat([x, torch.full((3, 640), -9.0)], 1), 6)[1]
        return best, m.table(best)

    _check(indices, torch.randn(3, 8), cpu=["aten.topk.default"])


def test_int64_products_that_int32_may_not_hold_stay_on_the_cpu() -> None:
    large = torch.tensor([100_000, 7])
    delegated = _check(lambda m, i: (i * i, m.table(i % 5) + 1), large, cpu=["aten.mul.Tensor"])
    (refused,) = (node for node in delegated.graph.nodes if node.target is aten.mul.Tensor)
    assert "may exceed int32" in refused.meta["custom"][REFUSAL_REASON]


def test_int64_padding_that_int32_does_not_hold_stays_on_the_cpu() -> None:
    _check(
        lambda m, i: (torch.nn.functional.pad(i, (0, 1), value=2**35) > 5, m.table(i)),
        IDS,
        cpu=["aten.pad.default", "aten.gt.Scalar"],
    )


def test_int64_values_beyond_int32_are_not_read_by_a_delegate() -> None:
    """A delegate would convert them at its boundary: 2**40 to 0. Indices, and operators on the low bits, are exempt."""

    def large(m: Any, i: torch.Tensor) -> Any:
        product = i * 2**33
        return product.to(torch.float32) * 2.0**-33, product.flip(0), product.to(torch.int32), m.table(product // 2**33)

    _check(
        large,
        torch.tensor([3, 5]),
        cpu=["aten.mul.Tensor", "aten.to.dtype", "aten.flip.default", "aten.floor_divide.default"],
    )


def test_int64_arithmetic_that_stays_small_is_delegated() -> None:
    _check(lambda m, x: ((x > 0).to(torch.int64) * 7 + 1, x + 1), torch.randn(4), cpu=[], spec=FP_INT)


@pytest.mark.parametrize(("dim", "cpu"), [(1, []), (-1, []), (0, ["aten.mul.Tensor"]), (None, ["aten.mul.Tensor"])])
def test_argmax_is_bounded_by_the_size_of_its_dimension(dim: int | None, cpu: list[str]) -> None:
    """31 * 2**25 fits int32; 64 * 2**25 does not."""
    _check(lambda m, x: (x.argmax(dim) * 2**25, x + 1), torch.randn(65, 32), cpu=cpu, spec=FP_INT)


def test_unbounded_float_to_int64_cast_is_not_saturated() -> None:
    _check(lambda m, x: (x.to(torch.int64), x + 1), torch.tensor([3e9, -5.5]), cpu=["aten.to.dtype"])


def test_clamped_float_to_int64_cast_is_delegated() -> None:
    def indices(m: Any, x: torch.Tensor) -> Any:
        places = (x * 10).clamp(0, 99).round().long()
        return m.table(places), places + 1, torch.nn.functional.one_hot(x.floor().clamp(min=-1.5, max=2).long() + 2, 5)

    _check(indices, torch.tensor([-3.0, 0.26, 5.0, 77.0]), cpu=[], spec=FP_INT)


def test_int64_inputs_are_assumed_to_have_31_bits() -> None:
    """2 * x + 1 fits int32 for each x of 31 bits; 2 * x - 2 does not."""
    _check(lambda m, i: ((i - 1).clamp(min=0), m.table(i + 1)), IDS, cpu=[], spec=FP_INT)
    _check(lambda m, i: (i * 2 + 1, i * 2 - 2), IDS, cpu=["aten.sub.Tensor"], spec=FP_INT)


def test_a_chain_of_delegates_and_cpu_operators() -> None:
    def chain(m: Any, x: torch.Tensor) -> Any:
        shared = torch.relu(x)
        for _ in range(5):
            x = torch.topk(torch.cat([x * 0.5 + shared] * 90, 1), 8)[0]
        return x, shared

    delegated = _check(chain, torch.randn(2, 8), cpu=["aten.topk.default"] * 5)
    modules = get_lowered_backend_modules(delegated.graph_module)
    assert len(modules) == 5
    inside = [node.name for module in modules for node in module.original_module.graph.nodes]
    assert any("relu" in name for name in inside), "tools look for the original nodes in a delegate"


def test_delegation_generates_no_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating the code of the program and of its delegates takes as long as compiling them, and nothing runs it."""

    def chain(m: Any, x: torch.Tensor) -> Any:
        for _ in range(4):
            x = torch.topk(torch.cat([x * 0.5] * 90, 1), 8)[0]
        return (x,)

    program = _export_function(chain, torch.randn(2, 8))
    calls: list[torch.fx.GraphModule] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.fx.GraphModule, "recompile", calls.append)
        lowered = delegate(program, FP)
    assert not calls
    assert len(get_lowered_backend_modules(lowered.graph_module)) == 4


def test_a_split_stays_on_the_cpu_with_one_of_its_results() -> None:
    def halves(m: Any, x: torch.Tensor) -> Any:
        left, right = torch.split(x, 2, 1)
        return left + 1, right * 2

    program = _export_function(halves, torch.randn(3, 4))
    picks = [node for node in program.graph.nodes if node.op == "call_function" and "getitem" in node.name]
    delegated = delegate(program, FP, keep_on_cpu=[lambda node: node.name == picks[1].name])
    x = torch.randn(3, 4)
    for result, wanted in zip(delegated.module()(x), program.module()(x), strict=True):
        torch.testing.assert_close(result, wanted)


def test_boundary_of_a_delegate_has_quantization_parameters() -> None:
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers quantized_decomposed)

    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default

    def quantized(m: Any, x: torch.Tensor) -> Any:
        def fake_quantize(y: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
            parameters = (scale, zero, -128, 127, torch.int8)
            return dequantize(quantize(y, *parameters), *parameters)

        return (fake_quantize(torch.sigmoid(fake_quantize(x, 0.5, 3)), 0.25, -7),)

    with compilation_log.open_log() as log:
        delegate(_export_function(quantized, torch.randn(2, 3)), TosaCompileSpec())
    (made,) = log.delegates
    assert [(io.scale, io.zero_point) for io in (*made.inputs, *made.outputs)] == [(0.5, 3), (0.25, -7)]


def _program_with_rule(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any]) -> ExportedProgram:
    monkeypatch.setattr(aten_entries()[aten.cos.default], "lower", rule)
    return _export_function(lambda m, x: (torch.cos(x), x + 1), torch.randn(3))


def _raises(cx: Context, x: Operand) -> Value:
    raise IndexError("no such axis")


def _wrong_type(cx: Context, x: Operand) -> Value:
    return cx.b.cast(x.value, DType.INT32)


def _wrong_shape(cx: Context, x: Operand) -> Value:
    return cx.b.reshape(x.value, (3, 1))


def _wrong_number(cx: Context, x: Operand) -> list[Value]:
    return [x.value, x.value]


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (_raises, "lowering aten.cos.default raised IndexError in test_delegate.py"),
        (_wrong_type, "int32[3] in place of torch.float32[3]"),
        (_wrong_shape, "fp32[3, 1] in place of torch.float32[3]"),
        (_wrong_number, "2 results in place of 1"),
    ],
)
def test_a_rule_that_fails_is_a_refusal_that_blames_the_compiler(
    monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any], what: str
) -> None:
    program = _program_with_rule(monkeypatch, rule)
    with pytest.raises(InternalError) as strict:
        delegate(program, FP)
    assert what in str(strict.value)
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")
    with compilation_log.open_log() as log:
        delegated = delegate(program, FP)
    (refused,) = log.refused_operators
    assert refused.fault
    assert refused.operator == "aten.cos.default"
    assert "test_delegate.py" in refused.source
    assert "fault of this compiler" in refused.reason
    assert what in refused.reason
    assert _on_cpu(delegated) == ["aten.cos.default"]


def _replace_decomposition(
    monkeypatch: pytest.MonkeyPatch, overload: torch._ops.OpOverload, decompose: Callable[..., Any]
) -> None:
    known = aten_entries()[overload]
    assert isinstance(known, registry.Composite)
    monkeypatch.setitem(registry._RECORDS, overload, dataclasses.replace(known, decompose=decompose))


def _refuse_as_compiler_fault(
    monkeypatch: pytest.MonkeyPatch, program: ExportedProgram, reason: str
) -> compilation_log.RefusedOperator:
    """Check that ``reason`` is an error in strict mode, otherwise a refusal. Returns the refusal."""
    with pytest.raises(InternalError, match=reason):
        delegate(program, FP)
    monkeypatch.delenv("ARM_BACKEND_CORE_STRICT")
    with compilation_log.open_log() as log:
        delegate(program, FP)
    (refused,) = log.refused_operators
    assert refused.fault
    assert reason in refused.reason
    return refused


def _raise_in_decomposition(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("no such operand")


@pytest.mark.parametrize("overload", [aten.hypot.default, aten.lstm.input], ids=str)
def test_a_decomposition_that_fails_is_a_refusal_that_blames_the_compiler(
    monkeypatch: pytest.MonkeyPatch, overload: torch._ops.OpOverload
) -> None:
    _replace_decomposition(monkeypatch, overload, _raise_in_decomposition)
    layer = torch.nn.LSTM(3, 2)
    call: Any = (lambda m, x: layer(x)[0]) if overload is aten.lstm.input else (lambda m, x: torch.hypot(x, x))
    program = _export_function(call, torch.randn(2, 1, 3))
    _refuse_as_compiler_fault(monkeypatch, program, f"decomposing {overload} raised TypeError: no such operand")


def _write_into_operand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.copy_(y)


def test_a_decomposition_that_writes_into_an_operand_is_a_refusal_that_blames_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _replace_decomposition(monkeypatch, aten.hypot.default, _write_into_operand)
    program = _export_function(lambda m, x: torch.hypot(x, x + 1), torch.randn(3))
    reason = "aten.hypot.default decomposes into writes to shared memory"
    refused = _refuse_as_compiler_fault(monkeypatch, program, reason)
    assert refused.operator == "aten.hypot.default"


def test_splits_of_a_constant_are_constants() -> None:
    weight = torch.randn(6, 4)

    def split_weight(m: Any, x: torch.Tensor) -> Any:
        first, second = weight.split(3)
        return torch.nn.functional.linear(x, first), torch.nn.functional.linear(x, second)

    _check(split_weight, torch.randn(2, 4), cpu=[])


@pytest.mark.parametrize("bounds", [{"min": 1}, {"max": 3}, {"min": 1, "max": 3}])
def test_clamp_with_one_bound_keeps_the_interval_of_its_operand(bounds: dict[str, int]) -> None:
    tokens = torch.tensor([[0, 1, 0, 2], [0, 0, 0, 0], [3, 3, 3, 3]], dtype=torch.int32)
    _check(lambda m, i: ((i != 0).sum(1).clamp(**bounds),), tokens, cpu=[], spec=TosaCompileSpec("TOSA-1.0+INT"))


def test_refusal_of_a_constant_that_no_delegate_reads_says_so() -> None:
    weight = torch.randn(4)
    delegated = _check(lambda m, x: (weight * 2, x + 1), torch.randn(4), cpu=["aten.clone.default"])
    (node,) = (node for node in delegated.graph.nodes if node.target is aten.clone.default)
    assert "constant" in node.meta["custom"][REFUSAL_REASON]


def test_a_shape_that_depends_on_data_is_refused() -> None:
    program = _export_function(lambda m, x: (x[x > 0] * 2, x + 1), torch.randn(4))
    with compilation_log.open_log() as log:
        delegate(program, FP)
    refused = {refused.operator: refused for refused in log.refused_operators}
    assert "not known before the program runs" in refused["aten.mul.Tensor"].reason
    assert not any(refused.fault for refused in log.refused_operators)


def test_inputs_of_a_delegate_keep_the_programs_order() -> None:
    with compilation_log.open_log() as log:
        _check(lambda m, x, y: (torch.relu(y) * 2 + x,), torch.randn(3), torch.randn(3), cpu=[])
    (made,) = log.delegates
    assert [io.name for io in made.inputs] == ["args_0", "args_1"]


def test_partitions_do_not_change_the_graph_and_contain_shared_constant_expressions() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        table = m.table.weight * 2
        return torch.relu(x @ table.t()) @ table

    program = prepare_program(_export_function(function, torch.randn(3, 4)), FP.target)
    selection = select_operators(program, FP.target, [lambda node: node.target is aten.relu.default])
    nodes = list(program.graph.nodes)
    first, second = selection.partitions(), selection.partitions()
    assert first == second
    assert list(program.graph.nodes) == nodes
    products = [node.target for part in first for node in part.nodes if node.target is aten.mul.Tensor]
    assert (len(first), len(products)) == (2, 2)


def test_a_copied_program_has_its_own_signature() -> None:
    program = torch.export.export(torch.nn.Linear(4, 4), (torch.randn(1, 4),))
    copied = copy_program(program)
    for spec in (*copied.graph_signature.input_specs, *copied.graph_signature.output_specs):
        spec.target, spec.arg.name = "changed", "changed"
    names = {spec.arg.name for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs)}
    assert "changed" not in names
    assert [spec.target for spec in program.graph_signature.input_specs] == ["weight", "bias", None]
