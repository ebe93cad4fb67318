"""Peephole rules that merge or remove RESHAPE, SLICE, CONCAT, PAD and TILE, and remove operators without effect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from arm_backend_core.tosa.graph import Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE, LEVEL_8K, UNARY
from arm_backend_core.tosa.passes.rewrite import Rewriter, RewriteRule, producer, trace_back

#: Result of ``reshape_groups``: for each group, its dimensions in the first shape and its dimensions in the second.
DimGroups = list[tuple[list[int], list[int]]]


def reshape_groups(a: tuple[int, ...], b: tuple[int, ...]) -> DimGroups:
    """Split a RESHAPE from ``a`` to ``b`` into groups of adjacent dimensions that are reshaped independently.

    The groups are as short as possible. For example, [4, 6] to [2, 2, 6] has the groups ([0], [0, 1]) and ([1], [2]):
    dimension 0 becomes the dimensions 0 and 1, and dimension 1 becomes dimension 2. A dimension of size 1 belongs to
    the preceding group, a leading one to the first group. Both shapes have the same, non-zero number of elements.
    """
    boundaries = sorted(set(accumulate(a, mul)) & set(accumulate(b, mul)) | {prod(a)})
    groups: DimGroups = [([], []) for _ in boundaries]
    for side, shape in enumerate((a, b)):
        total, group = 1, 0
        for dim, size in enumerate(shape):
            total *= size
            while size > 1 and total > boundaries[group]:
                group += 1
            groups[group][side].append(dim)
    return groups


def equal_without_ones(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether the shapes differ only in dimensions of size 1."""
    return [size for size in a if size != 1] == [size for size in b if size != 1]


# -- RESHAPE -------------------------------------------------------------------------------------------------


def merge_reshape(op: Op, rewriter: Rewriter) -> Value | None:
    """Merge two successive RESHAPEs; remove a RESHAPE to the same shape."""
    first = producer(op.inputs[0], "RESHAPE")
    if first is None and op.output.shape != op.inputs[0].shape:
        return None
    return rewriter.builder.reshape(first.inputs[0] if first else op.inputs[0], op.output.shape)


def sink_reshape(op: Op, rewriter: Rewriter) -> Value | None:
    """f(RESHAPE(x), ...) becomes RESHAPE(f(x, ...)). The RESHAPE sinks until it merges with another RESHAPE.

    All readers of the RESHAPE must be elementwise, so that the rule removes it from all of them.
    """
    reshape = next((r for v in op.inputs if v.shape == op.output.shape and (r := producer(v, "RESHAPE"))), None)
    if reshape is None or not _only_elementwise_readers(reshape.output, rewriter):
        return None
    shape = reshape.inputs[0].shape
    if len(shape) > max(4, op.output.rank) or not shape:  # the hardware is fastest with up to four dimensions
        return None
    if op.attrs.get("per_channel") and shape[-1] != op.output.shape[-1]:
        return None
    inputs = [_undo_reshape(value, op.output.shape, shape, rewriter) for value in op.inputs]
    sunk = [value for value in inputs if value is not None]
    if len(sunk) != len(inputs):
        return None
    result = rewriter.builder.emit(op.kind, sunk, op.output.dtype, **op.attrs)
    return rewriter.builder.reshape(result, op.output.shape)


def _only_elementwise_readers(value: Value, rewriter: Rewriter) -> bool:
    users = rewriter.users(value)
    return users is not None and all(user.kind in ELEMENTWISE for user in users)


def _undo_reshape(value: Value, old: tuple[int, ...], new: tuple[int, ...], rewriter: Rewriter) -> Value | None:
    """Reshape ``value``, which broadcasts to shape ``old``, to a shape that broadcasts to shape ``new``.

    Returns:
        The reshaped value. None if the reshape is not free. It is free if ``value`` is a RESHAPE from ``new``, a
        constant, a RESCALE (with a single scale) of a constant, or a tensor of one element. Also None if a constant
        broadcasts along some, but not all dimensions of a group (``reshape_groups``).
    """
    reshape = producer(value, "RESHAPE")
    if reshape is not None and value.shape == old and reshape.inputs[0].shape == new:
        return reshape.inputs[0]
    rescale = producer(value, "RESCALE")
    if rescale is not None and rescale.inputs[0].data is not None and not rescale.attrs["per_channel"]:
        inner = _undo_reshape(rescale.inputs[0], old, new, rewriter)
        return inner and rewriter.builder.emit("RESCALE", (inner,), value.dtype, **rescale.attrs)
    # A RESHAPE of a computed operand is not free. If ``old`` has one element, every operand would qualify, and
    # ``sink_reshape`` would move the RESHAPE from one operand to the other forever.
    if value.data is None and (value.size > 1 or prod(old) == 1):
        return None
    shape = [1] * len(new)
    for new_dims, old_dims in reshape_groups(new, old):
        broadcast_dims = [dim for dim in old_dims if value.shape[dim] != 1]
        if broadcast_dims and any(value.shape[dim] != old[dim] for dim in old_dims):
            return None
        for dim in new_dims if broadcast_dims else ():
            shape[dim] = new[dim]
    return rewriter.builder.reshape(value, shape)


# -- SLICE, CONCAT, PAD, TILE --------------------------------------------------------------------------------


def merge_slice(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a SLICE of the whole operand. Merge a SLICE with the SLICE, CONCAT or PAD that produces its operand.

    A SLICE of a CONCAT is merged if it reads one operand only; a SLICE of a PAD if it reads no padding.
    """
    source, start, size = op.inputs[0], list(op.attrs["start"]), list(op.attrs["size"])
    if tuple(size) == source.shape:
        return source
    inner = source.producer
    if inner is None:
        return None
    if inner.kind == "SLICE":
        return rewriter.builder.slice(inner.inputs[0], _add_elementwise(start, inner.attrs["start"]), size)
    if inner.kind == "CONCAT":
        found = _operand_that_contains(inner, start, size)
        return None if found is None else rewriter.builder.slice(*found, size)
    if inner.kind == "PAD":
        leading_padding = inner.attrs["padding"][::2]
        start = [a - b for a, b in zip(start, leading_padding, strict=True)]
        ends = zip(start, size, inner.inputs[0].shape, strict=True)
        if all(a >= 0 and a + n <= limit for a, n, limit in ends):
            return rewriter.builder.slice(inner.inputs[0], start, size)
    return None


def hoist_slice_of_unary(op: Op, rewriter: Rewriter) -> Value | None:
    """SLICE(f(CONCAT(a, b))) becomes f(a), for example for the real part of a complex tensor after a RESCALE.

    f is a chain of elementwise operators with one operand. All readers of its result must be SLICEs that each read one
    whole operand of the CONCAT. The chain then runs on smaller tensors, and the CONCAT is not needed.
    """
    source, chain = trace_back(op.inputs[0], _is_unary)
    concat = producer(source, "CONCAT")
    if concat is None or not chain or not all(rewriter.has_one_use(step.output) for step in chain[:-1]):
        return None
    readers, value = rewriter.users(op.inputs[0]), _whole_operand(concat, op)
    if readers is None or value is None or any(_whole_operand(concat, reader) is None for reader in readers):
        return None
    for step in chain:
        value = rewriter.builder.emit(step.kind, (value,), step.output.dtype, **step.attrs)
    return value


def _is_unary(op: Op) -> bool:
    return op.kind in UNARY and not op.attrs.get("per_channel")


def _whole_operand(concat: Op, reader: Op) -> Value | None:
    """The operand of ``concat`` that ``reader`` reads as a whole; None if ``reader`` reads no whole operand."""
    if reader.kind != "SLICE":
        return None
    found = _operand_that_contains(concat, reader.attrs["start"], reader.output.shape)
    return found[0] if found is not None and found[0].shape == reader.output.shape else None


def hoist_slice(op: Op, rewriter: Rewriter) -> Value | None:
    """SLICE(RESHAPE(x)) becomes RESHAPE(SLICE(x)) if the RESHAPE only adds or removes dimensions of size 1.

    The last dimension must keep its size. Only SLICEs may read the RESHAPE, which may also be a result of the graph.
    Only elementwise operators and RESHAPEs may read the SLICE.
    """
    reshape = producer(op.inputs[0], "RESHAPE")
    can_absorb = [r.kind in ELEMENTWISE or r.kind == "RESHAPE" for r in rewriter.users(op.output) or ()]
    if reshape is None or not can_absorb or not all(can_absorb):
        return None
    shape, source = op.inputs[0].shape, reshape.inputs[0]
    if any(user.kind != "SLICE" for user in rewriter.users(op.inputs[0]) or (op,)):
        return None
    if shape[-1] != source.shape[-1] or not equal_without_ones(shape, source.shape):
        return None
    spans = iter([span for n, *span in zip(shape, op.attrs["start"], op.attrs["size"], strict=True) if n > 1])
    start, size = zip(*(next(spans) if n > 1 else (0, 1) for n in source.shape), strict=True)
    return rewriter.builder.reshape(rewriter.builder.slice(source, start, size), op.output.shape)


def _add_elementwise(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _operand_that_contains(concat: Op, start: Sequence[int], size: Sequence[int]) -> tuple[Value, list[int]] | None:
    """The operand of ``concat`` that contains a part of the result, and the start of the part in it.

    Returns:
        None if the part lies in several operands.
    """
    axis, offset = concat.attrs["axis"], 0
    for value in concat.inputs:
        end = offset + value.shape[axis]
        if offset <= start[axis] and start[axis] + size[axis] <= end:
            return value, [n - offset if dim == axis else n for dim, n in enumerate(start)]
        offset = end
    return None


def merge_concat(op: Op, rewriter: Rewriter) -> Value | None:
    """Merge nested CONCATs along the same axis. Adjacent SLICEs of a value that are concatenated become one SLICE."""
    axis = op.attrs["axis"]
    parts: list[Value] = []
    for value in op.inputs:
        inner = producer(value, "CONCAT")
        is_nested = inner is not None and inner.attrs["axis"] == axis and rewriter.has_one_use(value)
        for part in inner.inputs if inner is not None and is_nested else (value,):
            merged = _join_slices(parts[-1], part, axis, rewriter) if parts else None
            if merged is None:
                parts.append(part)
            else:
                parts[-1] = merged
    if len(parts) > LEVEL_8K.max_tensor_list_size or (parts == op.inputs and len(parts) > 1):
        return None
    return rewriter.builder.concat(parts, axis)


def _join_slices(a: Value, b: Value, axis: int, rewriter: Rewriter) -> Value | None:
    """Emit one SLICE that is equal to CONCAT(a, b) along ``axis``; None if ``a`` and ``b`` are not adjacent SLICEs."""
    first, second = producer(a, "SLICE"), producer(b, "SLICE")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    start, size = list(first.attrs["start"]), list(first.attrs["size"])
    expected = [*start]
    expected[axis] += size[axis]
    has_equal_sizes = all(dim == axis or n == size[dim] for dim, n in enumerate(second.attrs["size"]))
    if list(second.attrs["start"]) != expected or not has_equal_sizes:
        return None
    size[axis] += second.attrs["size"][axis]
    return rewriter.builder.slice(first.inputs[0], start, size)


def merge_pad(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a PAD by 0; merge two successive PADs with the same value."""
    source, padding = op.inputs[0], list(op.attrs["padding"])
    if not any(padding):
        return source
    inner = producer(source, "PAD")
    if inner is None or inner.attrs["pad_const"] != op.attrs["pad_const"] or not rewriter.has_one_use(source):
        return None
    padding = _add_elementwise(padding, inner.attrs["padding"])
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    return rewriter.builder.pad(inner.inputs[0], pairs, op.attrs["pad_const"])


def merge_tile(op: Op, rewriter: Rewriter) -> Value | None:
    """Merge two successive TILEs; remove a TILE by 1."""
    source, multiples = op.inputs[0], op.attrs["multiples"]
    inner = producer(source, "TILE")
    if inner is not None and rewriter.has_one_use(source):
        total = [a * b for a, b in zip(multiples, inner.attrs["multiples"], strict=True)]
        return rewriter.builder.tile(inner.inputs[0], total)
    return source if all(multiple == 1 for multiple in multiples) else None


def replace_tile_by_broadcast(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a TILE of dimensions of size 1 before an elementwise operator, which broadcasts these dimensions."""
    inputs = list(op.inputs)
    for i, value in enumerate(op.inputs):
        tile = producer(value, "TILE")
        if tile is not None and all(
            1 in pair for pair in zip(tile.inputs[0].shape, tile.attrs["multiples"], strict=True)
        ):
            inputs[i] = tile.inputs[0]
            if np.broadcast_shapes(*(v.shape for v in inputs)) != op.output.shape:
                inputs[i] = value
    if inputs == op.inputs:
        return None
    return rewriter.builder.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def remove_identity(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove an IDENTITY, or a CAST to the type of its operand."""
    return op.inputs[0] if op.output.dtype is op.inputs[0].dtype else None


def remove_unit_axis_operator(op: Op, rewriter: Rewriter) -> Value | None:
    """Remove a reduction or a REVERSE along an axis of size 1."""
    return op.inputs[0] if op.inputs[0].shape[op.attrs["axis"]] == 1 else None


RULES: dict[str, list[RewriteRule]] = {
    "RESHAPE": [merge_reshape],
    "SLICE": [merge_slice, hoist_slice_of_unary, hoist_slice],
    "CONCAT": [merge_concat],
    "PAD": [merge_pad],
    "TILE": [merge_tile],
    "IDENTITY": [remove_identity],
    "CAST": [remove_identity],
    **{f"REDUCE_{kind}": [remove_unit_axis_operator] for kind in ("ALL", "ANY", "MAX", "MIN", "PRODUCT", "SUM")},
    "REVERSE": [remove_unit_axis_operator],
}
for _kind in ELEMENTWISE:
    RULES[_kind] = [*RULES.get(_kind, ()), *([replace_tile_by_broadcast] if _kind not in UNARY else ()), sink_reshape]
