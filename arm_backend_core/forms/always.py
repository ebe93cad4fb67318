"""Forms that are always taken, without asking what they cost.

``bounded`` changes no command of the NPU, but Vela's estimate, which is wrong without it. Vela 5.1 charges an operation
of U55 and U65 that no activation follows as if it had a table: 1 cycle an element on U55-128. One with a CLAMP is
charged what its own output takes, 0.25 to 0.75. It is the same command, with the bounds that all results have
(``docs/vela.md``). So this is no gain in hardware: it is one of the estimate, which Vela's scheduler and our
choice of forms follow.
"""

from __future__ import annotations

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, Rule, sweep
from arm_backend_core.tosa.passes.vela_numbers import filled

#: Those whose output takes less than a table's cycle.
_CHEAP = ("CONV2D", "DEPTHWISE_CONV2D", "MAX_POOL2D", "MUL")


def take_always(graph: Graph, target: Target) -> None:
    """Write these forms wherever they can be."""
    known: dict[str, list[Rule]] = {"RESCALE": [with_product]}
    if target.family != "ethos-u85":  # whose estimate is right
        known = {"RESCALE": [with_product, bounded], "MAX_POOL2D": [bounded]}
    sweep(graph, target, known)


def with_product(op: Op, rewriter: Rewriter) -> Value | None:
    """RESCALE of int16 that no operation does on its way, behind x * 1, which does: 30 cycles for 700 on U85-256."""
    x, b = op.inputs[0], rewriter.build
    if x.dtype is not DType.INT16 or op.output.dtype is DType.INT32 or op.attrs["per_channel"]:
        return None
    product = b.mul(x, filled(x, 1, DType.INT16, b))
    return b.emit("RESCALE", (product,), x.shape, op.output.dtype, **op.attrs)


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


def _apart(op: Op) -> bool:
    """Whether Vela makes several operations of it, which do no activation, or one of another shape."""
    images = op.output.rank > 3 and op.output.shape[0] > 1
    multiplied = op.kind == "DEPTHWISE_CONV2D" and op.inputs[1].shape[3] > 1
    return images or multiplied or max(op.attrs.get("dilation", (1,))) > 2 or max(op.attrs.get("stride", (1,))) > 3
