"""What a graph may hold behind each stage of the passes, and the check of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op
from arm_backend_core.tosa.legality import op_refusal, write_refusal
from arm_backend_core.tosa.operators import OPERATORS


@dataclass(frozen=True)
class Stage:
    """What may be in a graph; each operator must be legal on the target besides.

    Attributes:
        operators: kinds of operators.
        booleans: whether those that hardware without booleans lacks may wait for ``booleans.count_booleans``.
        int4: whether weights may have four bits.
        distinct: whether each result must be that of an operator, and no other result.
    """

    operators: frozenset[str]
    booleans: bool = False
    int4: bool = False
    distinct: bool = False


_BLOCK_SCALED = {"CAST_TO_BLOCK_SCALED", "CONV2D_BLOCK_SCALED"}
#: What lowering writes: operators of one result each, with marks in the place of others.
LOWERED = Stage(frozenset(OPERATORS) - _BLOCK_SCALED, booleans=True)
#: Behind the first rules.
SIMPLE = replace(LOWERED, operators=LOWERED.operators - {"IDENTITY"})
#: Booleans only where the hardware has them.
COUNTED = replace(SIMPLE, booleans=False)
#: Constant weights may have four bits.
NARROWED = replace(COUNTED, int4=True)
#: IDENTITY is in front of results that no other operator makes.
RETURNED = replace(NARROWED, operators=NARROWED.operators | {"IDENTITY"}, distinct=True)
#: The mark of block-scaled convolutions is gone.
BLOCKS = replace(RETURNED, operators=(RETURNED.operators | _BLOCK_SCALED) - {"MX_CONV2D"})
#: The marks of loops are gone: what the flatbuffer holds.
WRITTEN = replace(BLOCKS, operators=(BLOCKS.operators | {"COND_IF", "WHILE_LOOP"}) - {"LOOP_IN", "LOOP_OUT"})


class StageChecker:
    """Asserts what graphs are behind passes; of operators, those that are not as they were the last time.

    All of them after every pass took two thirds of the passes' time, those that changed take a fifth.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: How operators were that are legal, and what keeps the numbers in that from standing for something else.
        self._legal: dict[Op, tuple[object, object]] = {}

    def check(self, graph: Graph, stage: Stage, behind: str) -> None:
        """Assert that ``graph`` and the graphs that its operators hold are as ``stage`` says.

        Args:
            behind: what the message says has left the graph so.

        Raises:
            AssertionError: an operator may not be there yet or any more, or its record or the hardware refuses it.
        """
        parts = [graph]
        for op in graph.walk():
            parts += op.graphs
            assert op.kind in stage.operators, f"behind {behind} there may be no {op!r}"
            assert stage.int4 or all(x.dtype is not DType.INT4 for x in op.inputs), f"behind {behind}: INT4 in {op!r}"
            reason = self._refusal(op, stage)
            assert reason is None, f"behind {behind}: {op!r}: {reason}"
        for part in parts if stage.distinct else ():
            assert all(x.producer is not None for x in part.outputs), f"behind {behind}: an output is no operator's"
            assert len(set(part.outputs)) == len(part.outputs), f"behind {behind}: two outputs are one value"

    def _refusal(self, op: Op, stage: Stage) -> str | None:
        tensors = tuple((id(x), id(x.data), x.shape, x.dtype) for x in (*op.inputs, op.output))
        waits = stage.booleans and not self._target.hardware.booleans and any(x[3] is DType.BOOL for x in tensors)
        state = (op.kind, waits, id(op.attrs), tensors)
        if op in self._legal and self._legal[op][0] == state:
            return None
        reason = (write_refusal if waits else op_refusal)(self._target, op)
        if reason is None and not op.graphs:
            self._legal[op] = state, (op.attrs, [(x, x.data) for x in op.inputs])
        return reason
