"""Check of operand dtypes: all operands of a matrix product or recurrent layer must have the same dtype.

PyTorch checks this only at run time. Tracing accepts unequal dtypes, so this module checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from arm_recipes._internal.conversions import dtype_name

_ATEN = torch.ops.aten
#: Operators whose operands must have one dtype.
_EQUAL_DTYPES = frozenset(
    {
        *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.mm.default, _ATEN.bmm.default),
        *(_ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.mv.default, _ATEN.addmv.default, _ATEN.dot.default),
        *(_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input),
    }
)


def check_operand_dtypes(graph: Graph) -> None:
    """Check the operators of a captured graph. Regions of ``torch.autocast`` are separate graphs, and are not checked.

    Raises:
        RuntimeError: PyTorch would refuse an operator. The message names it.
    """
    from arm_backend_core.nodes import describe_node

    for node in graph.nodes:
        if node.target in _EQUAL_DTYPES:
            values = (source.meta.get("val") for source in node.all_input_nodes)
            dtypes = _dtypes(values)
            if len(dtypes) > 1:
                raise RuntimeError(
                    f"{describe_node(node)} has operands of {' and '.join(dtypes)}, and PyTorch takes one dtype: "
                    "convert the operands to the same dtype with .to()"
                )


class RequireEqualDtypes(TorchDispatchMode):
    """Dispatch mode for runs on fake tensors: raises for the operators that ``check_operand_dtypes`` rejects."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator.

        Raises:
            RuntimeError: PyTorch would refuse its operands.
        """
        call: Callable[..., Any] = func
        if func in _EQUAL_DTYPES and len(dtypes := _dtypes(pytree.tree_leaves((args, kwargs)))) > 1:
            raise RuntimeError(f"{func} has operands of {' and '.join(dtypes)}")
        return call(*args, **(kwargs or {}))


def _dtypes(values: Iterable[Any]) -> list[str]:
    """The names of the tensors' dtypes without duplicates, in order of first use."""
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return list(dict.fromkeys(dtype_name(tensor.dtype) for tensor in tensors))
