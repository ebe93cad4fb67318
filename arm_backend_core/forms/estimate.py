"""Forms that change no command of the NPU, but Vela's estimate of it, which is wrong for the others.

Vela 5.1 charges an operation of U55 and U65 that no activation follows as if it had a table, 1 cycle an element on
U55-128; one with a CLAMP is charged what its own output takes, 0.25 to 0.75. It is the same command, with the bounds
that all results have anyway (``docs/vela.md``). So this is no gain in hardware: the estimate is, which Vela's own
scheduler and our choice of forms follow.
"""

from __future__ import annotations

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op, Value
from arm_backend_core.tosa.passes.rewrite import Rewriter, sweep

#: Those whose output takes less than a table's cycle.
_CHEAP = ("CONV2D", "DEPTHWISE_CONV2D", "MAX_POOL2D", "MUL")


def bound_results(graph: Graph, target: Target) -> None:
    """Put a CLAMP that changes nothing behind operations that have no activation."""
    if target.hardware.npu and not target.hardware.transposes_by_convolution:
        sweep(graph, target, {"RESCALE": [bounded], "MAX_POOL2D": [bounded]})


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
