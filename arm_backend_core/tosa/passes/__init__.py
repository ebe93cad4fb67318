"""The passes between lowering and the flatbuffer, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legality import op_refusal
from arm_backend_core.tosa.operators import OPERATORS
from arm_backend_core.tosa.passes import booleans, fold, fuse, merge, split, transpose
from arm_backend_core.tosa.passes.block_scaled import write_block_scaled
from arm_backend_core.tosa.passes.branches import write_branches
from arm_backend_core.tosa.passes.cse import share_common
from arm_backend_core.tosa.passes.layout_choice import choose_layouts, movement_cost
from arm_backend_core.tosa.passes.narrow import move_narrow_elements, narrow_weights
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import settle
from arm_backend_core.tosa.passes.space_to_depth import fold_strides
from arm_backend_core.tosa.passes.table import compose_tables
from arm_backend_core.tosa.passes.transpose_form import choose_transpose_forms, slice_after_transposes
from arm_backend_core.tosa.passes.vela import avoid_mistakes, check_mistakes
from arm_backend_core.tosa.passes.vela_columns import write_columns
from arm_backend_core.tosa.passes.vela_tables import give_arithmetic

Pass = Callable[[Graph, Target], None]

#: Rules by operator: constants first, then fewer data movements, then fusion, then what moves a TRANSPOSE.
_FAMILIES = (fold.RULES, merge.RULES, fuse.RULES, split.RULES, transpose.RULES)
RULES = {kind: [rule for rules in _FAMILIES for rule in rules.get(kind, ())] for kind in OPERATORS}
#: Apply all local rules until none does anything; each removes an operator or moves one downstream.
simplify: Pass = partial(settle, rules=RULES)
undo_transposes: Pass = partial(settle, rules={"TRANSPOSE": [transpose.undo_transpose]})
#: RESHAPEs of RESHAPEs become one.
merge_reshapes: Pass = partial(settle, rules={"RESHAPE": merge.RULES["RESHAPE"]})

PASSES: tuple[tuple[Pass, str], ...] = (
    (simplify, "first: what lowering wrote without looking around need not be seen by the others"),
    (share_common, "equal TRANSPOSEs and RESCALEs of one value must be one before layouts are chosen"),
    (choose_layouts, "on the merged graph; in the next round PAD, CONV2D, RESHAPE and arithmetic meet"),
    (compose_tables, "after the TRANSPOSEs are gone: only whole elementwise chains become tables"),
    (booleans.count_booleans, "after whole chains that compare are tables; what is left may become parts of others"),
    (move_narrow_elements, "undoes what simplify let sink in vain, so it comes after all that could merge"),
)

#: Once, after the others: they write more operators than they remove, for hardware that runs these faster.
HARDWARE_PASSES: tuple[tuple[Pass, str], ...] = (
    (slice_after_transposes, "a convolution that is folded reads beyond the SLICE"),
    (fold_strides, "before TRANSPOSEs get their form, because it may add some"),
    (choose_transpose_forms, "needs each TRANSPOSE that will be there"),
    (write_columns, "after all that looks for neighbours in other shapes; it leaves equal RESHAPEs"),
    (share_common, "several readers of one input ask for the same TRANSPOSE"),
    (merge_reshapes, "the two above view images as they like, so RESHAPEs meet"),
)
#: Behind the forms that are chosen by their price (``arm_backend_core.forms``), of each of which they are a part.
LAST_PASSES: tuple[tuple[Pass, str], ...] = (
    (undo_transposes, "forms turn what was turned before; Vela would forget a SLICE before two that undo each other"),
    (give_arithmetic, "what is there twice must not be shared again"),
    (avoid_mistakes, "on the neighbours that Vela will see; what two readers share of it Vela would not fuse"),
    (narrow_weights, "the others compute with int8"),
    (make_outputs_distinct, "the others remove IDENTITY and share equal results"),
    (write_block_scaled, "before branches take what they read; the others know operators of one result"),
    (write_branches, "last: an operator that holds graphs is none that the others know"),
)


def run(graph: Graph, target: Target, forms: Pass = lambda graph, target: None) -> None:
    """Optimise ``graph`` in place for ``target``; integer results keep every bit. ``forms`` chooses among equal ones.

    The general passes are repeated until neither of two rounds lowers the cost of data movement or, at no more of it,
    the number of operators: both are bounded from below.

    Raises:
        AssertionError: a pass left a graph that is not in single-assignment form, an operator that its record or the
            hardware refuses, a form that Vela gets wrong, or one value for two outputs; the pass is wrong.
    """
    best, vain = (float("inf"), 0), 0
    last = best
    while vain < 2:
        _apply(PASSES, graph, target)
        cost = (movement_cost(graph), len(graph.ops))
        if cost == last:
            break
        vain = 0 if cost < best else vain + 1
        best, last = min(best, cost), cost
    _apply(HARDWARE_PASSES, graph, target)
    forms(graph, target)
    finish(graph, target)
    check(graph, target)
    check_mistakes(graph, target)


def _apply(passes: Sequence[tuple[Pass, str]], graph: Graph, target: Target) -> None:
    for transform, _reason in passes:
        transform(graph, target)
        graph.remove_dead()
        graph.verify()


#: What is left to do when all forms are chosen.
finish: Pass = partial(_apply, LAST_PASSES)


def check(graph: Graph, target: Target) -> None:
    """What every graph that is written must be.

    Raises:
        AssertionError: an operator is refused by its record or by the hardware, or an output is no operator's result or
            is there twice.
    """
    for op in graph.walk():
        reason = None if op.graphs else op_refusal(target, op)
        assert reason is None, f"{op!r}: {reason}"
    assert all(value.producer is not None for value in graph.outputs), "an output is an input or a constant"
    assert len(set(graph.outputs)) == len(graph.outputs), "two outputs are one value"
