"""Vela workarounds for RESCALEs that lose the offset of a partial tensor when Vela fuses or merges them.

A partial tensor is a part of a larger tensor: the result of a SLICE, or an operand of a CONCAT, PAD or TILE. All bugs
here are in Vela 5.2 only:

- U55 and U65 execute a RESCALE to or from int32 as a MUL, unless an operator fuses the RESCALE. If the RESCALE reads
  int8 or int16, a widening ADD precedes the MUL. Vela fuses SLICE, CONCAT, PAD and TILE into the RESCALE, but then
  emits the ADD and the MUL without the offset of the part.
- On all NPUs, Vela merges a CONCAT, PAD or TILE, a RESCALE and a following CONCAT or PAD, and writes only one part.
- Vela duplicates a RESCALE for its readers. A duplicate may get the shape of another tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.passes.peephole_fusion import log2_scale, rescale_factors
from arm_backend_core.tosa.passes.peephole_movement import equal_without_ones
from arm_backend_core.tosa.passes.rewrite import Rewriter, producer, trace_back
from arm_backend_core.tosa.vela_workarounds.copies import copy_operands_where, copy_result
from arm_backend_core.tosa.vela_workarounds.fused_rescales import (
    NARROW_TYPES,
    NONUNARY,
    RESCALE_DUPLICATING_KINDS,
    UNIT_RESHAPE,
    absorbs_widening,
    fuses_unit_rescales_of_operands,
    is_pure_reshape,
    is_sole_reader,
    readers_past_views,
    rescale_copy,
)
from arm_backend_core.tosa.vela_workarounds.workaround import AnyWorkaround, Workaround

#: Operators into which Vela fuses the RESCALE of their result, whatever its scale is.
_RESULT_SCALING_KINDS = (
    *("AVG_POOL2D", "CONV2D", "CONV3D", "DEPTHWISE_CONV2D", "MATMUL", "REDUCE_SUM", "TRANSPOSE_CONV2D"),
)
#: Operators that fuse the RESCALE of their result only after Vela has duplicated this RESCALE.
_LATE_SCALING_KINDS = ("AVG_POOL2D", "CONV3D", "TRANSPOSE_CONV2D")
#: Operators that Vela implements by writing each operand at its offset in the result.
_CONCATENATION_KINDS = ("CONCAT", "PAD", "TILE")
#: Operators into which Vela never fuses a RESCALE.
_UNFUSIBLE_KINDS = ("GATHER", "IDENTITY", "REVERSE", "SCATTER", "SLICE", "TRANSPOSE")


def _has_int32(op: Op) -> bool:
    """Whether the RESCALE ``op`` is to or from int32."""
    return DType.INT32 in (op.inputs[0].dtype, op.output.dtype)


def _loses_operand_offset(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE to or from int32 of a SLICE or of a tensor written in parts, unless all readers fuse the RESCALE.

    Bug ``lost_rescale_operand_offset``: Vela emits a MUL that reads from the start of the larger tensor, or writes only
    one part. RESHAPEs that only add or remove dimensions of size 1 may follow the SLICE.
    ``_find_partitioned_producer`` finds operands that are written in parts.
    """
    if not _has_int32(op):
        return False
    source, _ = trace_back(op.inputs[0], lambda view: _is_size_one_reshape(view) or _merges_with(view, op, rewriter))
    if producer(source, "SLICE") is None and _find_partitioned_producer(op, rewriter) is None:
        return False
    readers = rewriter.users(op.output)
    return not readers or not all(_fuses_all_operand_rescales(reader, rewriter) for reader in readers)


def _is_size_one_reshape(op: Op) -> bool:
    """Whether ``op`` is a RESHAPE that adds or removes only dimensions of size 1."""
    return op.kind == "RESHAPE" and equal_without_ones(op.output.shape, op.inputs[0].shape)


def _merges_with(before: Op, op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges the RESCALE ``before`` into its only reader, the RESCALE ``op``. One must have scale 1."""
    return before.kind == "RESCALE" and rewriter.has_one_use(before.output) and 0 in map(log2_scale, (before, op))


def _find_partitioned_producer(op: Op, rewriter: Rewriter) -> Op | None:
    """The operator that writes the operand of the RESCALE ``op`` in parts, if ``op`` is the only reader; else None.

    The operator is a CONCAT, PAD or TILE, or a pooling that Vela splits, because its stride exceeds 3. RESHAPEs and
    RESCALEs that merge with ``op`` may be between the two.
    """

    def can_skip(view: Op) -> bool:
        return rewriter.has_one_use(view.output) and (view.kind == "RESHAPE" or _merges_with(view, op, rewriter))

    value, _ = trace_back(op.inputs[0], can_skip)
    source = value.producer
    if source is None or not rewriter.has_one_use(value):
        return None
    is_split_pool = source.kind in ("AVG_POOL2D", "MAX_POOL2D") and max(source.attrs["stride"]) > 3
    return source if is_split_pool or source.kind in _CONCATENATION_KINDS else None


def _is_between_concatenations(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE between two concatenations, or a per-channel RESCALE of a tensor that is written in parts.

    Bug ``merged_concats`` has two forms:

    - A CONCAT, PAD or TILE precedes the RESCALE, and a CONCAT or PAD follows it. Each operator is the only reader of
      the preceding one. Vela merges the three, and writes only one part. A RESCALE that computes the first operand of
      the following CONCAT is not affected.
    - The operand of a per-channel RESCALE is written in parts (``_find_partitioned_producer``). Vela rescales each part
      by the scales of the first channels, and not by the scales of the part's channels.
    """
    source, readers = _find_partitioned_producer(op, rewriter), rewriter.users(op.output)
    if source is not None and op.attrs["per_channel"]:
        return True
    if source is None or source.kind not in _CONCATENATION_KINDS or readers is None or len(readers) != 1:
        return False
    reader = readers[0]
    return reader.kind == "PAD" or (reader.kind == "CONCAT" and op.output is not reader.inputs[0])


def _is_duplicated_for_slice(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE to or from int32 that Vela duplicates for several readers, one of which reads a SLICE of it.

    Bug ``duplicated_rescale_slice``: unless all readers fuse their duplicates, the duplicate before the SLICE has the
    bug ``lost_rescale_operand_offset``.
    """
    readers = _duplicating_readers(op, rewriter)
    return (
        any("SLICE" in between for _, between in readers) and _has_int32(op) and not _all_absorb_widening(op, readers)
    )


def _is_duplicated_for_reshape(op: Op, rewriter: Rewriter) -> bool:
    """Match a RESCALE that Vela duplicates for several readers, one of which reads a RESHAPE of it.

    Bug ``duplicated_rescale_reshape``: each duplicate writes the shape of its reader, but reads the shape before the
    RESHAPE. If the reader fuses its duplicate, both shapes are correct. If a SLICE precedes ``op`` or the reader, the
    offset of the SLICE is always wrong, also for fused duplicates and for RESHAPEs that only add or remove dimensions
    of size 1: Vela computes the offset from the shape on the wrong side of the RESHAPE.
    """
    readers = _duplicating_readers(op, rewriter)
    source, _ = trace_back(op.inputs[0], _is_size_one_reshape)
    sliced = {"SLICE"} if producer(source, "SLICE") is not None else set()
    if any("SLICE" in between | sliced and between & {"RESHAPE", UNIT_RESHAPE} for _, between in readers):
        return True
    return any("RESHAPE" in between for _, between in readers) and not _all_absorb_widening(op, readers)


def _duplicating_readers(op: Op, rewriter: Rewriter) -> list[tuple[Op, frozenset[str]]]:
    """The readers for which Vela duplicates the RESCALE ``op``. Empty if Vela does not duplicate it.

    Vela does not duplicate a RESCALE to int8 or int16 that the producer of its operand fuses, unless this producer is
    one of ``_LATE_SCALING_KINDS``.

    Returns:
        (reader, operator kinds between ``op`` and the reader: "RESHAPE", ``UNIT_RESHAPE`` or "SLICE"). Example:
        [(ADD, {"SLICE"}), (MUL, set())].
    """
    before = op.inputs[0].producer
    is_fused_late = before is not None and before.kind in _LATE_SCALING_KINDS
    if op.output.dtype in NARROW_TYPES and not is_fused_late and _fuses_into_producer(op, rewriter):
        return []
    readers = list(_final_readers(op.output, rewriter, frozenset()))
    is_duplicated = all(
        reader.kind in RESCALE_DUPLICATING_KINDS or _may_fuse_into_readers(reader, rewriter) for reader, _ in readers
    )
    return readers if is_duplicated and len(readers) > 1 else []


def _final_readers(value: Value, rewriter: Rewriter, passed: frozenset[str]) -> Iterator[tuple[Op, frozenset[str]]]:
    """Like ``readers_past_views``, but the search continues behind a RESCALE that Vela may fuse into several readers.

    Args:
        value: the tensor to search from.
        rewriter: the rewriter of the graph.
        passed: the operator kinds that the search has already passed, as for ``readers_past_views``.

    Yields:
        (reader, passed kinds).
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
    """Whether ``op`` is a RESCALE that Vela may fuse into its readers, which then read the operand of ``op``."""
    if op.kind != "RESCALE":
        return False
    readers = [reader for reader, _ in readers_past_views(op.output, rewriter, frozenset())]
    return log2_scale(op) == 0 or (
        bool(readers) and all(reader.kind in RESCALE_DUPLICATING_KINDS for reader in readers)
    )


def _fuses_all_operand_rescales(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela fuses the RESCALEs of all operands into ``op``, so that Vela emits no operation for them.

    If all readers of a RESCALE are arithmetic, Vela duplicates the RESCALE and fuses the duplicates. Exception: Vela
    first fuses RESCALEs into their producers where possible, and does not duplicate these. If ``op`` broadcasts both
    operands, Vela may first broadcast one of them in a separate operation, and fuses no RESCALE.
    """
    if len(op.inputs) == 2 and all(value.shape != op.output.shape for value in op.inputs):
        return False
    if _fuses_scaled_sum(op, rewriter) or fuses_unit_rescales_of_operands(op, rewriter):
        return True
    are_duplicated = absorbs_widening(op) and all(_gets_own_rescale_per_reader(value, rewriter) for value in op.inputs)
    return are_duplicated and not any(_may_fuse_into_producer(value, rewriter) for value in op.inputs)


def _fuses_scaled_sum(op: Op, rewriter: Rewriter) -> bool:
    """Whether ``op`` is an ADD or SUB on U55 or U65 that fuses the RESCALEs of both operands and of its result."""
    if op.kind not in ("ADD", "SUB") or not rewriter.builder.target.hardware.sums_rescale_operands:
        return False
    match rewriter.users(op.output):
        case [Op(kind="RESCALE", attrs={"per_channel": False, "input_zp": 0}, output=result) as rescale]:
            is_narrow = result.dtype in NARROW_TYPES and not _merges_to_int32(rescale, rewriter)
            return (
                is_narrow
                and is_sole_reader(op, rewriter)
                and _has_fusible_scales([value.producer for value in op.inputs])
            )
    return False


def _merges_to_int32(op: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges the RESCALE ``op`` with a following RESCALE to int32 (``_merges_with``).

    RESHAPEs and other merged RESCALEs may be between the two. Vela does not merge the RESCALE to int32 if an operator
    fuses it (``fuses_unit_rescales_of_operands``).
    """
    result = op.output
    while (reader := rewriter.only_user(result)) is not None:
        if reader.kind == "RESCALE" and _merges_with(op, reader, rewriter):
            if reader.output.dtype is DType.INT32:
                consumer = rewriter.only_user(reader.output)
                return consumer is None or not fuses_unit_rescales_of_operands(consumer, rewriter)
        elif not is_pure_reshape(reader):
            return False
        result = reader.output
    return False


def _has_fusible_scales(terms: list[Op | None]) -> bool:
    """Whether an ADD or SUB can apply the scales of the RESCALEs of its operands.

    It can in two cases:

    - Both scales are integers below 2**15.
    - The scales differ, and the larger one is 2**14 (int16 operands) or 2**19 (int8 operands).
    """
    rescales = [term for term in terms if term is not None and term.kind == "RESCALE" and not term.attrs["per_channel"]]
    dtypes = {rescale.inputs[0].dtype for rescale in rescales}
    if len(rescales) != 2 or len(dtypes) != 1 or not dtypes <= {*NARROW_TYPES}:
        return False
    scales = [float(rescale_factors(rescale)[0]) for rescale in rescales]
    shift_scale = 2.0**14 if DType.INT16 in dtypes else 2.0**19
    fit_16_bits = all(scale.is_integer() and scale < 1 << 15 for scale in scales)
    return fit_16_bits or (max(scales) == shift_scale and scales[0] != scales[1])


def _may_fuse_into_producer(value: Value, rewriter: Rewriter) -> bool:
    """Whether Vela may fuse the RESCALE that computes ``value`` into the operator before it.

    The RESCALE must be the only reader of the result of this operator. RESHAPEs may be between the two.
    """
    x = value.producer.inputs[0] if value.producer is not None else value
    x, _ = trace_back(x, lambda view: view.kind == "RESHAPE" and rewriter.has_one_use(view.output))
    return rewriter.has_one_use(x) and x.producer is not None and x.producer.kind not in _UNFUSIBLE_KINDS


def _gets_own_rescale_per_reader(value: Value, rewriter: Rewriter) -> bool:
    """Whether each reader of the RESCALE result ``value`` has a separate RESCALE in Vela.

    This is true if ``value`` has one reader, or if all readers are of the kinds ``NONUNARY``.
    """
    readers = rewriter.users(value)
    return readers is not None and (len(readers) == 1 or all(reader.kind in NONUNARY for reader in readers))


def _loses_result_offset(reader: Op, value: Value, rewriter: Rewriter) -> bool:
    """Whether only a CONCAT or PAD reads the result of a RESCALE to or from int32, and stores it at an offset.

    Bug ``lost_rescale_result_offset``: unless the producer of the RESCALE's operand fuses the RESCALE, Vela writes the
    result to the start of the larger tensor.
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
    """Whether Vela fuses ``rescale`` into the producer of its operand."""
    op = rescale.inputs[0].producer
    if op is None or rescale.attrs["input_zp"] or not rewriter.has_one_use(op.output):
        return False
    if op.kind == "TABLE":
        return {op.inputs[0].dtype, rescale.output.dtype} == {DType.INT16}
    is_narrow = op.kind in NONUNARY and all(value.dtype in NARROW_TYPES for value in op.inputs)
    if is_narrow and _merges_unscaled(rescale, rewriter):
        return False
    return op.kind in _RESULT_SCALING_KINDS or is_narrow or _fuses_all_operand_rescales(op, rewriter)


def _merges_unscaled(rescale: Op, rewriter: Rewriter) -> bool:
    """Whether Vela merges the RESCALE after arithmetic on int8 or int16 with a following RESCALE with scale 1 to int32.

    Only U55 and U65 are affected: they do not scale an int32 result of arithmetic, so that the arithmetic cannot fuse
    the merged RESCALE. The result is False if ``rescale`` has scale 1, because Vela removes it, and if it has an output
    zero point, because Vela does not merge it.
    """
    if not rewriter.builder.target.hardware.sums_rescale_operands or log2_scale(rescale) == 0:
        return False
    return not rescale.attrs["output_zp"] and _merges_to_int32(rescale, rewriter)


WORKAROUNDS: tuple[AnyWorkaround, ...] = (
    Workaround("duplicated_rescale_reshape", ("RESCALE",), _is_duplicated_for_reshape, copy_result, releases=((5, 2),)),
    Workaround("duplicated_rescale_slice", ("RESCALE",), _is_duplicated_for_slice, copy_result, releases=((5, 2),)),
    Workaround("lost_rescale_operand_offset", ("RESCALE",), _loses_operand_offset, rescale_copy, releases=((5, 2),)),
    Workaround("merged_concats", ("RESCALE",), _is_between_concatenations, rescale_copy, releases=((5, 2),)),
    copy_operands_where("lost_rescale_result_offset", ("CONCAT", "PAD"), _loses_result_offset, releases=((5, 2),)),
)
