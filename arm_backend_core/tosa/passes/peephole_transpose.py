"""Peephole rules for TRANSPOSE: merge, cancel, sink, or permute constant weights instead."""

from __future__ import annotations

from arm_backend_core.permutation import compose, identity, inverse
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.layout_modes import (
    LayoutMode,
    is_free_permutation,
    permute_attributes,
    propagate_layout,
)
from arm_backend_core.tosa.passes.peephole_movement import equal_without_ones, reshape_groups
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, producer, skip_through


def merge_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """Merge two successive TRANSPOSEs. A TRANSPOSE that moves only dimensions of size 1 becomes a RESHAPE.

    If no TRANSPOSE directly precedes, apply ``cancel_transpose``.
    """
    source, perms = op.inputs[0], tuple(op.attrs["perms"])
    if is_free_permutation(source.shape, identity(source.rank), perms):
        return rewriter.builder.reshape(source, op.output.shape)
    inner = producer(source, "TRANSPOSE")
    if inner is None:
        return cancel_transpose(op, rewriter)
    return rewriter.builder.transpose(inner.inputs[0], compose(tuple(inner.attrs["perms"]), perms))


def cancel_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace two inverse TRANSPOSEs by a RESHAPE. Between them, a RESHAPE may add or remove dimensions of size 1."""
    before = producer(skip_through(op.inputs[0], "RESHAPE"), "TRANSPOSE")
    if before is None or not equal_without_ones(op.inputs[0].shape, before.output.shape):
        return None
    moved_dims = [[d for d in x.attrs["perms"] if x.inputs[0].shape[d] > 1] for x in (before, op)]
    first, second = ([sorted(dims).index(d) for d in dims] for dims in moved_dims)
    if [first[d] for d in second] != sorted(first):
        return None
    return rewriter.builder.reshape(before.inputs[0], op.output.shape)


def sink_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """f(TRANSPOSE(x), constants) becomes TRANSPOSE(f(x, constants)), if the result's elements are not wider than x's.

    Arithmetic then directly follows its convolution, and the TRANSPOSE directly precedes an operator that absorbs it.
    """
    operands = [value for value in op.inputs if value.data is None]
    transpose = producer(operands[0], "TRANSPOSE") if len(operands) == 1 else None
    if transpose is None or operands[0].shape != op.output.shape or not rewriter.has_one_use(operands[0]):
        return None
    if op.output.dtype.numpy.itemsize > operands[0].dtype.numpy.itemsize:
        return None
    perms = tuple(transpose.attrs["perms"])
    layout = propagate_layout(op, inverse(perms))
    if layout is None:
        return None
    mode = LayoutMode((layout,) * len(op.inputs), layout)
    source = transpose.inputs[0]
    inputs = [source if v.data is None else rewriter.builder.transpose(v, layout) for v in op.inputs]
    result = rewriter.builder.emit(op.kind, inputs, op.output.dtype, **permute_attributes(op, mode))
    return rewriter.builder.transpose(result, perms)


def permute_weights(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a TRANSPOSE before the flattened input of a linear layer by permuting the weights.

    A CONV2D with a 1x1 kernel sums over its last dimension. The sum does not depend on the order of its terms (in
    floating point, apart from rounding).
    """
    x, weight = op.inputs[0], op.inputs[1]
    reshape = producer(x, "RESHAPE")
    transpose = producer(reshape.inputs[0], "TRANSPOSE") if reshape is not None else None
    if transpose is None or weight.data is None or weight.shape[1:3] != (1, 1):
        return None
    order = _summed_dims_order(transpose, x.shape)
    if order is None:
        return None
    summed_dims = sorted(order)
    data = weight.data.reshape(weight.shape[0], *(transpose.output.shape[dim] for dim in summed_dims))
    data = data.transpose(0, *(1 + summed_dims.index(dim) for dim in order)).reshape(weight.shape)
    flat = rewriter.builder.reshape(transpose.inputs[0], x.shape)
    inputs = [flat, constant(data, weight.dtype), *op.inputs[2:]]
    return rewriter.builder.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def _summed_dims_order(transpose: Op, flat: tuple[int, ...]) -> list[int] | None:
    """The dimensions of the TRANSPOSE's result that a RESHAPE to ``flat`` merges into the last dimension of ``flat``.

    Returns:
        the dimensions in their order in the TRANSPOSE's operand. None if the RESHAPE distributes them over several
        dimensions of ``flat``, or if the other dimensions do not come first in the operand, in the same order.
    """
    shape = transpose.output.shape
    summed, flat_dims = reshape_groups(shape, flat)[-1]
    if any(flat[dim] != 1 for dim in flat_dims if dim != len(flat) - 1):
        return None
    before = [dim for dim in inverse(tuple(transpose.attrs["perms"])) if shape[dim] != 1]
    other_dims = [dim for dim, size in enumerate(shape) if size != 1 and dim not in summed]
    return before[len(other_dims) :] if before[: len(other_dims)] == other_dims else None


RULES: dict[str, list[RewriteRule]] = {
    "TRANSPOSE": [merge_transpose],
    "CONV2D": [permute_weights],
    **{kind: [sink_transpose] for kind in ELEMENTWISE},
}
