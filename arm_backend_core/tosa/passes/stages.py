"""Stages of the pass pipeline: which operators and types a graph may contain after each pass, and the check of that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op
from arm_backend_core.tosa.legality import emission_refusal, op_refusal
from arm_backend_core.tosa.operators import OPERATORS


@dataclass(frozen=True)
class Stage:
    """The operators and types that a graph may contain; each operator must also be legal on the target.

    Attributes:
        operators: the operator kinds.
        booleans: whether boolean operators that the hardware lacks may still wait for ``booleans.lower_bool_to_int8``.
        int4: whether weights may have four bits.
        distinct_outputs: whether each output must be an operator's result, and no two outputs the same value.
    """

    operators: frozenset[str]
    booleans: bool = False
    int4: bool = False
    distinct_outputs: bool = False


_BLOCK_SCALED = {"CAST_TO_BLOCK_SCALED", "CONV2D_BLOCK_SCALED"}
#: What lowering emits: operators with one result each. Placeholders stand for block-scaled convolutions and loops.
LOWERED = Stage(frozenset(OPERATORS) - _BLOCK_SCALED, booleans=True)
#: After the peephole rules: no IDENTITY.
SIMPLIFIED = replace(LOWERED, operators=LOWERED.operators - {"IDENTITY"})
#: Booleans only if the hardware has them.
BOOLEANS_LOWERED = replace(SIMPLIFIED, booleans=False)
#: Constant weights may have four bits.
WEIGHTS_NARROWED = replace(BOOLEANS_LOWERED, int4=True)
#: Each output has an operator of its own, an IDENTITY where there is no other.
OUTPUTS_DISTINCT = replace(WEIGHTS_NARROWED, operators=WEIGHTS_NARROWED.operators | {"IDENTITY"}, distinct_outputs=True)
#: MX_CONV2D is legalized to block-scaled operators.
BLOCK_SCALED = replace(OUTPUTS_DISTINCT, operators=(OUTPUTS_DISTINCT.operators | _BLOCK_SCALED) - {"MX_CONV2D"})
#: Loops and branches are outlined: this is what the flatbuffer holds.
FINAL = replace(BLOCK_SCALED, operators=(BLOCK_SCALED.operators | {"COND_IF", "WHILE_LOOP"}) - {"LOOP_IN", "LOOP_OUT"})


class StageChecker:
    """Asserts that graphs meet a stage; it checks only operators that changed since the last check.

    Checking all operators after every pass takes two thirds of the passes' time; checking those that changed takes a
    fifth.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: State of each operator that was found legal, and references to the objects whose ids are in that state.
        self._legal: dict[Op, tuple[object, object]] = {}

    def check(self, graph: Graph, stage: Stage, pass_name: str) -> None:
        """Assert that ``graph`` and the graphs that its operators hold meet ``stage``.

        Args:
            pass_name: named in the message as the cause.

        Raises:
            AssertionError: an operator is not allowed at this stage, or its record or the hardware refuses it.
        """
        graphs = [graph]
        for op in graph.walk():
            graphs += op.graphs
            assert op.kind in stage.operators, f"after {pass_name}: {op.kind} is not allowed at this stage: {op!r}"
            assert stage.int4 or all(x.dtype is not DType.INT4 for x in op.inputs), (
                f"after {pass_name}: INT4 is not allowed at this stage: {op!r}"
            )
            reason = self._refusal(op, stage)
            assert reason is None, f"after {pass_name}: {op!r}: {reason}"
        for each in graphs if stage.distinct_outputs else ():
            assert all(x.producer is not None for x in each.outputs), (
                f"after {pass_name}: an output is no operator's result"
            )
            assert len(set(each.outputs)) == len(each.outputs), f"after {pass_name}: two outputs are the same value"

    def _refusal(self, op: Op, stage: Stage) -> str | None:
        tensors = tuple((id(x), id(x.data), x.shape, x.dtype) for x in (*op.inputs, op.output))
        awaits_lowering = (
            stage.booleans and not self._target.hardware.booleans and any(x[3] is DType.BOOL for x in tensors)
        )
        state = (op.kind, awaits_lowering, id(op.attrs), tensors)
        if op in self._legal and self._legal[op][0] == state:
            return None
        reason = (emission_refusal if awaits_lowering else op_refusal)(self._target, op)
        if reason is None and not op.graphs:
            self._legal[op] = state, (op.attrs, [(x, x.data) for x in op.inputs])
        return reason
