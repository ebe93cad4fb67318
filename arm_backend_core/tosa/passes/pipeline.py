"""The pass pipeline between lowering and serialization: the passes, their order, and the reasons for this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from arm_backend_core.errors import is_strict
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes import (
    booleans,
    constant_folding,
    convolution_splitting,
    peephole_fusion,
    peephole_movement,
    peephole_transpose,
)
from arm_backend_core.tosa.passes.block_scaled import legalize_block_scaled
from arm_backend_core.tosa.passes.constant_deduplication import deduplicate_constants
from arm_backend_core.tosa.passes.control_flow import outline_control_flow
from arm_backend_core.tosa.passes.cse import duplicate_convolutions, duplicate_rescales, eliminate_common_subexpressions
from arm_backend_core.tosa.passes.layout_assignment import assign_layouts, movement_cost
from arm_backend_core.tosa.passes.matmul_columns import rewrite_vectors_to_columns
from arm_backend_core.tosa.passes.narrow_types import convert_weights_to_int4, hoist_reshapes
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import rewrite_to_fixpoint
from arm_backend_core.tosa.passes.space_to_depth import apply_space_to_depth
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
from arm_backend_core.tosa.passes.transpose_lowering import lower_transposes, sink_slices
from arm_backend_core.tosa.vela_workarounds.catalog import apply_vela_workarounds, assert_no_vela_bugs
from arm_backend_core.tosa.vela_workarounds.tables import duplicate_cheap_producers

Pass = Callable[[Graph, Target], None]


class ScheduledPass(NamedTuple):
    """A pass of the pipeline.

    Attributes:
        run: the pass, which changes the graph in place.
        reason: why the pass runs at this position.
        stage_after: the operators and types that the graph may contain after the pass.
    """

    run: Pass
    reason: str
    stage_after: Stage


#: Tables of peephole rules in the order in which the rules are tried on an operator: constant folding, data movement,
#: fusion, convolution splitting, TRANSPOSEs.
_RULE_TABLES = (
    constant_folding.RULES,
    peephole_movement.RULES,
    peephole_fusion.RULES,
    convolution_splitting.RULES,
    peephole_transpose.RULES,
)
RULES = {kind: [rule for rules in _RULE_TABLES for rule in rules.get(kind, ())] for kind in OPERATORS}
#: Apply all peephole rules to a fixpoint. Each rule removes an operator or moves one towards the outputs.
#: ``split_convolution`` removes a SLICE and splits the convolution before it.
simplify: Pass = partial(rewrite_to_fixpoint, rules=RULES)
#: Remove pairs of inverse TRANSPOSEs.
cancel_transposes: Pass = partial(rewrite_to_fixpoint, rules={"TRANSPOSE": [peephole_transpose.cancel_transpose]})
#: Merge RESHAPEs of RESHAPEs.
merge_reshapes: Pass = partial(rewrite_to_fixpoint, rules={"RESHAPE": peephole_movement.RULES["RESHAPE"]})

PASSES = (
    ScheduledPass(
        simplify,
        "Lowering does not look at neighbouring operators. All other passes expect a simplified graph.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        eliminate_common_subexpressions,
        "Layout assignment must count equal TRANSPOSEs or RESCALEs of a value once.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        assign_layouts,
        "It needs a graph without duplicates. It makes PAD, CONV2D, RESHAPE and arithmetic adjacent for the next "
        "round.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        compose_tables,
        "Layout assignment has removed TRANSPOSEs that would interrupt chains of elementwise operators.",
        SIMPLIFIED,
    ),
    ScheduledPass(
        booleans.lower_bool_to_int8,
        "TABLEs have replaced the int8 chains that have comparisons inside. This pass gives the other comparisons "
        "an int8 result, so that TABLEs of the next round can replace them.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        hoist_reshapes,
        "It moves back RESHAPEs that ``simplify`` moved towards the outputs and that no pass merged.",
        BOOLEANS_LOWERED,
    ),
)

#: Passes that run once after ``PASSES``. Most of them add operators, but the hardware executes the new graph faster.
HARDWARE_PASSES: tuple[ScheduledPass, ...] = (
    ScheduledPass(
        sink_slices,
        "The next pass can fold a SLICE into a convolution only if the two are adjacent.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(apply_space_to_depth, "It may add TRANSPOSEs, which the next pass lowers.", BOOLEANS_LOWERED),
    ScheduledPass(lower_transposes, "No later pass of this list adds a TRANSPOSE.", BOOLEANS_LOWERED),
    ScheduledPass(
        rewrite_vectors_to_columns,
        "It inserts RESHAPEs, which separate operators that the earlier passes must see side by side.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        eliminate_common_subexpressions,
        "The preceding passes emit a TRANSPOSE or RESHAPE for each reader, and some are equal.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(merge_reshapes, "The preceding passes emit RESHAPEs of RESHAPEs.", BOOLEANS_LOWERED),
)
#: Passes that run after the cost model has chosen alternatives (``arm_backend_core.alternatives``). They also run on
#: each alternative before the cost model estimates it.
LAST_PASSES = (
    ScheduledPass(
        cancel_transposes,
        "Alternatives may emit pairs of inverse TRANSPOSEs. Vela loses the offset of a SLICE before such a pair.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        duplicate_convolutions,
        "Common subexpression elimination would merge the duplicates, so this pass runs after it.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        duplicate_rescales,
        "Common subexpression elimination would merge the duplicates, so this pass runs after it.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        duplicate_cheap_producers,
        "Common subexpression elimination would merge the duplicates, so this pass runs after it.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(
        apply_vela_workarounds,
        "It depends on what Vela fuses, and the preceding duplication lets Vela fuse more.",
        BOOLEANS_LOWERED,
    ),
    ScheduledPass(convert_weights_to_int4, "The earlier passes do not handle INT4 weights.", WEIGHTS_NARROWED),
    ScheduledPass(
        make_outputs_distinct, "The earlier passes remove IDENTITYs and merge equal results.", OUTPUTS_DISTINCT
    ),
    ScheduledPass(
        legalize_block_scaled,
        "The earlier passes do not handle operators with two results. The next pass copies operators into regions.",
        BLOCK_SCALED,
    ),
    ScheduledPass(outline_control_flow, "The earlier passes do not handle operators with regions.", FINAL),
    ScheduledPass(
        deduplicate_constants,
        "It stores equal constants of different shapes once and reshapes them, and constant folding would fold these "
        "RESHAPEs into constants again. Each outlined region has its own constants.",
        FINAL,
    ),
)


def run(graph: Graph, target: Target, choose_alternatives: Pass = lambda graph, target: None) -> None:
    """Optimize ``graph`` in place for ``target``. Integer results are bit-exact.

    ``PASSES`` run in rounds. A round brings a gain if data movement costs less than after all earlier rounds, or costs
    the same with fewer operators. The rounds end when one of them changes neither the cost nor the number of operators,
    or when two in a row bring no gain. Neither figure can fall below 0, so the rounds always end.

    Args:
        choose_alternatives: replaces parts of the graph by equivalent, faster alternatives.

    Raises:
        AssertionError: a pass has a bug. It left a graph that is not in single-assignment form, an operator that is
            illegal in TOSA or on the target, a pattern that Vela miscompiles, one value as two outputs, or an output
            that is not the result of an operator.
    """
    checker = StageChecker(target) if is_strict() else None
    if checker:
        checker.check(graph, LOWERED, "lowering")
    best, rounds_without_gain = (float("inf"), 0), 0
    previous_cost = best
    while rounds_without_gain < 2:
        _run_passes(PASSES, graph, target, checker)
        cost = (movement_cost(graph), len(graph.ops))
        if cost == previous_cost:
            break
        rounds_without_gain = 0 if cost < best else rounds_without_gain + 1
        best, previous_cost = min(best, cost), cost
    _run_passes(HARDWARE_PASSES, graph, target, checker)
    choose_alternatives(graph, target)
    if checker:
        checker.check(graph, BOOLEANS_LOWERED, "the choice of alternatives")
    run_last_passes(graph, target, checker)
    assert_serializable(graph, target)


def run_last_passes(graph: Graph, target: Target, checker: StageChecker | None = None) -> None:
    """Run ``LAST_PASSES``."""
    _run_passes(LAST_PASSES, graph, target, checker)


def _run_passes(passes: Sequence[ScheduledPass], graph: Graph, target: Target, checker: StageChecker | None) -> None:
    for scheduled in passes:
        scheduled.run(graph, target)
        graph.remove_dead()
        graph.verify()
        if checker:
            checker.check(graph, scheduled.stage_after, getattr(scheduled.run, "__name__", scheduled.reason))


def assert_serializable(graph: Graph, target: Target) -> None:
    """Assert that ``graph`` can be serialized.

    Raises:
        AssertionError: an operator is illegal in TOSA or on the target, Vela miscompiles a pattern, or an output is
            repeated or is not the result of an operator.
    """
    StageChecker(target).check(graph, FINAL, "all passes")
    assert_no_vela_bugs(graph, target)
