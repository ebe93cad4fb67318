"""Interpreter plan: a captured program as a picklable list of steps, run in floating point and as quantized.

Pickling an fx graph traces it again, and PyTorch operators cannot be pickled, so neither can go to a worker process.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from arm_backend_core.aten.functionalize import functionalize_program
from arm_backend_core.aten.higher_order import inline_higher_order_ops
from arm_backend_core.kinds import ScalarKind, kind_of
from arm_backend_core.nodes import (
    boundary_source,
    is_dequantize,
    is_float,
    is_quantize,
    modules_of,
    operator_name,
    overload_of,
    source_line,
)
from arm_backend_core.ops.catalog import find_record, is_data_movement
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.program import constants_of, copy_program, drop_assertions, store_of, user_inputs
from arm_backend_core.quantization.diagnostics.error_metrics import QuantizationGrid

_USER_OUTPUTS = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)


class UnsupportedProgramError(Exception):
    """The program has an operator that a plan cannot hold; the message names it."""


@dataclass(frozen=True)
class Ref:
    """A reference to the result of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """A node: an operator with its operands, or an input or constant without operator."""

    name: str
    kind: str  # "input", "constant", "quantize", "dequantize", "call"
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of the steps whose results this step reads."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Ref)))

    def __call__(self, value_of: Callable[[str], Any]) -> Any:
        """Apply the operator to its operands."""
        args, kwargs = map_aggregate(
            (self.args, dict(self.kwargs)), lambda x: value_of(x.name) if isinstance(x, Ref) else x
        )
        return _operator(self.target)(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "sources"}


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor that is compared.

    Attributes:
        name: name of the step that holds it.
        float_step: name of the step that holds it in floating point, before quantization.
        node: node of the captured program that computes it.
        grid: quantization grid; None if the tensor is not quantized.
        is_data_movement: whether it only rearranges values on the same grid, without loss.
        is_fixed: whether the operator fixes the grid, regardless of calibration.
        dtype: dtype in the program.
        operator, module, source: ATen operator, path of the submodule, line of the model. For a fused layer (an
            operator with weights and its activation): both operators, module and line of the first.
        readers: submodules that consume it; empty if the model itself does, or nothing does.
        weights: quantized constants that only this tensor's operators read.
    """

    name: str
    float_step: str
    node: str
    grid: QuantizationGrid | None
    is_data_movement: bool
    is_fixed: bool
    dtype: str
    operator: str
    module: str
    readers: tuple[str, ...]
    source: str
    weights: tuple[str, ...] = ()


@dataclass
class InterpreterPlan:
    """The steps of a program.

    Attributes:
        steps: steps in program order.
        inputs: names of the input tensors, in order.
        constants: parameters, buffers and constants by name.
        float_constants: values of quantized constants before quantization, by name.
        outputs: results, tensors as ``Ref``; written-back inputs come first.
        writes: names of written buffers, with the step whose result is written.
        tensors: tensors that can be compared, in program order.
    """

    steps: list[Step]
    inputs: list[str]
    constants: dict[str, Tensor]
    float_constants: dict[str, Tensor]
    outputs: list[Any]
    writes: dict[str, str]
    tensors: list[ComparedTensor]

    @staticmethod
    def from_program(program: ExportedProgram, floats: Mapping[str, Tensor] | None = None) -> InterpreterPlan:
        """Build the plan of a program; the program is not modified.

        Args:
            floats: constants before quantization, by their name in the graph signature.

        Raises:
            UnsupportedProgramError: the program has loops or calls that are not operators.
        """
        program = copy_program(program)
        inline_higher_order_ops(program.graph_module, constants_of(program))
        program = functionalize_program(program)
        drop_assertions(program)
        return _build_plan(program, floats or {})

    @property
    def has_state(self) -> bool:
        """Whether a sample changes the results of the next one, through buffers."""
        return bool(self.writes)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is quantized."""
        return any(row.grid is not None for row in self.tensors)


def _build_plan(program: ExportedProgram, floats: Mapping[str, Tensor]) -> InterpreterPlan:
    signature = program.graph_signature
    constants, float_constants = {}, {}
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = spec.arg.name
            constants[name] = store_of(program, str(spec.target))[str(spec.target)].detach()
            if spec.target in floats:
                float_constants[name] = floats[str(spec.target)].detach()
    steps = [_make_step(node, constants) for node in program.graph.nodes if node.op != "output"]
    results = pytree.tree_leaves(program.graph.output_node().args[0])
    buffers = {name: graph_input for graph_input, name in signature.inputs_to_buffers.items()}
    outputs, writes = [], {}
    for spec, result in zip(signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            writes[buffers[str(spec.target)]] = result.name
        elif spec.kind in _USER_OUTPUTS:
            outputs.append(Ref(result.name) if isinstance(result, Node) else result)
    graph_inputs = [node.name for node in user_inputs(program) if isinstance(node.meta.get("val"), Tensor)]
    return InterpreterPlan(
        steps, graph_inputs, constants, float_constants, outputs, writes, _compared_tensors(program, float_constants)
    )


def _make_step(node: Node, constants: Mapping[str, Tensor]) -> Step:
    if node.op == "placeholder":
        return Step(node.name, "constant" if node.name in constants else "input")
    if node.op != "call_function" or node.target is LOOP_OUT:
        raise UnsupportedProgramError(
            "a loop" if node.target is LOOP_OUT else f"'{node.name}', a {node.op} of '{node.target}'"
        )
    kind = "quantize" if is_quantize(node) else "dequantize" if is_dequantize(node) else "call"
    args, kwargs = map_aggregate((node.args, node.kwargs), _as_ref)
    overload = overload_of(node.target)
    if overload is None and getattr(node.target, "__module__", None) not in ("_operator", "builtins", "math"):
        raise UnsupportedProgramError(f"'{node.name}', a call of {node.target}")
    target = str(overload) if overload is not None else node.target
    return Step(node.name, kind, target, tuple(args), dict(kwargs))


def _as_ref(x: Any) -> Any:
    return Ref(x.name) if isinstance(x, Node) else x


def _operator(target: Any) -> Callable[..., Any]:
    if not isinstance(target, str):
        function: Callable[..., Any] = target
        return function
    if target == "aten.view.default":  # attention returns another memory layout than was traced
        return torch.reshape
    if target.startswith("quantized_decomposed."):
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers them)
    overload: Callable[..., Any] = operator.attrgetter(target)(torch.ops)
    return overload


def _compared_tensors(program: ExportedProgram, floats: Mapping[str, Tensor]) -> list[ComparedTensor]:
    """List the quantized tensors, and the floating-point tensors that are not fused into a quantized result."""
    tensors = []
    fused: set[Node] = set()
    for node in reversed(program.graph.nodes):
        computes = node.op == "call_function" and not is_quantize(node) and not is_dequantize(node)
        if computes and node.users and all(is_quantize(user) or user in fused for user in node.users):
            fused.add(node)
    varying = set(program.graph.find_nodes(op="placeholder")) - constants_of(program).keys()
    for node in program.graph.nodes:
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if node.op != "call_function" or is_dequantize(node) or node in fused or node not in varying:
            continue
        if is_quantize(node):
            tensors.append(_compared_tensor(node, node.args[0], _grid(node), floats))
        elif is_float(node) and isinstance(node.meta["val"], Tensor):
            tensors.append(_compared_tensor(node, node, None, floats))
    return tensors


def _compared_tensor(
    node: Node, value: Node, grid: QuantizationGrid | None, floats: Mapping[str, Tensor]
) -> ComparedTensor:
    source = boundary_source(value)
    producer = source.args[0] if source.target is operator.getitem else source
    assert isinstance(producer, Node)
    weights = _quantized_weights(value, floats)
    reader = next(iter(weights.values()), producer)  # users call this the layer, with or without an activation
    *_, module = ("", *modules_of(reader))
    operators = [operator_name(node) for node in dict.fromkeys((reader, producer))]
    return ComparedTensor(
        name=node.name,
        float_step=value.name,
        node=source.name,
        grid=grid,
        is_data_movement=_is_lossless_move(producer, grid),
        is_fixed=getattr(find_record(producer), "fixed_range", None) is not None,
        dtype=str(node.meta["val"].dtype).removeprefix("torch."),
        operator="input" if producer.op == "placeholder" else " + ".join(operators),
        module=module,
        readers=_reader_modules(node),
        source=source_line(reader),
        weights=tuple(weights),
    )


def _reader_modules(node: Node) -> tuple[str, ...]:
    """Return the submodules that compute with a tensor, looking through data movement."""
    modules: dict[str, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if is_quantize(user) or is_dequantize(user) or is_data_movement(user):
            pending += user.users
        elif user.op == "call_function":
            modules[("", *modules_of(user))[-1]] = None
    return () if "" in modules else tuple(modules)


def _is_lossless_move(node: Node, grid: QuantizationGrid | None) -> bool:
    """Whether a node only moves data, and all its inputs have the grid of its result."""
    sources = [source for source in node.all_input_nodes if is_float(source)]
    is_same_grid = grid is None or all(is_dequantize(source) and _grid(source) == grid for source in sources)
    return is_data_movement(node) and bool(sources) and is_same_grid


def _quantized_weights(node: Node, floats: Mapping[str, Tensor]) -> dict[str, Node]:
    """Return the quantized constants read between a tensor and the next quantized tensors, with their readers."""
    readers: dict[str, Node] = {}
    seen, pending = {node}, [node] if floats else []
    while pending:
        reader = pending.pop()
        for source in reader.all_input_nodes:
            if is_dequantize(source):
                value = source.args[0]
                if isinstance(value, Node) and value.name in floats:
                    readers[value.name] = reader
            elif source.op == "call_function" and not is_quantize(source) and source not in seen:
                seen.add(source)
                pending.append(source)
    return readers


def _grid(node: Node) -> QuantizationGrid | None:
    """Return the grid of a quantize or dequantize node; None for per-channel or computed parameters."""
    args = node.args[1:5]
    if "per_tensor" not in str(node.target) or any(isinstance(x, Node) for x in args):
        return None
    scale, zero_point, least, most = args
    return QuantizationGrid(float(scale), int(zero_point), int(least), int(most))  # type: ignore[arg-type]


@dataclass
class TensorValues:
    """Values of one compared tensor for one sample.

    Attributes:
        reference: value in floating point.
        layer_output: result of the isolated layer: quantized weights, floating-point inputs, no rounding; None
            without quantized weights.
        program: value in the program; None if it was not requested.
    """

    reference: Tensor
    layer_output: Tensor | None
    program: Tensor | None


class PlanInterpreter:
    """Executes a plan; buffers keep their values from sample to sample.

    Args:
        provided: names of the tensors whose values the program itself provides.
    """

    def __init__(self, plan: InterpreterPlan, provided: frozenset[str] = frozenset()) -> None:
        self._plan, self._simulated = plan, _find_simulated(plan, provided)
        self._tensors = {row.name: row for row in plan.tensors}
        self._released = _find_releases(plan)
        self._reference_state: dict[str, Tensor] = {}
        self._program_state: dict[str, Tensor] = {}
        #: Outputs of the model for the last sample.
        self.outputs: list[Any] = []

    def run(
        self,
        inputs: Sequence[Tensor],
        program_values: Mapping[str, Tensor] | None = None,
        *,
        isolate_layers: bool = False,
        overrides: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[ComparedTensor, TensorValues]]:
        """Execute all steps for a sample; yield each compared tensor with its values.

        Args:
            program_values: values that the program provides, by name. None: the program's values are not needed.
            isolate_layers: also compute each layer with quantized weights on floating-point inputs.
            overrides: values by tensor name that replace the floating-point ones.
        """
        plan, simulated = self._plan, frozenset() if program_values is None else self._simulated
        sample = _SampleState(program_values or {}, simulated, isolate_layers, overrides or {})
        sample.reference.update(zip(plan.inputs, (x.clone() for x in inputs), strict=True))
        sample.program.update(sample.reference)
        for step in plan.steps:
            if step.kind == "constant":
                constant = plan.constants[step.name]
                sample.reference[step.name] = self._reference_state.get(
                    step.name, plan.float_constants.get(step.name, constant)
                )
                sample.program[step.name] = self._program_state.get(step.name, constant)
                if isolate_layers and step.name in plan.float_constants:
                    sample.isolated[step.name] = constant
            elif step.kind != "input":
                sample.execute(step)
            tensor = self._tensors.get(step.name)
            if tensor is not None:
                yield (
                    tensor,
                    TensorValues(
                        sample.reference[tensor.float_step],
                        sample.isolated.get(tensor.float_step),
                        sample.program.get(tensor.name),
                    ),
                )
            for name in self._released.get(step.name, ()):
                for environment in (sample.reference, sample.isolated, sample.program):
                    environment.pop(name, None)
        self.outputs = [sample.reference[x.name] if isinstance(x, Ref) else x for x in plan.outputs]
        self._reference_state = {buffer: sample.reference[value] for buffer, value in plan.writes.items()}
        self._program_state = {
            buffer: sample.program[value] for buffer, value in plan.writes.items() if value in sample.program
        }


@dataclass
class _SampleState:
    """State of one sample's execution.

    Attributes:
        program_values, isolates_layers, overrides: see ``PlanInterpreter.run``.
        simulated: steps whose values in the program are computed here.
        reference, isolated, program: values by step; see ``TensorValues``.
    """

    program_values: Mapping[str, Tensor]
    simulated: frozenset[str]
    isolates_layers: bool
    overrides: Mapping[str, Tensor]
    reference: dict[str, Any] = field(default_factory=dict)
    isolated: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def execute(self, step: Step) -> None:
        """Compute a step. Quantized tensors are held dequantized, as their consumers read them."""
        name, first = step.name, step.sources[0] if step.sources else ""
        compute: Callable[[Mapping[str, Any]], Any] = {
            "quantize": lambda values: _fake_quantize(step, values),
            "dequantize": lambda values: _dequantize(step, values),
            "call": lambda values: step(values.__getitem__),
        }[step.kind]
        if name in self.overrides:
            self.reference[name] = self.overrides[name]
        else:
            self.reference[name] = self.reference[first] if step.kind == "quantize" else compute(self.reference)
        if self.isolates_layers and step.kind != "quantize" and not self.isolated.keys().isdisjoint(step.sources):
            self.isolated[name] = compute(ChainMap(self.isolated, self.reference))
        if name in self.program_values:
            self.program[name] = self.program_values[name]
        elif name in self.simulated:
            self.program[name] = compute(self.program)


def _find_releases(plan: InterpreterPlan) -> dict[str, list[str]]:
    """Return the values that can be released after each step."""
    position = {step.name: index for index, step in enumerate(plan.steps)}
    last_use = {source: step.name for step in plan.steps for source in step.sources}
    for tensor in plan.tensors:  # the quantized tensor may be read later than its floating-point value
        last_use[tensor.float_step] = max(
            last_use.get(tensor.float_step, tensor.name), tensor.name, key=position.__getitem__
        )
    live = {ref.name for ref in plan.outputs if isinstance(ref, Ref)} | set(plan.writes.values())
    releases: dict[str, list[str]] = {}
    for source, step in last_use.items():
        if source not in live:
            releases.setdefault(step, []).append(source)
    return releases


def dequantize_constant(plan: InterpreterPlan, name: str) -> tuple[Step, Tensor]:
    """Return the dequantize step of a quantized constant, and the dequantized values."""
    step = next(step for step in plan.steps if step.kind == "dequantize" and step.sources[0] == name)
    return step, step(plan.constants.__getitem__)


def _find_simulated(plan: InterpreterPlan, provided: frozenset[str]) -> frozenset[str]:
    """Return the steps whose program values PyTorch must compute, because the program does not provide them."""
    simulated = {row.name for row in plan.tensors} - provided
    if simulated:
        simulated |= set(plan.writes.values()) - provided
    for step in reversed(plan.steps):
        if step.name in simulated:
            simulated.update(source for source in step.sources if source not in provided)
    return frozenset(simulated)


def _fake_quantize(step: Step, values: Mapping[str, Any]) -> Any:
    """Quantize and dequantize a tensor."""
    integers = step(values.__getitem__)
    args = [values[x.name] if isinstance(x, Ref) else x for x in step.args[1:]]
    name = str(step.target).replace(".quantize_", ".dequantize_")
    return _operator(name)(integers, *args)


def _dequantize(step: Step, values: Mapping[str, Any]) -> Any:
    source = values[step.sources[0]]
    return source if kind_of(source.dtype) is ScalarKind.FLOAT else step(values.__getitem__)
