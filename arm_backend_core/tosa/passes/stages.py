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
        distinct_outputs: whether each output of a graph must be the result of an operator, and all outputs must differ.
    """

    operators: frozenset[str]
    booleans: bool = False
    int4: bool = False
    distinct_outputs: bool = False


_BLOCK_SCALED = {"CAST_TO_BLOCK_SCALED", "CONV2D_BLOCK_SCALED"}
#: After lowering: operators with one result each. Block-scaled convolutions and loops are placeholders (``MX_CONV2D``,
#: ``LOOP_IN``, ``LOOP_OUT``).
LOWERED = Stage(frozenset(OPERATORS) - _BLOCK_SCALED, booleans=True)
#: After the peephole rules: no IDENTITY.
SIMPLIFIED = replace(LOWERED, operators=LOWERED.operators - {"IDENTITY"})
#: Booleans only if the hardware has them.
BOOLEANS_LOWERED = replace(SIMPLIFIED, booleans=False)
#: Constant weights may have four bits.
WEIGHTS_NARROWED = replace(BOOLEANS_LOWERED, int4=True)
#: Each output is the result of an operator of its own; an IDENTITY is added where needed.
OUTPUTS_DISTINCT = replace(WEIGHTS_NARROWED, operators=WEIGHTS_NARROWED.operators | {"IDENTITY"}, distinct_outputs=True)
#: MX_CONV2D is legalized to block-scaled operators.
BLOCK_SCALED = replace(OUTPUTS_DISTINCT, operators=(OUTPUTS_DISTINCT.operators | _BLOCK_SCALED) - {"MX_CONV2D"})
#: Loops and branches are outlined: this is what the flatbuffer holds.
FINAL = replace(BLOCK_SCALED, operators=(BLOCK_SCALED.operators | {"COND_IF", "WHILE_LOOP"}) - {"LOOP_IN", "LOOP_OUT"})


class StageChecker:
    """Asserts that graphs meet a stage; it checks only operators that changed since the last check.

    A check of all operators after every pass takes two thirds of the passes' time; a check of the changed operators
    takes a fifth.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: Key of each operator that was legal at the last check. The key contains ids of objects. References
        #: to these objects follow, so that no new object gets the same id.
        self._legal_operators: dict[Op, tuple[object, object]] = {}

    def check(self, graph: Graph, stage: Stage, pass_name: str) -> None:
        """Assert that ``graph`` and the graphs that its operators hold meet ``stage``.

        Args:
            pass_name: the pass that ran last, for the message.

        Raises:
            AssertionError: an operator or a type is not allowed at this stage, an operator violates the TOSA
                specification or the limits of the hardware, or the outputs are not distinct.
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
        for subgraph in graphs if stage.distinct_outputs else ():
            assert all(x.producer is not None for x in subgraph.outputs), (
                f"after {pass_name}: an output is no operator's result"
            )
            assert len(set(subgraph.outputs)) == len(subgraph.outputs), (
                f"after {pass_name}: two outputs are the same value"
            )

    def _refusal(self, op: Op, stage: Stage) -> str | None:
        tensors = tuple((id(x), id(x.data), x.shape, x.dtype) for x in (*op.inputs, op.output))
        awaits_lowering = (
            stage.booleans and not self._target.hardware.booleans and any(x[3] is DType.BOOL for x in tensors)
        )
        key = (op.kind, awaits_lowering, id(op.attrs), tensors)
        if op in self._legal_operators and self._legal_operators[op][0] == key:
            return None
        reason = (emission_refusal if awaits_lowering else op_refusal)(self._target, op)
        if reason is None and not op.graphs:
            self._legal_operators[op] = key, (op.attrs, [(x, x.data) for x in op.inputs])
        return reason
