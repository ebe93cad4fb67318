"""Attention matrix products: one MATMUL for each head on U85, products of transposed operands on U55 and U65."""

from __future__ import annotations

from arm_backend_core.alternatives.attention_heads import compute_heads
from arm_backend_core.alternatives.choose import Alternative, Region, collect_neighbors
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer

#: Maximum number of heads. Each head adds operators.
_MAX_HEADS = 16


def multiply_per_head(op: Op, rewriter: Rewriter) -> Value | None:
    """Replace a batched MATMUL and its RESCALE by one MATMUL and RESCALE for each head.

    ``op`` is the RESCALE, or the TRANSPOSE that merges the heads. Bit-exact: a batched MATMUL computes the same sums
    for each matrix. A CONCAT joins the heads along the batch, or along channels if ``op`` is the TRANSPOSE.

    If a convolution computes an operand, this convolution is split into one convolution for each head. If the operand
    is the transposed result [D, T] of the convolution, a TRANSPOSE follows each of the new convolutions. Vela inserts
    another TRANSPOSE before the MATMUL, and the two cancel.

    Attention with 2 heads of 64 channels on 32 tokens, int8, U85-256: the product with the keys takes 8,832 instead of
    11,520 cycles, and the product with the values 11,872 instead of 15,040. On U55, the rewrite costs more than it
    saves, because Vela copies the operands of each head: 207,552 instead of 183,472 cycles.
    """
    b, merges_heads = rewriter.builder, op.kind == "TRANSPOSE"
    rescale = _match_head_rescale(op) if merges_heads else op
    product = rescale and producer(rescale.inputs[0], "MATMUL")
    if rescale is None or product is None:
        return None
    (_, rows, columns), (first, second) = product.output.shape, (_split_heads(x, rewriter) for x in product.inputs)
    results = []
    for left, right in zip(first, second, strict=True):
        total = b.emit("MATMUL", (left, right), product.output.dtype, **product.attrs)
        part = b.emit("RESCALE", (total,), rescale.output.dtype, **rescale.attrs)
        results.append(b.reshape(part, (1, 1, rows, columns)))
    return b.reshape(b.concat(results, 3 if merges_heads else 1), op.output.shape)


def _split_heads(value: Value, rewriter: Rewriter) -> list[Value]:
    """Split [heads, T, K] into one [1, T, K] for each head."""
    b, shape = rewriter.builder, value.shape
    merged = producer(value, "RESHAPE")
    transpose = merged and producer(merged.inputs[0], "TRANSPOSE")
    is_sole = transpose is not None and transpose.output.shape == (1, *shape) and rewriter.has_one_use(transpose.output)
    if transpose is not None and is_sole and (parts := compute_heads(transpose, rewriter)):
        if tuple(transpose.attrs["perms"]) == (0, 2, 1, 3):
            return [b.reshape(part, (1, *shape[1:])) for part in parts]
        return [b.transpose(b.reshape(part, (1, shape[2], shape[1])), (0, 2, 1)) for part in parts]
    concat = merged and producer(merged.inputs[0], "CONCAT")
    head_shapes = [(1, 1, *shape[1:])] * shape[0]
    if concat is not None and concat.attrs["axis"] == 1 and [x.shape for x in concat.inputs] == head_shapes:
        return [b.reshape(x, (1, *shape[1:])) for x in concat.inputs]
    return [b.slice(value, (head, 0, 0), (1, *shape[1:])) for head in range(shape[0])]


def _match_head_rescale(op: Op) -> Op | None:
    """Match the RESCALE with result [heads, T, D] before a TRANSPOSE of [1, heads, T, D] that merges heads."""
    split = producer(op.inputs[0], "RESHAPE")
    rescale = split and producer(split.inputs[0], "RESCALE")
    has_same_shape = rescale is not None and (1, *rescale.output.shape) == op.inputs[0].shape
    return rescale if has_same_shape and tuple(op.attrs["perms"]) in ((0, 2, 1, 3), (2, 0, 1, 3)) else None


def multiply_transposed(op: Op, rewriter: Rewriter) -> Value | None:
    """Compute RESCALE(A @ B) as the transpose of RESCALE(B^T @ A^T). Bit-exact: the sums are the same.

    On U55 and U65, cycles grow with the columns of the second operand. The rewrite applies if A^T has fewer columns
    than B. Attention with 2 heads of 64 channels on 32 tokens, int8, product with the values: 155,136 instead of
    157,248 cycles on U55-128, 191,363 instead of 231,092 on U65-256.
    """
    b, product = rewriter.builder, producer(op.inputs[0], "MATMUL")
    if product is None:
        return None
    left, right = (b.transpose(x, (0, 2, 1)) for x in reversed(product.inputs))
    zero_points = {"a_zp": product.attrs["b_zp"], "b_zp": product.attrs["a_zp"]}
    total = b.emit("MATMUL", (left, right), product.output.dtype, **zero_points)
    scaled = b.emit("RESCALE", (total,), op.output.dtype, **op.attrs)
    return b.transpose(scaled, (0, 2, 1))


def _find_sole_rescale(op: Op, rewriter: Rewriter) -> Op | None:
    """Find the RESCALE that is the only reader of a MATMUL, if it has one scale."""
    readers = rewriter.users(op.output) or []
    is_sole = [reader.kind for reader in readers] == ["RESCALE"] and not readers[0].attrs["per_channel"]
    return readers[0] if is_sole else None


def _match_matmul_to_transpose(op: Op, rewriter: Rewriter) -> Region | None:
    last, (_, rows, columns) = _find_sole_rescale(op, rewriter), op.output.shape
    if last is None or rewriter.builder.target.hardware.splits_matmuls or columns <= rows:
        return None
    after = collect_neighbors(last, rewriter, (), ("RESHAPE", "TRANSPOSE"))
    if any(step.kind == "TRANSPOSE" for step in after):  # no later pass merges it with the result's new TRANSPOSE
        return None
    return Region([*collect_neighbors(op, rewriter, ("RESHAPE", "TRANSPOSE", "CONCAT"), ()), *after], ((last,),))


def _match_per_head(op: Op, rewriter: Rewriter) -> Region | None:
    last = _find_sole_rescale(op, rewriter)
    if last is None or not rewriter.builder.target.hardware.splits_matmuls or not 1 < op.output.shape[0] <= _MAX_HEADS:
        return None
    after = dict.fromkeys(collect_neighbors(last, rewriter, (), ("RESHAPE", "TRANSPOSE")))
    transposes = [step for step in after if step.kind == "TRANSPOSE"]
    if any(
        _match_head_rescale(step) is not last for step in transposes
    ):  # Vela may need many operations for a TRANSPOSE of the concatenation
        return None
    last = transposes[0] if len(transposes) == 1 else last
    # The region includes the producers of the operands, because Vela lets a producer write directly into a CONCAT. For
    # an input of the region, which has no producer, the estimate would include a copy that the whole graph does not
    # need.
    before = collect_neighbors(op, rewriter, ("RESHAPE", "TRANSPOSE", "CONCAT", "RESCALE"), ())
    convs = [conv for step in before for x in step.inputs if (conv := producer(x, "CONV2D")) is not None]
    read = collect_neighbors(last, rewriter, (), ("RESHAPE",))
    readers = [reader for step in read for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    scaled = [step for conv in readers for step in collect_neighbors(conv, rewriter, (), ("RESCALE",))]
    return Region([*convs, *before, *after, *read, *scaled], ((last,),))


MATMUL_PER_HEAD = Alternative("one MATMUL for each attention head", ("MATMUL",), multiply_per_head, _match_per_head)
TRANSPOSED_MATMUL = Alternative(
    "MATMULs of transposed operands", ("MATMUL",), multiply_transposed, _match_matmul_to_transpose
)
