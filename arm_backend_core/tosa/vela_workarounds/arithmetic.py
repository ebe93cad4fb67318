"""Arithmetic that Vela fuses or replaces by something else (``vela``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, constant, prod
from arm_backend_core.tosa.operators import ELEMENTWISE, UNARY
from arm_backend_core.tosa.passes.fuse import power_of_two, rescale_factors
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, skip_through
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround
from arm_backend_core.workers.vela import RELEASES, Release

#: Operators that move elements and change no value. Vela may fuse them with their producer or consumer.
MOVEMENTS = ("CONCAT", "IDENTITY", "PAD", "RESHAPE", "SLICE", "TILE", "TRANSPOSE")


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


def copy_result(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """Emit the operator again, and a copy of its result."""
    b = rewriter.build
    return copied(b.emit(op.kind, op.inputs, op.output.shape, op.output.dtype, **op.attrs), b)


def copy_where(
    name: str,
    kinds: tuple[str, ...],
    test: Callable[[Op, Value, Rewriter], bool],
    releases: tuple[Release, ...] = RELEASES,
) -> Workaround[list[int]]:
    """A mistake at each operand of which ``test`` is true of an operator: the operator reads a copy."""
    return Workaround(name, kinds, partial(_operands_where, test), _copy_operands, releases=releases)


def _operands_where(test: Callable[[Op, Value, Rewriter], bool], op: Op, rewriter: Rewriter) -> list[int]:
    return [i for i, value in enumerate(op.inputs) if test(op, value, rewriter)]


def _copy_operands(op: Op, found: Sequence[int], rewriter: Rewriter) -> Value:
    inputs = [copied(value, rewriter.build) if i in found else value for i, value in enumerate(op.inputs)]
    return rewriter.build.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)


def _saturated_bits(op: Op, rewriter: Rewriter) -> int | None:
    """The bits that a CAST to fewer drops, which saturates there, where values may not fit."""
    x, bits = op.inputs[0], {DType.INT8: 24, DType.INT16: 16}.get(op.output.dtype)
    wide = x.dtype in (DType.INT16, DType.INT32)
    return bits if wide and bits is not None and not _fits(x, op.output.dtype) else None


def _bits_saturated_in_chain(op: Op, rewriter: Rewriter) -> int | None:
    """The same where one operation alone reads it, in whose chain it saturates; a CLAMP is done with the CAST."""
    result = op.output
    while (users := rewriter.users(result)) and len(users) == 1 and users[0].kind == "RESHAPE":
        result = users[0].output
    readers = {user.kind for user in users or ()}
    chained = len(readers) == 1 and readers <= {*ELEMENTWISE, "CAST"} - {"CLAMP"}
    return _saturated_bits(op, rewriter) if chained else None


def _wrap_cast(op: Op, bits: int, rewriter: Rewriter) -> Value:
    """The CAST of the low bits shifted up and down with their sign."""
    b = rewriter.build
    x = b.cast(op.inputs[0], DType.INT32)
    places = filled(x, bits, DType.INT32, b)
    # Nothing is rounded, as the bits that are shifted out are 0; the hardware has no other right shift.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, places), places, round=True), op.output.dtype)


def _fits(value: Value, dtype: DType) -> bool:
    low, high = _range(value)
    least, most = dtype.range
    return bool(least <= low and high <= most)


def _range(value: Value, depth: int = 8) -> tuple[float, float]:
    """Bounds, through what programs of narrow integers have before a CAST back; what is before ``depth`` may be any."""
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    least, most = value.dtype.range
    if op is not None and depth and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = (_range(x, depth - 1) for x in op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    if op is not None and depth and op.kind in ("MUL", "ARITHMETIC_RIGHT_SHIFT") and op.inputs[1].size == 1:
        return _range_by_number(op, _range(op.inputs[0], depth - 1))
    if op is not None and depth and (op.kind in ("CAST", "RESHAPE") or (op.kind == "RESCALE" and _is_plain(op))):
        low, high = _range(op.inputs[0], depth - 1)
        if least <= low and high <= most:
            return low, high
    return least, most


def _range_by_number(op: Op, operand: tuple[float, float]) -> tuple[float, float]:
    """Bounds of what the workarounds write, x * 1 and x << n >> n; anything of other operators."""
    least, most = op.output.dtype.range
    if op.kind == "MUL":
        one = op.inputs[1].data is not None and op.inputs[1].data.flat[0] == 1 and not op.attrs["shift"]
        return operand if one else (least, most)
    up, places = producer(op.inputs[0], "LOGICAL_LEFT_SHIFT"), op.inputs[1].data
    if up is None or places is None or up.inputs[1].data is None or up.inputs[1].data.flat[0] != places.flat[0]:
        return least, most
    return int(least) >> int(places.flat[0]), int(most) >> int(places.flat[0])


def _is_plain(op: Op) -> bool:
    """Whether a RESCALE changes no number that fits."""
    return power_of_two(op) == 0 and op.attrs["input_zp"] == op.attrs["output_zp"] == 0


def _is_clamped_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CLAMP behind a CAST to fewer bits: Vela does not clip such a CAST, nor with it."""
    cast = producer(skip_through(value, "RESHAPE"), "CAST")
    return cast is not None and cast.inputs[0].dtype.range[1] > cast.output.dtype.range[1]


def _is_unclipped_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """RESCALE behind a CAST, to fewer bits than the CAST reads: it is done with the CAST, which clips nothing."""
    cast = producer(skip_through(value, *MOVEMENTS), "CAST")
    return cast is not None and op.output.dtype.bytes < cast.inputs[0].dtype.bytes


def _is_shifted_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CAST to fewer bits behind a RESCALE by 1 with an input zero point: they become one, which is clipped."""
    rescale = producer(skip_through(value, *MOVEMENTS), "RESCALE")
    narrows = op.output.dtype.bytes < value.dtype.bytes
    return narrows and rescale is not None and bool(rescale.attrs["input_zp"]) and power_of_two(rescale) == 0


def _complement_minimum(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """min(x) as ~max(~x), ~x = -1 - x: what Vela makes of it, which forgets shapes on the way back."""
    b = rewriter.build
    peak = b.reduce("REDUCE_MAX", _complement(op.inputs[0], b), op.attrs["axis"])
    return _complement(peak, b)


def _complement(x: Value, b: Builder) -> Value:
    ones = b.rescale(filled(x, -1, x.dtype, b), DType.INT32, 1.0)
    return b.rescale(b.sub(ones, b.rescale(x, DType.INT32, 1.0)), x.dtype, 1.0)


def _is_scaled_maximum(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE that Vela does with the maximum before it, which U55 and U65 do not scale: it is lost.

    To the same type, and nothing else reads the maximum.
    """
    x = op.inputs[0]
    if op.attrs["input_zp"] or op.attrs["output_unsigned"] or power_of_two(op) == 0:
        return False
    while (before := x.producer) is not None and rewriter.single_use(x):
        if before.kind in ("MAX_POOL2D", "REDUCE_MAX"):
            return before.output.dtype is op.output.dtype
        if before.kind not in ("IDENTITY", "RESHAPE") and not (before.kind == "RESCALE" and _is_plain(before)):
            return False
        x = before.inputs[0]
    return False


def _has_channel_scales(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE by channel of what is no sum: a pool, which reads no scales by channel on U55 and U65."""
    narrow = {op.inputs[0].dtype, op.output.dtype} <= {DType.INT8, DType.INT16}
    return narrow and bool(op.attrs["per_channel"])


def _scale_product(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """RESCALE of x * 1, which is scaled."""
    b, x, zero_point = rewriter.build, op.inputs[0], op.attrs["input_zp"]
    x = b.rescale(x, DType.INT32, 1.0, zero_point) if zero_point else x
    product = b.mul(x, filled(x, 1, x.dtype, b))
    return b.emit("RESCALE", (product,), op.output.shape, op.output.dtype, **op.attrs | {"input_zp": 0})


@dataclass(frozen=True)
class _Sum:
    """ADD or SUB of two RESCALEs by whole numbers, ``factors``; the NPU wants the larger doubled ``up`` times."""

    total: Op
    terms: Sequence[Op]
    factors: Sequence[int]
    up: int


def _unequal_scales(op: Op, rewriter: Rewriter) -> _Sum | None:
    """RESCALE(RESCALE(x) +- RESCALE(y)) by different whole numbers, both less than 2**15.

    The NPU scales one operand, by any number, and shifts the other by 14 bits (int16) or 19 (int8): right by chance
    where the larger number is 2 to the power of these. RESHAPE and TRANSPOSE, which Vela may remove, are skipped.
    """
    x = op.inputs[0]
    while rewriter.single_use(x) and x.producer is not None and x.producer.kind in ("RESHAPE", "TRANSPOSE"):
        x = x.producer.inputs[0]
    total = x.producer
    if total is None or total.kind not in ("ADD", "SUB") or not rewriter.single_use(x):
        return None
    if op.attrs["per_channel"] or op.output.dtype not in (DType.INT8, DType.INT16):
        return None
    for joined in (False, True):
        found = _whole_scales(total, rewriter, joined=joined)
        if found is not None and len({*found[1]}) > 1:
            shifted = 14 if found[0][0].inputs[0].dtype is DType.INT16 else 19
            if max(found[1]) != 1 << shifted:
                return _Sum(total, *found, shifted + 1 - max(found[1]).bit_length())
    return None


def _level_scales(op: Op, found: _Sum, rewriter: Rewriter) -> Value:
    """All three scales times a power of two, where the larger number is one: the sum stays within 31 bits.

    Else Vela must not fuse them: one operand is multiplied by its number, or the sum copied that is moved first.
    """
    total, terms, factors, up = found.total, found.terms, found.factors, found.up
    b, attrs, large = rewriter.build, dict(op.attrs), max(factors)
    if op.inputs[0] is not total.output:
        return b.emit("RESCALE", (copied(op.inputs[0], b),), op.output.shape, op.output.dtype, **attrs)
    shift = np.asarray(attrs["shift"]) + up
    if large & (large - 1) == 0 and shift[0] <= 62 and attrs["rounding_mode"] == "SINGLE_ROUND":
        attrs["shift"] = shift.astype(np.int8)
        scaled = [_scaled(term, factor << up, b) for term, factor in zip(terms, factors, strict=True)]
    else:
        plain = _scaled(terms[1], 1, b)
        scaled = [total.inputs[0], b.mul(plain, filled(plain, factors[1], DType.INT32, b))]
    result = b.emit(total.kind, scaled, total.output.shape, DType.INT32)
    return b.emit("RESCALE", (result,), op.output.shape, op.output.dtype, **attrs)


def _whole_scales(total: Op, rewriter: Rewriter, *, joined: bool) -> tuple[list[Op], list[int]] | None:
    """The RESCALEs before ADD or SUB and their numbers, where U55 and U65 can do these on their way.

    Vela 5.1 fuses a RESCALE with its only reader; 5.2 repeats one for each of its readers, and makes one of two.

    Args:
        joined: of two, the first.
    """
    terms, factors, alone = [], [], rewriter.build.target.vela == (5, 1)
    for value in total.inputs:
        term = producer(value, "RESCALE")
        if term is not None and joined and not alone:
            term = _joined(term, rewriter)
        if term is None or term.attrs["per_channel"] or (alone and not rewriter.single_use(value)):
            return None
        multiplier, shift = int(term.attrs["multiplier"][0]), int(term.attrs["shift"][0])
        if multiplier % (1 << shift) or multiplier >> shift >= 1 << 15:
            return None
        terms.append(term)
        factors.append(multiplier >> shift)
    kinds = {term.inputs[0].dtype for term in terms}
    fused = len(kinds) == 1 and kinds <= {DType.INT8, DType.INT16}
    return (terms, factors) if fused else None


def _joined(term: Op, rewriter: Rewriter) -> Op:
    """Of RESCALEs that become one, all but the first by 1, the first."""
    while _is_plain(term) and rewriter.single_use(term.inputs[0]):
        before = producer(term.inputs[0], "RESCALE")
        if before is None:
            break
        term = before
    return term


def _scaled(term: Op, factor: int, b: Builder) -> Value:
    return b.rescale(term.inputs[0], DType.INT32, factor, term.attrs["input_zp"])


def _is_unclipped(op: Op, rewriter: Rewriter, *, scaled: bool = False) -> bool:
    """RESCALE by 1 to fewer bits, and one by 1 to as many or more: Vela takes both for nothing.

    Args:
        scaled: one by any number.
    """
    source, dtype = op.inputs[0], op.output.dtype
    if power_of_two(op) != 0 or dtype.bytes >= source.dtype.bytes or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return False
    return not (_is_plain(op) and _fits(source, dtype)) and _widened(op.output, rewriter, scaled=scaled)


def _keep_clip(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """By 1 + 2**-30: round(x * (1 + 2**-30)) is x below 2**29, and what is beyond is clipped.

    A RESCALE of int48 has a multiplier of 15 bits, too few for this: copy its result instead.
    """
    if op.inputs[0].dtype is DType.INT48:
        return copy_result(op, found, rewriter)
    attrs = {**op.attrs, "multiplier": np.array([(1 << 30) + 1], np.int32), "shift": np.array([30], np.int8)}
    return rewriter.build.emit("RESCALE", op.inputs, op.output.shape, op.output.dtype, **attrs)


def _widened(value: Value, rewriter: Rewriter, *, scaled: bool) -> bool:
    """Whether such a RESCALE reads it, past movements, of which Vela removes some.

    On U55 and U65 one that scales is joined with what it alone reads.
    """
    joined = scaled and (rewriter.single_use(value) or rewriter.build.target.hardware.fuses_shared_rescale)
    for op in rewriter.users(value) or ():
        if op.kind == "RESCALE" and (power_of_two(op) == 0 or joined) and op.output.dtype.bytes >= value.dtype.bytes:
            return True
        if op.kind in MOVEMENTS and _widened(op.output, rewriter, scaled=scaled):
            return True
    return False


def _is_of_long_scale(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE of int48 by 1, followed by a RESCALE whose multiplier has more than 15 bits.

    Vela merges them into one RESCALE of int48, whose multiplier has 15 bits.
    """
    if op.inputs[0].dtype is not DType.INT48 or power_of_two(op) != 0:
        return False
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and power_of_two(reader) != 0:
            return bool(np.any(np.asarray(reader.attrs["multiplier"]) & 0xFFFF))
        if reader.kind not in ("RESCALE", "RESHAPE"):
            return False
        result = reader.output
    return False


def _is_moved(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE by 1 to another zero point, behind one to as many bits that may clip: Vela clips once, at the end."""
    x = skip_through(op.inputs[0], "RESHAPE")
    while (wider := producer(x, "RESCALE")) is not None and _is_plain(wider) and wider.output.dtype is DType.INT32:
        x = skip_through(wider.inputs[0], "RESHAPE")
    before = producer(x, "RESCALE")
    if before is None or op.attrs["input_zp"] or not op.attrs["output_zp"] or power_of_two(op) != 0:
        return False
    return before.inputs[0].dtype.bytes >= before.output.dtype.bytes == op.output.dtype.bytes and _may_clip(before)


def _may_clip(op: Op) -> bool:
    """Whether a RESCALE to as many bits, or fewer, may clip; to fewer it is ruled out for RESCALEs by 1 only."""
    source, (low, high) = op.inputs[0], op.output.dtype.range
    if source.dtype.bytes > op.output.dtype.bytes:
        return not (_is_plain(op) and _fits(source, op.output.dtype))
    scale = float(rescale_factors(op).max())
    ends = [round((end - op.attrs["input_zp"]) * scale + op.attrs["output_zp"]) for end in source.dtype.range]
    return min(ends) < low or max(ends) > high


def _is_one_of_five(op: Op, rewriter: Rewriter) -> bool:
    """Arithmetic of more dimensions whose first operand is one element, of which Vela reads more.

    Not of a constant of 16 bits or fewer, a number in the command.
    """
    shape, first = op.output.shape, op.inputs[0]
    single = first.size == 1 and (first.data is None or first.dtype is DType.INT32)
    several = len(shape) > 4 and prod(shape) > 1
    return several and single and all(value.size == 1 or value.shape == shape for value in op.inputs)


def _four_dimensions(op: Op, found: bool, rewriter: Rewriter) -> Value:
    """Parts, which Vela reads in their own dimensions, are copied."""
    b, shape = rewriter.build, op.output.shape
    flat = (prod(shape[:-3]), *shape[-3:])
    parts = [copied(x, b) if producer(skip_through(x, "RESHAPE", "RESCALE"), "SLICE") else x for x in op.inputs]
    inputs = [b.reshape(x, flat if x.shape == shape else (1, 1, 1, 1)) for x in parts]
    return b.reshape(b.emit(op.kind, inputs, flat, op.output.dtype, **op.attrs), shape)


def _equal_weights(graph: Graph, target: Target) -> list[tuple[Op, int]]:
    """Convolutions with the weights and scales of others, whose bias Vela gives them, numbered by their biases."""
    users, known, found = graph.users(), dict[tuple[Any, ...], dict[Any, int]](), []
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
        if number := biases.setdefault(bias.content, len(biases)):
            found.append((op, number))
    return found


def _tell_weights_apart(graph: Graph, target: Target, found: Sequence[tuple[Op, int]]) -> None:
    """Columns of zeros, of which the tap is on padding, tell the weights apart."""
    for op, columns in found:
        weight, axis = op.inputs[1], 1 if op.kind == "DEPTHWISE_CONV2D" else 2
        assert weight.data is not None
        zeros = [(0, columns if i == axis else 0) for i in range(4)]
        op.inputs[1] = constant(np.pad(weight.data, zeros), weight.dtype)
        *sides, right = op.attrs["pad"]
        op.attrs = {**op.attrs, "pad": [*sides, right + columns * op.attrs["dilation"][1]]}


def _unreached(op: Op, rewriter: Rewriter) -> tuple[int, ...] | None:
    """Rows and columns of a TRANSPOSE_CONV2D that no tap reaches: before and behind the image, on both sides.

    Vela computes them, which are the bias alone, by convolutions of equal weights, with the bias of the first.
    """
    unreached = tuple(max(pad, 0) for pad in op.attrs["out_pad"])
    return unreached if any(unreached) and op.inputs[1].data is not None else None


def _reach_padding(op: Op, unreached: tuple[int, ...], rewriter: Rewriter) -> Value:
    """Taps of zero reach them."""
    x, weight, bias = op.inputs
    assert weight.data is not None
    zeros = ((0, 0), unreached[:2], unreached[2:], (0, 0))
    out_pad = [min(pad, 0) for pad in op.attrs["out_pad"]]
    taps = rewriter.build.const(np.pad(weight.data, zeros, constant_values=op.attrs["weight_zp"]), weight.dtype)
    attrs = {**op.attrs, "out_pad": out_pad}
    return rewriter.build.emit(op.kind, (x, taps, bias), op.output.shape, op.output.dtype, **attrs)


SCALED_MAXIMUM = Workaround("scaled_maximum", ("RESCALE",), _is_scaled_maximum, _scale_product, releases=((5, 1),))
#: By priority: of two mistakes at one operator, the first is rewritten first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("equal_weights", _equal_weights, _tell_weights_apart),
    # Before the scales and tables that are copied from:
    Workaround("unclipped", ("RESCALE",), _is_unclipped, _keep_clip),
    Workaround("unclipped_scaled", ("RESCALE",), partial(_is_unclipped, scaled=True), _keep_clip),
    Workaround("unclipped_move", ("RESCALE",), _is_moved, _keep_clip, releases=((5, 2),)),
    Workaround("long_scale", ("RESCALE",), _is_of_long_scale, copy_result),
    Workaround("unreached", ("TRANSPOSE_CONV2D",), _unreached, _reach_padding),
    Workaround("reduce_min", ("REDUCE_MIN",), lambda op, rewriter: True, _complement_minimum),
    Workaround("narrowing_cast", ("CAST",), _saturated_bits, _wrap_cast),
    Workaround("chained_cast", ("CAST",), _bits_saturated_in_chain, _wrap_cast),
    copy_where("clamped_cast", ("CLAMP",), _is_clamped_cast),
    copy_where("rescaled_cast", ("RESCALE",), _is_unclipped_cast),
    copy_where("shifted_cast", ("CAST",), _is_shifted_cast),
    SCALED_MAXIMUM,
    Workaround("channel_scales", ("RESCALE",), _has_channel_scales, _scale_product),
    Workaround("unequal_scales", ("RESCALE",), _unequal_scales, _level_scales),
    Workaround("one_of_five", tuple(ELEMENTWISE - UNARY), _is_one_of_five, _four_dimensions),
)
