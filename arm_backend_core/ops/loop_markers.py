"""Markers of a loop whose trip count is known only at run time.

The graph contains one iteration of the loop body inline, between LOOP_IN and LOOP_OUT operators. Every part of the
compiler thus treats these nodes like all others. The last pass converts the marked region to a WHILE_LOOP
(``tosa/passes/branches``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from arm_backend_core.ops import intervals
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, op
from arm_backend_core.tosa.graph import Value

_LIBRARY = torch.library.Library("arm_backend_core", "DEF")
_LIBRARY.define(
    "loop_in(Tensor first, int loop, int place) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # no constant folding: the value differs in every iteration
)
_LIBRARY.define("loop_out(Tensor goes_on, Tensor[] then, Tensor[] last, int loop) -> Tensor[]")
LOOP_IN, LOOP_OUT = (getattr(torch.ops.arm_backend_core, name).default for name in ("loop_in", "loop_out"))


def _run_one_iteration(
    goes_on: torch.Tensor, then: Sequence[torch.Tensor], last: Sequence[torch.Tensor], loop: int
) -> list[torch.Tensor]:
    return [x.clone() for x in (last if not goes_on.is_meta and not goes_on else then)]


_LIBRARY.impl("loop_in", lambda first, loop, place: first.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("loop_out", _run_one_iteration, "CompositeExplicitAutograd")


# A loop's integers are assumed to fit int32, like program inputs.
@op(LOOP_IN, kind=Kind.SHARED, interval=lambda node, interval_of: intervals.ASSUMED_INTERVAL)
def loop_in(cx: Context, first: Tensor, loop: int, place: int) -> Value:
    """A loop-carried value at the start of an iteration: ``first``, or the result of the previous iteration."""
    return cx.b.emit("LOOP_IN", (first.value,), first.value.dtype, loop=loop, place=place)


@op(LOOP_OUT, kind=Kind.SHARED, interval=lambda node, interval_of: intervals.INT32)
def loop_out(cx: Context, goes_on: Tensor, then: Sequence[Tensor], last: Sequence[Tensor], loop: int) -> list[Tensor]:
    """The loop-carried values after the loop: those for which the condition ``goes_on`` is false.

    Each LOOP_OUT operator reads all values, so that dead code elimination cannot remove one of them.
    """
    next_values = [y.value if x.q is None else cx.requantize(y, x.q) for y, x in zip(then, last, strict=True)]
    values = [goes_on.value, *next_values, *(x.value for x in last)]
    return [
        Tensor(cx.b.emit("LOOP_OUT", values, x.value.dtype, loop=loop, place=place), x.q)
        for place, x in enumerate(last)
    ]
