"""PyTorch's own quantized graph, evaluated in float64.

The graph that ``convert_pt2e`` makes says which integers every tensor is rounded to, but PyTorch computes what lies
between a dequantize and a quantize in float32. Where the exact value is close to the middle between two integers, a
rounding error of float32 decides: about one value in 100,000 goes the other way. In a deep random network every such
step is amplified by the layers behind it, so that two correct evaluations can end many steps apart. In float64 the sum
of a convolution's products of integers is exact for all practical purposes, as it is in the target's accumulators, and
the question "does the target compute what the quantized graph says" has an answer again.

What is left are exact ties: TOSA rounds them up, quantize rounds them to even. That is one step, where it happens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target
from torch.utils import _pytree as pytree

from arm_backend_core.delegate import delegate
from arm_backend_core.nodes import is_dequantize, is_quantize, overload_of
from arm_backend_core.program import copy_program
from arm_backend_core.targets.compile_spec import TosaCompileSpec

_PER_TENSOR = "quantized_decomposed::{}_per_tensor"
_PER_CHANNEL = "quantized_decomposed::{}_per_channel"


class Float64(Interpreter):
    """Runs a graph with every floating-point tensor in float64."""

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _wide(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _wide(super().get_attr(target, args, kwargs))

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        overload = overload_of(target)
        name = overload.name().split(".")[0] if overload is not None else ""
        if name == _PER_TENSOR.format("quantize"):
            return _quantize(*args)
        if name == _PER_CHANNEL.format("quantize"):
            x, scales, zero_points, axis, *rest = args
            shape = [-1 if i == axis else 1 for i in range(x.dim())]
            return _quantize(x, scales.double().reshape(shape), zero_points.reshape(shape), *rest)
        if name == _PER_TENSOR.format("dequantize"):
            x, scale, zero_point = args[:3]
            return (x.double() - int(zero_point)) * float(scale)
        if name == _PER_CHANNEL.format("dequantize"):
            x, scales, _, axis = args[:4]
            return x.double() * scales.double().reshape([-1 if i == axis else 1 for i in range(x.dim())])
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _wide_dtype)
        return torch.fx.node.map_aggregate(super().call_function(target, args, kwargs), _wide)


def _quantize(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Nearest integers, ties to even."""
    return (torch.round(x / scale) + zero_point).clamp(low, high).to(dtype)


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _wide_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def evaluate(program: ExportedProgram, *inputs: Tensor) -> Tensor:
    """The first output of a quantized ATen program (it is left as it is), float64.

    Args:
        program: from ``torch.export`` of what ``convert_pt2e`` returned.
        inputs: as the model takes them.
    """
    with torch.no_grad():
        output = Float64(program.module(check_guards=False)).run(*inputs)
    first = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(first, Tensor)
    return first


def output_node(program: ExportedProgram) -> Node:
    """What the first output of a program comes from, data movement behind a dequantize aside."""
    output = program.graph.output_node().args[0][0]
    node = output
    while not is_dequantize(node):
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return output  # the program is not quantized
        node = node.all_input_nodes[0]
    return node


def output_step(program: ExportedProgram) -> float:
    """Scale of the first output.

    Raises:
        AssertionError: no dequantize node, nor data movement behind one, is at its end.
    """
    return _output_quantize(program)[1]


@dataclass(frozen=True)
class Difference:
    """How one quantized tensor of the target differs from that of PyTorch's graph, given the same operands."""

    node: str
    dtype: torch.dtype
    steps: int
    """Largest difference, in steps of the tensor's own scale."""

    count: int
    """Elements that differ."""

    far: int
    """Elements that differ by more than one step."""

    size: int
    """Elements."""


@dataclass(frozen=True)
class Judgement:
    """What PyTorch's graph says where it is given the target's operands, operator by operator."""

    differences: list[Difference]
    """Of every quantized tensor inside the program."""

    output: Tensor
    """What the program must return, float64."""


class Judge:
    """Compares every quantized tensor inside a program with PyTorch's, operator by operator.

    The program is compiled for TOSA once more, with all its quantized tensors as outputs, and executed on the reference
    model. PyTorch's graph is then evaluated in float64, but wherever it quantizes, the target's integers go on: so
    every operator is judged alone, on the operands that the target had, and no difference is amplified by what follows.

    Args:
        program: quantized.
        last: judge the operator alone that the first output comes from, with what it reads as further outputs. With
            all as outputs the compiler writes the mean of an image in another way, which rounds ties otherwise. Behind
            it, a step of int8 in an operand is up to ten steps of what a linear layer gives in int16 (resnet18: seven).
    """

    def __init__(self, program: ExportedProgram, *, last: bool = False) -> None:
        self._program = program
        self._computed = _last_operator(_output_quantize(program)[0]) if last else None
        self._exposed = with_outputs(program, self._computed)
        self._ours = delegate(self._exposed, TosaCompileSpec()).module(check_guards=False)

    def __call__(self, *inputs: Tensor) -> Judgement:
        """Run both on inputs as the model takes them."""
        names = [node.name for node in self._exposed.graph.output_node().args[0]]
        with torch.no_grad():
            ours = dict(zip(names, self._ours(*inputs), strict=True))
            interpreter = _Judging(self._exposed.module(check_guards=False), ours, self._computed)
            interpreter.run(*inputs)
        quantize, scale, zero_point = _output_quantize(self._program)
        return Judgement(interpreter.found, (interpreter.theirs[quantize.name].double() - zero_point) * scale)


class _Judging(Float64):
    """Goes on with the target's integers after every quantize, and notes its own and where they were others."""

    def __init__(self, module: GraphModule, ours: dict[str, Tensor], computed: set[str] | None) -> None:
        super().__init__(module)
        self._ours, self._computed = ours, computed
        self.theirs: dict[str, Tensor] = {}
        self.found: list[Difference] = []

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and self._computed is not None and n.name not in self._computed:
            return self._ours.get(n.name)
        value = super().run_node(n)
        if n.name not in self._ours or n.op != "call_function":
            return value
        ours = self._ours[n.name]
        apart = (ours.long() - value.long()).abs()
        count, far = (int((apart > steps).sum()) for steps in (0, 1))
        self.found.append(Difference(n.name, ours.dtype, int(apart.max()), count, far, apart.numel()))
        self.theirs[n.name] = value
        return ours


def with_shifted_output(program: ExportedProgram, steps: int) -> ExportedProgram:
    """A program whose integers at the output are ``steps`` too large, saturation aside. The given one is left alone."""
    program = copy_program(program)
    quantize, _, zero_point = _output_quantize(program)
    quantize.update_arg(2, zero_point + steps)
    program.graph_module.recompile()
    return program


def _output_quantize(program: ExportedProgram) -> tuple[Node, float, int]:
    """The quantize node that the first output comes from, with scale and zero point of the output."""
    dequantize = output_node(program)
    assert is_dequantize(dequantize), f"{dequantize} is not quantized"
    arguments: Any = dequantize.args
    quantize, scale, zero_point = arguments[:3]
    assert is_quantize(quantize), f"{quantize} is no quantize"
    return quantize, float(scale), int(zero_point)


def _last_operator(quantize: Node) -> set[str]:
    """Names of the nodes between what is quantized before and ``quantize``, which is one of them."""
    found, left = set[str](), [quantize]
    while left:
        node = left.pop()
        found.add(node.name)
        left += [source for source in node.all_input_nodes if source.op == "call_function" and not is_quantize(source)]
    return found


def with_outputs(program: ExportedProgram, readers: set[str] | None) -> ExportedProgram:
    """A copy that returns the tensors that it quantizes: all, or those that the ``readers`` read and quantize."""
    program = copy_program(program)
    graph = program.graph
    nodes = [node for node in graph.nodes if is_quantize(node)]
    if readers is not None:
        nodes = [node for node in nodes if node.name in readers or readers & {user.name for user in node.users}]
    graph.output_node().args = (tuple(nodes),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    # An exported program has no public way to change what it returns.
    program._module_call_graph = copy.deepcopy(program.module_call_graph)
    signature = program.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = pytree.tree_structure(tuple(nodes))
    program.graph_signature.output_specs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in nodes
    ]
    return program
