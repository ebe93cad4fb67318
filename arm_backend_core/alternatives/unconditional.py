"""Unconditional alternatives: bit-exact rewrites that are applied without the cost model.

``clamp_to_dtype`` (Vela 5.1 only) corrects an estimate of Vela, which guides Vela's scheduler and our cost model. The
CLAMP itself adds no command; the schedule may change, because Vela chooses block sizes by the estimate
(``docs/contributors/vela.md``). For an operation without an activation on U55 and U65, Vela 5.1 wrongly counts a table
look-up: 1 cycle per element on U55-128. With a CLAMP, it counts only the output: 0.25 to 0.75 cycles. Vela 5.2
estimates equal cycles with and without the CLAMP, and may execute the CLAMP as a separate operation.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.int16_as_int8_rows import split_int16_rows
from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.peephole_fusion import has_unit_scale_and_no_zero_points
from arm_backend_core.tosa.passes.pipeline import merge_reshapes
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer
from arm_backend_core.tosa.vela_workarounds.copies import broadcast_constant, emit_copy
from arm_backend_core.tosa.vela_workarounds.fused_rescales import LOST_MAXIMUM_SCALE_WORKAROUND, absorbs_widening
from arm_backend_core.tosa.vela_workarounds.workaround import is_needed

#: Operators that take less than one cycle per element of the result. A table look-up takes one cycle.
_KINDS_CHEAPER_THAN_TABLE = ("CONV2D", "DEPTHWISE_CONV2D", "MAX_POOL2D", "MUL")
#: Arithmetic on int32 whose constant operands ``copy_constant`` copies.
_KINDS_THAT_READ_CONSTANTS = ("ADD", "SUB", "MUL", "MAXIMUM", "MINIMUM")


def apply_unconditional(graph: Graph, target: Target) -> None:
    """Apply the unconditional rewrites wherever they match."""
    if apply_once(graph, target, {"RESCALE": [use_reader_shape]}):
        merge_reshapes(graph, target)
        eliminate_common_subexpressions(graph, target)
    apply_once(graph, target, {"RESCALE": [split_int16_rows, multiply_before_rescale, widen_by_multiply]})
    if target.hardware.estimates_missing_activation:
        if target.vela_release == (5, 1):
            apply_once(graph, target, {"RESCALE": [clamp_to_dtype], "MAX_POOL2D": [clamp_to_dtype]})
        apply_once(graph, target, {kind: [copy_constant] for kind in _KINDS_THAT_READ_CONSTANTS})
        apply_once(graph, target, {kind: [copy_narrow_constant] for kind in ("ADD", "SUB", "MUL")})


def use_reader_shape(op: Op, rewriter: Rewriter) -> Value | None:
    """If a RESHAPE also reads an operand of an ADD, SUB or MUL, compute the arithmetic in the shape of the RESHAPE.

    The RESCALEs of the operands and of the result are computed in this shape too. Without this rewrite, the operand is
    read in two shapes, and Vela copies it: 8,576 cycles for 128x64 elements on U55-128.
    """
    b, binary = rewriter.builder, op.inputs[0].producer
    if binary is None or binary.kind not in ("ADD", "SUB", "MUL") or not rewriter.has_one_use(binary.output):
        return None
    terms = [term for value in binary.inputs if (term := producer(value, "RESCALE")) and rewriter.has_one_use(value)]
    sources = [term.inputs[0] for term in terms if term.inputs[0].shape == op.output.shape]
    readers = [reader for source in sources for reader in rewriter.users(source) or ()]
    shapes = [reader.output.shape for reader in readers if reader.kind == "RESHAPE" and reader.output.rank == 4]
    if len(sources) != 2 or not shapes or any(step.attrs["per_channel"] for step in (op, *terms)):
        return None
    scaled = [_emit_like(term, b.reshape(source, shapes[0]), b) for term, source in zip(terms, sources, strict=True)]
    result = b.emit(binary.kind, scaled, binary.output.dtype, **binary.attrs)
    return b.reshape(_emit_like(op, result, b), op.output.shape)


def _emit_like(op: Op, x: Value, b: Builder) -> Value:
    return b.emit(op.kind, (x,), op.output.dtype, **op.attrs)


def multiply_before_rescale(op: Op, rewriter: Rewriter) -> Value | None:
    """Insert x * 1 before a RESCALE of int16 x. Vela fuses the RESCALE with this MUL, but not with the producer of x.

    The RESCALE takes 30 instead of 700 cycles on U85-256. A RESCALE of another dtype is rewritten, too, if
    ``LOST_MAXIMUM_SCALE_WORKAROUND`` would insert a MUL before it anyway. ``clamp_to_dtype`` then applies to this MUL:
    89,303 instead of 102,252 cycles after a MAX_POOL2D. A RESCALE to int32 or with per-channel scales stays.
    """
    x, b = op.inputs[0], rewriter.builder
    workaround = LOST_MAXIMUM_SCALE_WORKAROUND
    loses_scale = is_needed(workaround, b.target) and workaround.find(op, rewriter)
    if not (x.dtype is DType.INT16 or loses_scale) or op.output.dtype is DType.INT32 or op.attrs["per_channel"]:
        return None
    return _emit_like(op, b.mul(x, broadcast_constant(x, 1, x.dtype, b)), b)


def widen_by_multiply(op: Op, rewriter: Rewriter) -> Value | None:
    """Widen the rescaled int16 result of a TABLE to int32 by x * 1 instead of a RESCALE that Vela does not fuse.

    If the tensor has one channel, U85 can execute the RESCALE in a chain of operations. In this case, the RESCALE
    stays, with the factor 1 + 2**-30.

    The TABLE and the widening of [8, 512] take 15,232 instead of 22,400 cycles with Vela 5.1 (U55-128). Without the
    rewrite, Vela 5.2 merges the RESCALE with the preceding one. The TABLE then has an int32 result, which no NPU
    supports, so that Vela emits three TABLEs and three other operations. With x * 1, they take 14,016 instead of 41,920
    cycles (U55-128), and 7,488 instead of 17,184 (U85-256).
    """
    x, b = op.inputs[0], rewriter.builder
    scaled = producer(x, "RESCALE")
    reads_table = scaled is not None and producer(scaled.inputs[0], "TABLE") is not None
    widens = x.dtype is DType.INT16 and op.output.dtype is DType.INT32
    if not reads_table or not widens or not has_unit_scale_and_no_zero_points(op):
        return None
    readers = rewriter.users(op.output) or ()
    if any(absorbs_widening(reader) or reader.kind in ("CLZ", "RESCALE") for reader in readers):
        return None
    if b.target.hardware.chains and (1, *x.shape)[-1] == 1:  # a chain may contain a RESCALE, and needs less SRAM
        # The result of the factor 1 + 2**-30 is equal to x, but Vela removes only a RESCALE with the factor 1.
        multiplier, shift = np.array([(1 << 30) + 1], np.int32), np.array([30], np.int8)
        return b.emit("RESCALE", (x,), DType.INT32, **{**op.attrs, "multiplier": multiplier, "shift": shift})
    return b.mul(x, broadcast_constant(x, 1, DType.INT16, b))


def clamp_to_dtype(op: Op, rewriter: Rewriter) -> Value | None:
    """Clamp the result to the range of its dtype if Vela fuses the CLAMP with the operation.

    Returns None, among other cases, if all readers of the result are CLAMPs, TABLEs or RESCALEs.
    """
    x, b = op.output, rewriter.builder
    main_op = op if op.kind == "MAX_POOL2D" else op.inputs[0].producer
    if main_op is None or main_op.kind not in _KINDS_CHEAPER_THAN_TABLE or x.dtype not in (DType.INT8, DType.INT16):
        return None
    if main_op is not op and not rewriter.has_one_use(op.inputs[0]):
        return None
    readers = rewriter.users(x)
    if _is_split_by_vela(main_op) or (
        readers and all(reader.kind in ("CLAMP", "TABLE", "RESCALE") for reader in readers)
    ):
        return None
    low, high = x.dtype.range
    result = b.emit(op.kind, op.inputs, x.dtype, **op.attrs)
    return b.clamp(result, low, high)


def copy_constant(op: Op, rewriter: Rewriter) -> Value | None:
    """Copy a broadcast constant from flash once: MAXIMUM(constant, its smallest element), which Vela does not fold.

    Without the copy, the NPU reads the constant again for each row. With the copy, an operator on [64, 128] of INT32
    takes 30,880 instead of 36,864 cycles on U55-128 (Vela 5.1). Vela 5.2 counts all four bytes of an element: 33,284
    instead of 86,016 cycles. With 5.2 on U55, the copy is cheaper from two rows on; otherwise, from 64 rows on.
    """
    b = rewriter.builder
    min_rows = b.target.hardware.constant_copy_min_rows.get(b.target.vela_release, 64)
    for i, constant in enumerate(op.inputs):
        is_broadcast = constant.dtype is DType.INT32 and 1 < constant.size <= op.output.size // min_rows
        if constant.data is not None and is_broadcast and op.inputs[1 - i].data is None:
            copy = b.maximum(constant, b.const(np.full((1,) * constant.rank, constant.data.min()), DType.INT32))
            return _emit_with_operand(op, i, copy, b)
    return None


def copy_narrow_constant(op: Op, rewriter: Rewriter) -> Value | None:
    """Copy a broadcast int8 or int16 constant from flash once, by x * 1 and a RESCALE with scale 1.

    Vela does not fold this copy. Without it, the NPU reads the constant again for each result. A read takes 8 to 16
    cycles on U55-128 if the last dimension is broadcast; otherwise 1 cycle for int8 and up to 4 for int16 (Vela 5.2).
    Two products of int16: [64, 8, 8] by [64, 1, 1] takes 6,664 instead of 65,536 cycles, [128, 64] by [64] 6,404
    instead of 32,768. On U65, the copy saves nothing. An int8 constant is copied only if its last dimension is
    broadcast; otherwise, the copy saves almost nothing. Sums of int16 are not rewritten: the copy makes them slower
    (45,444 instead of 32,768 cycles for [128, 64] and [64]).
    """
    b = rewriter.builder
    if not b.target.hardware.constant_copy_min_rows:
        return None
    for i, operand in enumerate(op.inputs):
        rescale = producer(operand, "RESCALE")
        constant = operand if rescale is None else rescale.inputs[0]
        is_narrow = constant.dtype in (DType.INT8, DType.INT16) and constant.size > 1
        if constant.data is None or not is_narrow or op.inputs[1 - i].data is not None:
            continue
        is_last_broadcast = constant.shape[-1] < op.output.shape[-1]
        is_saving = is_last_broadcast if constant.dtype is DType.INT8 else op.kind == "MUL"
        if is_saving and constant.size <= op.output.size // (2 if is_last_broadcast else 4):
            copy = emit_copy(constant, b)
            return _emit_with_operand(op, i, copy if rescale is None else _emit_like(rescale, copy, b), b)
    return None


def _emit_with_operand(op: Op, index: int, operand: Value, b: Builder) -> Value:
    """Emit ``op`` with another operand at ``index``."""
    inputs = [*op.inputs[:index], operand, *op.inputs[index + 1 :]]
    return b.emit(op.kind, inputs, op.output.dtype, **op.attrs)


def _is_split_by_vela(op: Op) -> bool:
    """Whether Vela splits the operator or changes its shape, and therefore fuses no activation into it."""
    has_several_images = op.output.rank > 3 and op.output.shape[0] > 1
    has_channel_multiplier = op.kind == "DEPTHWISE_CONV2D" and op.inputs[1].shape[3] > 1
    return (
        has_several_images
        or has_channel_multiplier
        or max(op.attrs.get("dilation", (1,))) > 2
        or max(op.attrs.get("stride", (1,))) > 3
    )
