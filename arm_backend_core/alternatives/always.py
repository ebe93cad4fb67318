"""Forms that are always taken, without asking what they cost.

``bounded``, for Vela 5.1 alone, changes no command of the NPU, but an estimate that is wrong without it: 5.1 charges an
operation of U55 and U65 that no activation follows as if it had a table: 1 cycle an element on U55-128. One with a
CLAMP is charged what its own output takes, 0.25 to 0.75. It is the same command, with the bounds that all results have
(``docs/contributors/vela.md``). So this is no gain in hardware: it is one of the estimate, which Vela's scheduler and
our choice of forms follow. Vela 5.2 estimates both alike, and may compute such a CLAMP by an operation of its own.
"""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.int16_as_int8_rows import by_halves
from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes import merge_reshapes
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.fuse import power_of_two
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer
from arm_backend_core.tosa.vela_workarounds.arithmetic import SCALED_MAXIMUM, broadcast_constant
from arm_backend_core.tosa.vela_workarounds.rescales import absorbs_widening
from arm_backend_core.tosa.vela_workarounds.workaround import is_needed

#: Those whose output takes less than a table's cycle.
_CHEAP = ("CONV2D", "DEPTHWISE_CONV2D", "MAX_POOL2D", "MUL")


def take_always(graph: Graph, target: Target) -> None:
    """Write these forms wherever they can be."""
    if apply_once(graph, target, {"RESCALE": [summed_as_read]}):
        merge_reshapes(graph, target)
        eliminate_common_subexpressions(graph, target)
    apply_once(graph, target, {"RESCALE": [by_halves, with_product, widened_by_product]})
    if target.hardware.estimates_missing_activation:
        if target.vela == (5, 1):
            apply_once(graph, target, {"RESCALE": [bounded], "MAX_POOL2D": [bounded]})
        apply_once(graph, target, {"ADD": [fetched], "MUL": [fetched]})


def summed_as_read(op: Op, rewriter: Rewriter) -> Value | None:
    """ADD, SUB or MUL with its RESCALEs, in the shape in which another reads one of the operands.

    Vela copies what is read in two shapes: 8,576 cycles for 128x64 elements on U55-128.
    """
    b, total = rewriter.build, op.inputs[0].producer
    if total is None or total.kind not in ("ADD", "SUB", "MUL") or not rewriter.single_use(total.output):
        return None
    terms = [term for value in total.inputs if (term := producer(value, "RESCALE")) and rewriter.single_use(value)]
    sources = [term.inputs[0] for term in terms if term.inputs[0].shape == op.output.shape]
    readers = [reader for source in sources for reader in rewriter.users(source) or ()]
    shapes = [reader.output.shape for reader in readers if reader.kind == "RESHAPE" and reader.output.rank == 4]
    if len(sources) != 2 or not shapes or any(step.attrs["per_channel"] for step in (op, *terms)):
        return None
    scaled = [_again(term, b.reshape(source, shapes[0]), b) for term, source in zip(terms, sources, strict=True)]
    result = b.emit(total.kind, scaled, shapes[0], total.output.dtype, **total.attrs)
    return b.reshape(_again(op, result, b), op.output.shape)


def _again(op: Op, x: Value, b: Builder) -> Value:
    return b.emit(op.kind, (x,), x.shape, op.output.dtype, **op.attrs)


def with_product(op: Op, rewriter: Rewriter) -> Value | None:
    """RESCALE of int16 that no operation does on its way, behind x * 1, which does: 30 cycles for 700 on U85-256.

    One that Vela would lose too, so that ``bounded`` is of its product: 89,303 cycles for 102,252 behind MAX_POOL2D.
    """
    x, b = op.inputs[0], rewriter.build
    lost = is_needed(SCALED_MAXIMUM, b.target) and SCALED_MAXIMUM.find(op, rewriter)
    if not (x.dtype is DType.INT16 or lost) or op.output.dtype is DType.INT32 or op.attrs["per_channel"]:
        return None
    return _again(op, b.mul(x, broadcast_constant(x, 1, x.dtype, b)), b)


def widened_by_product(op: Op, rewriter: Rewriter) -> Value | None:
    """A TABLE's int16 result, widened to int32 by x * 1 in place of a RESCALE, where nothing does that on its way.

    [8, 512] on U55-128, with the TABLE: 15,232 cycles for 22,400 (Vela 5.1). Vela 5.2 joins the RESCALE with the one
    before it; the TABLE then gives int32, which no NPU has, and becomes three TABLEs and three operations: 14,016 for
    41,920 (U55-128), 7,488 for 17,184 (U85-256).
    """
    x, b = op.inputs[0], rewriter.build
    scaled = producer(x, "RESCALE")
    behind_table = scaled is not None and producer(scaled.inputs[0], "TABLE") is not None
    plain = power_of_two(op) == 0 and op.attrs["input_zp"] == op.attrs["output_zp"] == 0
    if not behind_table or x.dtype is not DType.INT16 or op.output.dtype is not DType.INT32 or not plain:
        return None
    readers = rewriter.users(op.output) or ()
    if any(absorbs_widening(reader) or reader.kind in ("CLZ", "RESCALE") for reader in readers):
        return None
    if b.target.hardware.chains and (1, *x.shape)[-1] == 1:  # a chain takes a RESCALE, and less SRAM
        multiplier, shift = np.array([(1 << 30) + 1], np.int32), np.array([30], np.int8)  # x still, and not by 1
        return b.emit("RESCALE", (x,), x.shape, DType.INT32, **{**op.attrs, "multiplier": multiplier, "shift": shift})
    return b.mul(x, broadcast_constant(x, 1, DType.INT16, b))


def bounded(op: Op, rewriter: Rewriter) -> Value | None:
    """The result, clamped to the range of its type, where Vela does that with the operation itself."""
    x, b = op.output, rewriter.build
    first = op if op.kind == "MAX_POOL2D" else op.inputs[0].producer
    if first is None or first.kind not in _CHEAP or x.dtype not in (DType.INT8, DType.INT16):
        return None
    if first is not op and not rewriter.single_use(op.inputs[0]):
        return None
    readers = rewriter.users(x)
    if _apart(first) or (readers and all(reader.kind in ("CLAMP", "TABLE", "RESCALE") for reader in readers)):
        return None
    low, high = x.dtype.range
    again = b.emit(op.kind, op.inputs, x.shape, x.dtype, **op.attrs)
    return b.clamp(again, low, high)


def fetched(op: Op, rewriter: Rewriter) -> Value | None:
    """With a constant for all rows that was fetched from flash before, by MAXIMUM: Vela folds what else would copy it.

    Every row reads it anew: 36,864 cycles for [64, 128] of INT32 on U55-128, 30,880 with the copy (Vela 5.1). Vela 5.2,
    which counts all four bytes of an element, estimates 86,016 and 33,284, and less with the copy from two rows on.
    """
    b = rewriter.build
    least = b.target.hardware.copies_constants_from.get(b.target.vela, 64)
    for i, constant in enumerate(op.inputs):
        rows = constant.dtype is DType.INT32 and 1 < constant.size <= op.output.size // least
        if constant.data is not None and rows and op.inputs[1 - i].data is None:
            copy = b.maximum(constant, b.const(np.full((1,) * constant.rank, constant.data.min()), DType.INT32))
            inputs = (copy, op.inputs[1]) if i == 0 else (op.inputs[0], copy)
            return b.emit(op.kind, inputs, op.output.shape, op.output.dtype, **op.attrs)
    return None


def _apart(op: Op) -> bool:
    """Whether Vela makes several operations of it, which do no activation, or one of another shape."""
    images = op.output.rank > 3 and op.output.shape[0] > 1
    multiplied = op.kind == "DEPTHWISE_CONV2D" and op.inputs[1].shape[3] > 1
    return images or multiplied or max(op.attrs.get("dilation", (1,))) > 2 or max(op.attrs.get("stride", (1,))) > 3
