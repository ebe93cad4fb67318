"""Vectors around a MATMUL by a constant as columns, which its operand and result are: the steps of recurrent layers.

Vela then needs no TRANSPOSE before it, chains little, and places tensors at once. A step of an LSTM of 118 on U85-256:
3,644 cycles and 1,456 bytes of commands as rows, 3,384 and 1,050 as columns, in a fifth of Vela's time.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes import merge
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer, skip_through

_LONGEST = (1 << 16) - 1


def matmul_columns(graph: Graph, target: Target) -> None:
    """Where ``Hardware.slow_weights`` has such MATMULs written."""
    if not 0 < (target.macs or 0) <= target.hardware.slow_weights:
        return
    region = _region(graph)

    def as_column(op: Op, rewriter: Rewriter) -> Value | None:
        if op not in region:
            return None
        b, (shape, dtype), attrs = rewriter.build, (op.output.shape, op.output.dtype), dict(op.attrs)
        inputs = [b.reshape(x := skip_through(y, "RESHAPE"), (1, x.size, 1)) for y in op.inputs]
        if op.kind == "SLICE":
            start = int(np.ravel_multi_index(op.attrs["start"], op.inputs[0].shape))
            attrs |= {"start": [0, start, 0], "size": [1, op.output.size, 1]}
        if op.kind == "CONCAT":
            attrs["axis"] = 1
        return b.reshape(b.emit(op.kind, inputs, (1, op.output.size, 1), dtype, **attrs), shape)

    if region:
        apply_once(graph, target, {kind: [as_column] for kind in {op.kind for op in region}})
        apply_once(graph, target, {"RESHAPE": merge.RULES["RESHAPE"]})
        _join(graph, target)


def _join(graph: Graph, target: Target) -> None:
    """What is multiplied by part of a column becomes part of it too, where both are made before either is read.

    By itself Vela lays it out in bricks of 16 channels, of which it has one: 472 cycles for the 30 of 118 elements.
    """
    users, b, made, pairs = graph.users(), Builder(graph, target), set[Value](), dict[Value, tuple[Value, Op]]()
    for op in graph.ops:
        for part, other in permutations(op.inputs) if op.kind == "MUL" else ():
            whole = skip_through(part, "SLICE")
            parted = users[other] == [op] and {user.kind for user in users[whole]} == {"SLICE"}
            if parted and _of_part(whole) and _of_part(other):
                pairs[whole] = other, op
    before, graph.ops = graph.ops, []
    for op in before:
        whole = op.inputs[0]
        other, reader = pairs.pop(whole, (whole, op)) if op.kind == "SLICE" else (whole, op)
        if reader is not op and other in made:
            both = b.concat([whole, other], 1)
            for user in users[whole]:
                user.inputs[0] = both
            reader.inputs[reader.inputs.index(other)] = b.slice(both, (0, whole.size, 0), other.shape)
        graph.ops.append(op)
        made.add(op.output)


def _of_part(x: Value) -> bool:
    """Whether ``x`` is a function of arithmetic that reads a SLICE: any other Vela lays out as it likes."""
    op = skip_through(x, "RESCALE", "TABLE").producer
    sources = (
        [skip_through(y, "RESCALE", "RESHAPE") for y in op.inputs] if op is not None and op.kind in ELEMENTWISE else []
    )
    return any(producer(y, "SLICE") for y in sources)


def _region(graph: Graph) -> set[Op]:
    """Arithmetic and movement of vectors from and to such MATMULs."""
    users, region = graph.users(), set[Op]()
    waiting = [x for op in graph.ops if _is_step(op) for x in (op.inputs[1], op.output)]
    while waiting:
        x = waiting.pop()
        for op in (*users.get(x, ()), *([x.producer] if x.producer else [])):
            if op not in region and _keeps_vectors(op):
                region.add(op)
                waiting += [op.output, *(y for y in op.inputs if y.size == max(y.shape, default=1))]
    return {op for op in region if op.kind != "RESHAPE"}


def _is_step(op: Op) -> bool:
    """Whether ``op`` is such a MATMUL; not of a sum with a SLICE (a plain RNN), which takes more cycles as a column."""
    if op.kind != "MATMUL" or op.inputs[0].data is None or op.output.shape[::2] != (1, 1):
        return False
    made = skip_through(op.inputs[1], "RESHAPE", "RESCALE")
    kind = made.producer.kind if made.producer is not None else ""
    return kind == "MUL" or (kind in ("ADD", "SUB") and not _of_part(made))


def _keeps_vectors(op: Op) -> bool:
    size = op.output.size
    if not 1 < size == max(op.output.shape):
        return False
    if op.kind == "SLICE":
        whole = op.inputs[0]
        last = op.output.shape.index(size)
        return whole.size <= _LONGEST and prod(whole.shape[last + 1 :]) == 1
    if op.kind in ("RESHAPE", "CONCAT"):
        return all(x.size == max(x.shape) for x in op.inputs)
    vectors = all(x.size in (1, size) for x in op.inputs)
    return vectors and op.kind in ELEMENTWISE | {"RESCALE"} and not op.attrs.get("per_channel")
