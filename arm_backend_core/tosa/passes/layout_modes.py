"""How operators take tensors whose dimensions are stored in another order.

A layout is a permutation: dimension i of what is stored is dimension ``layout[i]`` of what the program
means. For every operator this module says which layouts of operands and result go together, and how its
attributes change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from arm_backend_core.permutation import Layout, compose, identity, inverse
from arm_backend_core.tosa.graph import Op
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes.merge import groups

Shape = tuple[int, ...]

#: Operators whose operands and result share one layout.
_SAME = frozenset(
    kind
    for kind, record in OPERATORS.items()
    if record.elementwise or record.per_dimension or ("axis" in record.fields and kind != "ARGMAX")
)


class Mode(NamedTuple):
    """Layouts in which an operator reads its operands and writes its result."""

    inputs: tuple[Layout, ...]
    output: Layout


def _wide(shape: Shape, dims: Sequence[int]) -> list[int]:
    """Those of ``dims`` that have more than one element."""
    return [d for d in dims if shape[d] != 1]


@lru_cache(maxsize=65536)
def moves_nothing(shape: Shape, before: Layout, after: Layout) -> bool:
    """Whether both layouts store the elements in one order: only dimensions of size 1 stand elsewhere."""
    return _wide(shape, before) == _wide(shape, after)


def stored(shape: Shape, layout: Layout) -> Shape:
    """The shape of a tensor in ``layout``."""
    return tuple(shape[d] for d in layout)


@lru_cache(maxsize=65536)
def through_reshape(source: Shape, result: Shape, layout: Layout) -> Layout | None:
    """Layout of RESHAPE's result when its operand is in ``layout``; None when elements would have to move.

    Possible when every run of dimensions that is split or joined is stored in its own order.
    """
    runs = [(_wide(source, before), _wide(result, after)) for before, after in groups(source, result)]
    remaining = _wide(source, layout)
    order: list[int] = []
    while remaining:
        run, new = next(run for run in runs if remaining[0] in run[0])
        if remaining[: len(run)] != run:
            return None
        remaining = remaining[len(run) :]
        order += new
    # Dimensions of size 1 may stand anywhere: each keeps its place.
    moved = iter(order)
    return tuple(d if size == 1 else next(moved) for d, size in enumerate(result))


def flexible(op: Op) -> bool:
    """Whether the operator has any mode besides the one it is written in."""
    return op.kind in _SAME or op.kind in ("TRANSPOSE", "RESHAPE", "ARGMAX")


def forward(op: Op, operand: Layout) -> Layout | None:
    """Layout of the result when the (first) operand comes in this one."""
    if op.kind in _SAME:
        return operand if _accepts(op, operand) else None
    if op.kind == "TRANSPOSE":
        return compose(inverse(tuple(op.attrs["perms"])), operand)
    if op.kind == "RESHAPE":
        return through_reshape(op.inputs[0].shape, op.output.shape, operand)
    if op.kind == "ARGMAX":
        axis = op.attrs["axis"]
        return tuple(d - (d > axis) for d in operand if d != axis)
    return None


def modes(op: Op, output: Layout) -> list[Mode]:
    """Every way to write the result in this layout."""
    if op.kind in _SAME:
        return [Mode((output,) * len(op.inputs), output)] if _accepts(op, output) else []
    if op.kind == "TRANSPOSE":
        return [Mode((compose(tuple(op.attrs["perms"]), output),), output)]
    if op.kind == "RESHAPE":
        operand = through_reshape(op.output.shape, op.inputs[0].shape, output)
        return [] if operand is None else [Mode((operand,), output)]
    if op.kind == "ARGMAX":
        axis = op.attrs["axis"]
        kept = [d + (d >= axis) for d in output]
        return [Mode(((*kept[:i], axis, *kept[i:]),), output) for i in range(len(kept) + 1)]
    if output != identity(op.output.rank):
        return []
    return [Mode(tuple(identity(value.rank) for value in op.inputs), output)]


def _accepts(op: Op, layout: Layout) -> bool:
    """A RESCALE per channel has its channels in the last dimension."""
    return not op.attrs.get("per_channel") or layout[-1] == len(layout) - 1


def attributes(op: Op, mode: Mode) -> dict[str, Any]:
    """The operator's attributes in this mode."""
    attrs = dict(op.attrs)
    if "axis" in attrs:
        attrs["axis"] = mode.inputs[0].index(attrs["axis"])
    for name in OPERATORS[op.kind].per_dimension:
        per = len(attrs[name]) // len(mode.output)
        attrs[name] = [int(attrs[name][per * d + i]) for d in mode.output for i in range(per)]
    if op.kind == "RESHAPE":
        attrs["shape"] = list(stored(op.output.shape, mode.output))
    return attrs
