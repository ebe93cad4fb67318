"""Error location: the module, operator and source line of the user's model that an exception comes from."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import executorch.exir
import torch
from torch import fx

_PACKAGE_FOLDER = Path(__file__).parents[1]
#: Path prefixes of files that are not user code: Python, libraries, this package, generated code ("<eval_with_key>").
_LIBRARY_FOLDERS = (
    os.path.dirname(os.__file__),
    *(str(Path(package).parent.parent) for package in (torch.__file__, executorch.exir.__file__)),
    *(f"{_PACKAGE_FOLDER}{os.sep}", f"{_PACKAGE_FOLDER.with_name('arm_backend_core')}{os.sep}", "<"),
)

_STATIC_SHAPES = (
    "shapes and branches must not depend on the values of tensors: use torch.where, a mask, or a fixed number of "
    "elements (topk)"
)
#: PyTorch's name of a number that depends on data, such as "u0" or "zuf0". Users do not know these names, so messages
#: do not contain them.
_UNBACKED_SYMBOL = re.compile(r"\b(u|zuf)\d+\b")
_PAD_SEQUENCES = (
    "packed sequences have sizes that depend on the lengths: run the layer on the padded batch, and select the output "
    "of each sequence's last step, y[torch.arange(n), lengths - 1]"
)
#: {substring of an exception's text: advice how to change the model}.
_ADVICE_BY_SUBSTRING = {
    "data-dependent": _STATIC_SHAPES,
    "unbacked symbol": _STATIC_SHAPES,
    "finite upper bound for symbolic expression": _STATIC_SHAPES,
    "Missing out variants": "ExecuTorch cannot emit the operator: use another one",
}


def is_library_file(file: str) -> bool:
    """Whether a source file is part of Python, of a library or of this package, and not user code."""
    return file.startswith(_LIBRARY_FOLDERS)


def is_argument_error(error: BaseException) -> bool:
    """Whether ``error`` is a ValueError or TypeError that this package raised; its message then addresses the user."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        isinstance(error, (ValueError, TypeError))
        and bool(frames)
        and frames[-1].f_code.co_filename.startswith(f"{_PACKAGE_FOLDER}{os.sep}")
    )


def describe_error(
    operation: str, error: Exception, modules: Iterable[torch.nn.Module] = (), graphs: Sequence[fx.Graph] = ()
) -> str:
    """Compose an error message: what failed, where, why, and what to do.

    Args:
        operation: name of the operation that failed.
        error: the exception.
        modules: models whose submodules the message may name.
        graphs: graphs of the model, to find the node that the message names. If no frame of the traceback has an
            FX node, the message names the first node whose operator (``namespace::name``) occurs in the exception's
            text. If the error is about sizes that depend on data, the message names the first node with a symbolic
            size in its result or inputs.
    """
    submodule, line = _find_submodule_and_line(error, modules)
    text = str(error).strip()
    advice = next((advice for substring, advice in _ADVICE_BY_SUBSTRING.items() if substring in text), "")
    node = _find_node(error) or _find_named_operator(text, graphs)
    reason = text.splitlines()[0] if text else ""
    symbolic_node = _find_symbolic_size(graphs)
    is_data_dependent = bool(_UNBACKED_SYMBOL.search(reason)) and (
        advice is _STATIC_SHAPES or symbolic_node is not None
    )
    if is_data_dependent or (node is None and advice is _STATIC_SHAPES):
        node = symbolic_node or node
    location = f" in {submodule}" if submodule else ""
    if node is not None:
        from arm_backend_core.nodes import operator_name, source_line

        location += f" at {operator_name(node)}" if node.op == "call_function" else ""
        line = source_line(node) or line
        location += f" ({line})" if line else ""
    elif line:
        location += f" at {line}"
    reason = f"{type(error).__name__}: {reason}"
    if is_data_dependent:
        reason, advice = _describe_dependence(node), _STATIC_SHAPES
    if _involves_packed_sequence(error):
        advice = _PAD_SEQUENCES
    if not advice and node is not None and _has_symbolic_shape(node):
        advice = _STATIC_SHAPES
    return f"{operation} failed{location}: {reason}{'; ' if advice else ''}{advice}"


def _describe_dependence(node: fx.Node | None) -> str:
    if node is not None and _has_symbolic_shape(node):
        return "a size depends on data, such as on the number of elements that an index or a mask selects"
    return "a branch, a size or an index depends on data (the values of a tensor)"


def _involves_packed_sequence(error: Exception) -> bool:
    """Whether the exception was raised while packed sequences were created, used or padded."""
    packed = torch.nn.utils.rnn.PackedSequence
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(isinstance(value, packed) for frame in frames for value in frame.f_locals.values()) or any(
        frame.f_code.co_name in ("pack_padded_sequence", "pad_packed_sequence") for frame in frames
    )


def _find_submodule_and_line(error: Exception, modules: Iterable[torch.nn.Module]) -> tuple[str, str]:
    """Find the innermost submodule, as "'path' (class)", and the innermost line of user code; "" if there is none."""
    names = {id(submodule): name for module in modules for name, submodule in module.named_modules()}
    line, owner = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and id(module) in names:
            path = names[id(module)]
            owner = f"'{path}' ({type(module).__name__})" if path else type(module).__name__
        if not is_library_file(file):
            line = f"{file}:{number}"
    return owner, line


def _find_node(error: Exception) -> fx.Node | None:
    """Find the FX node that was being processed: the variable ``n`` or ``node`` of the innermost frame that has one.

    Nodes without a stack trace in their metadata are skipped.
    """
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for name in ("n", "node"):
            value = frame.f_locals.get(name)
            if isinstance(value, fx.Node) and value.meta.get("stack_trace"):
                innermost = value
    return innermost


def _has_symbolic_shape(node: fx.Node) -> bool:
    values = [value.meta.get("val") for value in (node, *node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(not isinstance(size, int) for tensor in tensors for size in tensor.shape)


def _find_symbolic_size(graphs: Sequence[fx.Graph]) -> fx.Node | None:
    """Find the first operator of the user's model with a symbolic size in its result or inputs."""
    nodes = (node for graph in graphs for node in graph.nodes if node.meta.get("stack_trace"))
    return next(filter(_has_symbolic_shape, nodes), None)


def _find_named_operator(text: str, graphs: Sequence[fx.Graph]) -> fx.Node | None:
    """Find the first node whose operator the text names, as ``namespace::name``."""
    from arm_backend_core.nodes import overload_of

    operators = set(re.findall(r"\w+::\w+", text))
    for graph in graphs:
        for node in graph.nodes:
            overload = overload_of(node.target) if node.op == "call_function" else None
            if overload is not None and overload._schema.name in operators:
                return node
    return None
