"""The pass pipeline between lowering and serialization: which passes run, in which order and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from arm_backend_core.errors import is_strict
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes import booleans, fold, fuse, merge, split, transpose
from arm_backend_core.tosa.passes.block_scaled import legalize_block_scaled
from arm_backend_core.tosa.passes.branches import outline_control_flow
from arm_backend_core.tosa.passes.constant_views import deduplicate_constants
from arm_backend_core.tosa.passes.cse import eliminate_common_subexpressions
from arm_backend_core.tosa.passes.layout_choice import assign_layouts, movement_cost
from arm_backend_core.tosa.passes.matmul_columns import matmul_columns
from arm_backend_core.tosa.passes.narrow import hoist_reshapes, narrow_weights
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import rewrite_to_fixpoint
from arm_backend_core.tosa.passes.space_to_depth import reduce_strides
from arm_backend_core.tosa.passes.stages import (
    BLOCK_SCALED,
    BOOLEANS_LOWERED,
    FINAL,
    LOWERED,
    OUTPUTS_DISTINCT,
    SIMPLIFIED,
    WEIGHTS_NARROWED,
    Stage,
    StageChecker,
)
from arm_backend_core.tosa.passes.table import compose_tables
from arm_backend_core.tosa.passes.transpose_form import lower_transposes, sink_slices
from arm_backend_core.tosa.vela_workarounds.catalog import apply_vela_workarounds, assert_no_vela_bugs
from arm_backend_core.tosa.vela_workarounds.tables import duplicate_cheap_producers

Pass = Callable[[Graph, Target], None]


class ScheduledPass(NamedTuple):
    """A pass of the pipeline.

    Attributes:
        run: the pass; it changes the graph in place.
        reason: why it stands at this place.
        stage_after: the stage that it leaves, which defines the allowed operators.
    """

    run: Pass
    reason: str
    stage_after: Stage


#: Peephole rules by operator kind: constant folding, merging of data movement, fusion, splitting, TRANSPOSEs.
_FAMILIES = (fold.RULES, merge.RULES, fuse.RULES, split.RULES, transpose.RULES)
RULES = {kind: [rule for rules in _FAMILIES for rule in rules.get(kind, ())] for kind in OPERATORS}
#: Apply all peephole rules to a fixpoint; each rule removes an operator or moves one downstream.
simplify: Pass = partial(rewrite_to_fixpoint, rules=RULES)
cancel_transposes: Pass = partial(rewrite_to_fixpoint, rules={"TRANSPOSE": [transpose.cancel_transpose]})
#: Merge RESHAPEs of RESHAPEs.
merge_reshapes: Pass = partial(rewrite_to_fixpoint, rules={"RESHAPE": merge.RULES["RESHAPE"]})

PASSES = (
    ScheduledPass(
        simplify,
        "Lowering emits each operator without looking at its neighbours; the later passes see simplified code.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        eliminate_common_subexpressions,
        "Layout assignment must see equal TRANSPOSEs and RESCALEs of one value as one.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        assign_layouts,
        "It needs the merged graph, and makes PAD, CONV2D, RESHAPE and arithmetic neighbours for the next round.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        compose_tables, "Without TRANSPOSEs between them, elementwise operators form the longest chains.", SIMPLIFIED
    ),
    ScheduledPass(
        booleans.lower_bool_to_int8,
        "Chains with comparisons are tables by now; the arithmetic of the others may join chains in the next round.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        hoist_reshapes, "It moves RESHAPEs back that simplify sank but that no pass could merge.", BOOLEANS_LOWERED
    ),
)

#: Run once after ``PASSES``: they emit more operators than they remove, which the hardware executes faster.
HARDWARE_PASSES: tuple[ScheduledPass, ...] = (
    ScheduledPass(
        sink_slices,
        "The folded convolution of the next pass can read beyond a SLICE that directly precedes it.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(reduce_strides, "It may add TRANSPOSEs, which the next pass lowers.", BOOLEANS_LOWERED),
    ScheduledPass(lower_transposes, "No later pass of this list adds a TRANSPOSE.", BOOLEANS_LOWERED),
    ScheduledPass(
        matmul_columns,
        "It inserts RESHAPEs, which hide neighbours from the earlier passes.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        eliminate_common_subexpressions,
        "The passes above emit a TRANSPOSE or RESHAPE for each reader, and some are equal.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        merge_reshapes, "The passes above reshape images, so that RESHAPEs of RESHAPEs appear.", BOOLEANS_LOWERED
    ),
)
#: Run after the cost model's choice of alternatives (``arm_backend_core.alternatives``), and on each alternative.
LAST_PASSES = (
    ScheduledPass(
        cancel_transposes,
        "Alternatives may emit inverse TRANSPOSEs; before such a pair, Vela loses the offset of a SLICE.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        duplicate_cheap_producers,
        "It follows the last common subexpression elimination, which would merge the duplicates.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        apply_vela_workarounds,
        "It needs the neighbours that Vela will see; before the duplication, Vela would fuse less.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(narrow_weights, "The earlier passes handle int8 weights only.", WEIGHTS_NARROWED),
    ScheduledPass(
        make_outputs_distinct, "The earlier passes remove IDENTITY and merge equal results.", OUTPUTS_DISTINCT
    ),
    ScheduledPass(
        legalize_block_scaled,
        "The earlier passes handle operators with one result only; outlined regions must have the operators already.",
        BLOCK_SCALED,
    ),
    ScheduledPass(outline_control_flow, "The earlier passes do not handle operators that hold graphs.", FINAL),
    ScheduledPass(
        deduplicate_constants,
        "Constant folding would remove its RESHAPEs; each outlined region has constants of its own.",
        FINAL,
    ),
)


def run(graph: Graph, target: Target, choose_alternatives: Pass = lambda graph, target: None) -> None:
    """Optimize ``graph`` in place for ``target``; integer results keep every bit.

    The general passes repeat until two rounds reduce neither the cost of data movement nor, at equal cost, the number
    of operators. Both are bounded from below, so that the loop ends.

    Args:
        choose_alternatives: replaces parts of the graph by equal alternatives.

    Raises:
        AssertionError: a pass is wrong. It left a graph that is not in single-assignment form, an operator that its
            record or the hardware refuses, a pattern that Vela miscompiles, or one value as two outputs.
    """
    checker = StageChecker(target) if is_strict() else None
    if checker:
        checker.check(graph, LOWERED, "lowering")
    best, rounds_without_gain = (float("inf"), 0), 0
    last = best
    while rounds_without_gain < 2:
        _apply(PASSES, graph, target, checker)
        cost = (movement_cost(graph), len(graph.ops))
        if cost == last:
            break
        rounds_without_gain = 0 if cost < best else rounds_without_gain + 1
        best, last = min(best, cost), cost
    _apply(HARDWARE_PASSES, graph, target, checker)
    choose_alternatives(graph, target)
    if checker:
        checker.check(graph, BOOLEANS_LOWERED, "the choice of alternatives")
    finish(graph, target, checker)
    check(graph, target)


def finish(graph: Graph, target: Target, checker: StageChecker | None = None) -> None:
    """Run the passes that follow the choice of alternatives."""
    _apply(LAST_PASSES, graph, target, checker)


def _apply(steps: Sequence[ScheduledPass], graph: Graph, target: Target, checker: StageChecker | None) -> None:
    for step in steps:
        step.run(graph, target)
        graph.remove_dead()
        graph.verify()
        if checker:
            checker.check(graph, step.stage_after, getattr(step.run, "__name__", step.reason))


def check(graph: Graph, target: Target) -> None:
    """Assert the conditions that every serialized graph meets.

    Raises:
        AssertionError: an operator's record or the hardware refuses it, Vela miscompiles a pattern, or an output is
            repeated or is no operator's result.
    """
    StageChecker(target).check(graph, FINAL, "all passes")
    assert_no_vela_bugs(graph, target)
