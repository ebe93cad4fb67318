"""TRANSPOSE on Ethos-U85: merged dimensions, or a sequence of TRANSPOSEs.

Vela compiles a TRANSPOSE to NPU operations, which take 0.6 to 100 cycles per element. A permutation of three dimensions
is one operation. Other permutations take one operation for each index of the leading dimensions. Examples:

* attention heads of many networks, [1, 49, 3, 6, 32] to [3, 1, 6, 49, 32]: 27.9 cycles per element, 4.4 without the
  dimension of size 1, 0.6 as [49, 18, 32] to [18, 49, 32];
* windows of Swin, [8, 7, 8, 672] to [8, 8, 7, 672]: 6.8 cycles per element, 1.0 as two TRANSPOSEs.
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

#: Consecutive TRANSPOSEs, each as (shape, permutation). A RESHAPE to this shape precedes each TRANSPOSE.
TransposePath = tuple[tuple[Layout, Layout], ...]


def drop_unit_dimensions(graph: Graph, target: Target) -> None:
    """Drop dimensions of size 1 from TRANSPOSEs above rank 4 (U85 only).

    This never costs cycles. It runs before the alternatives, which therefore match TRANSPOSEs without these dimensions.
    """
    if target.hardware.transposes_any_rank and apply_once(graph, target, {"TRANSPOSE": [_drop_unit_dimensions_of]}):
        merge_reshapes(graph, target)


def _drop_unit_dimensions_of(op: Op, rewriter: Rewriter) -> Value | None:
    """Drop dimensions of size 1, but keep at least rank 4, with the remaining dimensions of size 1 in front."""
    shape, perms = op.inputs[0].shape, op.attrs["perms"]
    nontrivial = [axis for axis, size in enumerate(shape) if size != 1]
    if len(shape) <= 4 or len(nontrivial) == len(shape):
        return None
    leading_ones = max(4 - len(nontrivial), 0)
    order = (*range(leading_ones), *(leading_ones + nontrivial.index(axis) for axis in perms if axis in nontrivial))
    return _emit_transposes(op, (((1,) * leading_ones + tuple(shape[axis] for axis in nontrivial), order),), rewriter)


def _emit_transposes(op: Op, path: TransposePath, rewriter: Rewriter) -> Value:
    b, value = rewriter.builder, op.inputs[0]
    for shape, perms in path:
        value = b.transpose(b.reshape(value, shape), perms)
    return b.reshape(value, op.output.shape)


def _make_alternative(name: str, find_path: Callable[[Op], TransposePath | None]) -> Alternative:
    """Create an alternative that replaces a TRANSPOSE by the sequence of TRANSPOSEs that ``find_path`` returns."""

    def rule(op: Op, rewriter: Rewriter) -> Value | None:
        path = find_path(op)
        return _emit_transposes(op, path, rewriter) if path else None

    def match_region(op: Op, rewriter: Rewriter) -> Region | None:
        """Match the TRANSPOSE with its readers, because Vela may fuse a reader with the TRANSPOSE."""
        unchanged_path = ((op.inputs[0].shape, tuple(op.attrs["perms"])),)
        if not rewriter.builder.target.hardware.transposes_any_rank or find_path(op) in (None, unchanged_path):
            return None
        return Region(collect_neighbors(op, rewriter, (), ("RESHAPE", "MATMUL")), ((op,),))

    return Alternative(name, ("TRANSPOSE",), rule, match_region)


def _merge_axes(op: Op) -> TransposePath:
    return (merge_axes(op.inputs[0].shape, op.attrs["perms"]),)


def _split_into_sequence(op: Op) -> TransposePath | None:
    """Return a sequence of TRANSPOSEs that each swap two of three dimensions, or the unchanged TRANSPOSE.

    The first TRANSPOSE may have four dimensions. ``plan_swaps`` minimizes the cycles of U55 and U65. On U85, another
    sequence may be cheaper, so the sequence is only a candidate for the cost model.
    """
    x = op.inputs[0]
    return plan_swaps(x.shape, tuple(op.attrs["perms"]), x.dtype, x.shape)


MERGED_TRANSPOSE = _make_alternative("TRANSPOSEs with merged dimensions", _merge_axes)
TRANSPOSE_SEQUENCE = _make_alternative("TRANSPOSEs in several steps", _split_into_sequence)
