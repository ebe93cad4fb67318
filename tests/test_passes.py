"""Passes that convert int64 values to int32: operators of each converted graph, and equal results."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from arm_backend_core import TosaCompileSpec, TOSAPartitioner, TOSAQuantizer, get_symmetric_quantization_config
from arm_recipes.passes import (
    ConvertInt64ConstOpsToInt32Pass,
    ConvertInt64OutputOpsToInt32Pass,
    InsertInt32CastsAfterInt64PlaceholdersPass,
    ToDevicePass,
)

CONST, OUTPUT, INSERT = (
    ConvertInt64ConstOpsToInt32Pass,
    ConvertInt64OutputOpsToInt32Pass,
    InsertInt32CastsAfterInt64PlaceholdersPass,
)
Body = Callable[..., Any]
Make = Callable[[], Callable[[GraphModule], PassResult]]


class Net(nn.Module):
    """A function as a module, with a table to look up in."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.table = nn.Parameter(torch.randn(12, 3))
        self.offset: Tensor
        self.register_buffer("offset", torch.tensor([3, 1, 2]))

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)


def _graph(body: Body, inputs: tuple[Tensor, ...]) -> GraphModule:
    module: Any = torch.export.export(Net(body).eval(), inputs).module(check_guards=False)
    return module


def _name(target: Any) -> str:
    """Name of an operator without namespace and overload; edge operators have their names in ATen."""
    if target is operator.getitem:
        return "getitem"
    name = (target._op if isinstance(target, EdgeOpOverload) else target)._schema.name.split("::")[1]
    if name in ("to", "_to_copy", "_to_dim_order_copy"):
        return "cast"
    return name.removesuffix("_copy") if isinstance(target, EdgeOpOverload) else name


def _operators(module: GraphModule) -> list[str]:
    """Operators with their result dtypes, such as ``add int32``, without guards and dead nodes."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.users:
            values = pytree.tree_leaves(node.meta["val"])
            found.append(" ".join([_name(node.target), *(str(x.dtype).removeprefix("torch.") for x in values)]))
    return found


def _ints(*values: int) -> Tensor:
    return torch.tensor(values)


X = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
PEAK_AT_50000 = torch.zeros(1, 50001).index_fill(1, torch.tensor([50000]), 1.0)
I32 = torch.arange(6, dtype=torch.int32)

#: Pass, model, inputs, and the operators after the pass; None if the graph is not modified.
CASES: dict[str, tuple[Make, Body, tuple[Tensor, ...], list[str] | None]] = {
    "arange": (CONST, lambda m, x: torch.arange(6) < x, (I32,), ["arange int32", "lt bool"]),
    "arange, read on": (
        CONST,
        lambda m, x: (torch.arange(1, 7) + 1).view(-1, 1) < x,
        (I32,),
        ["arange int32", "add int32", "view int32", "lt bool"],
    ),
    "arange with a step": (CONST, lambda m, x: torch.arange(0, 12, 2) + x, (I32,), ["arange int32", "add int32"]),
    "full": (CONST, lambda m, x: torch.full((6,), 7) + x, (I32,), ["full int32", "add int32"]),
    "eye": (CONST, lambda m, x: torch.eye(6, dtype=torch.int64) + x, (I32,), ["eye int32", "add int32"]),
    "linspace": (
        CONST,
        lambda m, x: torch.linspace(0, 10, 6, dtype=torch.int64) + x,
        (I32,),
        ["linspace int32", "add int32"],
    ),
    "no elements": (CONST, lambda m, x: torch.cat([torch.arange(0), x]), (I32,), ["arange int32", "cat int32"]),
    "int64 operand": (CONST, lambda m, x: torch.arange(3) + x, (_ints(1, 2, 3),), ["arange int32", "add int64"]),
    "float": (CONST, lambda m, x: torch.arange(6.0) + x, (I32,), None),
    "too large": (CONST, lambda m, x: torch.full((6,), 1 << 31) + x, (I32,), None),
    "int32 minimum": (CONST, lambda m, x: torch.full((6,), -(1 << 31)).lt(x), (I32,), ["full int32", "lt bool"]),
    "float to int64": (OUTPUT, lambda m, x: x.to(torch.int64), (X,), ["cast int32"]),
    "float to int64, read on": (OUTPUT, lambda m, x: x.long() * 2 + 1, (X,), ["cast int32", "mul int32", "add int32"]),
    "int32 to int64": (OUTPUT, lambda m, x: x.to(torch.int64) + 1, (I32,), ["add int32"]),
    "int64 to float": (OUTPUT, lambda m, x: x.float(), (_ints(1, 2),), None),
    "argmax, arithmetic": (
        OUTPUT,
        lambda m, x: (10 * x.argmax(-1) + 10) + 1.5,
        (X,),
        ["argmax int64", "cast int32", "mul int32", "add int32", "add float32"],
    ),
    "argmin, returned": (OUTPUT, lambda m, x: x.argmin(1), (X,), None),
    "argmax, arithmetic, returned": (
        OUTPUT,
        lambda m, x: x.argmax(1) - 1,
        (X,),
        ["argmax int64", "cast int32", "sub int32", "cast int64"],
    ),
    "argmax, both": (
        OUTPUT,
        lambda m, x: (x.argmax(1), x.argmax(1) * 2.5),
        (X,),
        ["argmax int64", "argmax int64", "cast int32", "mul float32"],
    ),
    "argmax, index": (
        OUTPUT,
        lambda m, x: m.table[x.argmax(1)],
        (X,),
        ["argmax int64", "cast int32", "index float32"],
    ),
    "a product that does not fit": (
        OUTPUT,
        lambda m, x: (i := x.argmax(1).unsqueeze(-1)) * i,
        (PEAK_AT_50000,),
        ["argmax int64", "cast int32", "unsqueeze int32", "cast int64", "mul int64"],
    ),
    "a product that fits": (
        OUTPUT,
        lambda m, x: (i := x.argmax(0).unsqueeze(-1)) * i + 0.5,
        (PEAK_AT_50000,),
        ["argmax int64", "cast int32", "unsqueeze int32", "mul int32", "add float32"],
    ),
    "an operator without a rule": (
        OUTPUT,
        lambda m, x: x.argmax(1).expand(2, 4).cumsum(0),
        (X,),
        ["argmax int64", "cast int32", "expand int32", "cast int64", "cumsum int64"],
    ),
    "int64 input": (OUTPUT, lambda m, x, y: x.argmax(1) + y, (X, _ints(1, 2, 3, 4)), None),
    "embedding": (
        INSERT,
        lambda m, i: nn.functional.embedding(i, m.table),
        (_ints(3, 0, 11),),
        ["cast int32", "embedding float32"],
    ),
    "read twice": (
        INSERT,
        lambda m, i: (i + 1, m.table[i]),
        (_ints(3, 0, 10),),
        ["cast int32", "add int32", "index float32"],
    ),
    "two inputs": (INSERT, lambda m, i, j: i * j, (_ints(3), _ints(4)), ["cast int32", "cast int32", "mul int32"]),
    "int32 input": (INSERT, lambda m, x: x + 1, (I32,), None),
    "index_copy, which takes int64 alone": (
        INSERT,
        lambda m, i, y: m.table.index_copy(0, i, y),
        (_ints(3, 0, 10), torch.ones(3, 3)),
        ["cast int32", "cast int64", "index_copy float32"],
    ),
    "one_hot, which takes int64 alone": (
        INSERT,
        lambda m, i: nn.functional.one_hot(i, 12) + i[0],
        (_ints(3, 0, 10),),
        ["cast int32", "cast int64", "one_hot int64", "select int32", "add int64"],
    ),
    "an attribute": (
        INSERT,
        lambda m, i: m.table[i[:3] // 4 + m.offset],
        (_ints(3, 0, 10),),
        ["cast int32", "cast int32", "slice int32", "floor_divide int32", "add int32", "index float32"],
    ),
    "two results": (
        INSERT,
        lambda m, i: m.table[i.topk(2).indices],
        (_ints(3, 0, 10),),
        ["cast int32", "topk int32 int64", "getitem int64", "index float32"],
    ),
}


def _flat(result: Any) -> list[Tensor]:
    return pytree.tree_leaves(result)


@pytest.mark.parametrize("name", CASES)
def test_operators_after_a_pass(name: str) -> None:
    make, body, inputs, expected = CASES[name]
    module = _graph(body, inputs)
    before = _operators(module)
    result = make()(module)
    assert isinstance(result, PassResult)
    assert result.modified == (expected is not None)
    assert _operators(result.graph_module) == (before if expected is None else expected)
    for actual, wanted in zip(_flat(result.graph_module(*inputs)), _flat(Net(body)(*inputs)), strict=True):
        torch.testing.assert_close(actual, wanted, check_dtype=False)
    exported = torch.export.export(result.graph_module, inputs)  # a second trace has the same dtypes
    assert [f for f in _operators(exported.graph_module) if "assert" not in f] == _operators(result.graph_module)


#: Case, and the operators of its edge program after the pass, for cases whose operators edge programs keep.
EDGE = {
    "arange, read on": ["arange int32", "add int32", "view int32", "lt bool"],
    "float": None,
    "int32 to int64": ["add int32"],
    "float to int64": ["cast int32"],
    "argmax, arithmetic": [
        *("cast int32", "cast int32", "argmax int64", "cast int32", "mul int32", "add int32"),  # scalars are tensors
        *("cast float32", "add float32"),
    ],
    "argmin, returned": None,
    "argmax, index": ["argmax int64", "cast int32", "index float32"],
    "a product that does not fit": ["argmax int64", "cast int32", "unsqueeze int32", "cast int64", "mul int64"],
    "embedding": ["cast int32", "embedding float32"],
    "read twice": ["cast int32", "cast int32", "add int32", "index float32"],
}


@pytest.mark.parametrize("name", CASES)
def test_edge_program_after_a_pass(name: str) -> None:
    make, body, inputs, _ = CASES[name]
    program = torch.export.export(Net(body).eval(), inputs)
    manager = to_edge(program, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    before = _operators(manager.exported_program().graph_module)
    changed = manager.transform([make()]).exported_program()
    if name in EDGE:
        assert _operators(changed.graph_module) == (EDGE[name] or before)
    for actual, wanted in zip(_flat(changed.module()(*inputs)), _flat(Net(body)(*inputs)), strict=True):
        torch.testing.assert_close(actual, wanted, check_dtype=False)
    results = changed.graph.output_node().args[0]
    assert [spec.arg.name for spec in changed.graph_signature.output_specs] == [node.name for node in results]


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.calls
        self.calls.copy_(self.calls + 1)
        return y


def test_dtype_assertions_are_dropped_when_the_dtype_changes() -> None:
    ids = torch.tensor([1, 2])
    graph = _graph(lambda net, i: i.to(torch.int32).to(torch.int64) * 3, (ids,))
    for make in (ConvertInt64OutputOpsToInt32Pass, InsertInt32CastsAfterInt64PlaceholdersPass):
        graph = make()(graph).graph_module
    assert torch.equal(graph(ids).long(), ids * 3)


def test_an_int64_buffer_is_still_mutated() -> None:
    module: Any = torch.export.export(Counter(), (I32,)).module(check_guards=False)
    result = INSERT()(module).graph_module
    for calls in (5, 6, 7):
        assert torch.equal(result(I32), I32 + calls)
    assert result.calls.dtype is torch.int64


# -- values beyond int32


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_constants_beyond_int32_are_named_in_a_warning(value: int, caplog: pytest.LogCaptureFixture) -> None:
    module = _graph(lambda m, x: torch.full((2,), value) + torch.full((2,), 5) + x, (_ints(1, 2),))
    with caplog.at_level(logging.WARNING):
        result = CONST()(module)
    assert result.modified
    assert _operators(result.graph_module)[:3] == ["full int64", "full int32", "add int64"]
    assert "full stays int64: it has values that int32 cannot hold" in caplog.text


def _argmax_beyond_int32() -> GraphModule:
    """An argmax over a fake tensor of 2**31 + 1 elements."""
    graph = Graph()
    with FakeTensorMode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty((1 << 31) + 1)
        index = graph.call_function(torch.ops.aten.argmax.default, (x, 0))
        index.meta["val"] = torch.empty((), dtype=torch.int64)
        result = graph.call_function(torch.ops.aten.mul.Tensor, (index, 1))
        result.meta["val"] = torch.empty((), dtype=torch.int64)
    graph.output(result)
    return GraphModule(nn.Module(), graph)


def test_argmax_that_may_exceed_int32(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match=r"argmax\w* may give indices that int32 cannot hold.*on_overflow='skip'"):
        OUTPUT()(_argmax_beyond_int32())
    with caplog.at_level(logging.WARNING):
        assert not OUTPUT(on_overflow="skip")(_argmax_beyond_int32()).modified
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        assert not OUTPUT(on_overflow="warn")(_argmax_beyond_int32()).modified
    assert "may give indices that int32 cannot hold" in caplog.text
    with pytest.raises(ValueError, match="on_overflow must be 'raise', 'warn' or 'skip'; got 'never'"):
        OUTPUT(on_overflow="never")  # type: ignore[arg-type]


# -- in ExecuTorch's flow


def _model(m: Net, i: Tensor, x: Tensor) -> Tensor:
    rows = nn.functional.embedding(i + torch.arange(3), m.table)
    return torch.relu(rows * x) + rows.argmax(1, keepdim=True).float()


def _inputs() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 9, (3,), generator=generator), torch.randn(3, 3, generator=generator)) for _ in range(8)]


PASSES: list[Make] = [CONST, OUTPUT, INSERT]


@pytest.mark.parametrize("quantize", [False, True])
def test_passes_before_quantization_and_export(quantize: bool) -> None:
    """One delegate has all operators of the converted program."""
    samples, model = _inputs(), Net(_model).eval()
    module: Any = torch.export.export(model, samples[0]).module(check_guards=False)
    for make in PASSES:
        module = make()(module).graph_module
    spec = TosaCompileSpec("TOSA-1.0+INT+int16" if quantize else "TOSA-1.0+FP")
    if quantize:
        module = prepare_pt2e(module, TOSAQuantizer(spec).set_global(get_symmetric_quantization_config()))
        with torch.no_grad():
            for sample in samples:
                module(*sample)
        module = convert_pt2e(module)
    program = torch.export.export(module, samples[0])
    assert [x for x in _operators(program.graph_module) if x.endswith("int64")] == ["argmax int64"]
    manager = to_edge_transform_and_lower(program, partitioner=[TOSAPartitioner(spec)])
    nodes = manager.exported_program().graph.nodes
    assert sum("executorch_call_delegate" in str(node.target) for node in nodes) == 1
    with torch.no_grad():
        quantized, actual = program.module()(*samples[0]), manager.exported_program().module()(*samples[0])
        torch.testing.assert_close(actual, quantized, atol=0.05, rtol=0.01)
        torch.testing.assert_close(quantized, model(*samples[0]), atol=0.05 if quantize else 1e-6, rtol=0.01)


def test_passes_after_the_partitioner() -> None:
    """``transform_passes`` run on the program with its delegates and must not change their interfaces."""
    samples, model = _inputs(), Net(_model).eval()
    manager = to_edge_transform_and_lower(
        torch.export.export(model, samples[0]),
        transform_passes=[make() for make in PASSES],
        partitioner=[TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"))],
    )
    with torch.no_grad():
        torch.testing.assert_close(manager.exported_program().module()(*samples[0]), model(*samples[0]))
    assert b"TOSABackend" in manager.to_executorch().buffer


def test_to_device_moves_parameters_and_created_tensors() -> None:
    module = _graph(lambda m, x: torch.arange(12, device="cpu")[:, None] + m.table + x, (torch.zeros(3),))
    moved = ToDevicePass("meta")(module).graph_module
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert moved(torch.zeros(3, device="meta")).device.type == "meta"
    exported = torch.export.export(moved, (torch.zeros(3, device="meta"),))
    assert {str(node.meta["val"].device) for node in exported.graph.nodes if "val" in node.meta} == {"meta"}
