"""Arithmetic that Vela fuses or replaces by something else (``vela``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import power_of_two
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, past, producer


def filled(x: Value, number: int, dtype: DType, b: Builder) -> Value:
    """One number that broadcasts to ``x``."""
    return b.const(np.full((1,) * x.rank, number), dtype)


def copied(x: Value, b: Builder) -> Value:
    """``x`` as the result of an operation that reads slices and writes into parts of a tensor: x * 1, or x or x.

    Vela removes IDENTITY, and estimates 1.1 to 1.5 cycles an element for CLAMP against 0.25 (U85) to 1 (U55) here.
    """
    if x.dtype is DType.BOOL:
        return b.bitwise("LOGICAL_OR", x, x)
    product = b.mul(x, filled(x, 1, x.dtype, b))
    return product if x.dtype is DType.INT32 else b.rescale(product, x.dtype, 1.0)


def wrap_cast(op: Op, rewriter: Rewriter) -> Value | None:
    """CAST to fewer bits, which saturates there, of the low bits shifted up and down with their sign."""
    b, dtype = rewriter.build, op.output.dtype
    bits = {DType.INT8: 24, DType.INT16: 16}.get(dtype)
    if bits is None or op.inputs[0].dtype not in (DType.INT16, DType.INT32) or _fits(op.inputs[0], dtype):
        return None
    x = b.cast(op.inputs[0], DType.INT32)
    places = filled(x, bits, DType.INT32, b)
    # Nothing is rounded, as the bits that are shifted out are 0; the hardware has no other right shift.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, places), places, round=True), dtype)


def wrap_chained_cast(op: Op, rewriter: Rewriter) -> Value | None:
    """The same where one operation alone reads it, in whose chain it saturates; a CLAMP is done with the CAST."""
    readers = {user.kind for user in rewriter.users(op.output) or ()}
    return wrap_cast(op, rewriter) if len(readers) == 1 and readers <= {*ELEMENTWISE, "CAST"} - {"CLAMP"} else None


def _fits(value: Value, dtype: DType) -> bool:
    low, high = _range(value)
    least, most = dtype.range
    return bool(least <= low and high <= most)


def _range(value: Value, depth: int = 8) -> tuple[float, float]:
    """Bounds, through what programs of narrow integers have before a CAST back; what is before ``depth`` may be any."""
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    if op is not None and depth and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = (_range(x, depth - 1) for x in op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    least, most = value.dtype.range
    if op is not None and depth and (op.kind in ("CAST", "RESHAPE") or (op.kind == "RESCALE" and _is_plain(op))):
        low, high = _range(op.inputs[0], depth - 1)
        if least <= low and high <= most:
            return low, high
    return least, most


def _is_plain(op: Op) -> bool:
    """Whether a RESCALE changes no number that fits."""
    return power_of_two(op) == 0 and op.attrs["input_zp"] == op.attrs["output_zp"] == 0


def clamp_apart(op: Op, rewriter: Rewriter) -> Value | None:
    """CLAMP behind a CAST to fewer bits, with an operation between: Vela does not clip such a CAST, nor with it."""
    cast = producer(past(op.inputs[0], "RESHAPE"), "CAST")
    if cast is None or cast.inputs[0].dtype.range[1] <= cast.output.dtype.range[1]:
        return None
    clamped = (copied(op.inputs[0], rewriter.build),)
    return rewriter.build.emit("CLAMP", clamped, op.output.shape, op.output.dtype, **op.attrs)


def complement_minimum(op: Op, rewriter: Rewriter) -> Value | None:
    """min(x) as ~max(~x), ~x = -1 - x: what Vela makes of it, which forgets shapes on the way back."""
    b = rewriter.build
    peak = b.reduce("REDUCE_MAX", _complement(op.inputs[0], b), op.attrs["axis"])
    return _complement(peak, b)


def _complement(x: Value, b: Builder) -> Value:
    ones = b.rescale(filled(x, -1, x.dtype, b), DType.INT32, 1.0)
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
        scaled = [total.inputs[0], b.mul(plain, filled(plain, factors[1], DType.INT32, b))]
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


def keep_clip(op: Op, rewriter: Rewriter, *, scaled: bool = False) -> Value | None:
    """RESCALE by 1 to fewer bits that one by 1 widens again: by 1 + 2**-30, as Vela takes both for nothing otherwise.

    round(x * (1 + 2**-30)) is x below 2**29, and what is beyond is clipped.

    Args:
        scaled: one by any number.
    """
    source, dtype = op.inputs[0], op.output.dtype
    if power_of_two(op) != 0 or dtype.bytes >= source.dtype.bytes or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return None
    if (_is_plain(op) and _fits(source, dtype)) or not _widened(op.output, rewriter, scaled=scaled):
        return None
    attrs = {**op.attrs, "multiplier": np.array([(1 << 30) + 1], np.int32), "shift": np.array([30], np.int8)}
    return rewriter.build.emit("RESCALE", (source,), op.output.shape, dtype, **attrs)


def _widened(value: Value, rewriter: Rewriter, *, scaled: bool) -> bool:
    for op in rewriter.users(value) or ():
        if op.kind == "RESCALE" and op.output.dtype.bytes > value.dtype.bytes and (scaled or power_of_two(op) == 0):
            return True
        if op.kind == "RESHAPE" and _widened(op.output, rewriter, scaled=scaled):
            return True
    return False


def four_dimensions(op: Op, rewriter: Rewriter) -> Value | None:
    """Arithmetic of more dimensions whose first operand is one element, of which Vela reads more.

    Not of a constant of 16 bits or fewer, a number in the command. Parts, which Vela reads in theirs, are copied.
    """
    b, shape, first = rewriter.build, op.output.shape, op.inputs[0]
    single = first.size == 1 and (first.data is None or first.dtype is DType.INT32)
    if len(shape) <= 4 or not single or any(value.size > 1 and value.shape != shape for value in op.inputs):
        return None
    flat = (prod(shape[:-3]), *shape[-3:])
    parts = [copied(x, b) if producer(past(x, "RESHAPE", "RESCALE"), "SLICE") else x for x in op.inputs]
    inputs = [b.reshape(x, flat if x.shape == shape else (1, 1, 1, 1)) for x in parts]
    return b.reshape(b.emit(op.kind, inputs, flat, op.output.dtype, **op.attrs), shape)


def tell_weights_apart(graph: Graph, target: Target) -> None:
    """Of convolutions with equal weights and scales, Vela gives all the bias of one.

    Columns of zeros, of which the tap is on padding, tell the weights apart.
    """
    build, users, known = Builder(graph, target), graph.users(), dict[tuple[Any, ...], dict[Any, int]]()
    for op in graph.ops:
        if op.kind not in ("CONV2D", "DEPTHWISE_CONV2D"):
            continue
        _, weight, bias = op.inputs
        if weight.data is None or bias.data is None:
            continue
        match users.get(op.output, ()):
            case [Op(kind="RESCALE", attrs=attrs)] if op.output not in graph.outputs:
                scales = [np.asarray(attrs[name]).tobytes() for name in ("multiplier", "shift")]
            case _:  # sums that several read are computed without a scale
                scales = []
        biases = known.setdefault((op.kind, weight.content, *scales), {})
        if columns := biases.setdefault(bias.content, len(biases)):
            axis = 1 if op.kind == "DEPTHWISE_CONV2D" else 2
            zeros = [(0, columns if i == axis else 0) for i in range(4)]
            op.inputs[1] = build.const(np.pad(weight.data, zeros), weight.dtype)
            *sides, right = op.attrs["pad"]
            op.attrs = {**op.attrs, "pad": [*sides, right + columns * op.attrs["dilation"][1]]}


def reach_padding(op: Op, rewriter: Rewriter) -> Value | None:
    """TRANSPOSE_CONV2D with rows or columns that no tap reaches: taps of zero reach them.

    Vela computes them, which are the bias alone, by convolutions of equal weights, with the bias of the first.
    """
    x, weight, bias = op.inputs
    unreached = [max(pad, 0) for pad in op.attrs["out_pad"]]
    if not any(unreached) or weight.data is None:
        return None
    zeros = ((0, 0), tuple(unreached[:2]), tuple(unreached[2:]), (0, 0))
    out_pad = [min(pad, 0) for pad in op.attrs["out_pad"]]
    taps = rewriter.build.const(np.pad(weight.data, zeros, constant_values=op.attrs["weight_zp"]), weight.dtype)
    attrs = {**op.attrs, "out_pad": out_pad}
    return rewriter.build.emit(op.kind, (x, taps, bias), op.output.shape, op.output.dtype, **attrs)


RULES: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "narrowing_cast": (wrap_cast, ("CAST",)),
    "chained_cast": (wrap_chained_cast, ("CAST",)),
    "clamped_cast": (clamp_apart, ("CLAMP",)),
    "reduce_min": (complement_minimum, ("REDUCE_MIN",)),
    "unequal_scales": (level_scales, ("RESCALE",)),
    "one_of_five": (four_dimensions, tuple(ELEMENTWISE - UNARY)),
}
#: For what others copy from.
FIRST: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "unreached": (reach_padding, ("TRANSPOSE_CONV2D",)),
    "unclipped": (keep_clip, ("RESCALE",)),
    "unclipped_scaled": (partial(keep_clip, scaled=True), ("RESCALE",)),
}
