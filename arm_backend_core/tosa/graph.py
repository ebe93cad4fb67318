"""The TOSA graph: a small SSA form that lowering emits, passes rewrite and the serializer reads.

Operands that TOSA requires as constants (zero points, shapes, shifts, tables, rescale parameters) are attributes here;
each operator's record (``operators``) says how they become operands in the flatbuffer. A pass therefore sees only data
flow.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from arm_backend_core.dtype import DType


@dataclass(frozen=True)
class Origin:
    """Source of an operator: the fx node, its ATen operator, and line and submodule of the user's model.

    Attributes:
        moves: the operator is no arithmetic of that node, but a TRANSPOSE that was inserted for it.
    """

    node: str
    operator: str
    source: str = ""
    module: str = ""
    moves: bool = False


#: ``Origin.operator`` of operators that belong to no node: an input or a constant is returned as it is.
COPY = "copy"
#: Origins of one operator with their work (``Op.work``), by which the operator's cost is divided among them.
Origins = Mapping[Origin, int]


@dataclass(eq=False)
class Value:
    """A tensor. ``data`` is set for constants, ``producer`` for results of an operator, neither for graph inputs."""

    shape: tuple[int, ...]
    dtype: DType
    name: str = ""
    data: np.ndarray[Any, Any] | None = None
    producer: Op | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @cached_property
    def content(self) -> tuple[tuple[int, ...], DType, bytes]:
        """A key that equal constants share: shape, element type, and their bytes or a digest of them."""
        assert self.data is not None, f"{self!r} is not constant"
        data = np.ascontiguousarray(self.data)
        short = data.nbytes <= 64
        return self.shape, self.dtype, data.tobytes() if short else hashlib.blake2b(data.data, digest_size=32).digest()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"{self.name or 'const'}:{self.dtype.value}{list(self.shape)}"


@dataclass(eq=False)
class Op:
    """A TOSA operator. It has one result, except those that the last passes emit (block-scaled casts, control flow)."""

    kind: str
    inputs: list[Value]
    output: Value
    attrs: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    extra_outputs: list[Value] = field(default_factory=list)

    @property
    def origin(self) -> Origin | None:
        """The origin with the most work."""
        return max(self.origins, key=self.origins.__getitem__, default=None)

    @property
    def work(self) -> int:
        """Multiply-accumulates; for other operators the elements of the largest operand or result. At least 1."""
        if (weight := self.weight) is not None:  # MACs per output position; for TRANSPOSE_CONV2D, per input position
            windows = self.inputs[0] if self.kind == "TRANSPOSE_CONV2D" else self.output
            return windows.size * weight.size // windows.shape[-1] or 1
        if self.kind == "MATMUL":
            return self.inputs[0].size * self.output.shape[-1] or 1
        return max(value.size for value in (*self.inputs, self.output) if value.data is None) or 1

    @property
    def weight(self) -> Value | None:
        """The weight of a convolution: the operand before the bias, or before its scales."""
        if "weight_zp" in self.attrs:
            return self.inputs[-2]
        return self.inputs[-3] if "dilation" in self.attrs else None

    @property
    def results(self) -> list[Value]:
        """All results."""
        return [self.output, *self.extra_outputs]

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that the operator holds, such as the branches of a COND_IF."""
        return [attr for attr in self.attrs.values() if isinstance(attr, Graph)]

    def __repr__(self) -> str:
        attrs = {name: value for name, value in self.attrs.items() if np.size(value) < 16}
        return f"{self.output!r} = {self.kind}({', '.join(map(repr, self.inputs))}) {attrs}"


def merge_origins(ops: Iterable[Op]) -> Origins:
    """The origins of an operator that replaces all of these."""
    total: Counter[Origin] = Counter()
    for op in ops:
        total.update(op.origins)
    return total


def constant(data: np.ndarray[Any, Any], dtype: DType, name: str = "") -> Value:
    """A constant whose array has the numpy type of ``dtype``."""
    array = np.asarray(data, dtype=dtype.numpy)
    return Value(tuple(array.shape), dtype, name, array)


class Graph:
    """Operators in execution order, with the values that enter and leave."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.ops: list[Op] = []
        self._count = 0

    def add_input(self, shape: Sequence[int], dtype: DType, name: str) -> Value:
        """Declare the next graph input."""
        value = Value(tuple(shape), dtype, name)
        self.inputs.append(value)
        return value

    def new_name(self, kind: str) -> str:
        """A name that no other value of this graph has."""
        self._count += 1
        return f"{kind.lower()}_{self._count}"

    def users(self) -> dict[Value, list[Op]]:
        """Operators that read each value, in execution order."""
        users: dict[Value, list[Op]] = {}
        for op in self.ops:
            for value in op.inputs:
                users.setdefault(value, []).append(op)
        return users

    def remove_dead(self) -> None:
        """Remove operators whose results nothing reads."""
        live = set(self.outputs)
        live_ops: list[Op] = []
        for op in reversed(self.ops):
            if not live.isdisjoint(op.results):
                live.update(op.inputs)
                live_ops.append(op)
        self.ops = live_ops[::-1]

    def verify(self) -> None:
        """Check single assignment and order of definition, also in the graphs that operators hold.

        Raises:
            AssertionError: a value is read before its definition, or defined twice; a pass is wrong.
        """
        defined = set(self.inputs)
        for op in self.ops:
            for value in op.inputs:
                assert value.data is not None or value in defined, f"{op!r} reads {value!r} before its definition"
            for value in op.results:
                assert value not in defined, f"{op!r} defines {value!r} a second time"
                assert value.producer is op, f"{value!r} has a wrong producer"
            for inner in op.graphs:
                inner.verify()
            defined.update(op.results)
        for value in self.outputs:
            assert value.data is not None or value in defined, f"output {value!r} is not defined"

    def walk(self) -> Iterator[Op]:
        """All operators; those of the graphs that an operator holds follow it."""
        for op in self.ops:
            yield op
            for inner in op.graphs:
                yield from inner.walk()


def extract_subgraph(
    inputs: Sequence[tuple[Value, str]], outputs: Sequence[Value], position: Callable[[Op], int]
) -> Graph:
    """Copy the operators that compute ``outputs`` from ``inputs`` to a graph of their own.

    Args:
        inputs: values and their names in the new graph; of a value that is repeated, the first input is read.
        position: the execution order of operators.
    """
    graph = Graph()
    mapping: dict[Value, Value] = {}
    for value, name in inputs:
        mapping.setdefault(value, graph.add_input(value.shape, value.dtype, name))
    needed: dict[Op, None] = {}
    pending = list(outputs)
    while pending:
        value = pending.pop()
        if value in mapping or value.producer is None or value.producer in needed:
            continue
        needed[value.producer] = None
        pending += value.producer.inputs
    for op in sorted(needed, key=position):
        results = [Value(value.shape, value.dtype, graph.new_name(op.kind)) for value in op.results]
        operands = [mapping.get(value, value) for value in op.inputs]
        graph.ops.append(Op(op.kind, operands, results[0], dict(op.attrs), op.origins, results[1:]))
        for value, result in zip(op.results, results, strict=True):
            mapping[value], result.producer = result, graph.ops[-1]
    graph.outputs = [mapping.get(value, value) for value in outputs]
    return graph


def prod(values: Iterable[int]) -> int:
    """Product of integers; 1 for none."""
    result = 1
    for value in values:
        result *= value
    return result
