"""Every so many elements put together again, as networks cut images: a TRANSPOSE, where each SLICE is a copy."""

from __future__ import annotations

import numpy as np

from arm_backend_core.alternatives.choose import Alternative, Region, around
from arm_backend_core.alternatives.split_axes import places
from arm_backend_core.alternatives.transpose_split import STEPS
from arm_backend_core.permutation import Layout
from arm_backend_core.tosa.graph import Op, Value
from arm_backend_core.tosa.operators import Array
from arm_backend_core.tosa.passes.rewrite import Rewriter
from arm_backend_core.tosa.passes.transpose_form import lower_transpose

_CUTS = ("RESHAPE", "SLICE", "TRANSPOSE")
#: Elements of which it is looked up where they come from.
_MOST = 1 << 22


def turn_at_once(op: Op, rewriter: Rewriter) -> Value | None:
    """CONCAT of what SLICE cuts, all of it, from one value in order: x[0::2], x[1::2] as [N / 2, 2] to [2, N / 2].

    Vela copies every SLICE in front of a CONCAT, elements apart one by one: 8 cycles each. 3x96x96 to 12x48x48, int8,
    as YOLOv5's focus: 634 k cycles with two convolutions of 3x3 behind it on U55-128, 290 k as a TRANSPOSE that the
    first of them reads.
    """
    found = _turned(op)
    if found is None:
        return None
    b, (x, shape, perms) = rewriter.build, found
    turned = b.transpose(b.reshape(x, shape), perms)
    if (made := turned.producer) is not None and made.kind == "TRANSPOSE":
        form = STEPS.rule if b.target.hardware.transposes_by_convolution else lower_transpose
        turned = form(made, rewriter) or turned
    return b.reshape(turned, op.output.shape)


def _turned(op: Op) -> tuple[Value, Layout, Layout] | None:
    """What is put together again, the shape that it has, and the order of that: None where it is no TRANSPOSE."""
    if op.output.size > _MOST:
        return None
    found = [_source(value, op.output.size) for value in op.inputs]
    x = found[0][0]
    if any(source is not x for source, _ in found) or x.size != op.output.size or not any(steps for _, steps in found):
        return None
    parts = [places(x, steps).reshape(value.shape) for value, (_, steps) in zip(op.inputs, found, strict=True)]
    runs = _runs(np.concatenate(parts, op.attrs["axis"]).ravel())
    if runs is None:
        return None
    order = sorted(range(len(runs)), key=lambda i: -runs[i][1])
    if [runs[i][1] for i in order] != [int(np.prod([runs[j][0] for j in order[i + 1 :]])) for i in range(len(order))]:
        return None
    return x, tuple(runs[i][0] for i in order), tuple(order.index(i) for i in range(len(runs)))


def _source(value: Value, size: int) -> tuple[Value, list[Op]]:
    """What has so many elements, and the operators that give ``value`` of it."""
    steps: list[Op] = []
    while (step := value.producer) is not None and step.kind in (_CUTS if value.size < size else ("RESHAPE",)):
        steps.insert(0, step)
        value = step.inputs[0]
    return value, steps


def _runs(order: Array) -> list[tuple[int, int]] | None:
    """(size, step) of dimensions that have elements in this order, the last one last; None where none have."""
    runs: list[tuple[int, int]] = []
    while len(order) > 1:
        step = int(order[1] - order[0])
        others = np.flatnonzero(np.diff(order) != step)
        size = int(others[0]) + 1 if len(others) else len(order)
        if step < 1 or len(order) % size:
            return None
        rows = order.reshape(-1, size)
        if not np.array_equal(rows, rows[:, :1] + np.arange(size) * step):
            return None
        runs.insert(0, (size, step))
        order = rows[:, 0]
    return runs


def _together(op: Op, rewriter: Rewriter) -> Region | None:
    if _turned(op) is None:
        return None
    return Region(around(op, rewriter, _CUTS, ("CONV2D", "RESCALE", *_CUTS)), ((op,),))


PHASES = Alternative("parts put together as one transposition", ("CONCAT",), turn_at_once, _together)
