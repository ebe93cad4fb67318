"""Column vectors around MATMULs by a constant (recurrent layers).

The operand and the result of such a MATMUL are columns [1, N, 1]. This pass gives all connected vectors that shape.
Vela then needs no TRANSPOSE before the MATMUL, forms fewer chains of elementwise operations, and allocates tensors
faster. On U85-256, one time step of an LSTM with 118 units takes 3,644 cycles and 1,456 bytes of commands with row
vectors, and 3,384 cycles and 1,050 bytes with columns. Vela compiles the columns in a fifth of the time.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, prod
from arm_backend_core.tosa.operators import ELEMENTWISE
from arm_backend_core.tosa.passes import peephole_movement
from arm_backend_core.tosa.passes.rewrite import Rewriter, apply_once, producer, skip_through

#: Maximum number of elements of a sliced column: dimensions have 16 bits.
_MAX_SLICED_SIZE = (1 << 16) - 1


def rewrite_vectors_to_columns(graph: Graph, target: Target) -> None:
    """Rewrite vectors around MATMULs to columns on targets with up to ``Hardware.slow_weights_max_macs`` MACs."""
    if not 0 < (target.macs or 0) <= target.hardware.slow_weights_max_macs:
        return
    region = _find_region(graph)

    def rewrite_as_column(op: Op, rewriter: Rewriter) -> Value | None:
        if op not in region:
            return None
        b, (shape, dtype), attrs = rewriter.builder, (op.output.shape, op.output.dtype), dict(op.attrs)
        inputs = [b.reshape(x := skip_through(y, "RESHAPE"), (1, x.size, 1)) for y in op.inputs]
        if op.kind == "SLICE":
            start = int(np.ravel_multi_index(op.attrs["start"], op.inputs[0].shape))
            attrs |= {"start": [0, start, 0], "size": [1, op.output.size, 1]}
        if op.kind == "CONCAT":
            attrs["axis"] = 1
        return b.reshape(b.emit(op.kind, inputs, dtype, **attrs), shape)

    if region:
        apply_once(graph, target, {kind: [rewrite_as_column] for kind in {op.kind for op in region}})
        apply_once(graph, target, {"RESHAPE": peephole_movement.RULES["RESHAPE"]})
        _concat_factors_of_slices(graph, target)


def _concat_factors_of_slices(graph: Graph, target: Target) -> None:
    """In MUL(SLICE(column), vector), append ``vector`` to ``column``, and read ``vector`` by a SLICE too.

    Otherwise Vela stores the vector in NHCWB16 bricks of 16 channels, of which only one channel is used. A vector of
    118 elements then takes 472 cycles instead of 30. The vector must be computed before the first SLICE of the column.
    """
    users, b, computed, factors = graph.users(), Builder(graph, target), set[Value](), dict[Value, tuple[Value, Op]]()
    for op in graph.ops:
        for operand, other in permutations(op.inputs) if op.kind == "MUL" else ():
            column = skip_through(operand, "SLICE")
            is_pair = users[other] == [op] and {user.kind for user in users[column]} == {"SLICE"}
            if is_pair and _is_computed_from_slice(column) and _is_computed_from_slice(other):
                factors[column] = other, op
    old_ops, graph.ops = graph.ops, []
    for op in old_ops:
        column = op.inputs[0]
        other, reader = factors.pop(column, (column, op)) if op.kind == "SLICE" else (column, op)
        if reader is not op and other in computed:
            concatenated = b.concat([column, other], 1)
            for user in users[column]:
                user.inputs[0] = concatenated
            reader.inputs[reader.inputs.index(other)] = b.slice(concatenated, (0, column.size, 0), other.shape)
        graph.ops.append(op)
        computed.add(op.output)


def _is_computed_from_slice(x: Value) -> bool:
    """Whether ``x`` results from elementwise arithmetic on a SLICE, optionally followed by RESCALE and TABLE.

    For other values, this pass cannot predict whether Vela stores them in NHWC or in NHCWB16.
    """
    op = skip_through(x, "RESCALE", "TABLE").producer
    sources = (
        [skip_through(y, "RESCALE", "RESHAPE") for y in op.inputs] if op is not None and op.kind in ELEMENTWISE else []
    )
    return any(producer(y, "SLICE") for y in sources)


def _find_region(graph: Graph) -> set[Op]:
    """Find the vector operators that are connected with a MATMUL for which ``_is_column_matmul`` is true.

    The connection may lead through RESHAPEs, which are not in the result.
    """
    users, region = graph.users(), set[Op]()
    pending = [x for op in graph.ops if _is_column_matmul(op) for x in (op.inputs[1], op.output)]
    while pending:
        x = pending.pop()
        for op in (*users.get(x, ()), *([x.producer] if x.producer else [])):
            if op not in region and _is_vector_operator(op):
                region.add(op)
                pending += [op.output, *(y for y in op.inputs if y.size == max(y.shape, default=1))]
    return {op for op in region if op.kind != "RESHAPE"}


def _is_column_matmul(op: Op) -> bool:
    """Whether ``op`` is a MATMUL of a constant matrix and a column that a MUL, ADD or SUB computes.

    An ADD or SUB that reads a SLICE (a plain RNN) is excluded, because it takes more cycles on columns.
    """
    if op.kind != "MATMUL" or op.inputs[0].data is None or op.output.shape[::2] != (1, 1):
        return False
    source = skip_through(op.inputs[1], "RESHAPE", "RESCALE")
    kind = source.producer.kind if source.producer is not None else ""
    return kind == "MUL" or (kind in ("ADD", "SUB") and not _is_computed_from_slice(source))


def _is_vector_operator(op: Op) -> bool:
    """Whether ``op`` computes a vector from vectors and scalars without permuting elements."""
    size = op.output.size
    if not 1 < size == max(op.output.shape):
        return False
    if op.kind == "SLICE":
        sliced = op.inputs[0]
        last = op.output.shape.index(size)
        return sliced.size <= _MAX_SLICED_SIZE and prod(sliced.shape[last + 1 :]) == 1
    if op.kind in ("RESHAPE", "CONCAT"):
        return all(x.size == max(x.shape) for x in op.inputs)
    vectors = all(x.size in (1, size) for x in op.inputs)
    return vectors and op.kind in ELEMENTWISE | {"RESCALE"} and not op.attrs.get("per_channel")
