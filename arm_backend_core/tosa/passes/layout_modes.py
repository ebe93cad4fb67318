"""Layout modes of operators.

A mode is one combination of operand and result layouts that an operator supports. The mode determines the operator's
attributes. A layout is a permutation: dimension i of the stored tensor is dimension ``layout[i]`` of the program's
tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from arm_backend_core.permutation import Layout, compose, identity, inverse
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes.peephole_movement import reshape_groups

Shape = tuple[int, ...]

#: Operators that accept any layout, if the operands and the result have the same layout (exception: ``_accepts``).
_LAYOUT_AGNOSTIC = frozenset(
    kind
    for kind, record in OPERATORS.items()
    if record.is_elementwise or record.per_dimension or ("axis" in record.fields and kind != "ARGMAX")
)


class LayoutMode(NamedTuple):
    """Layouts in which an operator with permuted attributes reads its operands and writes its result."""

    inputs: tuple[Layout, ...]
    output: Layout


def _dims_above_one(shape: Shape, dims: Sequence[int]) -> list[int]:
    """The dimensions among ``dims`` whose size is greater than 1, in the same order."""
    return [d for d in dims if shape[d] != 1]


@lru_cache(maxsize=65536)
def is_free_permutation(shape: Shape, before: Layout, after: Layout) -> bool:
    """Whether both layouts store the elements in the same order, because only dimensions of size 1 move."""
    return _dims_above_one(shape, before) == _dims_above_one(shape, after)


def permute_shape(shape: Shape, layout: Layout) -> Shape:
    """The stored shape of a tensor in ``layout``."""
    return tuple(shape[d] for d in layout)


@lru_cache(maxsize=65536)
def propagate_through_reshape(source: Shape, result: Shape, layout: Layout) -> Layout | None:
    """Layout of a RESHAPE's result if its operand is in ``layout``; None if elements would have to move.

    No element moves if each group of dimensions that the RESHAPE splits or merges is stored contiguously and in order.
    """
    groups = [
        (_dims_above_one(source, before), _dims_above_one(result, after))
        for before, after in reshape_groups(source, result)
    ]
    remaining = _dims_above_one(source, layout)
    order: list[int] = []
    while remaining:
        source_dims, result_dims = next(group for group in groups if remaining[0] in group[0])
        if remaining[: len(source_dims)] != source_dims:
            return None
        remaining = remaining[len(source_dims) :]
        order += result_dims
    # Dimensions of size 1 may have any position: they keep the position that they have in ``result``.
    ordered = iter(order)
    return tuple(d if size == 1 else next(ordered) for d, size in enumerate(result))


def is_layout_flexible(op: Op) -> bool:
    """Whether the operator supports modes with permuted layouts."""
    return op.kind in _LAYOUT_AGNOSTIC or op.kind in ("TRANSPOSE", "RESHAPE", "ARGMAX")


def propagate_layout(op: Op, operand_layout: Layout) -> Layout | None:
    """Layout of the result if the first operand is in layout ``operand_layout``; None if ``op`` does not support it."""
    if op.kind in _LAYOUT_AGNOSTIC:
        return operand_layout if _accepts(op, operand_layout) else None
    if op.kind == "TRANSPOSE":
        return compose(inverse(tuple(op.attrs["perms"])), operand_layout)
    if op.kind == "RESHAPE":
        return propagate_through_reshape(op.inputs[0].shape, op.output.shape, operand_layout)
    if op.kind == "ARGMAX":
        axis = op.attrs["axis"]
        return tuple(d - (d > axis) for d in operand_layout if d != axis)
    return None


def modes_with_output(op: Op, output_layout: Layout) -> list[LayoutMode]:
    """All modes of ``op`` that write the result in layout ``output_layout``."""
    if op.kind in _LAYOUT_AGNOSTIC:
        return [LayoutMode((output_layout,) * len(op.inputs), output_layout)] if _accepts(op, output_layout) else []
    if op.kind == "TRANSPOSE":
        return [LayoutMode((compose(tuple(op.attrs["perms"]), output_layout),), output_layout)]
    if op.kind == "RESHAPE":
        operand_layout = propagate_through_reshape(op.output.shape, op.inputs[0].shape, output_layout)
        return [] if operand_layout is None else [LayoutMode((operand_layout,), output_layout)]
    if op.kind == "ARGMAX":
        axis = op.attrs["axis"]
        other_dims = [d + (d >= axis) for d in output_layout]
        return [
            LayoutMode(((*other_dims[:i], axis, *other_dims[i:]),), output_layout) for i in range(len(other_dims) + 1)
        ]
    if output_layout != identity(op.output.rank):
        return []
    return [LayoutMode(tuple(identity(value.rank) for value in op.inputs), output_layout)]


def _accepts(op: Op, layout: Layout) -> bool:
    """Whether ``op`` accepts the layout. A per-channel RESCALE needs its channels in the last dimension."""
    return not op.attrs.get("per_channel") or layout[-1] == len(layout) - 1


def permute_attributes(op: Op, mode: LayoutMode) -> dict[str, Any]:
    """The operator's attributes in this mode."""
    attrs = dict(op.attrs)
    if "axis" in attrs:
        attrs["axis"] = mode.inputs[0].index(attrs["axis"])
    for name in OPERATORS[op.kind].per_dimension:
        entries_per_dim = len(attrs[name]) // len(mode.output)
        attrs[name] = [int(attrs[name][entries_per_dim * d + i]) for d in mode.output for i in range(entries_per_dim)]
    if op.kind == "RESHAPE":
        attrs["shape"] = list(permute_shape(op.output.shape, mode.output))
    return attrs
