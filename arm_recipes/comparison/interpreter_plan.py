"""Interpreter plan: a captured program as a picklable list of steps, which ``PlanInterpreter`` runs.

Worker processes need a picklable program. Pickling an FX graph would trace it again, and PyTorch operators cannot be
pickled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from arm_backend_core.aten.functionalize import functionalize_program
from arm_backend_core.aten.higher_order import inline_higher_order_ops
from arm_backend_core.nodes import is_dequantize, is_quantize, overload_of
from arm_backend_core.ops.loop_markers import LOOP_OUT
from arm_backend_core.program import TENSOR_KINDS, constants_of, copy_program, drop_assertions, store_of, user_inputs
from arm_recipes.comparison.compared_tensors import ComparedTensor, find_compared_tensors

_USER_OUTPUTS = (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION)


class UnsupportedProgramError(Exception):
    """The program has a loop, a branch or a call that a plan cannot represent. The message names it."""


@dataclass(frozen=True)
class Ref:
    """A reference to the result of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """A node of the program: an operator with its operands, an input, or a constant."""

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
        return resolve_operator(self.target)(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "sources"}


@dataclass
class InterpreterPlan:
    """The steps of a program.

    Attributes:
        steps: steps in program order.
        inputs: names of the input tensors, in order.
        constants: parameters, buffers and constants by name.
        float_constants: values of quantized constants before quantization, by name.
        outputs: outputs of the program: a ``Ref`` for a tensor, otherwise the value itself. The new values of mutated
            inputs come first.
        writes: ``{name of a mutated buffer: name of the step that computes its new value}``.
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
    def from_program(program: ExportedProgram, float_constants: Mapping[str, Tensor] | None = None) -> InterpreterPlan:
        """Build the plan of a program. The program is not modified.

        Args:
            float_constants: ``{name in the graph signature: constant before quantization}``.

        Raises:
            UnsupportedProgramError: the program has a loop, a branch that cannot be inlined, or a call of a function
                that is neither a PyTorch operator nor of Python's ``operator``, ``builtins`` or ``math``.
        """
        program = copy_program(program)
        inline_higher_order_ops(program.graph_module, constants_of(program))
        program = functionalize_program(program)
        drop_assertions(program)
        return _build_plan(program, float_constants or {})

    @property
    def has_state(self) -> bool:
        """Whether a sample changes the results of later samples, through buffers."""
        return bool(self.writes)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor that can be compared is quantized."""
        return any(row.qparams is not None for row in self.tensors)


def _build_plan(program: ExportedProgram, original_constants: Mapping[str, Tensor]) -> InterpreterPlan:
    signature = program.graph_signature
    constants, float_constants = {}, {}
    for spec in signature.input_specs:
        if spec.kind in TENSOR_KINDS:
            name = spec.arg.name
            constants[name] = store_of(program, str(spec.target))[str(spec.target)].detach()
            if spec.target in original_constants:
                float_constants[name] = original_constants[str(spec.target)].detach()
    steps = [_create_step(node, constants) for node in program.graph.nodes if node.op != "output"]
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
        steps,
        graph_inputs,
        constants,
        float_constants,
        outputs,
        writes,
        find_compared_tensors(program, float_constants),
    )


def _create_step(node: Node, constants: Mapping[str, Tensor]) -> Step:
    if node.op == "placeholder":
        return Step(node.name, "constant" if node.name in constants else "input")
    if node.op != "call_function" or node.target is LOOP_OUT:
        raise UnsupportedProgramError(
            "a loop" if node.target is LOOP_OUT else f"'{node.name}', a {node.op} of '{node.target}'"
        )
    kind = "quantize" if is_quantize(node) else "dequantize" if is_dequantize(node) else "call"
    args, kwargs = map_aggregate((node.args, node.kwargs), _to_ref)
    overload = overload_of(node.target)
    if overload is None and getattr(node.target, "__module__", None) not in ("_operator", "builtins", "math"):
        raise UnsupportedProgramError(f"'{node.name}', a call of {node.target}")
    target = str(overload) if overload is not None else node.target
    return Step(node.name, kind, target, tuple(args), dict(kwargs))


def _to_ref(x: Any) -> Any:
    return Ref(x.name) if isinstance(x, Node) else x


def resolve_operator(target: Any) -> Callable[..., Any]:
    """Return the function of ``Step.target``."""
    if not isinstance(target, str):
        function: Callable[..., Any] = target
        return function
    if target == "aten.view.default":
        # A view may fail: at run time, attention may return another memory layout than in the trace.
        return torch.reshape
    if target.startswith("quantized_decomposed."):
        from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers the operators)
    overload: Callable[..., Any] = operator.attrgetter(target)(torch.ops)
    return overload


def dequantize_constant(plan: InterpreterPlan, name: str) -> tuple[Step, Tensor]:
    """Return the dequantize step of a quantized constant, and the dequantized values."""
    step = next(step for step in plan.steps if step.kind == "dequantize" and step.sources[0] == name)
    return step, step(plan.constants.__getitem__)
