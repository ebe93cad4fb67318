"""Stages of the pass pipeline: the operators and types that a graph may contain after each pass, and their check."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Op
from arm_backend_core.tosa.legality import op_refusal, op_refusal_before_bool_lowering
from arm_backend_core.tosa.operators import OPERATORS


@dataclass(frozen=True)
class Stage:
    """The operators and types that a graph may contain. Each operator must also be legal on the target.

    Attributes:
        operators: the operator kinds.
        allows_bool: whether boolean operators may occur on hardware without booleans, before
            ``booleans.lower_bool_to_int8`` has run.
        allows_int4: whether weights may be INT4.
        distinct_outputs: whether each output must be the result of an operator, and no value may be output twice.
    """

    operators: frozenset[str]
    allows_bool: bool = False
    allows_int4: bool = False
    distinct_outputs: bool = False


_BLOCK_SCALED = {"CAST_TO_BLOCK_SCALED", "CONV2D_BLOCK_SCALED"}
#: After lowering: operators with one result each. Placeholders stand for block-scaled convolutions (``MX_CONV2D``) and
#: for loops (``LOOP_IN``, ``LOOP_OUT``).
LOWERED = Stage(frozenset(OPERATORS) - _BLOCK_SCALED, allows_bool=True)
#: After the peephole rules: no IDENTITY.
SIMPLIFIED = replace(LOWERED, operators=LOWERED.operators - {"IDENTITY"})
#: After ``lower_bool_to_int8``: booleans only if the hardware has them.
BOOLEANS_LOWERED = replace(SIMPLIFIED, allows_bool=False)
#: Constant weights may have four bits.
WEIGHTS_NARROWED = replace(BOOLEANS_LOWERED, allows_int4=True)
#: Each output is the result of an operator, and no two outputs are the same value. IDENTITYs are added where needed.
OUTPUTS_DISTINCT = replace(WEIGHTS_NARROWED, operators=WEIGHTS_NARROWED.operators | {"IDENTITY"}, distinct_outputs=True)
#: MX_CONV2D is legalized to block-scaled operators.
BLOCK_SCALED = replace(OUTPUTS_DISTINCT, operators=(OUTPUTS_DISTINCT.operators | _BLOCK_SCALED) - {"MX_CONV2D"})
#: Loops and branches are outlined. The flatbuffer holds this graph.
FINAL = replace(BLOCK_SCALED, operators=(BLOCK_SCALED.operators | {"COND_IF", "WHILE_LOOP"}) - {"LOOP_IN", "LOOP_OUT"})


class StageChecker:
    """Asserts that a graph conforms to a stage.

    It checks the legality only of operators that changed since its last check. A check of all operators after every
    pass would take two thirds of the pipeline's time. The incremental check takes a fifth.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        #: {operator that was legal at its last check: (key, referenced objects)}. If the key is the same at the next
        #: check, the operator has not changed. The key contains ids of the referenced objects. The references keep the
        #: objects alive, so that no new object gets the same id.
        self._legal_operators: dict[Op, tuple[object, object]] = {}

    def check(self, graph: Graph, stage: Stage, pass_name: str) -> None:
        """Assert that ``graph`` and the regions of its operators conform to ``stage``.

        Args:
            pass_name: the pass that ran last, for the message.

        Raises:
            AssertionError: an operator or a type is not allowed at this stage, an operator violates the TOSA
                specification or a limit of the hardware, two outputs are the same value, or an output is not the result
                of an operator.
        """
        graphs = [graph]
        for op in graph.walk():
            graphs += op.regions
            assert op.kind in stage.operators, f"after {pass_name}: {op.kind} is not allowed at this stage: {op!r}"
            assert stage.allows_int4 or all(x.dtype is not DType.INT4 for x in op.inputs), (
                f"after {pass_name}: INT4 is not allowed at this stage: {op!r}"
            )
            reason = self._refusal(op, stage)
            assert reason is None, f"after {pass_name}: {op!r}: {reason}"
        for subgraph in graphs if stage.distinct_outputs else ():
            assert all(x.producer is not None for x in subgraph.outputs), (
                f"after {pass_name}: an output is not the result of an operator"
            )
            assert len(set(subgraph.outputs)) == len(subgraph.outputs), (
                f"after {pass_name}: two outputs are the same value"
            )

    def _refusal(self, op: Op, stage: Stage) -> str | None:
        tensors = tuple((id(x), id(x.data), x.shape, x.dtype) for x in (*op.inputs, op.output))
        awaits_lowering = (
            stage.allows_bool and not self._target.hardware.has_booleans and any(x[3] is DType.BOOL for x in tensors)
        )
        key = (op.kind, awaits_lowering, id(op.attrs), tensors)
        if op in self._legal_operators and self._legal_operators[op][0] == key:
            return None
        reason = (op_refusal_before_bool_lowering if awaits_lowering else op_refusal)(self._target, op)
        if reason is None and not op.regions:
            self._legal_operators[op] = key, (op.attrs, [(x, x.data) for x in op.inputs])
        return reason
