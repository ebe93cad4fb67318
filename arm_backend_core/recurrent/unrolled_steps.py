"""Analysis of unrolled recurrent layers: what each step reads, and whether the steps form a loop.

The metadata ``arm_backend_core.nodes.TIMESTEP_SLOT`` identifies corresponding operators of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from arm_backend_core.nodes import TIMESTEP_SLOT, is_constant, is_dequantize, is_quantize
from arm_backend_core.program import constants_of

aten = torch.ops.aten
_QUANTIZE, _DEQUANTIZE = (
    getattr(torch.ops.quantized_decomposed, name).default for name in ("quantize_per_tensor", "dequantize_per_tensor")
)

#: The operators of one step, by slot. A slot is the position of an operator within its step.
Step = dict[int, Node]


class QdqOp(NamedTuple):
    """A quantize or dequantize operation: a node without its operand."""

    target: Any
    args: tuple[Any, ...]

    @classmethod
    def from_node(cls, node: Node) -> QdqOp:
        """The operation of a quantize or dequantize node."""
        return cls(node.target, node.args[1:])

    @property
    def inverse(self) -> QdqOp:
        """The dequantize for a quantize with the same parameters, or the quantize for a dequantize."""
        return QdqOp(_DEQUANTIZE if self.target is _QUANTIZE else _QUANTIZE, self.args)


class StepValue(NamedTuple):
    """A value computed by the step itself or by the previous one.

    Attributes:
        steps_back: 0 for the same step, 1 for the previous one.
        slot: the slot of its operator.
        qdq_ops: quantize and dequantize operations after the operator.
    """

    steps_back: int
    slot: int
    qdq_ops: tuple[QdqOp, ...]


class Slice(NamedTuple):
    """One slice of a tensor along ``dim``, with a different index in each step.

    Attributes:
        number: index of the slice among the slices that a step reads.
        source: the tensor that all steps read; integers if ``source_qdq_ops`` is not empty.
        source_qdq_ops: quantize and dequantize operations between ``source`` and the slicing.
        cuts: (dimension, start, end) of each slicing of another dimension. Dimensions are counted without ``dim``.
        dim: the dimension that is indexed by step.
        qdq_ops: quantize and dequantize operations after the slicing.
    """

    number: int
    source: Node
    source_qdq_ops: tuple[QdqOp, ...]
    cuts: tuple[tuple[int, int, int], ...]
    dim: int
    qdq_ops: tuple[QdqOp, ...]


class Constant(NamedTuple):
    """A constant operand, the same for every step.

    Attributes:
        target: the placeholder, or the operator that computes the constant from other constants.
        args: arguments of this operator; empty for a placeholder.
    """

    target: Any
    args: tuple[Any, ...]


class Port(NamedTuple):
    """A value that leaves a step: to the next call (loop-carried) or out of the loop.

    Attributes:
        slot: the slot of the operator that computes it.
        quantize: the operation that computes its integers; None for floating-point values.
    """

    slot: int
    quantize: QdqOp | None

    @classmethod
    def from_qdq_ops(cls, slot: int, qdq_ops: Sequence[QdqOp]) -> Port:
        """The port of a value that passes ``qdq_ops`` after the operator at ``slot``."""
        return cls(slot, qdq_ops[0] if qdq_ops else None)


def strip_qdq_ops(node: Node) -> tuple[Node, tuple[QdqOp, ...]]:
    """Strip per-tensor quantize and dequantize nodes from a value.

    Returns:
        The operator that computes the value, and the stripped operations in order.
    """
    qdq_ops: list[QdqOp] = []
    while (is_quantize(node) or is_dequantize(node)) and len(node.all_input_nodes) == 1 and not node.kwargs:
        qdq_ops.insert(0, QdqOp.from_node(node))
        node = node.all_input_nodes[0]
    return node, tuple(qdq_ops)


def _are_exact_qdq_ops(qdq_ops: Sequence[QdqOp], source: Any) -> bool:
    """Whether quantize and dequantize operations after a data movement of ``source`` are exact.

    They are exact if ``source`` is a dequantize node and all operations have its parameters. True without operations.
    """
    return not qdq_ops or (is_dequantize(source) and {op.args for op in qdq_ops} == {QdqOp.from_node(source).args})


def shape_of(node: Any) -> torch.Size:
    """The shape of a node's result."""
    return cast(torch.Size, node.meta["val"].shape)


def argument_leaves(node: Node) -> list[Any]:
    """The flattened arguments of a node."""
    return pytree.tree_leaves((node.args, node.kwargs))


class StepOutput(NamedTuple):
    """A node of a step that nodes outside of the steps read.

    Attributes:
        node: the node.
        step: index of the step.
        port: the port that carries its value.
        qdq_ops: quantize and dequantize operations between the port's operator and the node, including the port's own.
    """

    node: Node
    step: int
    port: Port
    qdq_ops: tuple[QdqOp, ...]


class _NotALoopError(Exception):
    """The steps do not form a loop; the message says why."""


class UnrolledLayer:
    """The steps of a recurrent layer, in order of computation, as a loop.

    Attributes:
        steps: the steps; each maps slots to operators.
        reads: {slot: the operator, the structure of its arguments, and its operands}, the same in every step except the
            first.
        initial_states: {port: operands that the first step reads in place of the port's value, which later steps read
            from the previous step; one operand for each reader}. All operands of a port are the same value, or all are
            constants.
        constants: constant placeholders of the program, and nodes that are computed from constants alone.
        outputs: nodes of the steps, and their quantize and dequantize nodes, that nodes outside of the steps read.

    Raises:
        _NotALoopError: the steps do not form a loop.
    """

    def __init__(self, steps: list[Step], constants: set[Node]) -> None:
        self.steps, self.constants = steps, constants
        self._members = {node: (k, slot) for k, step in enumerate(steps) for slot, node in step.items()}
        self.reads, second = self._read_step(1)
        self.initial_states: dict[Port, list[Node]] = {}
        self._first = self._match_first_step()
        self._strides = [b - a for a, b in zip(self._first, second, strict=False)]
        if len(self._first) != len(second) or set(self._strides) - {1, -1}:
            raise _NotALoopError("its slices are not consecutive")
        for k in range(2, len(steps)):
            reads, indices = self._read_step(k)
            expected = [a + k * d for a, d in zip(self._first, self._strides, strict=True)]
            if reads != self.reads or indices != expected:
                raise _NotALoopError(f"step {k} differs")
        self.outputs = list(self._find_outputs())

    def _read_step(self, k: int) -> tuple[dict[int, list[Any]], list[int]]:
        """Operands of a step's operators, and the indices of its slices."""
        indices: list[int] = []
        return {slot: self._read_operator(node, k, indices) for slot, node in self.steps[k].items()}, indices

    def _read_operator(self, node: Node, k: int, indices: list[int]) -> list[Any]:
        structure = pytree.tree_structure((node.args, node.kwargs))
        return [node.target, structure, *(self._read_operand(leaf, k, indices) for leaf in argument_leaves(node))]

    def _read_operand(self, leaf: Any, k: int, indices: list[int]) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        root, qdq_ops = strip_qdq_ops(leaf)
        step, slot = self._members.get(root, (None, -1))
        if step is not None and step in (k, k - 1):
            return StepValue(k - step, slot, qdq_ops)
        if leaf in self.constants:
            return Constant(leaf, ()) if leaf.op == "placeholder" else Constant(leaf.target, leaf.args)
        if step is None and root.target is aten.select.int:
            return self._read_slice(root, qdq_ops, indices)
        raise _NotALoopError(f"it reads '{root.name}', which is neither the same in each step nor a slice")

    def _read_slice(self, root: Node, qdq_ops: tuple[QdqOp, ...], indices: list[int]) -> Slice:
        source, dim, index = cast(tuple[Node, int, int], root.args)
        shape = source.meta["val"].shape
        dim %= len(shape)
        indices.append(index % shape[dim])
        cuts: list[tuple[int, int, int]] = []
        while True:
            inner, qdq_ops_between = strip_qdq_ops(source)
            axis = cast(int, inner.args[1]) % len(shape) if inner.target is aten.slice.Tensor else dim
            if axis == dim or len(inner.args) != 4 or not _are_exact_qdq_ops(qdq_ops_between, inner.args[0]):
                break
            start, end, _ = slice(*cast(Any, inner.args[2:])).indices(shape_of(inner.args[0])[axis])
            cuts.insert(0, (axis - (axis > dim), start, end))
            source = cast(Node, inner.args[0])
        before = (QdqOp.from_node(source),) if is_dequantize(source) else ()
        origin = source.all_input_nodes[0] if before else source
        return Slice(len(indices) - 1, origin, before, tuple(cuts), dim, qdq_ops)

    def _match_first_step(self) -> list[int]:
        """Match the first step against the others and collect its initial states; returns the indices of its slices."""
        indices: list[int] = []
        for slot, node in self.steps[0].items():
            target, structure, *expected = self.reads[slot]
            operands = argument_leaves(node)
            if (node.target, pytree.tree_structure((node.args, node.kwargs))) != (target, structure):
                raise _NotALoopError("its first step differs")
            for leaf, read in zip(operands, expected, strict=True):
                if isinstance(read, StepValue) and read.steps_back:
                    self._add_initial_state(read, leaf)
                elif isinstance(read, StepValue) and leaf in self.constants:
                    assert strip_qdq_ops(leaf)[0] is self.steps[0][read.slot], leaf
                elif node not in self.constants and self._read_operand(leaf, 0, indices) != read:
                    raise _NotALoopError("its first step differs")
        return indices

    def _add_initial_state(self, read: StepValue, leaf: Any) -> None:
        root, qdq_ops = strip_qdq_ops(leaf)
        port, count = Port.from_qdq_ops(read.slot, read.qdq_ops), len(read.qdq_ops)
        if leaf not in self.constants:
            if root in self._members or qdq_ops[len(qdq_ops) - count :] != read.qdq_ops:
                raise _NotALoopError("its initial state is quantized differently")
            for _ in read.qdq_ops[1:]:
                leaf = leaf.args[0]
        states = self.initial_states.setdefault(port, [])
        states.append(leaf)
        sources = [None if state in self.constants else strip_qdq_ops(state) for state in states]
        if sources.count(sources[0]) < len(sources):
            raise _NotALoopError("its first step reads two initial states for one port")

    def _find_outputs(self) -> Iterator[StepOutput]:
        """Yield the nodes of steps, and their quantize and dequantize nodes, that nodes outside of the steps read."""
        for member, (k, slot) in self._members.items():
            chain = [member]
            for node in chain:
                chain += [user for user in node.users if strip_qdq_ops(user)[0] is member]
            for node in chain:
                qdq_ops = strip_qdq_ops(node)[1]
                if any(user not in self._members and user not in chain for user in node.users):
                    yield StepOutput(node, k, Port.from_qdq_ops(slot, qdq_ops), qdq_ops)

    @cached_property
    def sequences(self) -> list[tuple[Slice, int, int]]:
        """The sequences that steps read slices of: (slice without its position, first index, stride per step)."""
        return list(dict.fromkeys(map(self._sequence, self._slices)))

    @property
    def _slices(self) -> list[Slice]:
        return [read for reads in self.reads.values() for read in reads if isinstance(read, Slice)]

    def _sequence(self, read: Slice) -> tuple[Slice, int, int]:
        sequence = read._replace(number=0, cuts=(), qdq_ops=())
        return sequence, self._first[read.number], self._strides[read.number]

    def sequence_index(self, read: Slice) -> int:
        """Index of a slice's sequence in ``sequences``."""
        return self.sequences.index(self._sequence(read))

    def port_meta(self, port: Port) -> torch.Tensor:
        """Fake tensor of a port's value."""
        result: torch.Tensor = self.steps[1][port.slot].meta["val"]
        return result if port.quantize is None else port.quantize.target(result, *port.quantize.args)

    def external_readers(self, node: Node) -> list[Node]:
        """Readers of a node that belong to no step."""
        return [user for user in node.users if strip_qdq_ops(user)[0] not in self._members]


def _operators_by_slot(program: ExportedProgram) -> dict[tuple[str, str], dict[int, list[Node]]]:
    """Group operators of steps: {(layer, step function): {slot: operators in program order}}."""
    operators: dict[tuple[str, str], dict[int, list[Node]]] = {}
    for node in program.graph.nodes:
        slot = node.meta.get(TIMESTEP_SLOT)
        if slot is not None and strip_qdq_ops(node)[0] is node:
            operators.setdefault(slot[:2], {}).setdefault(slot[2], []).append(node)
    return operators


def count_steps(program: ExportedProgram) -> list[int]:
    """Number of unrolled steps of each layer, over all its calls."""
    return [max(map(len, slots.values())) for slots in _operators_by_slot(program).values()]


def find_unrolled_layers(program: ExportedProgram) -> Iterator[UnrolledLayer]:
    """Yield each call of an unrolled recurrent layer whose steps form a loop.

    Each call is analyzed when it is requested, because the caller may have replaced the previous one.
    """
    constants = set(constants_of(program))
    for node in program.graph.nodes:
        if node.op == "call_function" and is_constant(node, constants):
            constants.add(node)
    for slots in _operators_by_slot(program).values():
        if len({len(nodes) for nodes in slots.values()}) == 1:
            steps = [dict(zip(slots, nodes, strict=True)) for nodes in zip(*slots.values(), strict=True)]
            for run in list(_split_calls(steps)):
                with suppress(_NotALoopError):
                    yield UnrolledLayer(run, constants)


def _split_calls(steps: list[Step]) -> Iterator[list[Step]]:
    """Split steps into calls of the layer: a step that does not read the previous one starts a new call.

    Calls of one or two steps are omitted.
    """
    begin = 0
    for k in range(1, len(steps) + 1):
        previous = set(steps[k - 1].values())
        if k == len(steps) or not any(
            strip_qdq_ops(x)[0] in previous for node in steps[k].values() for x in node.all_input_nodes
        ):
            if k - begin > 2:
                yield steps[begin:k]
            begin = k
