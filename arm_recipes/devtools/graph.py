"""The captured program as ExecuTorch's Inspector reads it, and what PyTorch computes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.export.graph_signature import ConstantArgument
from torch.fx import GraphModule, Interpreter, Node

from arm_backend_core.nodes import handle_of, number
from arm_backend_core.program import copied, store_of
from arm_recipes._internal.executorch_programs import simplify_call

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_KEPT_META = ("val", "stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack")


def assign_debug_handles(program: ExportedProgram) -> ExportedProgram:
    """A copy of a program as it was lowered, with the debug handles that delegates and events have."""
    program = _with_buffers(program)
    simplify_call(program)
    program._example_inputs = None  # which have what is constant in the program
    number(program.graph, 1)
    for node in program.graph.nodes:
        handle = handle_of(node)
        node.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        if handle is not None:
            node.meta["debug_handle"] = handle
            _pass_by_position(node)
            node.args = tuple(list(arg) if isinstance(arg, tuple) else arg for arg in node.args)
    return program


def _with_buffers(program: ExportedProgram) -> ExportedProgram:
    """A copy with buffers of its own: a run may write them."""
    program = copied(program)
    for name in program.graph_signature.inputs_to_buffers.values():
        store = store_of(program, name)
        store[name] = store[name].detach().clone()
    return program


def _pass_by_position(node: Node) -> None:
    """Give operands by position where the operator takes them so: the Inspector's graph leaves out the others."""
    if not isinstance(node.target, OpOverload) or not node.kwargs:
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    for argument in node.target._schema.arguments[len(args) :]:
        if argument.kwarg_only or not (argument.name in kwargs or argument.has_default_value()):
            break
        if not kwargs.keys() - {other.name for other in node.target._schema.arguments if other.kwarg_only}:
            break
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


class _Recorder(Interpreter):
    """Runs a graph and keeps what some of its nodes give."""

    def __init__(self, module: GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self._names = names
        self.recorded: dict[str, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """One node."""
        value = super().run_node(n)
        if n.name in self._names and isinstance(value, torch.Tensor):
            self.recorded[n.name] = value.detach().clone()
        return value


def compute_node_values(
    program: ExportedProgram, inputs: Sequence[torch.Tensor], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """What nodes of a program give, computed by PyTorch."""
    program = _with_buffers(program)
    # Not program.module(): that checks inputs by code that it writes, which numbers and odd names are too much for.
    recorder = _Recorder(program.graph_module, names)
    with torch.no_grad():
        recorder.run(*_all_inputs(program, inputs))
    return recorder.recorded


def _all_inputs(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """What the graph takes: weights and buffers too, and the numbers that it was captured with."""
    given = iter(tensors)
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            yield store_of(program, spec.target)[spec.target]
        elif isinstance(spec.arg, ConstantArgument):
            yield spec.arg.value
        else:
            yield next(given)
