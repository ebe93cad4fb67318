"""Queries and helpers for fx nodes, for use in any part of the compiler."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from arm_backend_core.permutation import Layout, identity
from arm_backend_core.scalar_kind import INTEGER_OR_BOOL, ScalarKind, kind_of

#: Key in a node's ``meta``: identifies the node among the operators of one step of an unrolled recurrent layer.
#: Corresponding nodes of all steps have the same value (the slot).
TIMESTEP_SLOT = "arm_place"
#: Key in a node's ``meta``: marks a ``scan`` whose iterations call a delegate.
DELEGATE_LOOP = "arm_loop"
#: Key in a node's ``meta``: assumed (minimum, maximum) of a tensor of integers, or of integers cast to floats.
INTERVAL = "arm_interval"
#: Key in a node's ``meta``: marks a ``where`` that selects the result of one branch of a ``torch.cond``.
#: Calibration computes only the branch that is taken.
BRANCH_SELECT = "arm_choice"
#: Key in the ``meta`` of a ``get_attr`` node: whether the attribute is a parameter, not a buffer or a constant.
PARAMETER = "arm_parameter"
#: Key in a node's ``meta``: marks the operand of a dropout that was removed because it is inactive in evaluation mode.
FEEDS_DROPOUT = "arm_feeds_dropout"
#: Key in a node's ``meta``: name of the node with ``FEEDS_DROPOUT`` that this node replaces.
REPLACED_NAME = "arm_replaced_name"
_RECIPES_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "arm_recipes", "")
_LIBRARY_FOLDERS = (os.path.join(os.path.dirname(torch.__file__), ""), _RECIPES_FOLDER)
_QUANTIZE = ("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::quantize_per_channel")
_DEQUANTIZE = ("quantized_decomposed::dequantize_per_tensor", "quantized_decomposed::dequantize_per_channel")


def overload_of(target: Any) -> OpOverload | None:
    """The operator overload behind a node's target, None for other targets; edge operators are unwrapped."""
    inner = target if isinstance(target, OpOverload) else getattr(target, "_op", None)
    return inner if isinstance(inner, OpOverload) else None


def operator_name(node: Node) -> str:
    """The operator overload, for example ``aten.add.Tensor``; the function's name for any other call."""
    overload: Any = overload_of(node.target)
    return str(overload or getattr(node.target, "__name__", node.target))


def is_composite_implicit(overload: OpOverload) -> bool:
    """Whether ``overload`` is CompositeImplicitAutograd: its library provides a decomposition."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")


def is_quantize(node: Node) -> bool:
    """Whether ``node`` is a quantize operator of ``quantized_decomposed``, per tensor or per channel."""
    overload = overload_of(node.target)
    return overload is not None and overload.name().split(".")[0] in _QUANTIZE


def is_dequantize(node: Node) -> bool:
    """Whether ``node`` is a dequantize operator of ``quantized_decomposed``, per tensor or per channel."""
    overload = overload_of(node.target)
    return overload is not None and overload.name().split(".")[0] in _DEQUANTIZE


def is_only_user_of_operand(node: Node) -> bool:
    """Whether no other node reads the first operand of ``node``, directly or through dequantize nodes."""
    source = node.all_input_nodes[0]
    if is_dequantize(source):
        source = source.all_input_nodes[0]
    return sum(len(user.users) if is_dequantize(user) else 1 for user in source.users) == 1


def is_constant(node: Node, constants: Container[Node]) -> bool:
    """Whether ``node`` computes tensors from constants alone, with a deterministic operator."""
    if node.target is operator.getitem:
        return node.args[0] in constants
    overload = overload_of(node.target)
    if overload is None or not all(source in constants for source in node.all_input_nodes):
        return False
    return not overload._schema.is_mutable and not is_random(node) and first_result(node) is not None


#: Random operators without PyTorch's ``nondeterministic_seeded`` tag. ``random`` also stands for in-place ``random_``.
_UNTAGGED_RANDOM = {
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"),
    *("random", "binomial", "_sample_dirichlet", "normal_functional"),
}


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of an operator by name, its defaults included."""
    arguments = cast(OpOverload, overload_of(node.target))._schema.arguments
    passed = {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    return {x.name: x.default_value for x in arguments if x.has_default_value()} | passed | node.kwargs


def is_random(node: Node) -> bool:
    """Whether ``node`` draws random numbers in each call; dropout in evaluation mode or with rate 0 does not."""
    overload = overload_of(node.target)
    if overload is None or not _may_be_random(overload):
        return False
    name, arguments = _schema_name(overload), arguments_of(node)
    rates = [arguments[key] for key in ("dropout", "dropout_p", "p") if key in arguments and ("dropout" in key + name)]
    return arguments.get("train", arguments.get("training", True)) is not False and rates[:1] != [0.0]


@cache
def _may_be_random(overload: OpOverload) -> bool:
    is_tagged = torch.Tag.nondeterministic_seeded in overload.tags
    return is_tagged or _schema_name(overload) in _UNTAGGED_RANDOM


def _schema_name(overload: OpOverload) -> str:
    """The operator's name; an in-place operator such as ``add_`` has the name ``add``."""
    return str(overload._schema.name).partition("::")[2].removesuffix("_")


def has_mutable_schema(node: Node) -> bool:
    """Whether ``node`` changes an operand in place: its elements, or only its metadata (``transpose_``)."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def is_state(node: Node) -> bool:
    """Whether ``node`` is mutable state: an attribute into which the graph writes, directly or through a view."""
    return node.op == "get_attr" and is_written(node)


def is_written(node: Node) -> bool:
    """Whether the graph writes into ``node`` or into one of its views."""
    aliases = [node]
    for source in aliases:  # the loop appends the views of each alias
        if any(is_write_to(user, source) for user in source.users):
            return True
        operators = (user for user in source.users if isinstance(user.target, (OpOverload, type(operator.getitem))))
        aliases += [user for user in operators if user not in aliases and is_view(user, source)]
    return False


def is_write_to(node: Node, source: Node) -> bool:
    """Whether ``node`` changes the memory of ``source``. ``x += y`` changes ``x``, but not ``y``."""
    return is_in_place_write(node) and any(info.is_write for info in _alias_infos(node, source))


def is_in_place_write(node: Node) -> bool:
    """Whether ``node`` writes elements in place. ``transpose_`` does not: it changes the metadata of one tensor."""
    return has_mutable_schema(node) and torch.Tag.inplace_view not in cast(OpOverload, node.target).tags


def is_view(node: Node, source: Node) -> bool:
    """Whether ``node``'s result may share memory with ``source``, which it reads.

    If the schema declares an alias for a result, the schema decides. Otherwise, the result is a view if the traced
    tensors share a storage: composites (``type_as``, ``broadcast_tensors``) may return their input unchanged although
    their schema declares no alias. True if the target is not an ``OpOverload``.
    """
    if not isinstance(node.target, OpOverload):
        return True
    if any(result.alias_info is not None for result in node.target._schema.returns):
        return bool(_alias_infos(node, source)) and not is_in_place_write(node)
    return not _storages(source).isdisjoint(_storages(node))


def _alias_infos(node: Node, source: Node) -> list[Any]:
    """The schema's alias annotations of the arguments to which ``node`` passes ``source``, alone or in a list."""
    arguments = cast(OpOverload, node.target)._schema.arguments
    values: list[Any] = [*node.args, *(node.kwargs.get(argument.name) for argument in arguments[len(node.args) :])]
    contains_source = [source in value if isinstance(value, (list, tuple)) else value is source for value in values]
    return [
        x.alias_info
        for x, contains in zip(arguments, contains_source, strict=True)
        if contains and x.alias_info is not None
    ]


def _storages(node: Node) -> set[int]:
    value = node.meta.get("val")
    values = [value] if isinstance(value, torch.Tensor) else torch.utils._pytree.tree_leaves(value)
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def constant_nodes(graph: Graph, inputs: Iterable[Node] = ()) -> set[Node]:
    """The attributes that the graph does not write, the constant ``inputs``, and nodes computed from these alone."""
    constants, has_writes = set(inputs), any(map(has_mutable_schema, graph.nodes))
    for node in graph.nodes:
        is_attribute = node.op == "get_attr" and not (has_writes and is_state(node))
        if is_attribute or (node.op == "call_function" and is_constant(node, constants)):
            constants.add(node)
    return constants


def evaluate_node(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Evaluate ``node`` with PyTorch; returns a tensor, or several.

    Some kernels return other strides than the graph's metadata, but later views in the graph are valid only for the
    strides of the metadata. If the metadata is contiguous and the result is not, this function copies the result.

    Args:
        node: the operator.
        value_of: returns the value of an operand.
    """
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    with torch.no_grad():
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    needs_contiguous = isinstance(result, torch.Tensor) and node.meta["val"].is_contiguous()
    return result.contiguous() if needs_contiguous else result


def dim_order_of(tensor: torch.Tensor) -> Layout:
    """Dimensions from the outermost in memory to the innermost: NHWC for ``channels_last``, else the identity.

    It is the identity for ``channels_last_3d``, too, because ExecuTorch's runtime refuses such inputs from Python.
    """
    is_channels_last = (
        tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return (0, 2, 3, 1) if is_channels_last else identity(tensor.dim())


#: Key in a node's ``meta``: marks a cast or copy that only carries a tensor across a delegate's boundary.
BOUNDARY = "arm_boundary"
#: Key in a node's ``meta["custom"]``: why the node stays on the CPU.
REFUSAL_REASON = "arm_reason"
#: Key in a node's ``meta``: why its decomposition was not used.
DECOMPOSITION_REFUSAL = "arm_declined"
#: Key in a node's ``meta``: marks a composite that a rewrite leaves to the CPU; it is not decomposed.
KEEP_COMPOSITE = "arm_keep_composite"
#: Key in a node's ``meta["custom"]``: its number in the captured program, see ``assign_debug_handles``.
DEBUG_HANDLE = "arm_handle"
#: First debug handle: larger than the handles that ExecuTorch assigns to CPU operators in a plain ``to_edge`` flow.
_FIRST_HANDLE = 1_000_001


def set_refusal_reason(node: Node, reason: str) -> None:
    """Store on ``node`` why it stays on the CPU. ExecuTorch copies ``custom`` when it decomposes or renames nodes."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), REFUSAL_REASON: reason}


def assign_debug_handles(graph: Graph, first: int = _FIRST_HANDLE) -> None:
    """Number the operators in program order, unless some have a number. The numbers become ExecuTorch's debug handles.

    The nodes of a decomposition inherit the number, because this compiler and ExecuTorch copy ``custom``.

    Args:
        graph: the graph to number.
        first: number of the first operator.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if all(debug_handle_of(node) is None for node in nodes):
        for handle, node in enumerate(nodes, first):
            node.meta["custom"] = {**(node.meta.get("custom") or {}), DEBUG_HANDLE: handle}


def debug_handle_of(node: Node) -> int | None:
    """The number of ``node``, or of the operator that it was decomposed from; None if it has no number."""
    return (node.meta.get("custom") or {}).get(DEBUG_HANDLE)


def boundary_source(node: Node) -> Node:
    """The node whose tensor ``node`` carries across a delegate's boundary.

    Follows first operands upstream, past quantize and dequantize nodes and nodes marked ``BOUNDARY``. Returns ``node``
    if it is none of these.
    """
    return source_through(node, lambda x: is_quantize(x) or is_dequantize(x) or bool(x.meta.get(BOUNDARY)))


def boundary_dim_order(node: Node) -> Layout:
    """The memory layout of ``node``'s result where a delegate reads it.

    A program input has the layout of the example input if that is contiguous or channels_last. Quantizing and casting
    preserve this layout. All other results are contiguous: a CPU operator's result is made contiguous, because its
    layout depends on later passes of ExecuTorch, which replace ``permute`` by ``permute_copy``.
    """
    source = boundary_source(node)
    return dim_order_of(source.meta["val"]) if source.op == "placeholder" else identity(source.meta["val"].dim())


def first_result(node: Node) -> torch.Tensor | None:
    """The fake tensor of ``node``'s (first) result; None if that is not a tensor."""
    meta = node.meta.get("val")
    first = meta[0] if isinstance(meta, (tuple, list)) and meta else meta
    return first if isinstance(first, torch.Tensor) else None


def result_kind(node: Node) -> ScalarKind | None:
    """The scalar kind of ``node``'s (first) result; None if that is not a tensor.

    Raises:
        ModelError: the type belongs to no kind (see ``scalar_kind``).
    """
    first = first_result(node)
    return None if first is None else kind_of(first.dtype)


def is_float(node: Node) -> bool:
    """Whether ``node``'s (first) result is a floating-point tensor."""
    return result_kind(node) is ScalarKind.FLOAT


def is_integer(node: Node) -> bool:
    """Whether ``node``'s (first) result is a tensor of integers, not booleans."""
    return result_kind(node) is ScalarKind.INTEGER


def is_complex(node: Node) -> bool:
    """Whether ``node``'s (first) result is a complex tensor."""
    return result_kind(node) is ScalarKind.COMPLEX


def is_empty(value: Any) -> bool:
    """Whether ``value`` is a tensor that has no elements. A size that depends on data is assumed not to be 0."""
    return isinstance(value, Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def is_integer_or_bool(node: Node) -> bool:
    """Whether ``node``'s (first) result is a tensor of integers or booleans."""
    return result_kind(node) in INTEGER_OR_BOOL


def source_line(node: Node) -> str:
    """``file:line`` of the user's model where ``node`` was traced; empty if the trace does not contain one.

    Lines of PyTorch and arm_recipes are skipped: in PyTorch, for example, every ``nn.Conv2d`` has the same line. If the
    trace contains only such lines, ``source_location`` names the module instead.
    """
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if 'File "' in line]
    user_lines = [line for line in lines if not line.removeprefix('File "').startswith(_LIBRARY_FOLDERS)]
    if not user_lines:
        return ""
    file, line, *_ = user_lines[-1].removeprefix("File ").split(", ")
    return f"{file.strip(chr(34))}:{line.removeprefix('line ')}"


def source_location(node: Node) -> str:
    """The source line of ``node``, or its innermost module if the user's model has no line for it; may be empty."""
    line = source_line(node)
    if line or not (modules := modules_of(node)):
        return line
    path, kind = list(modules.items())[-1]
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return f"'{path}' ({name})" if path else name


def modules_of(node: Node) -> dict[str, Any]:
    """The modules that a node was traced in, the innermost last: {path of the module: its type}."""
    stack = node.meta.get("nn_module_stack") or {}
    return {_module_path(entry[0]): entry[1] for entry in stack.values()}


def _module_path(raw: str) -> str:
    """Normalize a module path: torch.export writes ``L['self'].layer.0`` or ``layer.0``."""
    for old, new in (("L['self']", ""), ("L__self__", ""), ("['", "."), ("']", "")):
        raw = raw.replace(old, new)
    return raw.strip(".")


def describe_node(node: Node) -> str:
    """Describe ``node`` for a message to the user."""
    if node.op != "call_function":
        return f"{'input' if node.op == 'placeholder' else 'parameter'} '{node.target}'"
    line = source_location(node)
    return f"the result of {overload_of(node.target) or node.target} ('{node.name}'{line and ', ' + line})"


def source_through(node: Node, is_skipped: Callable[[Node], bool]) -> Node:
    """Follow first operands from ``node`` upstream; return the first node for which ``is_skipped`` is false."""
    while is_skipped(node):
        node = node.all_input_nodes[0]
    return node


def readers_through(node: Node, is_skipped: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield the readers of ``node`` and, recursively, of each reader for which ``is_skipped`` is true; each once."""
    pending, visited = list(node.users), set[Node]()
    while pending:
        reader = pending.pop()
        if reader not in visited:
            visited.add(reader)
            pending += reader.users if is_skipped(reader) else ()
            yield reader
