"""A captured program as steps that another process can take, in real numbers and as the program computes.

fx's graphs travel badly: pickling one traces it anew, and PyTorch's operators cannot be pickled at all.
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

from arm_backend_core.aten.functionalize import functional
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
from arm_backend_core.ops.catalog import find, is_data_movement
from arm_backend_core.ops.loops import LOOP_OUT
from arm_backend_core.program import constants_of, copied, drop_assertions, inputs_of, store_of
from arm_backend_core.quantization.diagnostics.error_metrics import Grid

_USER = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)


class UnsupportedProgramError(Exception):
    """The program has what a plan cannot have; says what."""


@dataclass(frozen=True)
class Ref:
    """The result of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """A node: an operator with its operands, or a tensor that the program is given or holds, without operator."""

    name: str
    kind: str  # "given", "held", "quantize", "dequantize", "call"
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Steps that it reads."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(dict.fromkeys(leaf.name for leaf in leaves if isinstance(leaf, Ref)))

    def __call__(self, value_of: Callable[[str], Any]) -> Any:
        """What the operator makes of its operands."""
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
        name: of the step that has it; ``float_step``: of the one that has it in floating point, before it is quantized.
        node: of the captured program, that computes it.
        grid: the real numbers that it is rounded to, if it is quantized.
        moves: it holds numbers that it read, in other places: nothing is lost.
        is_fixed: the grid is that of the operator, whatever calibration saw.
        dtype: of what the program holds.
        operator, module, source: where it comes from: ATen operator, path of the submodule, line of the model; where
            one with weights and its activation are one layer, both operators, and module and line of the first.
        readers: submodules that compute with it; empty if the model itself does, or nothing.
        weights: constants that are quantized and that only this row's operators read.
    """

    name: str
    float_step: str
    node: str
    grid: Grid | None
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
        inputs: names of the tensors that it takes, in order.
        constants: parameters, buffers and constants.
        float_constants: what some of these were before they were quantized.
        outputs: what it returns, tensors as ``Ref``: new values of inputs that it writes come first.
        writes: buffers, and what is written to them.
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
        """The plan of a program, which is left as it is.

        Args:
            float_constants: constants before they were quantized, by the name that the signature has for them.

        Raises:
            NoPlan: it has loops, or operators that are no more than a graph.
        """
        program = copied(program)
        inline_higher_order_ops(program.graph_module, constants_of(program))
        program = functional(program)
        drop_assertions(program)
        return _plan(program, floats or {})

    @property
    def has_state(self) -> bool:
        """Whether a sample changes what the next one gives."""
        return bool(self.writes)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is rounded."""
        return any(row.grid is not None for row in self.tensors)


def _plan(program: ExportedProgram, floats: Mapping[str, Tensor]) -> InterpreterPlan:
    signature = program.graph_signature
    held, real = {}, {}
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            name = spec.arg.name
            held[name] = store_of(program, str(spec.target))[str(spec.target)].detach()
            if spec.target in floats:
                real[name] = floats[str(spec.target)].detach()
    steps = [_step(node, held) for node in program.graph.nodes if node.op != "output"]
    results = pytree.tree_leaves(program.graph.output_node().args[0])
    buffers = {name: graph_input for graph_input, name in signature.inputs_to_buffers.items()}
    outputs, writes = [], {}
    for spec, result in zip(signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            writes[buffers[str(spec.target)]] = result.name
        elif spec.kind in _USER:
            outputs.append(Ref(result.name) if isinstance(result, Node) else result)
    given = [node.name for node in inputs_of(program) if isinstance(node.meta.get("val"), Tensor)]
    return InterpreterPlan(steps, given, held, real, outputs, writes, _rows(program, real))


def _step(node: Node, held: Mapping[str, Tensor]) -> Step:
    if node.op == "placeholder":
        return Step(node.name, "held" if node.name in held else "given")
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
        found: Callable[..., Any] = target
        return found
    if target == "aten.view.default":  # attention lays its result out in another way than it was traced with
        return torch.reshape
    if target.startswith("quantized_decomposed."):
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers them)
    made: Callable[..., Any] = operator.attrgetter(target)(torch.ops)
    return made


def _rows(program: ExportedProgram, floats: Mapping[str, Tensor]) -> list[ComparedTensor]:
    """Of quantized tensors; of real ones those that are not on their way to be quantized, and those it returns."""
    rows = []
    inside: set[Node] = set()
    for node in reversed(program.graph.nodes):
        computes = node.op == "call_function" and not is_quantize(node) and not is_dequantize(node)
        if computes and node.users and all(is_quantize(user) or user in inside for user in node.users):
            inside.add(node)
    varying = set(program.graph.find_nodes(op="placeholder")) - constants_of(program).keys()
    for node in program.graph.nodes:
        if not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if node.op != "call_function" or is_dequantize(node) or node in inside or node not in varying:
            continue
        if is_quantize(node):
            rows.append(_row(node, node.args[0], _grid(node), floats))
        elif is_float(node) and isinstance(node.meta["val"], Tensor):
            rows.append(_row(node, node, None, floats))
    return rows


def _row(node: Node, value: Node, grid: Grid | None, floats: Mapping[str, Tensor]) -> ComparedTensor:
    source = boundary_source(value)
    made = source.args[0] if source.target is operator.getitem else source
    assert isinstance(made, Node)
    weights = _weights(value, floats)
    reader = next(iter(weights.values()), made)  # what users call the layer, whatever its result goes through behind it
    *_, module = ("", *modules_of(reader))
    operators = [operator_name(node) for node in dict.fromkeys((reader, made))]
    return ComparedTensor(
        name=node.name,
        float_step=value.name,
        node=source.name,
        grid=grid,
        is_data_movement=_moves(made, grid),
        is_fixed=getattr(find(made), "fixed_range", None) is not None,
        dtype=str(node.meta["val"].dtype).removeprefix("torch."),
        operator="input" if made.op == "placeholder" else " + ".join(operators),
        module=module,
        readers=_readers(node),
        source=source_line(reader),
        weights=tuple(weights),
    )


def _readers(node: Node) -> tuple[str, ...]:
    """Submodules that compute with a tensor, wherever it is moved before."""
    found: dict[str, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if is_quantize(user) or is_dequantize(user) or is_data_movement(user):
            pending += user.users
        elif user.op == "call_function":
            found[("", *modules_of(user))[-1]] = None
    return () if "" in found else tuple(found)


def _moves(node: Node, grid: Grid | None) -> bool:
    """Whether it computes nothing, and all that it reads is on the grid of its result."""
    reads = [source for source in node.all_input_nodes if is_float(source)]
    same = grid is None or all(is_dequantize(source) and _grid(source) == grid for source in reads)
    return is_data_movement(node) and bool(reads) and same


def _weights(node: Node, floats: Mapping[str, Tensor]) -> dict[str, Node]:
    """Quantized constants that a row's operators read, those up to the next quantized tensors, and which reads each."""
    found: dict[str, Node] = {}
    seen, pending = {node}, [node] if floats else []
    while pending:
        reader = pending.pop()
        for source in reader.all_input_nodes:
            if is_dequantize(source):
                value = source.args[0]
                if isinstance(value, Node) and value.name in floats:
                    found[value.name] = reader
            elif source.op == "call_function" and not is_quantize(source) and source not in seen:
                seen.add(source)
                pending.append(source)
    return found


def _grid(node: Node) -> Grid | None:
    """None where a channel has a grid of its own, or one that is computed."""
    args = node.args[1:5]
    if "per_tensor" not in str(node.target) or any(isinstance(x, Node) for x in args):
        return None
    scale, zero_point, least, most = args
    return Grid(float(scale), int(zero_point), int(least), int(most))  # type: ignore[arg-type]


@dataclass
class TensorValues:
    """What is known of one row for one sample.

    Attributes:
        reference: in floating point.
        layer_output: what quantized weights make of right inputs; None where there are none.
        program: as the program has it; None where it was not asked for.
    """

    reference: Tensor
    layer_output: Tensor | None
    program: Tensor | None


class PlanInterpreter:
    """A plan under way from sample to sample.

    Args:
        known: names of the rows whose values the program itself tells.
    """

    def __init__(self, plan: InterpreterPlan, known: frozenset[str] = frozenset()) -> None:
        self._plan, self._simulated = plan, _asked(plan, known)
        self._tensors = {row.name: row for row in plan.tensors}
        self._released = _freed(plan)
        self._reference_state: dict[str, Tensor] = {}
        self._program_state: dict[str, Tensor] = {}
        #: What the model returns for the last sample.
        self.outputs: list[Any] = []

    def run(
        self,
        inputs: Sequence[Tensor],
        known: Mapping[str, Tensor] | None = None,
        *,
        own: bool = False,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[ComparedTensor, TensorValues]]:
        """Take all steps for a sample; yields the rows as they come.

        Args:
            known: values as the program has them; None: those of the program are not asked for.
            own: compute what layers make of right inputs.
            replaced: values of rows that stand in for the right ones.
        """
        plan, asked = self._plan, frozenset() if known is None else self._simulated
        at = _Sample(known or {}, asked, own, replaced or {})
        at.reference.update(zip(plan.inputs, (x.clone() for x in inputs), strict=True))
        at.program.update(at.reference)
        for step in plan.steps:
            if step.kind == "held":
                before = plan.constants[step.name]
                at.reference[step.name] = self._reference_state.get(step.name, plan.float_constants.get(step.name, before))
                at.program[step.name] = self._program_state.get(step.name, before)
                if own and step.name in plan.float_constants:
                    at.isolated[step.name] = before
            elif step.kind != "given":
                at.execute(step)
            row = self._tensors.get(step.name)
            if row is not None:
                yield row, TensorValues(at.reference[row.float_step], at.isolated.get(row.float_step), at.program.get(row.name))
            for name in self._released.get(step.name, ()):
                for values in (at.reference, at.isolated, at.program):
                    values.pop(name, None)
        self.outputs = [at.reference[x.name] if isinstance(x, Ref) else x for x in plan.outputs]
        self._reference_state = {buffer: at.reference[value] for buffer, value in plan.writes.items()}
        self._program_state = {buffer: at.program[value] for buffer, value in plan.writes.items() if value in at.program}


@dataclass
class _Sample:
    """What is known while the steps of one sample are taken.

    Attributes:
        program_values, overrides: see ``PlanInterpreter.run``; ``simulated``: steps whose values in the program are computed here.
        reference, isolated, program: see ``TensorValues``.
    """

    program_values: Mapping[str, Tensor]
    simulated: frozenset[str]
    isolates_layers: bool
    overrides: Mapping[str, Tensor]
    reference: dict[str, Any] = field(default_factory=dict)
    isolated: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def execute(self, step: Step) -> None:
        """Compute a step. Quantized tensors are real numbers here, as what follows reads them."""
        name, first = step.name, step.sources[0] if step.sources else ""
        make: Callable[[Mapping[str, Any]], Any] = {
            "quantize": lambda values: _rounded(step, values),
            "dequantize": lambda values: _dequantized(step, values),
            "call": lambda values: step(values.__getitem__),
        }[step.kind]
        if name in self.overrides:
            self.reference[name] = self.overrides[name]
        else:
            self.reference[name] = self.reference[first] if step.kind == "quantize" else make(self.reference)
        if self.isolates_layers and step.kind != "quantize" and not self.isolated.keys().isdisjoint(step.sources):
            self.isolated[name] = make(ChainMap(self.isolated, self.reference))
        if name in self.program_values:
            self.program[name] = self.program_values[name]
        elif name in self.simulated:
            self.program[name] = make(self.program)


def _freed(plan: InterpreterPlan) -> dict[str, list[str]]:
    """What need not be kept behind each step."""
    place = {step.name: index for index, step in enumerate(plan.steps)}
    last = {source: step.name for step in plan.steps for source in step.sources}
    for row in plan.tensors:  # a row may be read later than its value
        last[row.float_step] = max(last.get(row.float_step, row.name), row.name, key=place.__getitem__)
    kept = {ref.name for ref in plan.outputs if isinstance(ref, Ref)} | set(plan.writes.values())
    freed: dict[str, list[str]] = {}
    for source, step in last.items():
        if source not in kept:
            freed.setdefault(step, []).append(source)
    return freed


def dequantize_constant(plan: InterpreterPlan, name: str) -> tuple[Step, Tensor]:
    """The step that makes real numbers of a quantized constant, and these."""
    step = next(step for step in plan.steps if step.kind == "dequantize" and step.sources[0] == name)
    return step, step(plan.constants.__getitem__)


def _asked(plan: InterpreterPlan, known: frozenset[str]) -> frozenset[str]:
    """Steps whose values as the program has them PyTorch must compute, as the program does not tell them."""
    asked = {row.name for row in plan.tensors} - known
    if asked:
        asked |= set(plan.writes.values()) - known
    for step in reversed(plan.steps):
        if step.name in asked:
            asked.update(source for source in step.sources if source not in known)
    return frozenset(asked)


def _rounded(step: Step, values: Mapping[str, Any]) -> Any:
    """The real number that a quantized tensor stands for."""
    integers = step(values.__getitem__)
    args = [values[x.name] if isinstance(x, Ref) else x for x in step.args[1:]]
    name = str(step.target).replace(".quantize_", ".dequantize_")
    return _operator(name)(integers, *args)


def _dequantized(step: Step, values: Mapping[str, Any]) -> Any:
    source = values[step.sources[0]]
    return source if kind_of(source.dtype) is ScalarKind.FLOAT else step(values.__getitem__)
