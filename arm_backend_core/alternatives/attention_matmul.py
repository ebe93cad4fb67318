"""Attention's matrix products: on U85 of each head apart, elsewhere as those of the operands turned."""

from __future__ import annotations

from arm_backend_core.alternatives.attention_heads import heads_of
from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer

#: Heads, each of which takes some operators more.
_MOST = 16


def multiply_apart(op: Op, rewriter: Rewriter) -> Value | None:
    """A MATMUL of all heads and its RESCALE, which is ``op`` or what the TRANSPOSE ``op`` brings together: one each.

    A MATMUL is one of each of its matrices already: the same sums. Results of heads lie one behind the other, or side
    by side as channels where the TRANSPOSE brought them there. A second operand that a convolution computes is
    computed for each head too, and turned in front of its MATMUL, which turns it back: Vela does neither.

    Attention of 2 heads of 64 on 32 tokens, int8, U85-256: 8,832 cycles for 11,520 (scores), 11,872 for 15,040.
    On U55 copies of parts take more than that: 207,552 for 183,472.
    """
    b, joined = rewriter.build, op.kind == "TRANSPOSE"
    rescale = _scaled(op) if joined else op
    product = rescale and producer(rescale.inputs[0], "MATMUL")
    if rescale is None or product is None:
        return None
    (_, rows, columns), (first, second) = product.output.shape, (_heads(x, rewriter) for x in product.inputs)
    results = []
    for left, right in zip(first, second, strict=True):
        total = b.emit("MATMUL", (left, right), (1, rows, columns), product.output.dtype, **product.attrs)
        part = b.emit("RESCALE", (total,), total.shape, rescale.output.dtype, **rescale.attrs)
        results.append(b.reshape(part, (1, 1, rows, columns)))
    return b.reshape(b.concat(results, 3 if joined else 1), op.output.shape)


def _heads(value: Value, rewriter: Rewriter) -> list[Value]:
    """[1, T, K] of each head of [heads, T, K]."""
    b, shape = rewriter.build, value.shape
    whole = producer(value, "RESHAPE")
    moved = whole and producer(whole.inputs[0], "TRANSPOSE")
    alone = moved is not None and moved.output.shape == (1, *shape) and rewriter.single_use(moved.output)
    if moved is not None and alone and (parts := heads_of(moved, rewriter)):
        if tuple(moved.attrs["perms"]) == (0, 2, 1, 3):
            return [b.reshape(part, (1, *shape[1:])) for part in parts]
        return [b.transpose(b.reshape(part, (1, shape[2], shape[1])), (0, 2, 1)) for part in parts]
    apart = whole and producer(whole.inputs[0], "CONCAT")
    single = [(1, 1, *shape[1:])] * shape[0]
    if apart is not None and apart.attrs["axis"] == 1 and [x.shape for x in apart.inputs] == single:
        return [b.reshape(x, (1, *shape[1:])) for x in apart.inputs]
    return [b.slice(value, (head, 0, 0), (1, *shape[1:])) for head in range(shape[0])]


def _scaled(op: Op) -> Op | None:
    """The RESCALE [heads, T, D] whose heads the TRANSPOSE [1, heads, T, D] brings together."""
    split = producer(op.inputs[0], "RESHAPE")
    rescale = split and producer(split.inputs[0], "RESCALE")
    kept = rescale is not None and (1, *rescale.output.shape) == op.inputs[0].shape
    return rescale if kept and tuple(op.attrs["perms"]) in ((0, 2, 1, 3), (2, 0, 1, 3)) else None


def multiply_turned(op: Op, rewriter: Rewriter) -> Value | None:
    """RESCALE of A @ B as that of the TRANSPOSE of B @ A, both turned: the same sums.

    U55 and U65 multiply and add for each column of B, of which there are fewer then: attention of 2 heads of 64 on 32
    tokens, int8, 157,248 cycles for the sums of values on U55-128, 155,136 turned (U65-256: 231,092 and 191,363).
    """
    b, product = rewriter.build, producer(op.inputs[0], "MATMUL")
    if product is None:
        return None
    count, rows, columns = product.output.shape
    left, right = (b.transpose(x, (0, 2, 1)) for x in reversed(product.inputs))
    zero_points = {"a_zp": product.attrs["b_zp"], "b_zp": product.attrs["a_zp"]}
    total = b.emit("MATMUL", (left, right), (count, columns, rows), product.output.dtype, **zero_points)
    scaled = b.emit("RESCALE", (total,), total.shape, op.output.dtype, **op.attrs)
    return b.transpose(scaled, (0, 2, 1))


def _rescaled(op: Op, rewriter: Rewriter) -> Op | None:
    """The RESCALE that alone reads a MATMUL, with one scale."""
    readers = rewriter.users(op.output) or []
    one = [reader.kind for reader in readers] == ["RESCALE"] and not readers[0].attrs["per_channel"]
    return readers[0] if one else None


def _turned(op: Op, rewriter: Rewriter) -> Region | None:
    last, (_, rows, columns) = _rescaled(op, rewriter), op.output.shape
    if last is None or rewriter.build.target.hardware.splits_matmuls or columns <= rows:
        return None
    behind = around(last, rewriter, (), ("RESHAPE", "TRANSPOSE"))
    if any(step.kind == "TRANSPOSE" for step in behind):  # one behind the other: nothing merges them from here on
        return None
    return Region([*around(op, rewriter, ("RESHAPE", "TRANSPOSE", "CONCAT"), ()), *behind], ((last,),))


def _product(op: Op, rewriter: Rewriter) -> Region | None:
    last = _rescaled(op, rewriter)
    if last is None or not rewriter.build.target.hardware.splits_matmuls or not 1 < op.output.shape[0] <= _MOST:
        return None
    behind = dict.fromkeys(around(last, rewriter, (), ("RESHAPE", "TRANSPOSE")))
    moved = [step for step in behind if step.kind == "TRANSPOSE"]
    if any(_scaled(step) is not last for step in moved):  # of what is put together Vela may turn in many steps
        return None
    last = moved[0] if len(moved) == 1 else last
    # With what makes the operands: into a CONCAT it writes without a copy, which operands that are given need.
    before = around(op, rewriter, ("RESHAPE", "TRANSPOSE", "CONCAT", "RESCALE"), ())
    convs = [made for step in before for x in step.inputs if (made := producer(x, "CONV2D")) is not None]
    read = around(last, rewriter, (), ("RESHAPE",))
    readers = [reader for step in read for reader in rewriter.users(step.output) or () if reader.kind == "CONV2D"]
    scaled = [step for conv in readers for step in around(conv, rewriter, (), ("RESCALE",))]
    return Region([*convs, *before, *behind, *read, *scaled], ((last,),))


PRODUCTS = Alternative("matrix products of heads apart", ("MATMUL",), multiply_apart, _product)
TURNED = Alternative("matrix products of turned operands", ("MATMUL",), multiply_turned, _turned)
