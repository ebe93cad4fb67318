"""TRANSPOSE on Ethos-U85 with other dimensions or in several steps.

The cost depends on how Vela decomposes a TRANSPOSE: 0.6 to 100 cycles an element. A permutation of three dimensions is
one operation; others take one for each element of the leading dimensions. The attention heads of many networks,
[1, 49, 3, 6, 32] to [3, 1, 6, 49, 32], take 27.9 cycles an element, 4.4 without the 1, and 0.6 as [49, 18, 32] to
[18, 49, 32]. Swin's windows, [8, 7, 8, 672] to [8, 8, 7, 672], take 6.8, and 1.0 in two steps.
"""

from __future__ import annotations

from collections.abc import Callable

from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.permutation import Layout, merge_axes
from arm_backend_core.targets.target import Target
from arm_backend_core.targets.transpose_swaps import plan_swaps
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.pipeline import merge_reshapes
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once

#: Consecutive TRANSPOSEs as (shape of the operand, permutation).
TransposePath = tuple[tuple[Layout, Layout], ...]


def drop_unit_dimensions(graph: Graph, target: Target) -> None:
    """Drop dimensions of size 1 from TRANSPOSEs of rank over 4: never more expensive, and other alternatives match."""
    if target.hardware.transposes_any_rank and apply_once(graph, target, {"TRANSPOSE": [_drop_units]}):
        merge_reshapes(graph, target)


def _drop_units(op: Op, rewriter: Rewriter) -> Value | None:
    shape, perms = op.inputs[0].shape, op.attrs["perms"]
    real = [axis for axis, size in enumerate(shape) if size != 1]
    if len(shape) <= 4 or len(real) == len(shape):
        return None
    front = max(4 - len(real), 0)
    order = (*range(front), *(front + real.index(axis) for axis in perms if axis in real))
    return _emit_transposes(op, (((1,) * front + tuple(shape[axis] for axis in real), order),), rewriter)


def _emit_transposes(op: Op, path: TransposePath, rewriter: Rewriter) -> Value:
    b, value = rewriter.build, op.inputs[0]
    for shape, perms in path:
        value = b.transpose(b.reshape(value, shape), perms)
    return b.reshape(value, op.output.shape)


def _make_alternative(name: str, find: Callable[[Op], TransposePath | None]) -> Alternative:
    """Make an alternative that replaces a TRANSPOSE by the path that ``find`` returns."""

    def rule(op: Op, rewriter: Rewriter) -> Value | None:
        path = find(op)
        return _emit_transposes(op, path, rewriter) if path else None

    def match_region(op: Op, rewriter: Rewriter) -> Region | None:
        """Match the TRANSPOSE with its readers, which Vela may fuse with it."""
        own = ((op.inputs[0].shape, tuple(op.attrs["perms"])),)
        if not rewriter.build.target.hardware.transposes_any_rank or find(op) in (None, own):
            return None
        return Region(collect_neighbors(op, rewriter, (), ("RESHAPE", "MATMUL")), ((op,),))

    return Alternative(name, ("TRANSPOSE",), rule, match_region)


def _merge_axes(op: Op) -> TransposePath:
    return (merge_axes(op.inputs[0].shape, op.attrs["perms"]),)


def _split_steps(op: Op) -> TransposePath | None:
    x = op.inputs[0]
    return plan_swaps(x.shape, tuple(op.attrs["perms"]), x.dtype, x.shape)


MERGED = _make_alternative("TRANSPOSEs with merged dimensions", _merge_axes)
STEPS = _make_alternative("TRANSPOSEs in several steps", _split_steps)
