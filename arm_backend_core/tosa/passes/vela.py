"""Ethos-U: forms that Vela 5.1 compiles to something else, in forms that it compiles right (``docs/vela.md``).

``Hardware.mistakes`` names those that a family meets. Nothing here changes a bit of a result.
"""

from __future__ import annotations

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.passes import vela_numbers, vela_parts, vela_tables
from arm_backend_core.tosa.passes.rewrite import Rule, sweep

_RULES = vela_parts.RULES | vela_numbers.RULES | vela_tables.RULES


def avoid_mistakes(graph: Graph, target: Target) -> None:
    """Each operator once: what is written is not looked at again."""
    rules: dict[str, list[Rule]] = {}
    for mistake in target.hardware.mistakes:
        for rule, kinds in _RULES[mistake]:
            for kind in kinds:
                rules.setdefault(kind, []).append(rule)
    if rules:
        sweep(graph, target, rules)
