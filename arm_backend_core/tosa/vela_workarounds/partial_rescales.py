"""Vela workarounds for RESCALEs that lose the offset of a partial tensor when Vela fuses or merges them.

These bugs are in Vela 5.2 only. On U55 and U65, a RESCALE to or from int32 that no operator fuses is executed
as a MUL, after a widening ADD if it reads int8 or int16. Vela 5.2 moves SLICE, CONCAT, PAD and TILE into the RESCALE
before it emits these two operations, and gives them the whole tensor. On all NPUs it merges CONCAT or TILE, a RESCALE
and a following CONCAT or PAD, and writes only one part. "Fuses" below always means that Vela does so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.fuse import power_of_two, rescale_factors
from arm_backend_core.tosa.passes.merge import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, copy_result
from arm_backend_core.tosa.vela_workarounds.fused_rescales import (
    ARITHMETIC,
    DUPLICATES_RESCALE,
    NARROW,
    is_view,
    readers_past_views,
    rescale_copy,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: Operators that Vela fuses the RESCALE of their result into, whatever its scales.
_SCALES_RESULT = (*("AVG_POOL2D", "CONV2D", "CONV3D", "DEPTHWISE_CONV2D", "MATMUL", "REDUCE_SUM", "TRANSPOSE_CONV2D"),)
#: Operators that Vela implements by writing each operand to its place in the result.
_JOINS = ("CONCAT", "PAD", "TILE")
#: Operators that Vela never fuses a RESCALE into.
_NEVER_RESCALES = ("GATHER", "IDENTITY", "REVERSE", "SCATTER", "SLICE", "TRANSPOSE")


def _has_int32(op: Op) -> bool:
    """Whether a RESCALE is to or from int32."""
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _reads_part(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 of a partial tensor that no reader fuses (``rescaled_part``: U55, U65, 5.2).

    The operand is a SLICE, also past RESHAPEs that add or remove dimensions of size 1, or
    ``_find_partitioned_producer``'s. Vela emits a MUL that reads from the start of the whole tensor, or writes only one
    part.
    """
    if not _has_int32(op):
        return False
    part, _ = trace_back(op.inputs[0], lambda view: _is_size_one_reshape(view) or _merges_with(view, op, rewriter))
    if producer(part, "SLICE") is None and _find_partitioned_producer(op, rewriter) is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(_fuses_own_rescales(reader, rewriter) for reader in readers)


def _is_size_one_reshape(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE that adds or removes only dimensions of size 1."""
    return op.kind == "RESHAPE" and equal_without_ones(op.output.shape, op.inputs[0].shape)


def _merges_with(before: Op, op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges the RESCALE ``before`` and ``op``, its only reader: one of them is by 1."""
    return before.kind == "RESCALE" and rewriter.has_one_use(before.output) and 0 in map(power_of_two, (before, op))


def _find_partitioned_producer(op: Op, rewriter: Rewriter) -> Op | None:
    """The CONCAT, PAD, TILE or split pool (stride over 3) before a RESCALE, its only reader.

    Also past RESHAPEs and RESCALEs that merge with this one.
    """

    def is_passed(view: Op) -> bool:
        return rewriter.has_one_use(view.output) and (view.kind == "RESHAPE" or _merges_with(view, op, rewriter))

    value, _ = trace_back(op.inputs[0], is_passed)
    join = value.producer
    if join is None or not rewriter.has_one_use(value):
        return None
    is_split_pool = join.kind in ("AVG_POOL2D", "MAX_POOL2D") and max(join.attrs["stride"]) > 3
    return join if is_split_pool or join.kind in _JOINS else None


def _is_between_joins(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE between a CONCAT, PAD or TILE and another CONCAT or PAD (``joined_again``: all NPUs, 5.2).

    It is the only reader of the first, and the second is its only reader: a PAD, or a CONCAT in which it is not first.
    Vela merges all three and writes one part only. Also a per-channel RESCALE after the first alone: Vela gives each
    part a RESCALE with the scales of the first channels, wherever the part's channels are.
    """
    join, readers = _find_partitioned_producer(op, rewriter), rewriter.users(op.output)
    if join is not None and op.attrs["per_channel"]:
        return True
    if join is None or join.kind not in _JOINS or readers is None or len(readers) != 1:
        return False
    reader = readers[0]
    return reader.kind == "PAD" or (reader.kind == "CONCAT" and op.output is not reader.inputs[0])


def absorbs_widening(op: Op) -> bool:
    """Whether Vela lets ``op`` read int8 or int16 directly in place of the results of RESCALEs by 1."""
    terms = [producer(value, "RESCALE") for value in op.inputs]
    dtypes = {term.inputs[0].dtype for term in terms if term is not None and power_of_two(term) == 0}
    is_binary = op.kind in ARITHMETIC and len(terms) == 2
    are_identity = all(term is not None and power_of_two(term) == 0 for term in terms)
    return (op.kind == "REDUCE_SUM" or is_binary) and are_identity and len(dtypes) == 1 and dtypes <= {*NARROW}


def _is_duplicated_for_slice(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 that Vela duplicates for several readers (``rescaled_parts``: U55, U65, 5.2).

    One of them reads a SLICE of it, and not all fuse it: the duplicate then has the bug ``rescaled_part``.
    """
    readers = _duplicating_readers(op, rewriter)
    return any("SLICE" in passed for _, passed in readers) and _has_int32(op) and not _all_absorb_widening(op, readers)


def _is_duplicated_for_reshape(op: Op, rewriter: Rewriter) -> bool:
    """RESCALE that Vela duplicates for several readers, one of which reads a RESHAPE of it (``reshaped_parts``: all,
    5.2).

    Each duplicate writes the shape of its reader but reads the shape before the RESHAPE. Where the reader fuses its
    duplicate, both shapes are the reader's, but the offset of a SLICE is still counted in the shape before.
    """
    readers = _duplicating_readers(op, rewriter)
    if any({"SLICE", "RESHAPE"} <= passed for _, passed in readers):
        return True
    return any("RESHAPE" in passed for _, passed in readers) and not _all_absorb_widening(op, readers)


def _duplicating_readers(op: Op, rewriter: Rewriter) -> list[tuple[Op, frozenset[str]]]:
    """The readers for each of which Vela duplicates a RESCALE, and the operators between.

    Empty if it is not duplicated, or if the operator before fuses it.
    """
    if op.output.dtype in NARROW and _fuses_into_producer(op, rewriter):
        return []
    readers = list(_final_readers(op.output, rewriter, frozenset()))
    is_duplicated = all(
        reader.kind in DUPLICATES_RESCALE or _may_fuse_into_readers(reader, rewriter) for reader, _ in readers
    )
    return readers if is_duplicated and len(readers) > 1 else []


def _final_readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """The readers of ``value``; a RESCALE that Vela fuses into several readers is replaced by these readers.

    Yields: (reader, kinds of the operators between).
    """
    for reader, between in readers_past_views(value, rewriter, passed):
        duplicating = (
            list(_final_readers(reader.output, rewriter, between)) if _may_fuse_into_readers(reader, rewriter) else []
        )
        yield from duplicating if len(duplicating) > 1 else [(reader, between)]


def _all_absorb_widening(op: Op, readers: Iterable[tuple[Op, frozenset[str]]]) -> bool:
    """Whether all readers fuse the widening RESCALE ``op``."""
    return op.output.dtype is DType.INT32 and all(absorbs_widening(reader) for reader, _ in readers)


def _may_fuse_into_readers(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse the RESCALE ``op`` into its readers, which then read the operand of ``op``."""
    if op.kind != "RESCALE":
        return False
    readers = [reader for reader, _ in readers_past_views(op.output, rewriter, frozenset())]
    return power_of_two(op) == 0 or (bool(readers) and all(reader.kind in DUPLICATES_RESCALE for reader in readers))


def _fuses_own_rescales(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs of all operands into ``op``, so that none of them is executed.

    Vela duplicates a RESCALE with several readers if all are arithmetic, and then fuses the duplicates. But before it
    does so, it fuses RESCALEs into their producers where it can.
    """
    if _is_scaled_sum(op, rewriter) or _fuses_operands(op, rewriter):
        return True
    are_duplicated = absorbs_widening(op) and all(_is_duplicated(value, rewriter) for value in op.inputs)
    return are_duplicated and not any(_may_fuse_into_producer(value, rewriter) for value in op.inputs)


def _is_scaled_sum(op: Op, rewriter: Rewriter) -> bool:
    """ADD or SUB on U55 and U65 that fuses the RESCALEs of both operands and the RESCALE of its result."""
    if op.kind not in ("ADD", "SUB") or not rewriter.build.target.hardware.sums_rescale_operands:
        return False
    match rewriter.users(op.output):
        case [Op(kind="RESCALE", attrs={"per_channel": False, "input_zp": 0}, output=result) as rescale]:
            is_narrow = result.dtype in NARROW and not _merges_to_int32(rescale, rewriter)
            return (
                is_narrow
                and _is_sole_reader(op, rewriter)
                and _has_fusible_scales([value.producer for value in op.inputs])
            )
    return False


def _merges_to_int32(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges a RESCALE with the RESCALEs by 1 to int32 that follow it, past RESHAPEs.

    It does not where an operator fuses the last one (``_fuses_operands``).
    """
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and _merges_with(op, reader, rewriter):
            if reader.output.dtype is DType.INT32:
                consumer = rewriter.only_user(reader.output)
                return consumer is None or not _fuses_operands(consumer, rewriter)
        elif not is_view(reader):
            return False
        result = reader.output
    return False


def _fuses_operands(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs by 1 of all operands into the operator, as it is their only reader."""
    return absorbs_widening(op) and _is_sole_reader(op, rewriter)


def _is_sole_reader(op: Op, rewriter: Rewriter) -> bool:
    """Whether no other operator reads any operand."""
    return all(rewriter.has_one_use(value) for value in op.inputs)


def _has_fusible_scales(terms: list[Op | None]) -> bool:
    """Whether ADD or SUB can apply the scales of its operands.

    Either both are integers of 16 bits, or the larger is 2**14 (int16) or 2**19 (int8) and the other any other number.
    """
    rescales = [term for term in terms if term is not None and term.kind == "RESCALE" and not term.attrs["per_channel"]]
    dtypes = {rescale.inputs[0].dtype for rescale in rescales}
    if len(rescales) != 2 or len(dtypes) != 1 or not dtypes <= {*NARROW}:
        return False
    scales = [float(rescale_factors(rescale)[0]) for rescale in rescales]
    shift_scale = 2.0**14 if DType.INT16 in dtypes else 2.0**19
    fit_16_bits = all(scale.is_integer() and scale < 1 << 15 for scale in scales)
    return fit_16_bits or (max(scales) == shift_scale and scales[0] != scales[1])


def _may_fuse_into_producer(value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse a RESCALE into the producer of its operand, whose only reader it is."""
    x = value.producer.inputs[0] if value.producer is not None else value
    x, _ = trace_back(x, lambda view: view.kind == "RESHAPE" and rewriter.has_one_use(view.output))
    return rewriter.has_one_use(x) and x.producer is not None and x.producer.kind not in _NEVER_RESCALES


def _is_duplicated(value: Value, rewriter: Rewriter) -> bool:
    """Whether each reader of ``value`` gets a RESCALE of its own: there is one reader, or all are arithmetic."""
    readers = rewriter.users(value)
    return readers is not None and (len(readers) == 1 or all(reader.kind in ARITHMETIC for reader in readers))


def _loses_own_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """RESCALE to or from int32 whose only reader is CONCAT or PAD (``joined_rescale``: U55, U65, 5.2).

    It is not first there, and its producer does not fuse it. Vela writes it to the start of the larger tensor.
    """
    rescale = producer(value, "RESCALE")
    if rescale is None or not _has_int32(rescale) or not rewriter.has_one_use(value):
        return False
    if reader.kind == "CONCAT" and value is reader.inputs[0]:
        return False
    if reader.kind == "PAD" and not any(reader.attrs["padding"][::2]):
        return False
    return not _fuses_into_producer(rescale, rewriter)


def _fuses_into_producer(rescale: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALE into its producer."""
    op = rescale.inputs[0].producer
    if op is None or rescale.attrs["input_zp"] or not rewriter.has_one_use(op.output):
        return False
    if op.kind == "TABLE":
        return {op.inputs[0].dtype, rescale.output.dtype} == {DType.INT16}
    is_narrow = op.kind in ARITHMETIC and all(value.dtype in NARROW for value in op.inputs)
    if is_narrow and _merges_unscaled(rescale, rewriter):
        return False
    return op.kind in _SCALES_RESULT or is_narrow or _fuses_own_rescales(op, rewriter)


def _merges_unscaled(rescale: Op, rewriter: Rewriter) -> bool:
    """Whether Vela on U55 and U65 merges the RESCALE of narrow arithmetic to one that the arithmetic cannot fuse.

    These NPUs do not scale an int32 result of arithmetic. Scales of 1 need no fusion: Vela removes both RESCALEs. It
    does not merge them if there is a zero point between them.
    """
    if not rewriter.build.target.hardware.sums_rescale_operands or power_of_two(rescale) == 0:
        return False
    return not rescale.attrs["output_zp"] and _merges_to_int32(rescale, rewriter)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("reshaped_parts", ("RESCALE",), _is_duplicated_for_reshape, copy_result, releases=((5, 2),)),
    Workaround("rescaled_parts", ("RESCALE",), _is_duplicated_for_slice, copy_result, releases=((5, 2),)),
    Workaround("rescaled_part", ("RESCALE",), _reads_part, rescale_copy, releases=((5, 2),)),
    Workaround("joined_again", ("RESCALE",), _is_between_joins, rescale_copy, releases=((5, 2),)),
    copy_operands_where("joined_rescale", ("CONCAT", "PAD"), _loses_own_offset, releases=((5, 2),)),
)
