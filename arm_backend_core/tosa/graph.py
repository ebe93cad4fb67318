"""The TOSA graph: a small SSA form, which lowering emits, which passes rewrite, and which the serializer writes.

Operands that TOSA requires to be constant (zero points, shapes, shifts, tables, rescale parameters) are attributes
here. The record of each operator (``operators``) defines how they become operands in the flatbuffer. The inputs of an
operator are therefore its data operands only.
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
    """Source of a TOSA operator in the PyTorch model.

    Attributes:
        node: name of the fx node that the operator was lowered from.
        operator: ATen operator of this node.
        source: source line of the node in the user's model.
        module: submodule of the node in the user's model.
        is_transpose: whether the operator was emitted as a TRANSPOSE: a permutation of the model, or an inserted layout
            change. Passes may later replace the TRANSPOSE by other operators.
    """

    node: str
    operator: str
    source: str = ""
    module: str = ""
    is_transpose: bool = False


#: ``Origin.operator`` of operators without a node: they copy an input or a constant to an output.
COPY_OPERATOR = "copy"
#: {origin of an operator: work (``Op.work``) that comes from this origin}. The cost of the operator is divided among
#: its origins in proportion to the work.
Origins = Mapping[Origin, int]


@dataclass(eq=False)
class Value:
    """A tensor: a constant, the result of an operator, or a graph input.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        name: its name in the flatbuffer.
        data: the elements of a constant, else None.
        producer: the operator whose result it is, else None.
    """

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
    def content_key(self) -> tuple[tuple[int, ...], DType, bytes]:
        """A key that is equal for equal constants: shape, element type, and the bytes or their digest."""
        assert self.data is not None, f"{self!r} is not constant"
        data = np.ascontiguousarray(self.data)
        is_small = data.nbytes <= 64
        content = data.tobytes() if is_small else hashlib.blake2b(data.data, digest_size=32).digest()
        return self.shape, self.dtype, content

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"{self.name or 'const'}:{self.dtype.value}{list(self.shape)}"


@dataclass(eq=False)
class Op:
    """A TOSA operator. It has one result, unless one of the last passes emits it (block-scaled casts, control flow).

    Attributes:
        kind: its name in TOSA, such as "CONV2D".
        inputs: its data operands.
        output: its first result.
        attrs: its attributes and constant operands, by name.
        origins: its sources in the PyTorch model.
        extra_outputs: its results after the first.
    """

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
        """Amount of work, at least 1.

        For convolutions and MATMULs, it is the number of multiply-accumulates. For other operators, it is the number of
        elements of the largest operand or result that is not constant.
        """
        if (weight := self.weight) is not None:
            # Each output position needs weight.size MACs; for TRANSPOSE_CONV2D, each input position.
            windows = self.inputs[0] if self.kind == "TRANSPOSE_CONV2D" else self.output
            return windows.size * weight.size // windows.shape[-1] or 1
        if self.kind == "MATMUL":
            return self.inputs[0].size * self.output.shape[-1] or 1
        return max(value.size for value in (*self.inputs, self.output) if value.data is None) or 1

    @property
    def weight(self) -> Value | None:
        """The weight of a convolution, else None. Block-scaled convolutions have scales between weight and bias."""
        if "weight_zp" in self.attrs:
            return self.inputs[-2]
        return self.inputs[-3] if "dilation" in self.attrs else None

    @property
    def results(self) -> list[Value]:
        """All results."""
        return [self.output, *self.extra_outputs]

    @property
    def regions(self) -> list[Graph]:
        """The regions: graphs that a control-flow operator holds, such as the branches of a COND_IF."""
        return [attr for attr in self.attrs.values() if isinstance(attr, Graph)]

    def __repr__(self) -> str:
        attrs = {name: value for name, value in self.attrs.items() if np.size(value) < 16}
        return f"{self.output!r} = {self.kind}({', '.join(map(repr, self.inputs))}) {attrs}"


def merge_origins(ops: Iterable[Op]) -> Origins:
    """The origins of an operator that replaces all of ``ops``. The work of equal origins is added."""
    total: Counter[Origin] = Counter()
    for op in ops:
        total.update(op.origins)
    return total


def constant(data: np.ndarray[Any, Any], dtype: DType, name: str = "") -> Value:
    """Create a constant of ``data``, converted to the numpy type of ``dtype``."""
    array = np.asarray(data, dtype=dtype.numpy)
    return Value(tuple(array.shape), dtype, name, array)


class Graph:
    """Operators in execution order, with the graph's inputs and outputs."""

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
        """A name that this method has not returned for this graph before: the kind and a number."""
        self._count += 1
        return f"{kind.lower()}_{self._count}"

    def users(self) -> dict[Value, list[Op]]:
        """{value: the operators that read it, in execution order}. An operator that reads it twice is listed twice."""
        users: dict[Value, list[Op]] = {}
        for op in self.ops:
            for value in op.inputs:
                users.setdefault(value, []).append(op)
        return users

    def remove_dead(self) -> None:
        """Dead code elimination: remove operators that no graph output depends on."""
        live = set(self.outputs)
        live_ops: list[Op] = []
        for op in reversed(self.ops):
            if not live.isdisjoint(op.results):
                live.update(op.inputs)
                live_ops.append(op)
        self.ops = live_ops[::-1]

    def verify(self) -> None:
        """Check that each value is defined once and before its uses, in this graph and its regions.

        Raises:
            AssertionError: a pass has a bug. A value is read before its definition, is defined twice, or names another
            operator as its producer, or an output is not defined.
        """
        defined = set(self.inputs)
        for op in self.ops:
            for value in op.inputs:
                assert value.data is not None or value in defined, f"{op!r} reads {value!r} before its definition"
            for value in op.results:
                assert value not in defined, f"{op!r} defines {value!r} a second time"
                assert value.producer is op, f"{value!r} has a wrong producer"
            for region in op.regions:
                region.verify()
            defined.update(op.results)
        for value in self.outputs:
            assert value.data is not None or value in defined, f"output {value!r} is not defined"

    def walk(self) -> Iterator[Op]:
        """Yield all operators. The operators of a region follow the operator that holds the region."""
        for op in self.ops:
            yield op
            for region in op.regions:
                yield from region.walk()


def extract_subgraph(
    inputs: Sequence[tuple[Value, str]], outputs: Sequence[Value], position: Callable[[Op], int]
) -> Graph:
    """Copy the operators that compute ``outputs`` from ``inputs`` to a new graph.

    Args:
        inputs: (value, name of the input in the new graph). A value that occurs twice becomes two inputs; the operators
            read the first of them.
        outputs: the values that become the outputs of the new graph.
        position: returns the position of an operator in the execution order.
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
    """Product of integers; 1 if there are none."""
    result = 1
    for value in values:
        result *= value
    return result
