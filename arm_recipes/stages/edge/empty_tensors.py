"""Empty tensors (a dimension of size 0): replace CPU operators that produce or read them by constants.

Kernels of ExecuTorch's portable library crash on such tensors (``log_softmax`` and ``constant_pad_nd`` divide by a
size, ``amax`` aborts), or reject them (``index_select``). The results of such operators are known at export: an empty
tensor has no values, and a reduction over an empty dimension gives a constant, such as 0 for ``sum``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from executorch.exir import EdgeProgramManager
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.nodes import is_complex, is_empty, is_random, overload_of

_EDGE_ATEN = exir_ops.edge.aten
#: Kernels that accept a mix of empty and non-empty operands, as tests of each kernel show.
MIXED_OPERAND_KERNELS = frozenset(
    {
        *("aten::addmm.out", "aten::cat.out", "aten::index_put.out", "aten::scatter.src_out", "aten::scatter_add.out"),
        *("aten::slice_scatter.out", "aten::split_with_sizes_copy.out"),
    }
)


def replace_empty_tensors(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: replace operators with empty tensors by constants.

    An operator is replaced if its result is empty, or if all operands are empty and all elements of the result are
    equal. Other operators are unchanged, except that ``cat`` drops empty operands.
    """
    for method in manager.methods:
        module = manager.exported_program(method).graph_module
        changed = [_replace_or_trim(node) for node in list(module.graph.nodes) if _touches_empty_tensor(node)]
        if any(changed):
            eliminate_dead_code(module.graph)
            module.recompile()
    return []


def _result_tensors(nodes: Iterable[Node]) -> list[Tensor]:
    values = [value for node in nodes for value in pytree.tree_leaves(node.meta.get("val"))]
    return [value for value in values if isinstance(value, Tensor)]


def _touches_empty_tensor(node: Node) -> bool:
    """Whether a CPU operator (or a getitem of its results) without side effects reads or produces an empty tensor."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    producer = node.all_input_nodes[0] if node.target is operator.getitem else node
    overload = overload_of(producer.target)
    is_functional = (
        isinstance(producer.target, EdgeOpOverload) and overload is not None and not overload._schema.is_mutable
    )
    return is_functional and any(map(is_empty, _result_tensors([node, *node.all_input_nodes])))


def _replace_or_trim(node: Node) -> bool:
    """Replace ``node`` by a constant, or drop the empty operands of a ``cat``. Returns whether the graph changed."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not is_complex(node):  # programs have no complex numbers
        fill_value = 0 if is_empty(value) else _uniform_value(node)
        if fill_value is not None:
            node.target, node.args = _EDGE_ATEN.full.default, (list(value.shape), fill_value)
            node.kwargs = {"dtype": value.dtype}
            node.meta["val"] = value.new_empty(value.shape)  # contiguous
            return True
    if node.target is _EDGE_ATEN.cat.default:
        node.update_arg(0, [part for part in node.args[0] if not is_empty(part.meta["val"])])  # type: ignore[union-attr]
        return True
    return False


def _uniform_value(node: Node) -> float | int | bool | None:
    """Compute the value that all elements of the result have.

    None if the elements differ, an operand has elements, or the operator is random.
    """
    source, index = (node.all_input_nodes[0], node.args[1]) if node.target is operator.getitem else (node, None)
    overload = overload_of(source.target)
    if overload is None or is_random(source) or not all(map(is_empty, _result_tensors(source.all_input_nodes))):
        return None
    args, kwargs = torch.fx.map_arg((source.args, source.kwargs), _make_zeros)
    with torch.no_grad():
        results = overload(*args, **kwargs)
    result = results if index is None else results[index]
    first: float | int | bool = result.flatten()[0].item()
    is_uniform = (result == first) | (result != result) if first != first else result == first
    return first if bool(is_uniform.all()) else None


def _make_zeros(node: Node) -> Any:
    return pytree.tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), node.meta["val"])
