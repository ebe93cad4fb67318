"""Look-up tables: a table replaces elementwise operators that together compute one int8 tensor from another.

PyTorch evaluates the quantized operators to fill the 256 entries of the table. The result is therefore bit-equal to the
result of the quantized graph in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.cortex_m.kernels.registry import Array
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import is_dequantize, operator_name
from arm_backend_core.ops.catalog import find_record


@dataclass(frozen=True)
class UnivariateFunction:
    """An elementwise function of one quantized tensor.

    Attributes:
        source: a dequantize node that the function reads. If the function reads several dequantize nodes, all of them
            dequantize the same tensor of integers.
        nodes: its operators, in program order.
        result: the last operator.
    """

    source: Node
    nodes: tuple[Node, ...]
    result: Node

    def tabulate(self, quantize: Node, constants: Mapping[Node, Any]) -> Array:
        """The int8 results for the integers -128 to 127. ``quantize`` is a quantize node that reads ``result``."""
        integers = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
        values: dict[Node, Any] = {}

        def value_of(node: Node) -> Any:
            if node in values:
                return values[node]
            if is_dequantize(node):
                arguments = torch.fx.map_arg(node.args[1:], constants.__getitem__)
                return node.target(integers, *arguments)  # type: ignore[operator]
            return constants[node].reshape(()) if constants[node].numel() == 1 else constants[node]

        with torch.no_grad():
            for node in self.nodes:
                arguments, options = torch.fx.map_arg((node.args, node.kwargs), value_of)
                values[node] = node.target(*arguments, **options)  # type: ignore[operator]
            arguments = torch.fx.map_arg(quantize.args[1:], constants.__getitem__)
            result = quantize.target(value_of(self.result), *arguments)  # type: ignore[operator]
        return np.asarray(result.expand(256).numpy(), np.int8)


def match_univariate(result: Node, constants: Mapping[Node, Any]) -> UnivariateFunction:
    """Match the elementwise function of one tensor whose result is ``result``.

    Raises:
        Unsupported: an operator is not elementwise, the function does not read exactly one tensor, or the result has
            another shape than this tensor.
    """
    shape = tuple(result.meta["val"].shape)
    nodes: list[Node] = []
    sources: dict[Node, Node] = {}  # {node of the integers: a dequantize node that reads them}
    pending, visited = [result], set[Node]()
    while pending:
        node = pending.pop()
        if node in visited or (node in constants and constants[node].numel() == 1):
            continue
        visited.add(node)
        if is_dequantize(node):
            sources[node.all_input_nodes[0]] = node
            continue
        record = find_record(node) if node.op == "call_function" else None
        if record is None or not record.is_univariate:
            is_operator = node.op == "call_function"
            name = (
                operator_name(node) if is_operator else f"{operator_name(result)} with the float tensor '{node.name}'"
            )
            raise Unsupported(f"there is no int8 kernel for {name}")
        nodes.append(node)
        pending += node.all_input_nodes
    if len(sources) != 1:
        raise Unsupported(f"{operator_name(result)} combines {len(sources)} tensors, for which there is no kernel")
    (source,) = sources.values()
    if tuple(source.meta["val"].shape) != shape:
        raise Unsupported(f"{operator_name(result)} changes the shape of its operand")
    position = {node: index for index, node in enumerate(result.graph.nodes)}
    return UnivariateFunction(source, tuple(sorted(nodes, key=position.__getitem__)), result)
