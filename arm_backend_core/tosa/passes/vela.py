"""Ethos-U: forms that Vela 5.1 compiles to something else, in forms that it compiles right (``docs/vela.md``).

``Hardware.mistakes`` names those that a family meets. Nothing here changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, producer, sweep

#: What a chain of U85 has at most: operations, and operands that are not results within it.
_CHAIN_OPERATIONS, _CHAIN_OPERANDS = 4, 3
_REDUCTIONS = ("REDUCE_ALL", "REDUCE_ANY", "REDUCE_MAX", "REDUCE_MIN")


def avoid_mistakes(graph: Graph, target: Target) -> None:
    """Each operator once: what is written is not looked at again."""
    rules: dict[str, list[Rule]] = {}
    for mistake in target.hardware.mistakes:
        for rule, kinds in _RULES[mistake]:
            for kind in kinds:
                rules.setdefault(kind, []).append(rule)
    if rules:
        sweep(graph, target, rules)


def _filled(x: Value, number: int, dtype: DType, b: Builder) -> Value:
    """One number that broadcasts to ``x``."""
    return b.const(np.full((1,) * x.rank, number), dtype)


def copied(x: Value, b: Builder) -> Value:
    """``x`` as the result of an operation that reads slices and writes into parts of a tensor: x * 1, or x or x.

    Vela removes IDENTITY, and estimates 1.1 to 1.5 cycles an element for CLAMP against 0.25 (U85) to 1 (U55) here.
    """
    if x.dtype is DType.BOOL:
        return b.bitwise("LOGICAL_OR", x, x)
    product = b.mul(x, _filled(x, 1, x.dtype, b))
    return product if x.dtype is DType.INT32 else b.rescale(product, x.dtype, 1.0)


# -- SLICE, CONCAT and PAD beside what Vela takes apart ------------------------------------------------------


def slice_whole(op: Op, rewriter: Rewriter) -> Value | None:
    """The SLICE that an operator reads is copied where Vela, which lets the operator read the part, forgets it."""
    axes = rewriter.build.target.hardware.forgotten(op)
    inputs = [_whole(value, axes, rewriter.build) or value for value in op.inputs] if axes else op.inputs
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def copy_column(op: Op, rewriter: Rewriter) -> Value | None:
    """The reduction of rows that were columns, [.., n, 1], is of a copy.

    Vela reduces columns again and sees one layout all through, of 16 channels, but has allocated the rows.
    """
    value, column = op.inputs[0], producer(op.inputs[0], "RESHAPE")
    rows = op.attrs["axis"] == value.rank - 1 and value.shape[-1] > 1
    if not rows or column is None or column.inputs[0].shape[-1:] != (1,):
        return None
    inputs = [copied(value, rewriter.build)]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _whole(value: Value, axes: Sequence[int], b: Builder) -> Value | None:
    op = value.producer
    if op is None:
        return None
    if op.kind == "SLICE":
        whole, part = op.inputs[0].shape, value.shape
        cut = any(-axis <= value.rank and whole[axis] != part[axis] for axis in axes)
        return copied(value, b) if cut else None
    if op.kind not in ("RESHAPE", "RESCALE"):  # what Vela looks or writes through
        return None
    inner = _whole(op.inputs[0], range(-6, 0) if op.kind == "RESHAPE" else axes, b)
    return None if inner is None else b.emit(op.kind, (inner,), value.shape, value.dtype, **op.attrs)


def join_whole(op: Op, rewriter: Rewriter) -> Value | None:
    """CONCAT and PAD copy a result that Vela would write in their place, and does at the wrong one."""
    inputs = [copied(value, rewriter.build) if _misplaced(value, rewriter) else value for value in op.inputs]
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _misplaced(value: Value, rewriter: Rewriter) -> bool:
    op, reshaped = value.producer, False
    while op is not None and op.kind in ("RESCALE", "RESHAPE"):
        reshaped = reshaped or op.kind == "RESHAPE"
        op = op.inputs[0].producer
    if op is None or not rewriter.single_use(value):
        return False
    if op.kind == "DEPTHWISE_CONV2D":
        return op.inputs[1].shape[3] > 1 and not reshaped
    forgotten = bool(rewriter.build.target.hardware.forgotten(op))
    # Of a MATMUL the results that Vela sees have four dimensions, the first of them 1.
    return forgotten and (reshaped if op.kind == "MATMUL" else op.kind in _REDUCTIONS and not reshaped)


def pad_apart(op: Op, rewriter: Rewriter) -> Value | None:
    """PAD with 0 is copied before a convolution without padding, whose padding Vela would make it: with input_zp."""
    source = op.inputs[0].producer
    while source is not None and source.kind == "RESHAPE":
        source = source.inputs[0].producer
    if source is None or source.kind != "PAD" or any(op.attrs["pad"]) or not op.attrs["input_zp"]:
        return None
    if source.attrs["pad_const"] != 0:
        return None
    inputs = [copied(op.inputs[0], rewriter.build), *op.inputs[1:]]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


# -- Ethos-U55 and U65 ---------------------------------------------------------------------------------------


def wrap_cast(op: Op, rewriter: Rewriter) -> Value | None:
    """CAST to fewer bits, which saturates there, of the low bits shifted up and down with their sign."""
    b, dtype = rewriter.build, op.output.dtype
    bits = {DType.INT8: 24, DType.INT16: 16}.get(dtype)
    if bits is None or op.inputs[0].dtype not in (DType.INT16, DType.INT32) or _fits(op.inputs[0], dtype):
        return None
    x = b.cast(op.inputs[0], DType.INT32)
    places = _filled(x, bits, DType.INT32, b)
    # Nothing is rounded, as the bits that are shifted out are 0; the hardware has no other right shift.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, places), places, round=True), dtype)


def _fits(value: Value, dtype: DType) -> bool:
    low, high = _range(value)
    least, most = dtype.range
    return bool(least <= low and high <= most)


def _range(value: Value) -> tuple[float, float]:
    """Bounds, through what programs of narrow integers have before a CAST back."""
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    if op is not None and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = map(_range, op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    if op is not None and op.kind in ("CAST", "RESHAPE") and _fits(op.inputs[0], value.dtype):
        return _range(op.inputs[0])
    return value.dtype.range


def complement_minimum(op: Op, rewriter: Rewriter) -> Value | None:
    """min(x) as ~max(~x), ~x = -1 - x: what Vela makes of it, which forgets shapes on the way back."""
    b = rewriter.build
    peak = b.reduce("REDUCE_MAX", _complement(op.inputs[0], b), op.attrs["axis"])
    return _complement(peak, b)


def _complement(x: Value, b: Builder) -> Value:
    ones = b.rescale(_filled(x, -1, x.dtype, b), DType.INT32, 1.0)
    return b.rescale(b.sub(ones, b.rescale(x, DType.INT32, 1.0)), x.dtype, 1.0)


def level_scales(op: Op, rewriter: Rewriter) -> Value | None:
    """RESCALE(RESCALE(x) +- RESCALE(y)) by different whole numbers, both less than 2**15.

    The NPU scales one operand, by any number, and shifts the other by 14 bits (int16) or 19 (int8). All three
    scales times a power of two make it so where the larger number is one: the sum stays within 31 bits. Else Vela
    must not fuse them: one operand is multiplied by its number.
    """
    total = op.inputs[0].producer
    if total is None or total.kind not in ("ADD", "SUB") or not rewriter.single_use(op.inputs[0]):
        return None
    found = _whole_scales(total, rewriter)
    if found is None or op.attrs["per_channel"] or op.output.dtype not in (DType.INT8, DType.INT16):
        return None
    terms, factors = found
    b, attrs, large = rewriter.build, dict(op.attrs), max(factors)
    up = (14 if terms[0].inputs[0].dtype is DType.INT16 else 19) - large.bit_length() + 1
    shift = np.asarray(attrs["shift"]) + up
    if large & (large - 1) == 0 and shift[0] <= 62 and attrs["rounding_mode"] == "SINGLE_ROUND":
        attrs["shift"] = shift.astype(np.int8)
        scaled = [_scaled(term, factor << up, b) for term, factor in zip(terms, factors, strict=True)]
    else:
        plain = _scaled(terms[1], 1, b)
        scaled = [total.inputs[0], b.mul(plain, _filled(plain, factors[1], DType.INT32, b))]
    result = b.emit(total.kind, scaled, total.output.shape, DType.INT32)
    return b.emit("RESCALE", (result,), op.output.shape, op.output.dtype, **attrs)


def _whole_scales(total: Op, rewriter: Rewriter) -> tuple[list[Op], list[int]] | None:
    """The RESCALEs before ADD or SUB and their numbers, where Vela fuses these and gets them wrong."""
    terms, factors = [], []
    for value in total.inputs:
        term = producer(value, "RESCALE")
        if term is None or term.attrs["per_channel"] or not rewriter.single_use(value):
            return None
        multiplier, shift = int(term.attrs["multiplier"][0]), int(term.attrs["shift"][0])
        if multiplier % (1 << shift) or multiplier >> shift >= 1 << 15:
            return None
        terms.append(term)
        factors.append(multiplier >> shift)
    kinds = {term.inputs[0].dtype for term in terms}
    fused = len(kinds) == 1 and kinds <= {DType.INT8, DType.INT16}
    return (terms, factors) if fused and factors[0] != factors[1] else None


def _scaled(term: Op, factor: int, b: Builder) -> Value:
    return b.rescale(term.inputs[0], DType.INT32, factor, term.attrs["input_zp"])


def four_dimensions(op: Op, rewriter: Rewriter) -> Value | None:
    """Arithmetic of more dimensions with a single element that is no constant, of which Vela reads more."""
    b, shape = rewriter.build, op.output.shape
    single = any(value.size == 1 and value.data is None for value in op.inputs)
    if len(shape) <= 4 or not single or any(value.size > 1 and value.shape != shape for value in op.inputs):
        return None
    flat = (prod(shape[:-3]), *shape[-3:])
    inputs = [b.reshape(value, flat if value.shape == shape else (1, 1, 1, 1)) for value in op.inputs]
    return b.reshape(b.emit(op.kind, inputs, flat, op.output.dtype, **op.attrs), shape)


# -- Ethos-U85 -----------------------------------------------------------------------------------------------


def separate_tables(op: Op, rewriter: Rewriter) -> Value | None:
    """TABLE behind arithmetic behind another TABLE, one of them int16: the arithmetic and what follows, in halves.

    Vela would make one chain of them, for which the hardware holds one table of int16. What reads a SLICE is in no
    chain, and halves cost no more cycles than the whole.
    """
    steps = _from_arithmetic(op, rewriter)
    table = next((step for step in steps if step.kind == "TABLE"), op)
    if not steps or not _chains(steps[0], table, 0, 0, rewriter):
        return None
    b, shape = rewriter.build, steps[0].output.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:  # one element: a CLAMP is in the place that the TABLE would have in the chain
        clamped = b.reshape(b.clamp(table.inputs[0], *table.inputs[0].dtype.range), shape)
        return b.reshape(_repeated(steps[steps.index(table) :], clamped, b), op.output.shape)
    middle, halves = shape[axis] // 2, []
    for span in ((0, middle), (middle, shape[axis])):
        inputs = [_part(value, axis, span, rewriter) for value in steps[0].inputs]
        part = (*shape[:axis], span[1] - span[0], *shape[axis + 1 :])
        first = b.emit(steps[0].kind, inputs, part, steps[0].output.dtype, **steps[0].attrs)
        halves.append(_repeated(steps[1:], first, b))
    return b.reshape(b.concat(halves, axis), op.output.shape)


def select_own(op: Op, rewriter: Rewriter) -> Value | None:
    """SELECT reads copies of what others read in another shape: Vela takes that shape for it, and broadcasts."""
    inputs = [copied(value, rewriter.build) if _read_reshaped(value, rewriter) else value for value in op.inputs]
    if inputs == op.inputs:
        return None
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _read_reshaped(value: Value, rewriter: Rewriter) -> bool:
    """Whether another than the reader of ``value`` reads a RESHAPE of it; a result of the graph counts as that."""
    own = producer(value, "RESHAPE")
    readers = rewriter.users(own.inputs[0] if own else value)
    return readers is None or any(reader.kind == "RESHAPE" and reader is not own for reader in readers)


def _from_arithmetic(op: Op, rewriter: Rewriter) -> list[Op]:
    """Arithmetic, RESCALEs, a TABLE and, of int16, its RESCALE, if ``op`` is the last of such; RESHAPEs left out."""
    users = rewriter.users(op.output) or []
    if (op.kind == "TABLE" and len(users) == 1 and users[0].kind == "RESCALE") or (
        op.kind == "RESCALE" and producer(op.inputs[0], "TABLE") is None
    ):
        return []
    steps = [op]
    while steps[0].kind in ("TABLE", "RESCALE", "RESHAPE") and not steps[0].attrs.get("per_channel"):
        before = steps[0].inputs[0]
        if before.producer is None or not rewriter.single_use(before):
            return []
        steps.insert(0, before.producer)
    arithmetic = steps[0].kind in ELEMENTWISE - {"CLAMP", "RESCALE", "TABLE"}
    return [step for step in steps if step.kind != "RESHAPE"] if arithmetic else []


def _chains(op: Op, table: Op, length: int, operands: int, rewriter: Rewriter) -> bool:
    """Whether what ``op`` reads can be in a chain with it behind a TABLE that does not go with ``table``."""
    if op.kind not in (*ELEMENTWISE, "RESHAPE") or length > _CHAIN_OPERATIONS or operands > _CHAIN_OPERANDS:
        return False
    if op.kind == "TABLE" and op is not table:
        wide = DType.INT16 in (op.inputs[0].dtype, table.inputs[0].dtype)
        fits = length < _CHAIN_OPERATIONS and operands + _before_table(op, rewriter) <= _CHAIN_OPERANDS
        if wide and fits and not np.array_equal(op.attrs["table"], table.attrs["table"]):
            return True
    if op.kind not in ("CLAMP", "RESCALE", "RESHAPE", "TABLE"):  # those go with another operation or are none
        length, operands = length + 1, operands + _operands(op) - 1
    before = [value.producer for value in op.inputs if rewriter.single_use(value) and value.producer is not None]
    return any(_chains(one, table, length, operands, rewriter) for one in before)


def _operands(op: Op) -> int:
    """How many of arithmetic are no single number."""
    return max(1, sum(value.data is None or value.size > 1 for value in op.inputs))


def _before_table(op: Op, rewriter: Rewriter) -> int:
    """Operands of the operation that a TABLE goes with, where that is sure to be arithmetic; else one, its own."""
    value = op.inputs[0]
    rescale = producer(value, "RESCALE")
    if rescale is not None and rewriter.single_use(value) and not rescale.attrs["per_channel"]:
        value = rescale.inputs[0]
    before = value.producer
    sure = before is not None and before.kind in ("ADD", "SUB", "MUL") and rewriter.single_use(value)
    return _operands(before) if sure and before is not None else 1


def _repeated(steps: list[Op], value: Value, b: Builder) -> Value:
    for step in steps:
        value = b.emit(step.kind, (value,), value.shape, step.output.dtype, **step.attrs)
    return value


def _part(value: Value, axis: int, span: tuple[int, int], rewriter: Rewriter) -> Value:
    """Of ``value``, which may broadcast; a widening RESCALE stays with the arithmetic, which does it on its way."""
    b, (start, end), op = rewriter.build, span, producer(value, "RESCALE")
    if value.shape[axis] == 1:
        return value
    if op is not None and value.dtype is DType.INT32 and rewriter.single_use(value) and not op.attrs["per_channel"]:
        return _repeated([op], _part(op.inputs[0], axis, span, rewriter), b)
    if value.data is not None:
        return b.const(value.data.take(range(start, end), axis), value.dtype)
    starts, sizes = [0] * value.rank, list(value.shape)
    starts[axis], sizes[axis] = start, end - start
    return b.slice(value, starts, sizes)


_WINDOWS = ("CONV2D", "CONV3D", "DEPTHWISE_CONV2D")
_BINARY = tuple(ELEMENTWISE - UNARY)
_APART = (*_WINDOWS, *_REDUCTIONS, "ARGMAX", "AVG_POOL2D", "MATMUL", "MAX_POOL2D", "REDUCE_SUM", "TRANSPOSE_CONV2D")
#: By name: rules, and what they are for.
_RULES: dict[str, tuple[tuple[Rule, tuple[str, ...]], ...]] = {
    "sliced": ((slice_whole, _APART),),
    "column": ((copy_column, (*_REDUCTIONS, "ARGMAX")),),
    "joined": ((join_whole, ("CONCAT", "PAD")),),
    "padded_zero": ((pad_apart, _WINDOWS),),
    "narrowing_cast": ((wrap_cast, ("CAST",)),),
    "reduce_min": ((complement_minimum, ("REDUCE_MIN",)),),
    "unequal_scales": ((level_scales, ("RESCALE",)),),
    "one_of_five": ((four_dimensions, _BINARY),),
    "reshaped_select": ((select_own, ("SELECT",)),),
    "two_tables": ((separate_tables, ("TABLE", "RESCALE")),),
}
