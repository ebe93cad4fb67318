"""Local rules for TRANSPOSE: merging, and handing it to a constant operand."""

from __future__ import annotations

from arm_backend_core.permutation import compose, identity, inverse
from arm_backend_core.tosa.graph import Op, Value, constant
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes.layout_modes import Mode, attributes, forward, moves_nothing, stored
from arm_backend_core.tosa.passes.merge import alike, groups
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, producer, skip_through


def merge_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE of a TRANSPOSE is one; a TRANSPOSE that moves only dimensions of size 1 is a RESHAPE."""
    source, perms = op.inputs[0], tuple(op.attrs["perms"])
    if moves_nothing(source.shape, identity(source.rank), perms):
        return rewriter.build.reshape(source, op.output.shape)
    inner = producer(source, "TRANSPOSE")
    if inner is None:
        return undo_transpose(op, rewriter)
    return rewriter.build.transpose(inner.inputs[0], compose(tuple(inner.attrs["perms"]), perms))


def undo_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """A TRANSPOSE that undoes one before a RESHAPE, which adds or drops dimensions of size 1, is a RESHAPE too."""
    before = producer(skip_through(op.inputs[0], "RESHAPE"), "TRANSPOSE")
    if before is None or not alike(op.inputs[0].shape, before.output.shape):
        return None
    turns = [[d for d in turn.attrs["perms"] if turn.inputs[0].shape[d] > 1] for turn in (before, op)]
    first, second = ([sorted(turn).index(d) for d in turn] for turn in turns)
    if [first[d] for d in second] != sorted(first):
        return None
    return rewriter.build.reshape(before.inputs[0], op.output.shape)


def sink_transpose(op: Op, rewriter: Rewriter) -> Value | None:
    """f(TRANSPOSE(x), constants) is TRANSPOSE(f(x, constants)), where the result is not wider than x.

    It brings a convolution next to its arithmetic and a TRANSPOSE next to the operator that absorbs it.
    """
    moved = [value for value in op.inputs if value.data is None]
    transpose = producer(moved[0], "TRANSPOSE") if len(moved) == 1 else None
    if transpose is None or moved[0].shape != op.output.shape or not rewriter.single_use(moved[0]):
        return None
    if op.output.dtype.numpy.itemsize > moved[0].dtype.numpy.itemsize:
        return None
    perms = tuple(transpose.attrs["perms"])
    layout = forward(op, inverse(perms))
    if layout is None:
        return None
    mode = Mode((layout,) * len(op.inputs), layout)
    source = transpose.inputs[0]
    inputs = [source if v.data is None else rewriter.build.transpose(v, layout) for v in op.inputs]
    shape = stored(op.output.shape, layout)
    result = rewriter.build.emit(op.kind, inputs, shape, op.output.dtype, **attributes(op, mode))
    return rewriter.build.transpose(result, perms)


def permute_weights(op: Op, rewriter: Rewriter) -> Value | None:
    """A linear layer on a flattened, transposed tensor: its weights are permuted instead.

    CONV2D with a 1x1 window sums over its last dimension, in whatever order weights and input share.
    """
    x, weight = op.inputs[0], op.inputs[1]
    reshape = producer(x, "RESHAPE")
    transpose = producer(reshape.inputs[0], "TRANSPOSE") if reshape is not None else None
    if transpose is None or weight.data is None or weight.shape[1:3] != (1, 1):
        return None
    order = _order_of_summed(transpose, x.shape)
    if order is None:
        return None
    written = sorted(order)
    data = weight.data.reshape(weight.shape[0], *(transpose.output.shape[dim] for dim in written))
    data = data.transpose(0, *(1 + written.index(dim) for dim in order)).reshape(weight.shape)
    flat = rewriter.build.reshape(transpose.inputs[0], x.shape)
    inputs = [flat, constant(data, weight.dtype), *op.inputs[2:]]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _order_of_summed(transpose: Op, flat: tuple[int, ...]) -> list[int] | None:
    """Dimensions of the TRANSPOSE's result that RESHAPE to ``flat`` joins as the last one, in its operand's order.

    None where they are joined with more than that, or where the TRANSPOSE moves other dimensions too.
    """
    shape = transpose.output.shape
    summed, features = groups(shape, flat)[-1]
    if any(flat[dim] != 1 for dim in features if dim != len(flat) - 1):
        return None
    before = [dim for dim in inverse(tuple(transpose.attrs["perms"])) if shape[dim] != 1]
    kept = [dim for dim, size in enumerate(shape) if size != 1 and dim not in summed]
    return before[len(kept) :] if before[: len(kept)] == kept else None


RULES: dict[str, list[Rule]] = {
    "TRANSPOSE": [merge_transpose],
    "CONV2D": [permute_weights],
    **{kind: [sink_transpose] for kind in ELEMENTWISE},
}
