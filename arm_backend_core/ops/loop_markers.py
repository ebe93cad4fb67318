"""LOOP_IN and LOOP_OUT operators, which mark the body of a loop whose trip count is known only at run time.

The graph contains the loop body once, inline between the LOOP_IN and LOOP_OUT operators. Every part of the compiler
thus treats the nodes of the body like all others. One of the last passes converts the region to a WHILE_LOOP
(``tosa/passes/control_flow``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arm_backend_core.ops import intervals
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import AnnotationKind, op
from arm_backend_core.tosa.graph import Value

_LIBRARY = torch.library.Library("arm_backend_core", "DEF")
_LIBRARY.define(
    "loop_in(Tensor initial, int loop, int index) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # no constant folding: the value differs in every iteration
)
_LIBRARY.define("loop_out(Tensor condition, Tensor[] next_values, Tensor[] current_values, int loop) -> Tensor[]")
LOOP_IN, LOOP_OUT = (getattr(torch.ops.arm_backend_core, name).default for name in ("loop_in", "loop_out"))


def _run_one_iteration(
    condition: torch.Tensor, next_values: Sequence[torch.Tensor], current_values: Sequence[torch.Tensor], loop: int
) -> list[torch.Tensor]:
    return [x.clone() for x in (current_values if not condition.is_meta and not condition else next_values)]


_LIBRARY.impl("loop_in", lambda initial, loop, index: initial.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("loop_out", _run_one_iteration, "CompositeExplicitAutograd")


# The integers that a loop carries are assumed to stay within 2**30, like program inputs.
@op(LOOP_IN, kind=AnnotationKind.SHARED, interval=lambda node, interval_of: intervals.ASSUMED_INTERVAL)
def loop_in(cx: Context, initial: Operand, loop: int, index: int) -> Value:
    """Loop-carried value number ``index`` at the start of an iteration of loop number ``loop``.

    The value is ``initial`` in the first iteration, and later the result of the previous iteration.
    """
    return cx.b.emit("LOOP_IN", (initial.value,), initial.value.dtype, loop=loop, index=index)


@op(LOOP_OUT, kind=AnnotationKind.SHARED, interval=lambda node, interval_of: intervals.INT32)
def loop_out(
    cx: Context, condition: Operand, next_values: Sequence[Operand], current_values: Sequence[Operand], loop: int
) -> list[Operand]:
    """The loop-carried values after the loop.

    ``condition`` and ``next_values`` are computed from ``current_values``. If the condition is false, the loop ends
    with ``current_values``, otherwise it goes on with ``next_values``.

    Each LOOP_OUT operator reads all values, so that dead code elimination cannot remove one of them.
    """
    requantized_values = [
        y.value if x.q is None else cx.requantize(y, x.q) for y, x in zip(next_values, current_values, strict=True)
    ]
    values = [condition.value, *requantized_values, *(x.value for x in current_values)]
    return [
        Operand(cx.b.emit("LOOP_OUT", values, x.value.dtype, loop=loop, index=index), x.q)
        for index, x in enumerate(current_values)
    ]
