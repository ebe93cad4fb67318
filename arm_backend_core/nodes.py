"""Facts about fx nodes that any part of the compiler may ask."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Container
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from arm_backend_core.kinds import INTEGER_OR_BOOL, ScalarKind, kind_of
from arm_backend_core.permutation import Layout, identity

#: Metadata of what a recurrent layer's step consists of: what has it in common is in the same place of its steps.
TIMESTEP_SLOT = "arm_place"
#: Metadata of a ``scan`` whose rounds are calls of a delegate.
DELEGATE_LOOP = "arm_loop"
#: Metadata of a tensor of integers, or of these as real numbers: the least and the largest that it is taken to hold.
INTERVAL = "arm_interval"
#: Metadata of a ``where`` between the results of two branches, of which one alone is computed while it is calibrated.
BRANCH_SELECT = "arm_choice"
_RECIPES_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "arm_recipes", "")
_LIBRARY_FOLDERS = (os.path.join(os.path.dirname(torch.__file__), ""), _RECIPES_FOLDER)
_QUANTIZE = ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel")
_DEQUANTIZE = ("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel")


def overload_of(target: Any) -> OpOverload | None:
    """The ATen overload behind a node's target; edge operators are unwrapped."""
    inner = target if isinstance(target, OpOverload) else getattr(target, "_op", None)
    return inner if isinstance(inner, OpOverload) else None


def operator_name(node: Node) -> str:
    """The ATen overload, for example ``aten.add.Tensor``; of any other call what it is called."""
    overload: Any = overload_of(node.target)
    return str(overload or getattr(node.target, "__name__", node.target))


def is_implicit(overload: OpOverload) -> bool:
    """Whether the library that has ``overload`` says what it is made of."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def is_quantize(node: Node) -> bool:
    """Whether ``node`` turns real numbers into integers."""
    overload = overload_of(node.target)
    return overload is not None and overload.name().split(".")[0] in _QUANTIZE


def is_dequantize(node: Node) -> bool:
    """Whether ``node`` turns integers into real numbers."""
    overload = overload_of(node.target)
    return overload is not None and overload.name().split(".")[0] in _DEQUANTIZE


def is_sole_reader(node: Node) -> bool:
    """Whether nothing but ``node`` reads its first operand, be that dequantized for each reader or not."""
    source = node.all_input_nodes[0]
    if is_dequantize(source):
        source = source.all_input_nodes[0]
    return sum(len(user.users) if is_dequantize(user) else 1 for user in source.users) == 1


def is_constant(node: Node, constants: Container[Node]) -> bool:
    """Whether ``node`` computes tensors from constants alone, by an operator that always gives the same."""
    if node.target is operator.getitem:
        return node.args[0] in constants
    overload = overload_of(node.target)
    if overload is None or overload._schema.is_mutable or is_random(node):
        return False
    known = all(source in constants for source in node.all_input_nodes)
    return known and first_result(node) is not None


#: Random operators that PyTorch's tag does not tell, without what marks an in-place form.
_UNTAGGED_RANDOM = {
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"),
    *("random", "binomial", "_sample_dirichlet", "normal_functional"),
}


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an operator by name, its defaults included."""
    names = cast(OpOverload, overload_of(node.target))._schema.arguments
    given = {argument.name: value for argument, value in zip(names, node.args, strict=False)}
    return {x.name: x.default_value for x in names if x.has_default_value()} | given | node.kwargs


def is_random(node: Node) -> bool:
    """Whether ``node`` draws random numbers in each call; a dropout of evaluation mode, or of nothing, does not."""
    overload = overload_of(node.target)
    if overload is None:
        return False
    name, known = overload._schema.name.partition("::")[2].removesuffix("_"), arguments_of(node)
    if torch.Tag.nondeterministic_seeded not in overload.tags and name not in _UNTAGGED_RANDOM:
        return False
    rates = [known[key] for key in ("dropout", "dropout_p", "p") if key in known and ("dropout" in key + name)]
    return known.get("train", known.get("training", True)) is not False and rates[:1] != [0.0]


def mutates(node: Node) -> bool:
    """Whether ``node`` writes into an operand."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_state(node: Node) -> bool:
    """Whether ``node`` is an attribute that the graph writes into, or into a view of: it differs from call to call."""
    return node.op == "get_attr" and is_written(node)


def is_written(node: Node) -> bool:
    """Whether the graph writes into ``node``, or into a view of it."""
    known = [node]
    for source in known:  # views of it are added on the way
        if any(overwrites(user, source) for user in source.users):
            return True
        operators = (user for user in source.users if isinstance(user.target, (OpOverload, type(operator.getitem))))
        known += [user for user in operators if user not in known and is_view(user, source)]
    return False


def overwrites(node: Node, source: Node) -> bool:
    """Whether ``node`` changes the memory of ``source``; ``x += y`` does not change ``y``, which it reads."""
    return changes_memory(node) and any(info.is_write for info in _alias_infos(node, source))


def changes_memory(node: Node) -> bool:
    """Whether ``node`` writes into memory: ``transpose_`` changes how one name reads it."""
    return mutates(node) and torch.Tag.inplace_view not in cast(OpOverload, node.target).tags


def is_view(node: Node, source: Node) -> bool:
    """Whether ``node``'s result may share memory with ``source``, which it reads.

    The schema says so, or what PyTorch traced: composites (``type_as``, ``broadcast_tensors``) return their input where
    nothing is to be done, whatever their schema says.
    """
    if not isinstance(node.target, OpOverload):
        return True
    if any(result.alias_info is not None for result in node.target._schema.returns):
        return bool(_alias_infos(node, source)) and not changes_memory(node)
    return not _memory(source).isdisjoint(_memory(node))


def _alias_infos(node: Node, source: Node) -> list[Any]:
    """What the schema says of the memory of those arguments that are ``source``, or lists with it; not of others."""
    arguments = cast(OpOverload, node.target)._schema.arguments
    values: list[Any] = [*node.args, *(node.kwargs.get(argument.name) for argument in arguments[len(node.args) :])]
    holding = [source in value if isinstance(value, (list, tuple)) else value is source for value in values]
    return [x.alias_info for x, holds in zip(arguments, holding, strict=True) if holds and x.alias_info is not None]


def _memory(node: Node) -> set[int]:
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def constant_nodes(graph: Graph) -> set[Node]:
    """Parameters, buffers and what is computed from them alone, of a graph that has them as attributes."""
    constants: set[Node] = set()
    for node in graph.nodes:
        held = node.op == "get_attr" and not is_state(node)
        if held or (node.op == "call_function" and is_constant(node, constants)):
            constants.add(node)
    return constants


def evaluate_node(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """What PyTorch makes of ``value_of`` each operand: a tensor, or several.

    Some kernels lay their result out in another way than the graph says, by which its views were traced.
    """
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    with torch.no_grad():
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    as_traced = isinstance(made, torch.Tensor) and node.meta["val"].is_contiguous()
    return made.contiguous() if as_traced else made


def eliminate_dead_code(graph: Graph) -> None:
    """Erase what nothing reads and has no effect; fx's ``eliminate_dead_code`` checks the whole graph before."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def memory_order(tensor: torch.Tensor) -> Layout:
    """Dimensions from the outermost in memory to the innermost: NHWC for ``channels_last``, else as they are.

    ``channels_last_3d`` is no exception: ExecuTorch's runtime refuses it as an input from Python.
    """
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return (0, 2, 3, 1) if last else identity(tensor.dim())


#: Marks a node that only brings a tensor across a delegate's boundary.
BOUNDARY = "arm_boundary"
#: Key in a node's ``meta["custom"]``: why the node stays on the CPU.
REFUSAL_REASON = "arm_reason"
#: Key in a node's ``meta``: why its decomposition was not used.
DECOMPOSITION_REFUSAL = "arm_declined"
#: Key in a node's ``meta["custom"]``: its number in the program as it was captured, see ``assign_debug_handles``.
DEBUG_HANDLE = "arm_handle"
#: Above the debug handles that ExecuTorch gives to what stays on the CPU, in a flow that is not ours.
_FIRST_HANDLE = 1_000_001


def set_refusal_reason(node: Node, reason: str) -> None:
    """Have ``node`` carry why it stays on the CPU; ExecuTorch decomposes and renames it, and copies this."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), REFUSAL_REASON: reason}


def assign_debug_handles(graph: Graph, first: int = _FIRST_HANDLE) -> None:
    """Give operators numbers in program order, unless they have some: ExecuTorch's debug handles come from these.

    What an operator is decomposed into inherits its number, here and in ExecuTorch, as ``set_refusal_reason`` has it.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if all(debug_handle_of(node) is None for node in nodes):
        for handle, node in enumerate(nodes, first):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), DEBUG_HANDLE: handle}


def debug_handle_of(node: Node) -> int | None:
    """The number of ``node``, or of the operator that it was made for; None for what only the compiler wants."""
    return (node.meta.get("custom") or {}).get(DEBUG_HANDLE)


def boundary_source(node: Node) -> Node:
    """What ``node`` only quantizes, dequantizes or casts, or is."""
    while is_quantize(node) or is_dequantize(node) or node.meta.get(BOUNDARY):
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node


def boundary_order(node: Node) -> Layout:
    """How ``node``'s result lies in memory where a delegate reads it.

    Inputs of the program lie as the example did, if that was contiguous or channels_last, and quantizing or casting
    keeps that. What an operator on the CPU returns depends on ExecuTorch's later passes (a permute copies there), so
    it is made contiguous; what a delegate returns is.
    """
    source = boundary_source(node)
    return memory_order(source.meta["val"]) if source.op == "placeholder" else identity(source.meta["val"].dim())


def first_result(node: Node) -> torch.Tensor | None:
    """The fake tensor of ``node``'s (first) result; None for what is no tensor."""
    meta = node.meta.get("val")
    first = meta[0] if isinstance(meta, (tuple, list)) and meta else meta
    return first if isinstance(first, torch.Tensor) else None


def result_kind(node: Node) -> ScalarKind | None:
    """What the elements of ``node``'s (first) result are; None for what is no tensor.

    Raises:
        ModelError: their type is of no kind that a program can hold.
    """
    first = first_result(node)
    return None if first is None else kind_of(first.dtype)


def is_float(node: Node) -> bool:
    """Whether ``node``'s (first) result is a floating-point tensor."""
    return result_kind(node) is ScalarKind.FLOAT


def is_integer(node: Node) -> bool:
    """Whether ``node``'s (first) result is a tensor of integers; one of booleans is not."""
    return result_kind(node) is ScalarKind.INTEGER


def is_complex(node: Node) -> bool:
    """Whether ``node``'s (first) result is a complex tensor."""
    return result_kind(node) is ScalarKind.COMPLEX


def is_integer_or_bool(node: Node) -> bool:
    """Whether ``node``'s (first) result is a tensor of integers or booleans, which count as 0 and 1."""
    return result_kind(node) in INTEGER_OR_BOOL


def source_line(node: Node) -> str:
    """``file:line`` of the user's model that made ``node``, empty if the trace does not say.

    PyTorch's own lines, as that of every convolution in ``nn.Conv2d``, and ours tell nothing: they are only for models
    that have no other.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    if not lines:
        return ""
    theirs = [line for line in lines if not line.removeprefix('File "').startswith(_LIBRARY_FOLDERS)]
    file, line, *_ = (theirs or lines)[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"


def modules_of(node: Node) -> dict[str, Any]:
    """{path of a module: its type} for the modules that a node was traced in, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return {_module_path(entry[0]): entry[1] for entry in stack.values()}


def _module_path(raw: str) -> str:
    """torch.export writes ``L['self'].layer.0`` or ``layer.0``."""
    for old, new in (("L['self']", ""), ("L__self__", ""), ("['", "."), ("']", "")):
        raw = raw.replace(old, new)
    return raw.strip(".")


def describe_node(node: Node) -> str:
    """What a user may know ``node`` by."""
    if node.op != "call_function":
        return f"{'input' if node.op == 'placeholder' else 'parameter'} '{node.target}'"
    line = source_line(node)
    return f"the result of {overload_of(node.target) or node.target} ('{node.name}'{line and ', ' + line})"


def add_buffer_node(module: GraphModule, name: str, tensor: Tensor) -> Node:
    """A node, where the graph inserts, that reads ``tensor``; it becomes a buffer called ``name`` or similar."""
    node = module.graph.get_attr(add_buffer(module, name, tensor))
    node.meta["val"] = tensor
    return node


def add_buffer(module: GraphModule, name: str, tensor: Tensor) -> str:
    """The name of ``tensor`` as a buffer of the module: ``name``, or similar."""
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, tensor)
    return name
