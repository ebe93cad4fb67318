"""Casts of int8 and uint8 to float, and dequantization of uint8: replace them by dequantize operators of int8.

The lowering merges a dequantize operator into the kernel that reads it, so the program stores no float32 tensor. A cast
of int8 to float becomes a dequantize operator with scale 1 and zero point 0. uint8 becomes int8: 128 is subtracted from
the integers and from the zero point. Two operators subtract 128 from the integers: a cast of ExecuTorch's portable
library, which keeps the bits, and a look-up table, which flips the highest bit. For 27,648 elements on a Cortex-M55,
both together take an estimated 1.0 million cycles. With the portable library's ``bitwise_xor`` instead of the table,
they take 1.9 million.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from arm_backend_core.cortex_m.emitter import Emitter
from arm_backend_core.dtype import UINT8_OFFSET
from arm_backend_core.nodes import first_result, is_dequantize, is_float, is_quantize
from arm_backend_core.ops.catalog import is_cast

aten = torch.ops.aten
_DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default
_INT8_LIMITS = (-128, 127, torch.int8)


def is_cast_from_8_bits(node: Node) -> bool:
    """Whether ``node`` casts int8 or uint8 to a floating-point type."""
    return is_cast(node) and is_float(node) and _dtype(node.all_input_nodes[0]) in (torch.int8, torch.uint8)


def replace_casts_by_dequantize(graph: Graph, emit: Emitter) -> None:
    """Replace casts from int8 and uint8 to float, and dequantize operators of uint8, by dequantize operators of int8.

    A dequantize operator of uint8 is replaced if it is per tensor, with the limits 0 and 255. A node is left unchanged
    if no quantize operator reads it, because then no kernel would read its integers.

    Args:
        graph: the graph.
        emit: inserts the conversions from uint8 to int8.
    """
    int8_sources: dict[Node, Node] = {}
    for node in list(graph.nodes):
        parameters = _parameters(node)
        if parameters is None or not any(map(is_quantize, node.users)):
            continue
        scale, zero_point = parameters
        source = node.all_input_nodes[0]
        if source not in int8_sources:
            int8_sources[source] = _to_int8(source, node, emit)
        if _dtype(source) is torch.uint8:
            zero_point -= UINT8_OFFSET
        node.target, node.kwargs = _DEQUANTIZE, {}
        node.args = (int8_sources[source], scale, zero_point, *_INT8_LIMITS)
        node.meta = {**node.meta, "val": node.meta["val"].contiguous()}


def _parameters(node: Node) -> tuple[float, int] | None:
    """Scale and zero point of a node that ``replace_casts_by_dequantize`` may replace; None for other nodes."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if is_cast_from_8_bits(node):
        return 1.0, 0
    arguments: Any = node.args
    is_per_tensor = is_dequantize(node) and isinstance(arguments[1], float)
    has_full_range = is_per_tensor and _dtype(arguments[0]) is torch.uint8 and arguments[3:5] == (0, 255)
    return (arguments[1], arguments[2]) if has_full_range else None


def _to_int8(source: Node, reader: Node, emit: Emitter) -> Node:
    """``source`` as contiguous int8 (for uint8: minus 128), computed before ``reader``."""
    value = source.meta["val"]
    if value.dtype is torch.int8 and value.is_contiguous():
        return source
    emit.set_insertion_point(reader, reader)
    bits = emit.call(aten._to_copy.default, source, dtype=torch.int8, memory_format=torch.contiguous_format)
    if value.dtype is torch.int8:
        return bits
    # Entry i is the result for the integer i - 128: this integer with its highest bit flipped.
    flipped = np.roll(np.arange(-UINT8_OFFSET, UINT8_OFFSET), UINT8_OFFSET).astype(np.int8)
    return emit.call_kernel("quantized_activation", bits, emit.constant(flipped, "table"))


def _dtype(node: Node) -> torch.dtype | None:
    return getattr(first_result(node), "dtype", None)
