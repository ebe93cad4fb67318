"""Scatter chains: replace writes into all slices of a tensor by one concatenation of the written values.

``c[..., 0] = c[..., 0] / width; c[..., 1] = c[..., 1] / height`` is a chain of two scatters. After the first
scatter, channel 0 holds fractions of the image size, and channel 1 still holds pixel coordinates. A single scale cannot
represent both. The prompt encoder of Segment Anything has this chain. For images of 1024 x 768 pixels, the SQNR of the
normalized coordinates is -2 dB in INT8 and 27 dB in A16W8. With a concatenation, it is 44 dB and 81 dB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from arm_backend_core.graph_edits import insert_call, replace_node
from arm_backend_core.nodes import is_float

aten = torch.ops.aten
_READS = (aten.select.int, aten.slice.Tensor)
_WRITES = (aten.select_scatter.default, aten.slice_scatter.default)
#: Maximum average number of pieces that a write contributes to the concatenation. A chain with more pieces is not
#: replaced. For example, if two writes alternate along a long dimension, each index is a piece.
_MAX_PIECES_PER_WRITE = 4


@dataclass(frozen=True)
class _IndexRange:
    """The indices of one dimension that a node reads or writes."""

    dim: int
    positions: range


def resolve_scatter_chains(module: GraphModule) -> None:
    """Let reads skip writes to other indices. Put a concatenation in place of each chain that writes all indices."""
    calls = [node for node in module.graph.nodes if node.op == "call_function" and is_float(node)]
    for node in calls:
        if node.target in _READS:
            _skip_writes(node)
    # The last write of a chain comes first. Its replacement leaves the earlier writes without users.
    for node in reversed(calls):
        if node.target in _WRITES and node.users:
            _replace_by_concatenation(node)
        elif node.target in _WRITES:
            module.graph.erase_node(node)


def _skip_writes(node: Node) -> None:
    """Let ``node``, a slice, read the tensor before the preceding writes, if they do not overlap the slice."""
    read, source = _index_range(node), node.args[0]
    while read is not None and isinstance(source, Node) and source.target in _WRITES:
        written = _index_range(source)
        if written is None or written.dim != read.dim or not set(written.positions).isdisjoint(read.positions):
            break
        source = source.args[0]
    node.update_arg(0, source)


def _replace_by_concatenation(node: Node) -> None:
    """If the chain of writes that ends with ``node`` writes a whole dimension, replace it by a concatenation."""
    last = _index_range(node)
    if last is None or len(last.positions) == node.meta["val"].shape[last.dim]:
        return
    # ``{7: (write, 2)}``: ``write`` is the last write to index 7, and stores index 2 of its values there.
    writers: dict[int, tuple[Node, int]] = {}
    write: Any = node
    while isinstance(write, Node) and write.target in _WRITES:
        written, source = _index_range(write), cast(Node, write.args[1])
        if written is None or written.dim != last.dim or source.meta["val"].dtype is not node.meta["val"].dtype:
            break
        for index, position in enumerate(written.positions):
            writers.setdefault(position, (write, index))
        write = write.args[0]
    if len(writers) < node.meta["val"].shape[last.dim]:
        return
    pieces: list[tuple[Node, int, int]] = []  # (write, start, end): the range [start, end) of its values
    for position in range(len(writers)):
        write, index = writers[position]
        if pieces and pieces[-1][0] is write and pieces[-1][2] == index:
            pieces[-1] = (*pieces[-1][:2], index + 1)
        else:
            pieces.append((write, index, index + 1))
    if len(pieces) > _MAX_PIECES_PER_WRITE * len({write for write, *_ in pieces}):
        return
    with node.graph.inserting_before(node):
        operands = [_written_slice(node, *piece, last.dim) for piece in pieces]
        result = node.graph.call_function(aten.cat.default, (operands, last.dim))
    result.meta = dict(node.meta)
    replace_node(node, result)


def _written_slice(origin: Node, write: Node, start: int, end: int, dim: int) -> Node:
    """Insert the slice [start, end) of the values that ``write`` stores, with the metadata of ``origin``."""
    source = cast(Node, write.args[1])
    if write.target is aten.select_scatter.default:
        return insert_call(origin, aten.unsqueeze.default, source, dim)
    if end - start == source.meta["val"].shape[dim]:
        return source
    return insert_call(origin, aten.slice.Tensor, source, dim, start, end)


def _index_range(node: Node) -> _IndexRange | None:
    """The indices that ``node`` reads or writes; None if the range is empty or unknown at compile time."""
    shape = cast(Node, node.args[0]).meta["val"].shape
    arguments: tuple[Any, ...] = node.args[2 if node.target in _WRITES else 1 :]
    if node.kwargs or not shape or not all(x is None or isinstance(x, int) for x in (*arguments, *shape)):
        return None
    if 0 in shape:  # after the check above: symbolic sizes cannot be compared
        return None
    defaults: tuple[Any, ...] = (0, None, None, None)
    dim, start, end, step = (*arguments, *defaults[len(arguments) :])
    dim, positions = dim % len(shape), range(shape[dim])
    if node.target in (aten.select.int, aten.select_scatter.default):
        return _IndexRange(dim, range(positions[start], positions[start] + 1))
    positions = positions[start:end:step]
    return _IndexRange(dim, positions) if positions else None
