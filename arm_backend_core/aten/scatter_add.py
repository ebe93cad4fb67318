"""Scatter-adds: rewrite as overlap-add, a layer with one-hot weights or a sum of gathers, or leave to the CPU.

The decomposition of a scatter-add (``ops/composites/scatter``) compares each index with each position: its mask has one
element for each pair. If the indices are constant, this module uses the first of these rewrites that applies:

- Overlap-add: element c of frame f goes to position start + f * hop + c, as in the inverse short-time Fourier
  transform. The result is a ``col2im``. 61 frames of 256 samples with a hop of 64 take 38,007 cycles on U55-128 (Vela
  5.1), and 8,064,167 as a product with a one-hot matrix.
- In a program that will be quantized: a product with a one-hot matrix of up to ``_MAX_WEIGHTS`` elements. The sum is
  rounded once.
- The sum of k gathers from the source, which is padded with a row of zeros. k is the largest number of elements that
  go to one position.

Any other floating-point scatter-add, for example with computed indices, is decomposed if its number of pairs is within
the limit of the target, else left to the CPU. This module does not change integer scatter-adds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.errors import Unsupported
from arm_backend_core.graph_edits import add_buffer_node, eliminate_dead_code, insert_call, replace_node
from arm_backend_core.nodes import DECOMPOSITION_REFUSAL, KEEP_COMPOSITE, arguments_of, is_float
from arm_backend_core.targets.hardware import Hardware

aten = torch.ops.aten
Array = np.ndarray[Any, Any]

#: Maximum number of elements of a one-hot matrix, the weight of a layer. If 400 rows of 32 elements are added at 100
#: positions, this takes 24,336 cycles on U55-128 and 11,760 on U85-256; gathers take 319,244 and 124,902.
_MAX_WEIGHTS = 1 << 18
#: Maximum number of gathers in a sum (each gather adds a rounding error), and maximum total number of elements that the
#: gathers read. 16,384 elements take 211,424 cycles on U55-128 and 121,742 on U85-256.
_MAX_GATHERS, _MAX_GATHERED_ELEMENTS = 8, 1 << 16
_MAX_RUNS = 256  #: maximum number of SLICEs that replace the gathers on targets without GATHER
#: Maximum number of mask elements of a decomposition: on NPUs without EQUAL, on other NPUs, on other targets. An
#: element takes 78 cycles on U55-128, which has no EQUAL, and 3 on U85-256. The CPU takes a few cycles for each
#: element of the source.
_MAX_PAIRS_WITHOUT_COMPARISON, _MAX_PAIRS_ON_NPU, _MAX_PAIRS = 1 << 13, 1 << 16, 1 << 18
_PRODUCTS_PER_PAIR = 64  #: this many products with a quantized one-hot matrix take the time of one mask element


def rewrite_scatter_adds(
    module: GraphModule, hardware: Hardware, tensors: Mapping[Node, Tensor] | None = None, *, quantized: bool = False
) -> bool:
    """Rewrite floating-point scatter-adds at constant indices. Leave the others to the CPU if it is faster.

    Args:
        module: the module to edit.
        hardware: the hardware of the target.
        tensors: the values of placeholders that are parameters, buffers or lifted constants.
        quantized: whether the program is going to be quantized.

    Returns:
        Whether the graph changed.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _PARSERS]
    if not nodes:
        return False
    constants = Constants(module, tensors)
    changed = False
    for node in nodes:
        scatter = _PARSERS[node.target](arguments_of(node), constants) if is_float(node) else None
        if scatter is None or not scatter.rows or not node.meta["val"].numel():
            continue
        with module.graph.inserting_before(node):
            if _Rewriter(module, node, hardware, constants, quantized).rewrite(scatter):
                changed = True
            elif (refusal := _refuse_decomposition(scatter, hardware, quantized=quantized)) is not None:
                changed |= _keep_on_cpu(node, scatter, refusal)
    if changed:
        eliminate_dead_code(module.graph)
    return changed


@dataclass(frozen=True)
class _ScatterAdd:
    """Adds row r of ``source`` [leading, rows, trailing] to ``x`` [leading, positions, trailing] at indices[r].

    Attributes:
        x: the node that is added to.
        source: the node of the rows.
        indices: position of each row, not negative, [rows]; None if they are computed at run time.
        rows: number of rows.
        shape: shape to which ``source`` is expanded before it is reshaped to [leading, rows, trailing].
        leading: product of the sizes of the dimensions before the indexed ones.
        positions: number of positions.
        trailing: product of the sizes of the dimensions after the indexed ones.
        alpha: factor of the rows.
        has_mask_per_element: True if the decomposition has a mask for each element of a row, not one mask for the row.
    """

    x: Node
    source: Node
    indices: Array | None
    rows: int
    shape: tuple[int, ...]
    leading: int
    positions: int
    trailing: int
    alpha: float = 1
    has_mask_per_element: bool = False


def _refuse_decomposition(scatter: _ScatterAdd, hardware: Hardware, *, quantized: bool) -> Unsupported | None:
    """Return the reason why a decomposition would take more time than the CPU; None if it would take less."""
    vectors, pairs = scatter.leading * scatter.trailing, scatter.rows * scatter.positions
    if scatter.has_mask_per_element or not quantized:
        pairs *= vectors
    else:
        pairs += pairs * vectors // _PRODUCTS_PER_PAIR
    limit = _MAX_PAIRS
    if hardware.is_ethos_u:
        limit = _MAX_PAIRS_WITHOUT_COMPARISON if "EQUAL" in hardware.unsupported else _MAX_PAIRS_ON_NPU
    if pairs <= limit:
        return None
    return Unsupported(
        f"it adds {scatter.rows} elements at {scatter.positions} positions: without a scatter operator, it would take "
        f"{pairs} mask elements (at most {limit}), and the CPU is faster"
    )


def _keep_on_cpu(node: Node, scatter: _ScatterAdd, refusal: Unsupported) -> bool:
    """Mark the node, so that it is not decomposed.

    ``aten.scatter.reduce`` and ``aten.scatter_reduce.two`` have no CPU kernel: a marked ``scatter_add`` replaces them.

    Returns:
        Whether the node was replaced.
    """
    arguments, kept = arguments_of(node), node
    if node.target in (aten.scatter.reduce, aten.scatter_reduce.two):
        kept = insert_call(
            node, aten.scatter_add.default, scatter.x, arguments["dim"], arguments["index"], scatter.source
        )
        replace_node(node, kept)
    kept.meta[DECOMPOSITION_REFUSAL], kept.meta[KEEP_COMPOSITE] = refusal, True
    return kept is not node


# -- the operators -------------------------------------------------------------------------------------------------


def _wrap(indices: Array, size: int) -> Array:
    """Replace negative indices, which count from the end."""
    return np.where(indices < 0, indices + size, indices)


def _parse_index_put(arguments: dict[str, Any], constants: Constants) -> _ScatterAdd | None:
    x, source, sizes = arguments["self"], arguments["values"], arguments["self"].meta["val"].shape
    indexed = {axis: index for axis, index in enumerate(arguments["indices"]) if index is not None}
    axes = list(indexed)
    if not arguments["accumulate"] or axes != list(range(axes[0], axes[-1] + 1)):
        return None
    if any(index.meta["val"].dtype is torch.bool for index in indexed.values()):
        return None
    leading, inner, trailing = sizes[: axes[0]], sizes[axes[0] : axes[-1] + 1], sizes[axes[-1] + 1 :]
    index_shape = torch.broadcast_shapes(*(index.meta["val"].shape for index in indexed.values()))
    flat = None
    if all(index in constants for index in indexed.values()):
        arrays = [_wrap(constants.value(index).numpy(), sizes[axis]) for axis, index in indexed.items()]
        flat = np.ravel_multi_index(tuple(np.broadcast_arrays(*arrays)), tuple(inner)).reshape(-1)
    shape = (*leading, *index_shape, *trailing)
    dims = math.prod(leading), math.prod(inner), math.prod(trailing)
    return _ScatterAdd(x, source, flat, math.prod(index_shape), shape, *dims)


def _parse_index_add(arguments: dict[str, Any], constants: Constants) -> _ScatterAdd | None:
    x, index, source = arguments["self"], arguments["index"], arguments["source"]
    sizes = x.meta["val"].shape
    if not sizes:
        return None
    dim, indices = arguments["dim"] % len(sizes), None
    if index in constants:
        indices = _wrap(constants.value(index).numpy().reshape(-1), sizes[dim])
    rows, dims = index.meta["val"].numel(), (math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :]))
    return _ScatterAdd(x, source, indices, rows, tuple(source.meta["val"].shape), *dims, alpha=arguments["alpha"])


def _parse_scatter(arguments: dict[str, Any], constants: Constants) -> _ScatterAdd | None:
    """``scatter_add``, and ``scatter_reduce`` of sums."""
    x, index, source = arguments["self"], arguments["index"], arguments["src"]
    sizes, shape = x.meta["val"].shape, tuple(index.meta["val"].shape)
    is_sum = arguments.get("reduce", "sum") in ("sum", "add") and arguments.get("include_self", True)
    if not is_sum or not sizes or 0 in shape:
        return None
    dim = arguments["dim"] % len(sizes)
    dims = math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :])
    if index not in constants or tuple(source.meta["val"].shape) != shape:
        return _ScatterAdd(x, source, None, shape[dim], shape, *dims, has_mask_per_element=True)
    values = _wrap(constants.value(index).numpy(), sizes[dim])
    row = values[tuple(slice(None) if axis == dim else slice(0, 1) for axis in range(len(shape)))]
    covers_x = all(
        size == covered for axis, (size, covered) in enumerate(zip(sizes, shape, strict=True)) if axis != dim
    )
    if covers_x and (values == row).all():  # all elements of a row go to one position
        return _ScatterAdd(x, source, row.reshape(-1), shape[dim], shape, *dims, has_mask_per_element=True)
    coordinates = list(np.indices(shape, sparse=True))
    coordinates[dim] = values
    flat = np.ravel_multi_index(tuple(np.broadcast_arrays(*coordinates)), tuple(sizes)).reshape(-1)
    return _ScatterAdd(x, source, flat, flat.size, shape, 1, math.prod(sizes), 1, has_mask_per_element=True)


_PARSERS = {
    aten.index_put.default: _parse_index_put,
    aten.index_add.default: _parse_index_add,
    aten.scatter_add.default: _parse_scatter,
    aten.scatter.reduce: _parse_scatter,
    aten.scatter_reduce.two: _parse_scatter,
}


# -- the rewrites -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frames:
    """Overlap-add structure: element c of frame f goes to position start + f * hop + c."""

    count: int
    length: int
    hop: int
    start: int
    is_frame_last: bool  #: element c of frame f is row c * count + f; if False, row f * length + c

    @property
    def span(self) -> int:
        """Number of positions from the first to the last."""
        return self.length + (self.count - 1) * self.hop


def find_frames(indices: Array) -> _Frames | None:
    """The overlap-add structure of the positions [rows]; None if there is none."""
    rows, start = indices.size, int(indices[0])
    step = int(indices[1]) - start if rows > 1 else 1
    breaks = np.flatnonzero(np.diff(indices) != step)
    length = int(breaks[0]) + 1 if breaks.size else rows
    if rows % length:
        return None
    count = rows // length
    hop = int(indices[length]) - start if count > 1 else length
    frames, elements = np.indices((count, length), sparse=True)
    if not np.array_equal((start + frames * hop + elements * step).reshape(-1), indices):
        return None
    if step == 1 and hop > 0:
        return _Frames(count, length, hop, start, is_frame_last=False)
    if step > 0 and (hop == 1 or count == 1):
        return _Frames(length, count, step, start, is_frame_last=True)
    return None


def _contribution_tables(indices: Array, positions: int) -> Array:
    """For each position (column), the rows that are added to it; unused entries have the index of the row of zeros.

    For example, the indices [0, 2, 0] of 3 rows give [[0, 3, 1], [2, 3, 3]] for 3 positions. Row 3 is the row of zeros.
    """
    order = np.argsort(indices, kind="stable")
    counts = np.bincount(indices, minlength=positions)
    first = np.cumsum(counts) - counts
    ranks = np.arange(counts.max())[:, None]
    return np.where(ranks < counts, order[np.minimum(first + ranks, indices.size - 1)], indices.size)


def _count_runs(indices: Array) -> int:
    """Number of slices that read the rows ``indices``: one for an arithmetic sequence, else one for each run.

    A run is a sequence of consecutive rows.
    """
    steps = np.diff(indices)
    return 1 if steps.size and steps[0] > 0 and (steps == steps[0]).all() else 1 + int((steps != 1).sum())


@dataclass(frozen=True)
class _Rewriter:
    """Emits the operators that replace the scatter-add ``node``."""

    module: GraphModule
    node: Node
    hardware: Hardware
    constants: Constants
    quantized: bool

    def rewrite(self, scatter: _ScatterAdd) -> bool:
        """Replace the node if its indices are constant and one of the rewrites applies; returns whether it did."""
        if scatter.indices is None:
            return False
        frames = find_frames(scatter.indices)
        if frames is not None:
            sums = self._overlap_add(self._rows(scatter), scatter, frames)
        elif self.quantized and scatter.rows * scatter.positions <= _MAX_WEIGHTS:
            sums = self._one_hot_product(self._rows(scatter), scatter.indices, scatter.positions)
        else:
            tables = self._gather_tables(scatter, scatter.indices)
            if tables is None:
                return False
            sums = self._sum_of_gathers(self._rows(scatter), scatter.rows, tables)
        sums = self._call(aten.reshape.default, sums, list(self.node.meta["val"].shape))
        if scatter.alpha != 1:
            sums = self._call(aten.mul.Scalar, sums, scatter.alpha)
        if scatter.x not in self.constants or bool(self.constants.value(scatter.x).any()):
            sums = self._call(aten.add.Tensor, scatter.x, sums)
        replace_node(self.node, sums)
        return True

    def _call(self, target: Any, *args: Any) -> Node:
        return insert_call(self.node, target, *args)

    def _rows(self, scatter: _ScatterAdd) -> Node:
        """The source as [leading, rows, trailing]."""
        source = scatter.source
        if tuple(source.meta["val"].shape) != scatter.shape:
            source = self._call(aten.expand.default, source, list(scatter.shape))
        return self._call(aten.reshape.default, source, [scatter.leading, scatter.rows, scatter.trailing])

    def _overlap_add(self, rows: Node, scatter: _ScatterAdd, frames: _Frames) -> Node:
        leading, trailing = scatter.leading, scatter.trailing
        if trailing > 1:
            rows = self._call(aten.permute.default, rows, [0, 2, 1])
        sizes = (frames.length, frames.count) if frames.is_frame_last else (frames.count, frames.length)
        windows = self._call(aten.reshape.default, rows, [leading * trailing, *sizes])
        if not frames.is_frame_last:
            windows = self._call(aten.permute.default, windows, [0, 2, 1])
        kernel, stride = [1, frames.length], [1, frames.hop]
        sums = self._call(aten.col2im.default, windows, [1, frames.span], kernel, [1, 1], [0, 0], stride)
        sums = self._call(aten.reshape.default, sums, [leading, trailing, frames.span])
        pads = [frames.start, scatter.positions - frames.start - frames.span]
        if any(pads):
            sums = self._call(aten.constant_pad_nd.default, sums, pads)
        return self._call(aten.permute.default, sums, [0, 2, 1]) if trailing > 1 else sums

    def _one_hot_product(self, rows: Node, indices: Array, positions: int) -> Node:
        matrix = torch.zeros(indices.size, positions, dtype=rows.meta["val"].dtype)
        matrix[torch.arange(indices.size), torch.from_numpy(indices)] = 1
        weight = add_buffer_node(self.module, f"{self.node.name}_weight", matrix)
        product = self._call(aten.matmul.default, self._call(aten.permute.default, rows, [0, 2, 1]), weight)
        return self._call(aten.permute.default, product, [0, 2, 1])

    def _gather_tables(self, scatter: _ScatterAdd, indices: Array) -> Array | None:
        """The rows that each gather reads, [gathers, positions].

        Returns:
            None if there would be too many gathers, elements or slices. Also None if the program stays floating-point
            and the decomposition of the scatter-add is within the limit of the target.
        """
        elements = scatter.leading * scatter.positions * scatter.trailing
        has_small_mask = not self.quantized and _refuse_decomposition(scatter, self.hardware, quantized=False) is None
        gathers = int(np.bincount(indices).max())
        if has_small_mask or gathers > _MAX_GATHERS or gathers * elements > _MAX_GATHERED_ELEMENTS:
            return None
        tables = _contribution_tables(indices, scatter.positions)
        runs = sum(map(_count_runs, tables))
        return None if "GATHER" in self.hardware.unsupported and runs > _MAX_RUNS else tables

    def _sum_of_gathers(self, rows: Node, count: int, tables: Array) -> Node:
        if (tables == count).any():
            rows = self._call(aten.constant_pad_nd.default, rows, [0, 0, 0, 1])
        indices = [add_buffer_node(self.module, f"{self.node.name}_rows", torch.tensor(table)) for table in tables]
        gathers = [self._call(aten.index_select.default, rows, 1, index) for index in indices]
        return functools.reduce(lambda x, y: self._call(aten.add.Tensor, x, y), gathers)
