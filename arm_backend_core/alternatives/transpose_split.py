"""TRANSPOSE on Ethos-U85 in other dimensions, which Vela turns in ways of its own: 0.6 to 100 cycles an element.

It does a permutation of three dimensions in one operation, others in one for each of what is in front: the heads of
attention as many networks have them, [1, 49, 3, 6, 32] to [3, 1, 6, 49, 32], in 27.9 cycles an element, without the 1
in 4.4, as [49, 18, 32] to [18, 49, 32] in 0.6. Swin's windows, [8, 7, 8, 672] to [8, 8, 7, 672]: 6.8, in two steps 1.0.
"""

from __future__ import annotations

from collections.abc import Callable

from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.permutation import Layout, merge_axes
from arm_backend_core.targets.target import Target
from arm_backend_core.targets.transpose_swaps import plan_swaps
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes import merge_reshapes
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once

#: Shapes, and the orders that their dimensions get.
Path = tuple[tuple[Layout, Layout], ...]


def drop_ones(graph: Graph, target: Target) -> None:
    """TRANSPOSEs of more than four dimensions without those of size 1: no dearer anywhere, and like others to forms."""
    if target.hardware.transposes_any_rank and apply_once(graph, target, {"TRANSPOSE": [_without_ones]}):
        merge_reshapes(graph, target)


def _without_ones(op: Op, rewriter: Rewriter) -> Value | None:
    shape, perms = op.inputs[0].shape, op.attrs["perms"]
    real = [axis for axis, size in enumerate(shape) if size != 1]
    if len(shape) <= 4 or len(real) == len(shape):
        return None
    front = max(4 - len(real), 0)
    order = (*range(front), *(front + real.index(axis) for axis in perms if axis in real))
    return _turned(op, (((1,) * front + tuple(shape[axis] for axis in real), order),), rewriter)


def _turned(op: Op, path: Path, rewriter: Rewriter) -> Value:
    b, value = rewriter.build, op.inputs[0]
    for shape, perms in path:
        value = b.transpose(b.reshape(value, shape), perms)
    return b.reshape(value, op.output.shape)


def _form(name: str, find: Callable[[Op], Path | None]) -> Alternative:
    """TRANSPOSEs of the shapes and orders that are found, one after the other."""

    def rule(op: Op, rewriter: Rewriter) -> Value | None:
        path = find(op)
        return _turned(op, path, rewriter) if path else None

    def part(op: Op, rewriter: Rewriter) -> Region | None:
        """With what reads it, which Vela may do with it."""
        own = ((op.inputs[0].shape, tuple(op.attrs["perms"])),)
        if not rewriter.build.target.hardware.transposes_any_rank or find(op) in (None, own):
            return None
        return Region(around(op, rewriter, (), ("RESHAPE", "MATMUL")), ((op,),))

    return Alternative(name, ("TRANSPOSE",), rule, part)


def _merged(op: Op) -> Path:
    return (merge_axes(op.inputs[0].shape, op.attrs["perms"]),)


def _in_steps(op: Op) -> Path | None:
    x = op.inputs[0]
    return plan_swaps(x.shape, tuple(op.attrs["perms"]), x.dtype, x.shape)


MERGED = _form("transpositions of neighbours as one", _merged)
STEPS = _form("transpositions in steps", _in_steps)
