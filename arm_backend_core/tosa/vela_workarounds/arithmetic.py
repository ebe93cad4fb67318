"""Vela workarounds for casts, RESCALEs, sums, convolutions with equal weights and other arithmetic (``catalog``)."""

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
from arm_backend_core.tosa.passes.fuse import is_identity_rescale, power_of_two, rescale_factors
from arm_backend_core.tosa.passes.rewrite import Rewriter, has_constant_weights, producer, skip_through, trace_back
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, GraphWorkaround, Workaround
from arm_backend_core.workers.vela import SUPPORTED_RELEASES, Release

#: Operators that move elements and change no value. Vela may fuse them with their producer or consumer.
DATA_MOVEMENT = ("CONCAT", "IDENTITY", "PAD", "RESHAPE", "SLICE", "TILE", "TRANSPOSE")


def broadcast_constant(x: Value, number: int, dtype: DType, b: Builder) -> Value:
    """A constant of one element that broadcasts to ``x``."""
    return b.const(np.full((1,) * x.rank, number), dtype)


def emit_copy(x: Value, b: Builder) -> Value:
    """Emit a copy of ``x`` that Vela does not remove: x * 1, or x or x for booleans.

    The copy is an operation that can read a slice and write a part of a tensor. Vela removes IDENTITY. It estimates 1.1
    to 1.5 cycles per element for CLAMP, and 0.25 (U85) to 1 (U55) for this product.
    """
    if x.dtype is DType.BOOL:
        return b.bitwise("LOGICAL_OR", x, x)
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    return product if x.dtype is DType.INT32 else b.rescale(product, x.dtype, 1.0)


def copy_result(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Emit the operator again, and a copy of its result."""
    b = rewriter.build
    return emit_copy(b.emit(op.kind, op.inputs, op.output.dtype, **op.attrs), b)


def copy_operands_where(
    name: str,
    kinds: tuple[str, ...],
    test: Callable[[Op, Value, Rewriter], bool],
    releases: tuple[Release, ...] = SUPPORTED_RELEASES,
) -> Workaround[list[int]]:
    """A workaround that copies each operand for which ``test`` is true.

    Args:
        test: called with the operator, the operand and the rewriter; true where Vela miscompiles how the operator reads
            it.
    """
    return Workaround(name, kinds, partial(_operands_where, test), _copy_operands, releases=releases)


def _operands_where(test: Callable[[Op, Value, Rewriter], bool], op: Op, rewriter: Rewriter) -> list[int]:
    return [i for i, value in enumerate(op.inputs) if test(op, value, rewriter)]


def _copy_operands(op: Op, operands: Sequence[int], rewriter: Rewriter) -> Value:
    inputs = [emit_copy(value, rewriter.build) if i in operands else value for i, value in enumerate(op.inputs)]
    return rewriter.build.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def _match_narrowing_cast(op: Op, rewriter: Rewriter) -> int | None:
    """CAST of int32 or int16 to fewer bits whose operand may not fit (``narrowing_cast``: U55, U65, 5.1 and 5.2).

    These NPUs always clip to the output range, so that the CAST saturates. TOSA keeps the low bits.

    Returns:
        the number of high bits that the CAST drops from 32.
    """
    x, bits = op.inputs[0], {DType.INT8: 24, DType.INT16: 16}.get(op.output.dtype)
    is_wider = x.dtype in (DType.INT16, DType.INT32)
    return bits if is_wider and bits is not None and not _fits(x, op.output.dtype) else None


def _match_chained_cast(op: Op, rewriter: Rewriter) -> int | None:
    """The same CAST where a single elementwise operator or CAST reads it, also past RESHAPE (``chained_cast``: U85, 5.1
    and 5.2).

    In one chain with its reader, the CAST saturates as on U55. CLAMP is excluded: Vela fuses it with the CAST.
    """
    result = op.output
    while (users := rewriter.users(result)) and len(users) == 1 and users[0].kind == "RESHAPE":
        result = users[0].output
    readers = {user.kind for user in users or ()}
    is_chained = len(readers) == 1 and readers <= {*ELEMENTWISE, "CAST"} - {"CLAMP"}
    return _match_narrowing_cast(op, rewriter) if is_chained else None


def _wrap_cast(op: Op, bits: int, rewriter: Rewriter) -> Value:
    """CAST of the low bits: shift them up to the top of int32 and down again with their sign.

    The CAST's operand then fits the output type, so that saturation changes nothing.
    """
    b = rewriter.build
    x = b.cast(op.inputs[0], DType.INT32)
    shift = broadcast_constant(x, bits, DType.INT32, b)
    # The hardware has only the rounding right shift. It rounds nothing here: the bits that it shifts out are 0.
    return b.cast(b.arithmetic_right_shift(b.logical_left_shift(x, shift), shift, round=True), op.output.dtype)


def _fits(value: Value, dtype: DType) -> bool:
    low, high = _value_bounds(value)
    least, most = dtype.range
    return bool(least <= low and high <= most)


def _value_bounds(value: Value, depth: int = 8) -> tuple[float, float]:
    """Bounds of a value, derived through operators that typically precede a CAST in programs of narrow integers.

    Args:
        depth: the number of operators to look through; beyond, the bounds are those of the element type.
    """
    op = value.producer
    if value.data is not None:
        return int(value.data.min()), int(value.data.max())
    least, most = value.dtype.range
    if op is not None and depth and op.kind in ("MAXIMUM", "MINIMUM"):
        (a, b), (c, d) = (_value_bounds(x, depth - 1) for x in op.inputs)
        return (max(a, c), max(b, d)) if op.kind == "MAXIMUM" else (min(a, c), min(b, d))
    if op is not None and depth and op.kind in ("MUL", "ARITHMETIC_RIGHT_SHIFT") and op.inputs[1].size == 1:
        return _bounds_of_mul_or_shift(op, _value_bounds(op.inputs[0], depth - 1))
    if op is not None and depth and (op.kind in ("CAST", "RESHAPE") or is_identity_rescale(op)):
        low, high = _value_bounds(op.inputs[0], depth - 1)
        if least <= low and high <= most:
            return low, high
    return least, most


def _bounds_of_mul_or_shift(op: Op, operand: tuple[float, float]) -> tuple[float, float]:
    """Bounds of x * 1 and x << n >> n, which the workarounds emit; for other operands those of the element type."""
    least, most = op.output.dtype.range
    if op.kind == "MUL":
        is_identity = op.inputs[1].data is not None and op.inputs[1].data.flat[0] == 1 and not op.attrs["shift"]
        return operand if is_identity else (least, most)
    left_shift, shift = producer(op.inputs[0], "LOGICAL_LEFT_SHIFT"), op.inputs[1].data
    if (
        left_shift is None
        or shift is None
        or left_shift.inputs[1].data is None
        or left_shift.inputs[1].data.flat[0] != shift.flat[0]
    ):
        return least, most
    return int(least) >> int(shift.flat[0]), int(most) >> int(shift.flat[0])


def _is_clamped_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CLAMP of a CAST to fewer bits (``clamped_cast``: U55, U65, 5.1 and 5.2).

    Vela marks the CAST as not clipping and fuses the CLAMP into it: the CLAMP is lost. A copy keeps them apart.
    """
    cast = producer(skip_through(value, "RESHAPE"), "CAST")
    return cast is not None and cast.inputs[0].dtype.range[1] > cast.output.dtype.range[1]


def _is_rescaled_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """RESCALE of a CAST, to fewer bits than the CAST's operand has (``rescaled_cast``: U85, 5.1 and 5.2).

    Vela fuses both, also past data movement, into one operation without clipping. A copy of the CAST prevents that.
    """
    cast = producer(skip_through(value, *DATA_MOVEMENT), "CAST")
    return cast is not None and op.output.dtype.bytes < cast.inputs[0].dtype.bytes


def _is_shifted_cast(op: Op, value: Value, rewriter: Rewriter) -> bool:
    """CAST to fewer bits of a RESCALE by 1 with an input zero point (``shifted_cast``: U85, 5.1 and 5.2).

    Vela fuses both, also past data movement, into one operation that clips. TOSA keeps the low bits of a CAST. A copy
    of the RESCALE prevents the fusion.
    """
    rescale = producer(skip_through(value, *DATA_MOVEMENT), "RESCALE")
    narrows = op.output.dtype.bytes < value.dtype.bytes
    return narrows and rescale is not None and bool(rescale.attrs["input_zp"]) and power_of_two(rescale) == 0


def _rewrite_minimum_as_maximum(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """min(x) = ~max(~x), where ~x = -1 - x (``reduce_min``: U55, U65, 5.1 and 5.2).

    Vela lowers REDUCE_MIN in the same way: SUB, MAX pool, SUB. Its second SUB has the shape after a following RESHAPE
    and broadcasts the pool's first row to all rows. Emitted as operators, each has its own shape.
    """
    b = rewriter.build
    peak = b.reduce("REDUCE_MAX", _complement(op.inputs[0], b), op.attrs["axis"])
    return _complement(peak, b)


def _complement(x: Value, b: Builder) -> Value:
    """~x = -1 - x, computed in int32 and rescaled by 1 to the type of ``x``."""
    ones = b.rescale(broadcast_constant(x, -1, x.dtype, b), DType.INT32, 1.0)
    return b.rescale(b.sub(ones, b.rescale(x, DType.INT32, 1.0)), x.dtype, 1.0)


def _is_scaled_maximum(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to the same type of MAX_POOL2D or REDUCE_MAX, its only reader (``scaled_maximum``: U55, U65, 5.1).

    Also past IDENTITY, RESHAPE and RESCALEs by 1. Vela makes one MAX pool with ``OFM_SCALE``. These NPUs do not scale a
    maximum: the RESCALE is lost.
    """
    if op.attrs["input_zp"] or op.attrs["output_unsigned"] or power_of_two(op) == 0:
        return False

    def is_passed(before: Op) -> bool:
        keeps_values = before.kind in ("IDENTITY", "RESHAPE") or is_identity_rescale(before)
        return keeps_values and rewriter.single_use(before.output)

    maximum, _ = trace_back(op.inputs[0], is_passed)
    is_maximum = maximum.producer is not None and maximum.producer.kind in ("MAX_POOL2D", "REDUCE_MAX")
    return is_maximum and rewriter.single_use(maximum) and maximum.dtype is op.output.dtype


def _has_channel_scales(op: Op, rewriter: Rewriter) -> bool:
    """Per-channel RESCALE between int8 and int16 (``channel_scales``: U55, U65, 5.1 and 5.2).

    Vela makes it a pool, and pools read no per-channel scales: the RESCALE is lost. The operand is no accumulator.
    """
    narrow = {op.inputs[0].dtype, op.output.dtype} <= {DType.INT8, DType.INT16}
    return narrow and bool(op.attrs["per_channel"])


def _rescale_product(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """RESCALE of x * 1: the hardware scales products, so that both become one scaled MUL."""
    b, x, zero_point = rewriter.build, op.inputs[0], op.attrs["input_zp"]
    x = b.rescale(x, DType.INT32, 1.0, zero_point) if zero_point else x
    product = b.mul(x, broadcast_constant(x, 1, x.dtype, b))
    return b.emit("RESCALE", (product,), op.output.dtype, **op.attrs | {"input_zp": 0})


@dataclass(frozen=True)
class _ScaledSum:
    """ADD or SUB of two RESCALEs by integers.

    Attributes:
        total: the ADD or SUB.
        terms: the RESCALEs of its operands.
        factors: their integer scales.
        doublings: the power of two by which the larger scale is multiplied to become 2**14 (int16) or 2**19 (int8).
    """

    total: Op
    terms: Sequence[Op]
    factors: Sequence[int]
    doublings: int


def _match_unequal_scales(op: Op, rewriter: Rewriter) -> _ScaledSum | None:
    """RESCALE(RESCALE(x) +- RESCALE(y)) by different integers below 2**15 (``unequal_scales``: U55, U65, 5.1 and 5.2).

    Vela fuses all three RESCALEs into the ADD or SUB. Where the scales differ, the NPU multiplies one operand by its
    scale and shifts the other left by 14 (int16) or 19 (int8) bits, whatever that scale is. This is correct only if the
    larger scale is 2**14 or 2**19. RESHAPE and TRANSPOSE after the sum are skipped, since Vela may remove them.
    """
    x, _ = trace_back(
        op.inputs[0], lambda move: move.kind in ("RESHAPE", "TRANSPOSE") and rewriter.single_use(move.output)
    )
    total = x.producer
    if total is None or total.kind not in ("ADD", "SUB") or not rewriter.single_use(x):
        return None
    if op.attrs["per_channel"] or op.output.dtype not in (DType.INT8, DType.INT16):
        return None
    for merged in (False, True):
        scales = _integer_scales(total, rewriter, merged=merged)
        if scales is not None and len({*scales[1]}) > 1:
            shift = 14 if scales[0][0].inputs[0].dtype is DType.INT16 else 19
            if max(scales[1]) != 1 << shift:
                return _ScaledSum(total, *scales, shift + 1 - max(scales[1]).bit_length())
    return None


def _enlarge_scales(op: Op, match: _ScaledSum, rewriter: Rewriter) -> Value:
    """Multiply all three scales by the power of two that makes the larger one 2**14 or 2**19; the sum stays within 31
    bits.

    If the larger scale is no power of two, multiply one operand by a MUL, which Vela does not fuse. If data movement
    follows the sum, copy its result, so that Vela does not fuse the last RESCALE.
    """
    total, terms, factors, doublings = match.total, match.terms, match.factors, match.doublings
    b, attrs, large = rewriter.build, dict(op.attrs), max(factors)
    if op.inputs[0] is not total.output:
        return b.emit("RESCALE", (emit_copy(op.inputs[0], b),), op.output.dtype, **attrs)
    shift = np.asarray(attrs["shift"]) + doublings
    if large & (large - 1) == 0 and shift[0] <= 62 and attrs["rounding_mode"] == "SINGLE_ROUND":
        attrs["shift"] = shift.astype(np.int8)
        operands = [_rescale_operand(term, factor << doublings, b) for term, factor in zip(terms, factors, strict=True)]
    else:
        widened = _rescale_operand(terms[1], 1, b)
        operands = [total.inputs[0], b.mul(widened, broadcast_constant(widened, factors[1], DType.INT32, b))]
    result = b.emit(total.kind, operands, DType.INT32)
    return b.emit("RESCALE", (result,), op.output.dtype, **attrs)


def _integer_scales(total: Op, rewriter: Rewriter, *, merged: bool) -> tuple[list[Op], list[int]] | None:
    """The RESCALEs of the operands of an ADD or SUB and their integer scales, if U55 and U65 can fuse them.

    Vela 5.1 fuses a RESCALE with its only reader. 5.2 also duplicates a RESCALE for each of its readers, and merges two
    consecutive RESCALEs into one.

    Args:
        merged: where consecutive RESCALEs merge, take the first of them.

    Returns:
        (RESCALEs, integer scales), or None.
    """
    terms, factors, only_single_use = [], [], rewriter.build.target.vela == (5, 1)
    for value in total.inputs:
        term = producer(value, "RESCALE")
        if term is not None and merged and not only_single_use:
            term = _first_of_merged_rescales(term, rewriter)
        if term is None or term.attrs["per_channel"] or (only_single_use and not rewriter.single_use(value)):
            return None
        multiplier, shift = int(term.attrs["multiplier"][0]), int(term.attrs["shift"][0])
        if multiplier % (1 << shift) or multiplier >> shift >= 1 << 15:
            return None
        terms.append(term)
        factors.append(multiplier >> shift)
    dtypes = {term.inputs[0].dtype for term in terms}
    fused = len(dtypes) == 1 and dtypes <= {DType.INT8, DType.INT16}
    return (terms, factors) if fused else None


def _first_of_merged_rescales(term: Op, rewriter: Rewriter) -> Op:
    """The first of consecutive RESCALEs that Vela merges: all behind it are by 1."""
    while is_identity_rescale(term) and rewriter.single_use(term.inputs[0]):
        before = producer(term.inputs[0], "RESCALE")
        if before is None:
            break
        term = before
    return term


def _rescale_operand(term: Op, factor: int, b: Builder) -> Value:
    return b.rescale(term.inputs[0], DType.INT32, factor, term.attrs["input_zp"])


def _is_unclipped(op: Op, rewriter: Rewriter, *, scaled: bool = False) -> bool:
    """RESCALE by 1 to fewer bits, then a RESCALE by 1 to as many bits or more (``unclipped``: all NPUs, 5.1 and 5.2).

    Vela removes both, also past data movement, and with them the clipping of the first. Only where values may not fit.

    Args:
        scaled: the second RESCALE is by any number (``unclipped_scaled``).
    """
    source, dtype = op.inputs[0], op.output.dtype
    if power_of_two(op) != 0 or dtype.bytes >= source.dtype.bytes or op.attrs["rounding_mode"] != "SINGLE_ROUND":
        return False
    return not (is_identity_rescale(op) and _fits(source, dtype)) and _is_widened_again(
        op.output, rewriter, scaled=scaled
    )


def _preserve_clipping(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """Scale by 1 + 2**-30 in place of 1: Vela keeps this RESCALE, and no result changes.

    round(x * (1 + 2**-30)) = x for abs(x) < 2**29, and larger values are clipped. A RESCALE of int48 has a multiplier
    of 15 bits, too few for this scale: there a copy of its result keeps the two RESCALEs apart.
    """
    if op.inputs[0].dtype is DType.INT48:
        return copy_result(op, match, rewriter)
    attrs = {**op.attrs, "multiplier": np.array([(1 << 30) + 1], np.int32), "shift": np.array([30], np.int8)}
    return rewriter.build.emit("RESCALE", op.inputs, op.output.dtype, **attrs)


def _is_widened_again(value: Value, rewriter: Rewriter, *, scaled: bool) -> bool:
    """Whether a RESCALE to as many bits or more reads ``value``, also past data movement, and may merge with its
    producer.

    By 1 always. By another scale (``scaled``) on U85, and on U55 and U65 only if it is the single reader.
    """
    may_merge = scaled and (rewriter.single_use(value) or rewriter.build.target.hardware.fuses_shared_rescale)
    for op in rewriter.users(value) or ():
        if op.kind == "RESCALE" and (power_of_two(op) == 0 or may_merge) and op.output.dtype.bytes >= value.dtype.bytes:
            return True
        if op.kind in DATA_MOVEMENT and _is_widened_again(op.output, rewriter, scaled=scaled):
            return True
    return False


def _is_long_scale(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE of int48 by 1, followed by a RESCALE whose multiplier has more than 15 bits (``long_scale``: U85, 5.1 and
    5.2).

    Vela merges them into one RESCALE of int48, whose multiplier has 15 bits: the low bits are lost. A copy of the first
    result prevents that.
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


def _is_unclipped_move(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE by 1 to another zero point, after a RESCALE to as many bits that may clip (``unclipped_move``: all NPUs,
    5.2).

    Vela merges them, also past a RESCALE by 1 to int32, into one RESCALE that clips only at the end.
    """
    x, _ = trace_back(
        op.inputs[0],
        lambda step: step.kind == "RESHAPE" or (is_identity_rescale(step) and step.output.dtype is DType.INT32),
    )
    before = producer(x, "RESCALE")
    if before is None or op.attrs["input_zp"] or not op.attrs["output_zp"] or power_of_two(op) != 0:
        return False
    return before.inputs[0].dtype.bytes >= before.output.dtype.bytes == op.output.dtype.bytes and _may_clip(before)


def _may_clip(op: Op) -> bool:
    """Whether a RESCALE to as many or fewer bits may clip.

    To fewer bits the answer is False only for RESCALEs by 1 whose operand fits; other scales are not analysed.
    """
    source, (low, high) = op.inputs[0], op.output.dtype.range
    if source.dtype.bytes > op.output.dtype.bytes:
        return not (is_identity_rescale(op) and _fits(source, op.output.dtype))
    scale = float(rescale_factors(op).max())
    ends = [round((end - op.attrs["input_zp"]) * scale + op.attrs["output_zp"]) for end in source.dtype.range]
    return min(ends) < low or max(ends) > high


def _broadcasts_single_element(op: Op, rewriter: Rewriter) -> bool:
    """Arithmetic of rank 5 or 6 that broadcasts a first operand of one element (``one_of_five``: U55, U65, 5.1 and
    5.2).

    Vela drops dimensions of the other operand only and compares shapes of different rank. It then reads more elements
    than the one. A constant of 16 bits or fewer is not affected: it is a number in the command.
    """
    shape, first = op.output.shape, op.inputs[0]
    is_single = first.size == 1 and (first.data is None or first.dtype is DType.INT32)
    is_high_rank = len(shape) > 4 and prod(shape) > 1
    return is_high_rank and is_single and all(value.size == 1 or value.shape == shape for value in op.inputs)


def _flatten_to_rank_four(op: Op, match: bool, rewriter: Rewriter) -> Value:
    """The same operator on operands of rank 4.

    Operands that are slices are copied, because Vela reads a slice in the rank of the SLICE.
    """
    b, shape = rewriter.build, op.output.shape
    flat = (prod(shape[:-3]), *shape[-3:])
    parts = [emit_copy(x, b) if producer(skip_through(x, "RESHAPE", "RESCALE"), "SLICE") else x for x in op.inputs]
    inputs = [b.reshape(x, flat if x.shape == shape else (1, 1, 1, 1)) for x in parts]
    return b.reshape(b.emit(op.kind, inputs, op.output.dtype, **op.attrs), shape)


def _find_equal_weights(graph: Graph, target: Target) -> list[tuple[Op, int]]:
    """Convolutions with equal weights and scales but different biases (``equal_weights``: all NPUs, 5.1 and 5.2).

    Biases are not part of the key of Vela's cache of encoded weights: the second convolution gets the first's bias.

    Returns:
        (convolution, index of its bias among those of the same weights); the first of them, index 0, is left out.
    """
    users, biases_by_weights, found = graph.users(), dict[tuple[Any, ...], dict[Any, int]](), []
    for op in graph.ops:
        if op.kind not in ("CONV2D", "DEPTHWISE_CONV2D") or not has_constant_weights(op):
            continue
        _, weight, bias = op.inputs
        match users.get(op.output, ()):
            case [Op(kind="RESCALE", attrs=attrs)] if op.output not in graph.outputs:
                scales = [np.asarray(attrs[name]).tobytes() for name in ("multiplier", "shift")]
            case _:  # Vela writes an accumulator with several readers without a scale
                scales = []
        biases = biases_by_weights.setdefault((op.kind, weight.content, *scales), {})
        if index := biases.setdefault(bias.content, len(biases)):
            found.append((op, index))
    return found


def _make_weights_distinct(graph: Graph, target: Target, matches: Sequence[tuple[Op, int]]) -> None:
    """Append ``index`` columns of zeros to the weights, and as much padding at the right, so that the weights differ.

    The taps of these columns are zero, hence no result changes.
    """
    for op, columns in matches:
        weight, axis = op.inputs[1], 1 if op.kind == "DEPTHWISE_CONV2D" else 2
        assert weight.data is not None
        zeros = [(0, columns if i == axis else 0) for i in range(4)]
        op.inputs[1] = constant(np.pad(weight.data, zeros), weight.dtype)
        *sides, right = op.attrs["pad"]
        op.attrs = {**op.attrs, "pad": [*sides, right + columns * op.attrs["dilation"][1]]}


def _match_unreached_output(op: Op, rewriter: Rewriter) -> tuple[int, ...] | None:
    """Rows and columns of a TRANSPOSE_CONV2D's result that no tap reaches (``unreached``: U55, U65, 5.1 and 5.2).

    They hold the bias alone. Vela computes them by separate convolutions with equal weights, which get the bias of the
    first (as in ``equal_weights``).

    Returns:
        the number of such rows and columns: top, bottom, left, right.
    """
    unreached = tuple(max(pad, 0) for pad in op.attrs["out_pad"])
    return unreached if any(unreached) and op.inputs[1].data is not None else None


def _extend_kernel(op: Op, unreached: tuple[int, ...], rewriter: Rewriter) -> Value:
    """Extend the kernel by taps of zero (the weight zero point) that reach these rows and columns."""
    x, weight, bias = op.inputs
    assert weight.data is not None
    zeros = ((0, 0), unreached[:2], unreached[2:], (0, 0))
    out_pad = [min(pad, 0) for pad in op.attrs["out_pad"]]
    extended_weight = rewriter.build.const(
        np.pad(weight.data, zeros, constant_values=op.attrs["weight_zp"]), weight.dtype
    )
    attrs = {**op.attrs, "out_pad": out_pad}
    return rewriter.build.emit(op.kind, (x, extended_weight, bias), op.output.dtype, **attrs)


SCALED_MAXIMUM = Workaround("scaled_maximum", ("RESCALE",), _is_scaled_maximum, _rescale_product, releases=((5, 1),))
#: By priority: where two workarounds match one operator, the first is applied first.
WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    GraphWorkaround("equal_weights", _find_equal_weights, _make_weights_distinct),
    # Before the workarounds that copy scales and tables:
    Workaround("unclipped", ("RESCALE",), _is_unclipped, _preserve_clipping),
    Workaround("unclipped_scaled", ("RESCALE",), partial(_is_unclipped, scaled=True), _preserve_clipping),
    Workaround("unclipped_move", ("RESCALE",), _is_unclipped_move, _preserve_clipping, releases=((5, 2),)),
    Workaround("long_scale", ("RESCALE",), _is_long_scale, copy_result),
    Workaround("unreached", ("TRANSPOSE_CONV2D",), _match_unreached_output, _extend_kernel),
    Workaround("reduce_min", ("REDUCE_MIN",), lambda op, rewriter: True, _rewrite_minimum_as_maximum),
    Workaround("narrowing_cast", ("CAST",), _match_narrowing_cast, _wrap_cast),
    Workaround("chained_cast", ("CAST",), _match_chained_cast, _wrap_cast),
    copy_operands_where("clamped_cast", ("CLAMP",), _is_clamped_cast),
    copy_operands_where("rescaled_cast", ("RESCALE",), _is_rescaled_cast),
    copy_operands_where("shifted_cast", ("CAST",), _is_shifted_cast),
    SCALED_MAXIMUM,
    Workaround("channel_scales", ("RESCALE",), _has_channel_scales, _rescale_product),
    Workaround("unequal_scales", ("RESCALE",), _match_unequal_scales, _enlarge_scales),
    Workaround("one_of_five", tuple(ELEMENTWISE - UNARY), _broadcasts_single_element, _flatten_to_rank_four),
)
