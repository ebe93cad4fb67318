"""The captured program with debug handles for ExecuTorch's Inspector, and the values of its nodes in PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.export.graph_signature import ConstantArgument
from torch.fx import GraphModule, Interpreter, Node

from arm_backend_core.nodes import assign_debug_handles, debug_handle_of
from arm_backend_core.program import copy_module, copy_program, store_of
from arm_recipes._internal.executorch_programs import normalize_call_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: Keys of node metadata that the copied program keeps.
_METADATA_KEYS = ("val", "stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack")


def with_debug_handles(program: ExportedProgram) -> ExportedProgram:
    """Copy a program, and give its nodes the debug handles that delegates and events use for them."""
    program = _copy_with_buffers(program)
    normalize_call_signature(program)
    assign_debug_handles(program.graph, 1)
    for node in program.graph.nodes:
        handle = debug_handle_of(node)
        node.meta = _filter_metadata(node.meta)
        if handle is not None:
            node.meta["debug_handle"] = handle
            _make_arguments_positional(node)
            node.args = tuple(list(arg) if isinstance(arg, tuple) else arg for arg in node.args)
    _filter_metadata_of_branches(program.graph_module)
    return program


def _filter_metadata_of_branches(module: GraphModule) -> None:
    """Replace the graphs of ``torch.cond`` and other higher-order operators by copies with filtered metadata."""
    for name, branch in list(module.named_children()):
        if isinstance(branch, GraphModule):
            copied = copy_module(branch)
            for node in copied.graph.nodes:
                node.meta = _filter_metadata(node.meta)
            setattr(module, name, copied)
            _filter_metadata_of_branches(copied)


def _filter_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Keep only metadata that is equal in two exports of a model: no ``id`` of a graph or a module.

    In a branch of ``torch.cond``, the key of a module is its ``id``. The path of the module replaces this key.
    """
    kept = {key: meta[key] for key in _METADATA_KEYS if key in meta}
    if "nn_module_stack" in kept:
        stack = kept["nn_module_stack"].items()
        kept["nn_module_stack"] = {entry[0] if key.isdigit() else key: entry for key, entry in stack}
    return kept


def _copy_with_buffers(program: ExportedProgram) -> ExportedProgram:
    """Copy a program and its buffers, because a run may write buffers."""
    program = copy_program(program)
    for name in program.graph_signature.inputs_to_buffers.values():
        store = store_of(program, name)
        store[name] = store[name].detach().clone()
    return program


def _make_arguments_positional(node: Node) -> None:
    """Convert keyword arguments to positional arguments if the schema allows it.

    The Inspector's graph drops keyword arguments.
    """
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


class _NodeRecorder(Interpreter):
    """Interpreter that records the values of selected nodes."""

    def __init__(self, module: GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self._names = names
        self.recorded: dict[str, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        """Execute a node, and record its value if the node is selected."""
        value = super().run_node(n)
        if n.name in self._names and isinstance(value, torch.Tensor):
            self.recorded[n.name] = value.detach().clone()
        return value


def compute_node_values(
    program: ExportedProgram, inputs: Sequence[torch.Tensor], names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Compute the values of selected nodes in PyTorch.

    Args:
        program: the program.
        inputs: inputs of the program.
        names: names of the nodes.

    Returns:
        ``{node name: value}``.
    """
    program = _copy_with_buffers(program)
    # Not program.module(): its generated input checks fail for number arguments and unusual names.
    recorder = _NodeRecorder(program.graph_module, names)
    with torch.no_grad():
        recorder.run(*_all_inputs(program, inputs))
    return recorder.recorded


def _all_inputs(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Yield all inputs of the graph: weights, buffers, Python constants from the capture, and ``tensors``."""
    user_inputs = iter(tensors)
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            yield store_of(program, spec.target)[spec.target]
        elif isinstance(spec.arg, ConstantArgument):
            yield spec.arg.value
        else:
            yield next(user_inputs)
