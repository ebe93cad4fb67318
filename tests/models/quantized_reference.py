"""PyTorch's own quantized graph, evaluated in float64.

The graph of ``convert_pt2e`` defines the scale and zero point of every quantized tensor. PyTorch computes the operators
between dequantize and quantize in float32. If a value is close to the middle between two integers, the float32 rounding
error decides: about one value in 100,000 is rounded to the other integer. A deep random network amplifies each such
difference of one step, so that two correct evaluations can differ by many steps at the output. In float64 a
convolution's sum of integer products is exact in practice, as in the target's accumulators. The float64 evaluation is
therefore a reference for the target.

Exact ties still differ by one step: TOSA rounds them up, quantize rounds them to even.
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


class Float64Interpreter(Interpreter):
    """Interprets a graph with every floating-point tensor in float64."""

    def placeholder(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _to_float64(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _to_float64(super().get_attr(target, args, kwargs))

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
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _to_float64_dtype)
        return torch.fx.node.map_aggregate(super().call_function(target, args, kwargs), _to_float64)


def _quantize(
    x: Tensor, scale: float | Tensor, zero_point: int | Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    """Quantize to the nearest integers; ties go to even."""
    return (torch.round(x / scale) + zero_point).clamp(low, high).to(dtype)


def _to_float64(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _to_float64_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def evaluate(program: ExportedProgram, *inputs: Tensor) -> Tensor:
    """Evaluate a quantized ATen program and return its first output in float64.

    Args:
        program: the exported result of ``convert_pt2e``; it is not changed.
        inputs: inputs of the model.
    """
    with torch.no_grad():
        output = Float64Interpreter(program.module(check_guards=False)).run(*inputs)
    first = output[0] if isinstance(output, (tuple, list)) else output
    assert isinstance(first, Tensor)
    return first


def find_output_node(program: ExportedProgram) -> Node:
    """Find the dequantize node that computes the first output; data movement may follow it.

    Returns the output itself if the program is not quantized.
    """
    output = program.graph.output_node().args[0][0]
    node = output
    while not is_dequantize(node):
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return output
        node = node.all_input_nodes[0]
    return node


def output_scale(program: ExportedProgram) -> float:
    """Return the scale of the first output.

    Raises:
        AssertionError: the output is neither a dequantize node nor data movement of one.
    """
    return _find_output_quantize(program)[1]


@dataclass(frozen=True)
class Difference:
    """Difference between a quantized tensor of the target and of PyTorch's graph, computed from the same operands.

    Attributes:
        node: name of the quantize node.
        dtype: element type of the tensor.
        max_steps: largest difference, in steps of the tensor's scale.
        differing: number of elements that differ.
        beyond_one_step: number of elements that differ by more than one step.
        elements: number of elements of the tensor.
    """

    node: str
    dtype: torch.dtype
    max_steps: int
    differing: int
    beyond_one_step: int
    elements: int


@dataclass(frozen=True)
class OperatorComparison:
    """Comparison of a quantized program with PyTorch's graph, where each operator reads the target's operands.

    Attributes:
        differences: one for every quantized tensor inside the program.
        output: the expected output of the program, float64.
    """

    differences: list[Difference]
    output: Tensor


class OperatorComparer:
    """Compares every quantized tensor inside a program with PyTorch's graph, operator by operator.

    The program is compiled for TOSA once more, with all its quantized tensors as outputs, and runs on the reference
    model. PyTorch's graph is then evaluated in float64. After each quantize node, the evaluation continues with the
    target's integers. Each operator thus reads the target's operands, and later operators amplify no difference.

    Args:
        program: a quantized program.
        last: compare only the operator that computes the first output. Its operands are the other outputs. With all
            tensors as outputs, the compiler lowers the mean of an image in another way, which rounds ties differently.
            One step of an int8 operand is then up to ten steps of a linear layer's int16 result (resnet18: seven).
    """

    def __init__(self, program: ExportedProgram, *, last: bool = False) -> None:
        self._program = program
        self._compared_names = _find_last_operator(_find_output_quantize(program)[0]) if last else None
        self._exposed_program = expose_quantized_tensors(program, self._compared_names)
        self._target_module = delegate(self._exposed_program, TosaCompileSpec()).module(check_guards=False)

    def __call__(self, *inputs: Tensor) -> OperatorComparison:
        """Compare on these inputs of the model."""
        names = [node.name for node in self._exposed_program.graph.output_node().args[0]]
        with torch.no_grad():
            target_values = dict(zip(names, self._target_module(*inputs), strict=True))
            interpreter = _ComparingInterpreter(
                self._exposed_program.module(check_guards=False), target_values, self._compared_names
            )
            interpreter.run(*inputs)
        quantize, scale, zero_point = _find_output_quantize(self._program)
        return OperatorComparison(
            interpreter.differences, (interpreter.reference_values[quantize.name].double() - zero_point) * scale
        )


class _ComparingInterpreter(Float64Interpreter):
    """Continues with the target's integers after every quantize node; records its own values and the differences."""

    def __init__(self, module: GraphModule, target_values: dict[str, Tensor], compared_names: set[str] | None) -> None:
        super().__init__(module)
        self._target_values, self._compared_names = target_values, compared_names
        self.reference_values: dict[str, Tensor] = {}
        self.differences: list[Difference] = []

    def run_node(self, n: Node) -> Any:
        if n.op == "call_function" and self._compared_names is not None and n.name not in self._compared_names:
            return self._target_values.get(n.name)
        value = super().run_node(n)
        if n.name not in self._target_values or n.op != "call_function":
            return value
        integers = self._target_values[n.name]
        difference = (integers.long() - value.long()).abs()
        differing, beyond_one_step = (int((difference > limit).sum()) for limit in (0, 1))
        self.differences.append(
            Difference(n.name, integers.dtype, int(difference.max()), differing, beyond_one_step, difference.numel())
        )
        self.reference_values[n.name] = value
        return integers


def shift_output(program: ExportedProgram, steps: int) -> ExportedProgram:
    """Return a copy of the program whose output integers are larger by ``steps``, except where they saturate."""
    program = copy_program(program)
    quantize, _, zero_point = _find_output_quantize(program)
    quantize.update_arg(2, zero_point + steps)
    program.graph_module.recompile()
    return program


def _find_output_quantize(program: ExportedProgram) -> tuple[Node, float, int]:
    """Find the quantize node that computes the first output, with the scale and zero point of the output."""
    dequantize = find_output_node(program)
    assert is_dequantize(dequantize), f"{dequantize} is not quantized"
    arguments: Any = dequantize.args
    quantize, scale, zero_point = arguments[:3]
    assert is_quantize(quantize), f"{quantize} is no quantize"
    return quantize, float(scale), int(zero_point)


def _find_last_operator(quantize: Node) -> set[str]:
    """Collect the names of ``quantize`` and the nodes before it, up to the previous quantize nodes."""
    names, pending = set[str](), [quantize]
    while pending:
        node = pending.pop()
        names.add(node.name)
        pending += [
            source for source in node.all_input_nodes if source.op == "call_function" and not is_quantize(source)
        ]
    return names


def expose_quantized_tensors(program: ExportedProgram, readers: set[str] | None) -> ExportedProgram:
    """Return a copy whose outputs are its quantized tensors: all, or those that ``readers`` read or compute."""
    program = copy_program(program)
    graph = program.graph
    nodes = [node for node in graph.nodes if is_quantize(node)]
    if readers is not None:
        nodes = [node for node in nodes if node.name in readers or readers & {user.name for user in node.users}]
    graph.output_node().args = (tuple(nodes),)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    # ExportedProgram has no public interface to change its outputs.
    program._module_call_graph = copy.deepcopy(program.module_call_graph)
    signature = program.module_call_graph[0].signature
    assert signature is not None
    signature.out_spec = pytree.tree_structure(tuple(nodes))
    program.graph_signature.output_specs = [
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in nodes
    ]
    return program
