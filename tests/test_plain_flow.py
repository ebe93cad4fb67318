"""Quantizers and partitioners with ExecuTorch's own functions, without recipes."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, EdgeProgramManager, to_edge, to_edge_transform_and_lower
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from arm_backend_core import compilation_log
from arm_backend_core.errors import ArmBackendError, FullDelegationError
from arm_backend_core.nodes import is_quantize
from arm_backend_core.partitioner import EthosUPartitioner, TOSAPartitioner, VgfPartitioner
from arm_backend_core.quantization import (
    EthosUQuantizer,
    TOSAQuantizer,
    VgfQuantizer,
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.targets.compile_spec import EthosUCompileSpec, TosaCompileSpec, VgfCompileSpec
from arm_recipes import load

Samples = Sequence[tuple[Tensor, ...]]
INT8, A16W8 = get_symmetric_quantization_config, get_symmetric_a16w8_quantization_config
A8W4 = get_symmetric_a8w4_quantization_config


class Net(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish())
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Split(nn.Module):
    """Two matrix products with a sort between them, which no target has."""

    def __init__(self, middle: Callable[[Tensor], Tensor], residual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle, self.residual = middle, residual

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        z = self.middle(y)
        return self.second(z + y if self.residual else z)


def _int64_arithmetic(x: Tensor) -> Tensor:
    return ((x * 1000).to(torch.int64) * 2**33).to(torch.float32) * (0.001 * 2.0**-33)


def _topk_of_many(x: Tensor) -> Tensor:
    """The largest of more elements than a target sorts."""
    return torch.topk(torch.cat([x] * 300, -1), 8).values


def images(count: int = 4) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, 8, 8, generator=generator),) for _ in range(count)]


def vectors(count: int = 4, size: int = 8) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, size, generator=generator),) for _ in range(count)]


def export(model: nn.Module, samples: Samples) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model.eval(), samples[0])


def quantize(model: nn.Module, samples: Samples, quantizer: Quantizer) -> ExportedProgram:
    prepared = prepare_pt2e(export(model, samples).module(), quantizer)
    with torch.no_grad():
        for sample in samples:
            prepared(*sample)
    return export_converted(convert_pt2e(prepared), samples)


def export_converted(module: nn.Module, samples: Samples) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, samples[0])


@dataclass
class Lowered:
    """An edge program and the events of its lowering."""

    manager: EdgeProgramManager
    log: compilation_log.Log

    def run(self, *inputs: Tensor, method: str = "forward") -> Any:
        """Delegates run on the TOSA reference model (XNNPACK's in PyTorch), the rest in PyTorch."""
        with torch.no_grad():
            return self.manager.exported_program(method).module()(*inputs)

    def delegates(self, method: str = "forward") -> list[Node]:
        nodes = self.manager.exported_program(method).graph.nodes
        return [node for node in nodes if node.target is executorch_call_delegate]

    @staticmethod
    def _name(delegate: Node) -> str:
        module = delegate.args[0]
        assert isinstance(module, Node)
        return str(module.target)

    def backends(self) -> set[str]:
        """Backend ids of the delegates."""
        module: Any = self.manager.exported_program().graph_module
        return {getattr(module, self._name(node)).backend_id for node in self.delegates()}

    def on_cpu(self) -> list[str]:
        """Operators outside the delegates."""
        nodes = self.manager.exported_program().graph.nodes
        outside = [node.target for node in nodes if node.op == "call_function"]
        outside = [t for t in outside if t not in (executorch_call_delegate, operator.getitem)]
        return [str(target).removeprefix("<EdgeOpOverload: ").split(">")[0] for target in outside]

    def check_delegates(self) -> None:
        """Check that no parameter crosses a boundary and that each flatbuffer has the interface of its call."""
        program = self.manager.exported_program()
        module: Any = program.graph_module
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values())
        named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = {node for node, name in named.items() if name not in written}
        for node in self.delegates():
            lowered = getattr(module, self._name(node))
            assert isinstance(lowered, LoweredBackendModule)
            record = compilation_log.delegate_record(lowered)
            assert record is not None
            operands: list[Any] = list(node.args[1:])
            assert not [x for x in operands if x.name in constants]
            assert [io.shape for io in record.inputs] == [tuple(x.meta["val"].shape) for x in operands]
            assert [io.shape for io in record.outputs] == [tuple(x.shape) for x in node.meta["val"]]


def lower(program: ExportedProgram | dict[str, ExportedProgram], partitioner: Any) -> Lowered:
    with compilation_log.open_log() as log:
        manager = to_edge_transform_and_lower(
            program,
            partitioner=partitioner if isinstance(partitioner, (list, dict)) else [partitioner],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    return Lowered(manager, log)


def tosa(spec: str = "TOSA-1.0+INT+int16") -> tuple[TOSAQuantizer, TOSAPartitioner]:
    return TOSAQuantizer(TosaCompileSpec(spec)), TOSAPartitioner(TosaCompileSpec(spec))


def ethos_u(target: str) -> tuple[EthosUQuantizer, EthosUPartitioner]:
    return EthosUQuantizer(EthosUCompileSpec(target)), EthosUPartitioner(EthosUCompileSpec(target))


def vgf() -> tuple[VgfQuantizer, VgfPartitioner]:
    return VgfQuantizer(VgfCompileSpec()), VgfPartitioner(VgfCompileSpec())


TARGETS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "tosa": (tosa, "TOSABackend"),
    "u55": (lambda: ethos_u("ethos-u55-128"), "EthosUBackend"),
    "u65": (lambda: ethos_u("ethos-u65-256"), "EthosUBackend"),
    "u85": (lambda: ethos_u("ethos-u85-256"), "EthosUBackend"),
    "vgf": (vgf, "VgfBackend"),
}


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    error = float((actual - expected).abs().max().detach() / expected.abs().max().detach())
    assert error <= relative, error


# -- every target


@pytest.mark.parametrize("config", [INT8, A8W4, A16W8], ids=["int8", "a8w4", "a16w8"])
@pytest.mark.parametrize("target", TARGETS)
def test_quantized(target: str, config: Callable[[], Any]) -> None:
    make, backend = TARGETS[target]
    quantizer, partitioner = make()
    program = quantize(Net(), images(), quantizer.set_global(config()))
    lowered = lower(program, partitioner)
    assert len(lowered.delegates()) == 1
    assert not lowered.log.refused_operators
    lowered.check_delegates()
    with torch.no_grad():
        expected = program.module()(*images()[0])
    assert_close(lowered.run(*images()[0]), expected, 1 / 127)
    assert backend.encode() in lowered.manager.to_executorch().buffer


@pytest.mark.parametrize(
    "partitioner", [TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")), VgfPartitioner(VgfCompileSpec())]
)
def test_float(partitioner: Partitioner) -> None:
    model = Net().eval()
    lowered = lower(export(model, images()), partitioner)
    assert lowered.on_cpu() == []
    assert len(lowered.delegates()) == 1
    assert_close(lowered.run(*images()[0]), model(*images()[0]), 1e-5)


def test_lowering_does_not_change_its_input_program() -> None:
    model = Net().eval()
    program = export(model, images())
    before = str(program.graph)
    lower(program, TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))
    assert str(program.graph) == before
    assert torch.equal(program.module()(*images()[0]), model(*images()[0]))


def test_several_methods() -> None:
    first, second = Net().eval(), Split(torch.neg).eval()
    programs = {"first": export(first, images()), "second": export(second, vectors())}
    partitioner = TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"))
    for given in (partitioner, {"first": [partitioner], "second": [partitioner]}):
        lowered = lower(programs, given)
        assert [len(lowered.delegates(name)) for name in programs] == [1, 1]
        assert_close(lowered.run(*images()[0], method="first"), first(*images()[0]), 1e-5)
        assert_close(lowered.run(*vectors()[0], method="second"), second(*vectors()[0]), 1e-5)


# -- configuration of the quantizers


def _dtypes(program: ExportedProgram, module: str) -> set[str]:
    """Element types that the results of a module's operators are quantized to; "float" where they are not."""
    found = set()
    for node in program.graph.nodes:
        stack = [entry[0].replace("L['self'].", "") for entry in (node.meta.get("nn_module_stack") or {}).values()]
        if node.op != "call_function" or "quantized_decomposed" in str(node.target) or module not in stack:
            continue
        readers = list(node.users)
        interior = all(x.op == "call_function" and module in str(x.meta.get("nn_module_stack")) for x in readers)
        if (readers and not interior) or any(is_quantize(x) for x in readers):
            found |= {str(x.args[5]).removeprefix("torch.") if is_quantize(x) else "float" for x in readers}
    return found


def test_the_most_specific_setting_wins() -> None:
    quantizer, partitioner = tosa()
    quantizer.set_global(INT8()).set_module_type(nn.Conv2d, A16W8()).set_module_name("body.0", INT8())
    program = quantize(Net(), images(), quantizer)
    assert _dtypes(program, "body") == {"int8"}
    assert _dtypes(program, "head") == {"int8"}
    lowered = lower(program, partitioner)
    assert not lowered.log.refused_operators


def test_set_module_name() -> None:
    quantizer, partitioner = tosa()
    program = quantize(Net(), images(), quantizer.set_global(INT8()).set_module_name("head", A16W8()))
    assert _dtypes(program, "head") == {"int16"}
    assert not lower(program, partitioner).log.refused_operators


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            lambda q: q.set_module_name("tail", INT8()),
            "set_module_name: the model has no module 'tail' with operators of its own. It has: ",
        ),
        (lambda q: q.set_module_name("hea", INT8()), "set_module_name: the model has no module 'hea'"),
        (lambda q: q.set_module_type(nn.LSTM, INT8()), "set_module_type: the model has no LSTM. It has: "),
    ],
)
def test_a_filter_that_matches_nothing_raises(setting: Callable[[Any], Any], message: str) -> None:
    quantizer, _ = tosa()
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(Net(), images(), setting(quantizer.set_global(INT8())))


@pytest.mark.parametrize(
    "skip", [lambda q: q.set_module_name("head", None), lambda q: q.set_module_type(nn.Linear, None)]
)
def test_configuration_none_leaves_a_module_in_float(skip: Callable[[Any], Any]) -> None:
    for make in (tosa, lambda: ethos_u("ethos-u85-256")):
        quantizer, partitioner = make()
        program = quantize(Net(), images(), skip(quantizer.set_global(INT8())))
        lowered = lower(program, partitioner)
        (left,) = lowered.log.refused_operators
        assert left.operator == "aten.linear.default"
        target = partitioner.compile_spec.target.name
        assert left.reason == f"its result is not quantized, and {target} runs integers only"
        assert left.source.startswith(__file__)  # not the line within nn.Linear
        assert len(lowered.delegates()) == 1
        with torch.no_grad():
            assert_close(lowered.run(*images()[0]), program.module()(*images()[0]), 1 / 100)


@pytest.mark.parametrize("part", ["stem", "body", "head"])
def test_vgf_mixes_float_and_integers_in_one_delegate(part: str) -> None:
    quantizer, partitioner = vgf()
    program = quantize(Net(), images(), quantizer.set_global(INT8()).set_module_name(part, None))
    lowered = lower(program, partitioner)
    assert not lowered.log.refused_operators
    assert len(lowered.delegates()) == 1
    with torch.no_grad():
        assert_close(lowered.run(*images()[0]), program.module()(*images()[0]), 1 / 100)


def test_set_io() -> None:
    quantizer, partitioner = tosa()
    quantizer.set_global(INT8()).set_io(A16W8())
    program = quantize(Net(), images(), quantizer)
    nodes = [node for node in program.graph.nodes if is_quantize(node)]
    assert str(nodes[0].args[5]) == "torch.int16"
    assert str(nodes[-1].args[5]) == "torch.int16"
    assert _dtypes(program, "body") == {"int8"}
    lowered = lower(program, partitioner)
    assert not lowered.log.refused_operators
    with torch.no_grad():
        assert_close(lowered.run(*images()[0]), program.module()(*images()[0]), 1 / 100)


@pytest.mark.parametrize("kind", [TOSAQuantizer, TOSAPartitioner])
def test_a_compile_spec_for_another_target_raises(kind: Callable[[Any], Any]) -> None:
    message = f"compile_spec: {kind.__name__} takes a TosaCompileSpec, got VgfCompileSpec"
    with pytest.raises(TypeError, match=message):
        kind(VgfCompileSpec())


def test_a_quantizer_needs_an_integer_profile() -> None:
    with pytest.raises(ValueError, match=re.escape("has no INT profile to quantize for; add '+INT'")):
        TOSAQuantizer(TosaCompileSpec("TOSA-1.0+FP"))


# -- programs that a target cannot run whole


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("middle", [_topk_of_many, _int64_arithmetic], ids=["topk", "int64"])
@pytest.mark.parametrize("config", [None, INT8, A16W8], ids=["float", "int8", "a16w8"])
def test_an_operator_in_the_middle(
    config: Callable[[], Any] | None, middle: Callable[[Tensor], Tensor], residual: bool
) -> None:
    model = Split(middle, residual).eval()
    quantizer, partitioner = tosa()
    if config is None:
        program, partitioner = export(model, vectors()), TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"))
    else:
        program = quantize(model, vectors(), quantizer.set_global(config()))
    lowered = lower(program, partitioner)
    reasons = {left.operator: left.reason for left in lowered.log.refused_operators}
    reason = reasons.get("aten.topk.default") or reasons["aten.mul.Tensor"]
    assert reason.startswith(("its int64 result may exceed int32", "topk of 8 among 2400 elements"))
    assert len(lowered.delegates()) == 2
    lowered.check_delegates()
    for sample in vectors():
        with torch.no_grad():
            assert_close(lowered.run(*sample), program.module()(*sample), 1e-5 if config is None else 1 / 60)
    assert len(lowered.manager.to_executorch().buffer) > 0


class Shared(nn.Module):
    """One weight for two delegates and for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(_topk_of_many(self.layer(x)))
        return y, y + _topk_of_many(self.layer.weight[:4] * 2)


class Constants(nn.Module):
    """Two delegates and the CPU read values that depend on parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.exp(self.weight * 0.1)
        y = _topk_of_many(torch.cat([x @ table, self.weight]))
        return torch.cat([self.weight, y @ table]), _topk_of_many(table)


class Diamond(nn.Module):
    """Paths of different length through the CPU join."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.exp(x)
        b = _topk_of_many(a * 2) + a
        c = _topk_of_many(b - a)
        return torch.cumsum(a, -1) * c + b * a


@pytest.mark.parametrize("model", [Shared(), Constants(), Diamond()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("config", [None, INT8], ids=["float", "int8"])
def test_constants_and_paths_across_delegates(model: nn.Module, config: Callable[[], Any] | None) -> None:
    quantizer, partitioner = tosa()
    if config is None:
        program, partitioner = export(model, vectors()), TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"))
    else:
        program = quantize(model, vectors(), quantizer.set_global(config()))
    lowered = lower(program, partitioner)
    assert len(lowered.delegates()) >= 2
    lowered.check_delegates()
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(program.module()(*vectors()[1]))
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(lowered.run(*vectors()[1])), expected, strict=True):
        assert_close(ours, theirs, 1e-5 if config is None else 1 / 40)
    assert len(lowered.manager.to_executorch().buffer) > 0


class Memory(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.sum = nn.Buffer(torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.sum.add_(self.layer(x))
        return torch.relu(self.sum)


def test_a_buffer_that_is_written_is_not_a_constant() -> None:
    model = Memory().eval()
    program = export(copy.deepcopy(model), vectors())
    lowered = lower(program, TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))
    assert not lowered.log.refused_operators
    lowered.check_delegates()
    module = lowered.manager.exported_program().module()
    with torch.no_grad():
        for sample in vectors():
            assert_close(module(*sample), model(*sample), 1e-5)


def test_outputs_that_are_inputs_constants_or_duplicates() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"twice": [y, y], "input": x, "constant": self.layer.bias, "nothing": None, "view": x.view(8, -1)}

    model = Several().eval()
    lowered = lower(export(model, vectors()), TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))
    ours, theirs = lowered.run(*vectors()[0]), model(*vectors()[0])
    assert ours.keys() == theirs.keys()
    leaves = (torch.utils._pytree.tree_leaves(result) for result in (ours, theirs))
    for a, b in zip(*leaves, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_program_without_delegates() -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.topk(x, 8).values

    x = torch.randn(2, 720)
    lowered = lower(export(Largest(), [(x,)]), TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))
    assert lowered.delegates() == []
    assert [left.operator for left in lowered.log.refused_operators] == ["aten.topk.default"]
    assert torch.equal(lowered.run(x), torch.topk(x, 8).values)


def test_keep_on_cpu() -> None:
    model = Net().eval()
    spec = TosaCompileSpec("TOSA-1.0+FP")
    partitioner = TOSAPartitioner(spec, [lambda node: node.target is torch.ops.aten.relu.default])
    lowered = lower(export(model, images()), partitioner)
    assert [(left.operator, left.reason) for left in lowered.log.refused_operators] == [
        ("aten.relu.default", "kept on the CPU as asked")
    ]
    assert lowered.on_cpu() == ["aten.relu.default"]
    assert len(lowered.delegates()) == 2
    assert_close(lowered.run(*images()[0]), model(*images()[0]), 1e-5)


def test_require_full_delegation() -> None:
    partitioner = TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP"), require_full_delegation=True)
    assert len(lower(export(Net(), images()), partitioner).delegates()) == 1
    with pytest.raises(FullDelegationError, match=r"1 operator cannot run(.|\n)*aten.topk.default"):
        lower(export(Split(_topk_of_many), vectors()), partitioner)


def test_to_backend_says_what_to_call_instead() -> None:
    with pytest.raises(
        ArmBackendError, match=re.escape("call to_edge_transform_and_lower(program, partitioner=[...])")
    ):
        to_edge(export(Net(), images())).to_backend(TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP")))


# -- with another backend


@pytest.mark.parametrize("config", [None, INT8], ids=["float", "int8"])
def test_xnnpack_gets_the_remaining_operators(config: Callable[[], Any] | None) -> None:
    model = Net().eval()
    quantizer, partitioner = tosa()
    if config is None:  # an integer target and a program in floating point: XNNPACK gets all of it
        program = export(model, images())
    else:
        program = quantize(model, images(), quantizer.set_global(config()).set_module_name("head", None))
    lowered = lower(program, [partitioner, XnnpackPartitioner()])
    assert lowered.backends() == ({"XnnpackBackend"} if config is None else {"TOSABackend", "XnnpackBackend"})
    assert not [name for name in lowered.on_cpu() if "linear" in name or "addmm" in name]
    with torch.no_grad():
        assert_close(lowered.run(*images()[0]), program.module()(*images()[0]), 1 / 100)
    assert len(lowered.manager.to_executorch().buffer) > 0


def test_bfloat16_crosses_a_delegates_boundary() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, y.to(torch.bfloat16) + 1

    inputs = torch.tensor([1.0, 2.5, -3.0]).bfloat16(), torch.tensor([1.0, 2.5, -3.0])
    edge = to_edge_transform_and_lower(
        torch.export.export(Doubled(), inputs), partitioner=[TOSAPartitioner(TosaCompileSpec("TOSA-1.0+FP+bf16"))]
    )
    expected = Doubled()(*inputs)
    for got in (edge.exported_program().module()(*inputs), load(bytes(edge.to_executorch().buffer)).execute(*inputs)):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
