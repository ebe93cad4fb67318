"""Analysis of unrolled recurrent layers: what each step reads, and whether the steps form a loop.

Corresponding operators of the steps have equal metadata ``arm_backend_core.nodes.TIMESTEP_SLOT``: the name of the
layer, the function that computes a step, and the operator's position within this function (its slot).
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

#: {slot: operator} of one step. A slot is the position of an operator within its step.
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
        """The dequantize operation for a quantize operation with the same parameters, and vice versa."""
        return QdqOp(_DEQUANTIZE if self.target is _QUANTIZE else _QUANTIZE, self.args)


class StepValue(NamedTuple):
    """An operand that the step itself or the previous step computes.

    Attributes:
        steps_back: 0 if the step itself computes the operand, 1 if the previous step does.
        slot: the slot of its operator.
        qdq_ops: quantize and dequantize operations between this operator and the reader, in order.
    """

    steps_back: int
    slot: int
    qdq_ops: tuple[QdqOp, ...]


class StepSelect(NamedTuple):
    """An operand that ``aten.select`` reads from a tensor of all steps, with a different index in each step.

    Attributes:
        number: index of this operand among the selected operands of a step.
        source: the tensor of all steps; integers if ``source_qdq_ops`` is not empty.
        source_qdq_ops: quantize and dequantize operations between ``source`` and the select.
        slices: (dimension, start, end) of each ``aten.slice`` before the select along a dimension other than ``dim``.
            Dimensions are numbered as in the result of the select, which does not have ``dim``.
        dim: the dimension along which each step selects one index.
        qdq_ops: quantize and dequantize operations after the select.
    """

    number: int
    source: Node
    source_qdq_ops: tuple[QdqOp, ...]
    slices: tuple[tuple[int, int, int], ...]
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


class YieldedValue(NamedTuple):
    """A value that a step yields: to the next iteration (loop-carried), or out of the loop.

    Attributes:
        slot: the slot of the operator that computes it.
        quantize: the operation that quantizes the operator's result; None if the value is floating-point.
    """

    slot: int
    quantize: QdqOp | None

    @classmethod
    def from_qdq_ops(cls, slot: int, qdq_ops: Sequence[QdqOp]) -> YieldedValue:
        """The value that the operator at ``slot`` yields to a reader behind ``qdq_ops``.

        The first of ``qdq_ops`` quantizes the value.
        """
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
    """A node with a reader outside of the steps: an operator of a step, or a quantize or dequantize node after it.

    Attributes:
        node: the node.
        step: index of the step.
        yielded: the value that the loop yields instead of the node.
        qdq_ops: quantize and dequantize operations from the operator to the node. The first one is
            ``yielded.quantize``.
    """

    node: Node
    step: int
    yielded: YieldedValue
    qdq_ops: tuple[QdqOp, ...]


class _NotALoopError(Exception):
    """The steps do not form a loop; the message says why."""


class UnrolledLayer:
    """The steps of a recurrent layer, in order of computation, as a loop.

    Attributes:
        steps: the steps; each maps slots to operators.
        reads: {slot: [ATen overload, structure of its arguments, operand, ...]}. All steps have these reads, except
            that the first step reads initial states instead of values of a previous step.
        initial_states: {loop-carried value: operands of the first step}. Where a later step reads the value of the
            previous step, the first step reads such an operand. There is one operand for each reader of the value.
            Either all operands of a loop-carried value are the same value, or all are constants.
        constants: constant placeholders of the program, and nodes that are computed from constants alone.
        outputs: nodes with a reader outside of the steps: operators of the steps, or quantize and dequantize nodes
            after them.

    Raises:
        _NotALoopError: the steps do not form a loop.
    """

    def __init__(self, steps: list[Step], constants: set[Node]) -> None:
        self.steps, self.constants = steps, constants
        self._members = {node: (k, slot) for k, step in enumerate(steps) for slot, node in step.items()}
        self.reads, second = self._read_step(1)
        self.initial_states: dict[YieldedValue, list[Node]] = {}
        self._first = self._match_first_step()
        self._strides = [b - a for a, b in zip(self._first, second, strict=False)]
        if len(self._first) != len(second) or set(self._strides) - {1, -1}:
            raise _NotALoopError("its selected indices are not consecutive")
        for k in range(2, len(steps)):
            reads, indices = self._read_step(k)
            expected = [a + k * d for a, d in zip(self._first, self._strides, strict=True)]
            if reads != self.reads or indices != expected:
                raise _NotALoopError(f"step {k} differs")
        self.outputs = list(self._find_outputs())

    def _read_step(self, k: int) -> tuple[dict[int, list[Any]], list[int]]:
        """Return ``reads`` of a step, and the indices that its selects use."""
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
            return self._read_select(root, qdq_ops, indices)
        raise _NotALoopError(f"it reads '{root.name}', which is neither the same in each step nor a select")

    def _read_select(self, root: Node, qdq_ops: tuple[QdqOp, ...], indices: list[int]) -> StepSelect:
        source, dim, index = cast(tuple[Node, int, int], root.args)
        shape = source.meta["val"].shape
        dim %= len(shape)
        indices.append(index % shape[dim])
        slices: list[tuple[int, int, int]] = []
        while True:
            inner, qdq_ops_between = strip_qdq_ops(source)
            axis = cast(int, inner.args[1]) % len(shape) if inner.target is aten.slice.Tensor else dim
            if axis == dim or len(inner.args) != 4 or not _are_exact_qdq_ops(qdq_ops_between, inner.args[0]):
                break
            start, end, _ = slice(*cast(Any, inner.args[2:])).indices(shape_of(inner.args[0])[axis])
            slices.insert(0, (axis - (axis > dim), start, end))
            source = cast(Node, inner.args[0])
        before = (QdqOp.from_node(source),) if is_dequantize(source) else ()
        origin = source.all_input_nodes[0] if before else source
        return StepSelect(len(indices) - 1, origin, before, tuple(slices), dim, qdq_ops)

    def _match_first_step(self) -> list[int]:
        """Match the first step with ``reads`` and collect its initial states; return the indices that it selects."""
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
        yielded, count = YieldedValue.from_qdq_ops(read.slot, read.qdq_ops), len(read.qdq_ops)
        if leaf not in self.constants:
            if root in self._members or qdq_ops[len(qdq_ops) - count :] != read.qdq_ops:
                raise _NotALoopError("its initial state is quantized differently")
            for _ in read.qdq_ops[1:]:
                leaf = leaf.args[0]
        states = self.initial_states.setdefault(yielded, [])
        states.append(leaf)
        sources = [None if state in self.constants else strip_qdq_ops(state) for state in states]
        if sources.count(sources[0]) < len(sources):
            raise _NotALoopError("its first step reads two initial states for one value")

    def _find_outputs(self) -> Iterator[StepOutput]:
        """Yield operators of the steps, and quantize and dequantize nodes after them, with a reader outside."""
        for member, (k, slot) in self._members.items():
            chain = [member]
            for node in chain:
                chain += [user for user in node.users if strip_qdq_ops(user)[0] is member]
            for node in chain:
                qdq_ops = strip_qdq_ops(node)[1]
                if any(user not in self._members and user not in chain for user in node.users):
                    yield StepOutput(node, k, YieldedValue.from_qdq_ops(slot, qdq_ops), qdq_ops)

    @cached_property
    def sequences(self) -> list[tuple[StepSelect, int, int]]:
        """The input sequences of the loop: (source, first index, stride per step) of each.

        The source is the ``StepSelect`` of a step, without the fields that differ between readers of one sequence:
        ``number`` is 0, ``slices`` and ``qdq_ops`` are empty.
        """
        return list(dict.fromkeys(map(self._sequence, self._selects)))

    @property
    def _selects(self) -> list[StepSelect]:
        return [read for reads in self.reads.values() for read in reads if isinstance(read, StepSelect)]

    def _sequence(self, read: StepSelect) -> tuple[StepSelect, int, int]:
        sequence = read._replace(number=0, slices=(), qdq_ops=())
        return sequence, self._first[read.number], self._strides[read.number]

    def sequence_index(self, read: StepSelect) -> int:
        """Index in ``sequences`` of the sequence that ``read`` selects from."""
        return self.sequences.index(self._sequence(read))

    def yielded_meta(self, yielded: YieldedValue) -> torch.Tensor:
        """Fake tensor of a yielded value."""
        result: torch.Tensor = self.steps[1][yielded.slot].meta["val"]
        return result if yielded.quantize is None else yielded.quantize.target(result, *yielded.quantize.args)

    def external_readers(self, node: Node) -> list[Node]:
        """Readers of a node that belong to no step."""
        return [user for user in node.users if strip_qdq_ops(user)[0] not in self._members]


def _operators_by_slot(program: ExportedProgram) -> dict[tuple[str, str], dict[int, list[Node]]]:
    """Group operators of steps: {(layer, step function): {slot: operators in program order}}."""
    operators: dict[tuple[str, str], dict[int, list[Node]]] = {}
    for node in program.graph.nodes:
        key = node.meta.get(TIMESTEP_SLOT)  # (layer, step function, slot)
        if key is not None and strip_qdq_ops(node)[0] is node:
            operators.setdefault(key[:2], {}).setdefault(key[2], []).append(node)
    return operators


def count_steps(program: ExportedProgram) -> list[int]:
    """Number of unrolled steps of each layer, added over all calls of the layer."""
    return [max(map(len, slots.values())) for slots in _operators_by_slot(program).values()]


def find_unrolled_layers(program: ExportedProgram) -> Iterator[UnrolledLayer]:
    """Yield each call of an unrolled recurrent layer whose steps form a loop.

    Each call is analyzed only when the iterator reaches it, because the caller may edit the program between two
    results.
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
