"""The passes between lowering and the flatbuffer, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from arm_backend_core.errors import is_strict
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes import booleans, fold, fuse, merge, split, transpose
from arm_backend_core.tosa.passes.block_scaled import write_block_scaled
from arm_backend_core.tosa.passes.branches import write_branches
from arm_backend_core.tosa.passes.constant_views import share_constant_bytes
from arm_backend_core.tosa.passes.cse import share_common
from arm_backend_core.tosa.passes.layout_choice import choose_layouts, movement_cost
from arm_backend_core.tosa.passes.matmul_columns import matmul_columns
from arm_backend_core.tosa.passes.narrow import move_narrow_elements, narrow_weights
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import rewrite_to_fixpoint
from arm_backend_core.tosa.passes.space_to_depth import fold_strides
from arm_backend_core.tosa.passes.stages import (
    BLOCKS,
    COUNTED,
    LOWERED,
    NARROWED,
    RETURNED,
    SIMPLE,
    WRITTEN,
    Stage,
    StageChecker,
)
from arm_backend_core.tosa.passes.table import compose_tables
from arm_backend_core.tosa.passes.transpose_form import choose_transpose_forms, slice_after_transposes
from arm_backend_core.tosa.vela_workarounds.catalog import apply_vela_workarounds, assert_no_vela_bugs
from arm_backend_core.tosa.vela_workarounds.tables import duplicate_cheap_producers

Pass = Callable[[Graph, Target], None]


class Step(NamedTuple):
    """A pass, the reason for its place, and what a graph may hold behind it."""

    run: Pass
    reason: str
    behind: Stage


#: Rules by operator: constants first, then fewer data movements, then fusion, then what moves a TRANSPOSE.
_FAMILIES = (fold.RULES, merge.RULES, fuse.RULES, split.RULES, transpose.RULES)
RULES = {kind: [rule for rules in _FAMILIES for rule in rules.get(kind, ())] for kind in OPERATORS}
#: Apply all local rules until none does anything; each removes an operator or moves one downstream.
simplify: Pass = partial(rewrite_to_fixpoint, rules=RULES)
undo_transposes: Pass = partial(rewrite_to_fixpoint, rules={"TRANSPOSE": [transpose.undo_transpose]})
#: RESHAPEs of RESHAPEs become one.
merge_reshapes: Pass = partial(rewrite_to_fixpoint, rules={"RESHAPE": merge.RULES["RESHAPE"]})

PASSES = (
    Step(simplify, "first: what lowering wrote without looking around need not be seen by the others", SIMPLE),
    Step(share_common, "equal TRANSPOSEs and RESCALEs of one value must be one before layouts are chosen", SIMPLE),
    Step(choose_layouts, "on the merged graph; in the next round PAD, CONV2D, RESHAPE and arithmetic meet", SIMPLE),
    Step(compose_tables, "after the TRANSPOSEs are gone: only whole elementwise chains become tables", SIMPLE),
    Step(booleans.lower_bool_to_int8, "after whole chains that compare are tables; the rest may join others", COUNTED),
    Step(move_narrow_elements, "undoes what simplify let sink in vain, so after all that could merge", COUNTED),
)

#: Once, after the others: they write more operators than they remove, for hardware that runs these faster.
HARDWARE_PASSES: tuple[Step, ...] = (
    Step(slice_after_transposes, "a convolution that is folded reads beyond the SLICE", COUNTED),
    Step(fold_strides, "before TRANSPOSEs get their form, because it may add some", COUNTED),
    Step(choose_transpose_forms, "needs each TRANSPOSE that will be there", COUNTED),
    Step(matmul_columns, "after all that looks for neighbours in other shapes; it leaves equal RESHAPEs", COUNTED),
    Step(share_common, "several readers of one input ask for the same TRANSPOSE", COUNTED),
    Step(merge_reshapes, "the two above view images as they like, so RESHAPEs meet", COUNTED),
)
#: Behind the alternatives that the cost model chooses (``arm_backend_core.alternatives``); each alternative runs them.
LAST_PASSES = (
    Step(undo_transposes, "of forms that turn back; before two that undo each other Vela forgets a SLICE", COUNTED),
    Step(duplicate_cheap_producers, "what is there twice must not be shared again", COUNTED),
    Step(
        apply_vela_workarounds,
        "on the neighbours that Vela will see; it would not fuse what two readers share",
        COUNTED,
    ),
    Step(narrow_weights, "the others compute with int8", NARROWED),
    Step(make_outputs_distinct, "the others remove IDENTITY and share equal results", RETURNED),
    Step(write_block_scaled, "before branches take what they read; the others know operators of one result", BLOCKS),
    Step(write_branches, "an operator that holds graphs is none that the others know", WRITTEN),
    Step(share_constant_bytes, "last: rules would fold the RESHAPE; branches have constants of their own", WRITTEN),
)


def run(graph: Graph, target: Target, forms: Pass = lambda graph, target: None) -> None:
    """Optimise ``graph`` in place for ``target``; integer results keep every bit. ``forms`` chooses among equal ones.

    The general passes are repeated until neither of two rounds lowers the cost of data movement or, at no more of it,
    the number of operators: both are bounded from below.

    Raises:
        AssertionError: a pass left a graph that is not in single-assignment form, an operator that its record or the
            hardware refuses, a form that Vela gets wrong, or one value for two outputs; the pass is wrong.
    """
    checker = StageChecker(target) if is_strict() else None
    if checker:
        checker.check(graph, LOWERED, "lowering")
    best, vain = (float("inf"), 0), 0
    last = best
    while vain < 2:
        _apply(PASSES, graph, target, checker)
        cost = (movement_cost(graph), len(graph.ops))
        if cost == last:
            break
        vain = 0 if cost < best else vain + 1
        best, last = min(best, cost), cost
    _apply(HARDWARE_PASSES, graph, target, checker)
    forms(graph, target)
    if checker:
        checker.check(graph, COUNTED, "the forms")
    finish(graph, target, checker)
    check(graph, target)


def finish(graph: Graph, target: Target, checker: StageChecker | None = None) -> None:
    """Run the passes that follow the choice of alternatives."""
    _apply(LAST_PASSES, graph, target, checker)


def _apply(steps: Sequence[Step], graph: Graph, target: Target, checker: StageChecker | None) -> None:
    for step in steps:
        step.run(graph, target)
        graph.remove_dead()
        graph.verify()
        if checker:
            checker.check(graph, step.behind, getattr(step.run, "__name__", step.reason))


def check(graph: Graph, target: Target) -> None:
    """What every graph that is written must be.

    Raises:
        AssertionError: an operator is refused by its record or by the hardware, Vela gets a form wrong, or an output is
            no operator's result or is there twice.
    """
    StageChecker(target).check(graph, WRITTEN, "all passes")
    assert_no_vela_bugs(graph, target)
