"""The passes between lowering and the flatbuffer, in their order."""

from __future__ import annotations

from collections.abc import Callable

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.passes import absorb, fold, fuse, merge
from arm_backend_core.tosa.passes.cse import share_common
from arm_backend_core.tosa.passes.layout import choose_layouts
from arm_backend_core.tosa.passes.outputs import make_outputs_distinct
from arm_backend_core.tosa.passes.rewrite import sweep
from arm_backend_core.tosa.passes.table import compose_tables
from arm_backend_core.tosa.signatures import SIGNATURES

Pass = Callable[[Graph, Target], None]

#: Rules by operator: a constant result first, then fewer data movements, then fusion, then what moves only a TRANSPOSE.
_FAMILIES = (fold.RULES, merge.RULES, fuse.RULES, absorb.RULES)
_RULES = {kind: [rule for rules in _FAMILIES for rule in rules.get(kind, ())] for kind in SIGNATURES}
#: Every rule removes an operator, or moves one towards the outputs; this only bounds a wrong rule.
_SWEEPS = 50


def simplify(graph: Graph, target: Target) -> None:
    """Apply all local rules until none does anything."""
    for _ in range(_SWEEPS):
        if not sweep(graph, target, _RULES):
            return
    raise AssertionError("the local rules do not come to an end")


PASSES: tuple[tuple[Pass, str], ...] = (
    (simplify, "removes what lowering wrote without looking around, so that the later passes see less"),
    (share_common, "equal TRANSPOSEs and RESCALEs of one value must be one before their layout is chosen"),
    (choose_layouts, "needs the merged graph; brings convolutions next to the operators that they fuse with"),
    (simplify, "the TRANSPOSEs are gone from between PAD, CONV2D, RESHAPE and arithmetic: those meet now"),
    (choose_layouts, "again, for the RESHAPEs and PADs that are gone and stood in a TRANSPOSE's way"),
    (simplify, "merges what the second choice of layouts brought together"),
    (compose_tables, "after the TRANSPOSEs are gone, since only whole elementwise chains become tables"),
    (share_common, "rules that ran once per reader wrote equal operators"),
    (make_outputs_distinct, "last: the rules above remove IDENTITY"),
)


def run(graph: Graph, target: Target) -> None:
    """Optimise ``graph`` in place for ``target``; integer results keep every bit.

    Raises:
        AssertionError: a pass left a graph that is not in single-assignment form; the pass is wrong.
    """
    for transform, _ in PASSES:
        transform(graph, target)
        graph.remove_dead()
        graph.verify()
