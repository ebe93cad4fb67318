"""The steps of a recurrent layer that is written step by step: what each reads, and whether all are alike.

``arm_backend_core.nodes.TIMESTEP_SLOT`` tells which operators are in the same place of the steps.
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

#: Operators by place.
Step = dict[int, Node]


class Cast(NamedTuple):
    """A quantize or dequantize node without its operand."""

    target: Any
    args: tuple[Any, ...]

    @classmethod
    def from_node(cls, node: Node) -> Cast:
        """That of a node."""
        return cls(node.target, node.args[1:])

    @property
    def reverse(self) -> Cast:
        """The dequantize to a quantize, and the quantize to a dequantize."""
        return Cast(_DEQUANTIZE if self.target is _QUANTIZE else _QUANTIZE, self.args)


class StepValue(NamedTuple):
    """What the operator at a place gives, with the casts behind it: in the same step, or that many steps
    ``steps_back``.
    """

    steps_back: int
    slot: int
    casts: tuple[Cast, ...]


class Slice(NamedTuple):
    """One of the tensors along ``dim``, another one in each step.

    Attributes:
        number: of those that a step reads.
        source: what all steps read; integers, where a cast ``before`` follows.
        cuts: (dimension, begin, end) of the part of the tensor that is read.
    """

    number: int
    source: Node
    before: tuple[Cast, ...]
    cuts: tuple[tuple[int, int, int], ...]
    dim: int
    casts: tuple[Cast, ...]


class Constant(NamedTuple):
    """What is the same for every step."""

    target: Any
    args: tuple[Any, ...]


class Port(NamedTuple):
    """What is handed on, to the next call or out of the loop: the integers of a place; real numbers without a cast."""

    slot: int
    cast: Cast | None

    @classmethod
    def of(cls, place: int, casts: Sequence[Cast]) -> Port:
        """Of a value with casts behind the operator at ``slot``."""
        return cls(place, casts[0] if casts else None)


def strip_casts(node: Node) -> tuple[Node, tuple[Cast, ...]]:
    """The operator that a value comes from, and the casts behind that of all numbers alike."""
    casts: list[Cast] = []
    while (is_quantize(node) or is_dequantize(node)) and len(node.all_input_nodes) == 1 and not node.kwargs:
        casts.insert(0, Cast.from_node(node))
        node = node.all_input_nodes[0]
    return node, tuple(casts)


def _casts_are_exact(casts: Sequence[Cast], source: Any) -> bool:
    """Whether casts behind what only moves ``source`` change none of its numbers."""
    return not casts or (is_dequantize(source) and {each.args for each in casts} == {Cast.from_node(source).args})


def shape_of(node: Any) -> torch.Size:
    """Of a node's result."""
    return cast(torch.Size, node.meta["val"].shape)


def argument_leaves(node: Node) -> list[Any]:
    """Arguments of a node."""
    return pytree.tree_leaves((node.args, node.kwargs))


class StepOutput(NamedTuple):
    """A node of a step that others read: what hands it on, and the casts behind that, the port's own among them."""

    node: Node
    step: int
    port: Port
    casts: tuple[Cast, ...]


class _NotALoop(Exception):
    """Why steps are no loop."""


class UnrolledLayer:
    """Steps of a recurrent layer, in the order in which they are computed.

    Attributes:
        steps: operators by place.
        reads: of each place what the operator reads, the same in every step but the first.
        initial_states: what the first step reads in place of what the step before hands on, wherever that is read: the
            same, or constants, as real numbers.
        constants: nodes of the program that compute from constants alone.
        outputs: what is read outside.

    Raises:
        _Irregular: they are no loop.
    """

    def __init__(self, steps: list[Step], constants: set[Node]) -> None:
        self.steps, self.constants = steps, constants
        self._members = {node: (k, place) for k, step in enumerate(steps) for place, node in step.items()}
        self.reads, second = self._operands(1)
        self.initial_states: dict[Port, list[Node]] = {}
        self._first = self._match_first_step()
        self._strides = [b - a for a, b in zip(self._first, second, strict=False)]
        if len(self._first) != len(second) or set(self._strides) - {1, -1}:
            raise _NotALoop("its slices are not one behind the other")
        for k in range(2, len(steps)):
            reads, indices = self._operands(k)
            wanted = [a + k * d for a, d in zip(self._first, self._strides, strict=True)]
            if reads != self.reads or indices != wanted:
                raise _NotALoop(f"step {k} is another one")
        self.outputs = list(self._find_outputs())

    def _operands(self, k: int) -> tuple[dict[int, list[Any]], list[int]]:
        """What the operators of a step read, and which of the slices."""
        indices: list[int] = []
        return {place: self._read(node, k, indices) for place, node in self.steps[k].items()}, indices

    def _read(self, node: Node, k: int, indices: list[int]) -> list[Any]:
        structure = pytree.tree_structure((node.args, node.kwargs))
        return [node.target, structure, *(self._leaf(leaf, k, indices) for leaf in argument_leaves(node))]

    def _leaf(self, leaf: Any, k: int, indices: list[int]) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        root, casts = strip_casts(leaf)
        step, place = self._members.get(root, (None, -1))
        if step is not None and step in (k, k - 1):
            return StepValue(k - step, place, casts)
        if leaf in self.constants:
            return Constant(leaf, ()) if leaf.op == "placeholder" else Constant(leaf.target, leaf.args)
        if step is None and root.target is aten.select.int:
            return self._slice(root, casts, indices)
        raise _NotALoop(f"it reads '{root.name}', which is neither the same in each step nor a slice")

    def _slice(self, root: Node, casts: tuple[Cast, ...], indices: list[int]) -> Slice:
        source, dim, index = cast(tuple[Node, int, int], root.args)
        shape = source.meta["val"].shape
        dim %= len(shape)
        indices.append(index % shape[dim])
        cuts: list[tuple[int, int, int]] = []
        while True:
            part, between = strip_casts(source)
            along = cast(int, part.args[1]) % len(shape) if part.target is aten.slice.Tensor else dim
            if along == dim or len(part.args) != 4 or not _casts_are_exact(between, part.args[0]):
                break
            begin, end, _ = slice(*cast(Any, part.args[2:])).indices(shape_of(part.args[0])[along])
            cuts.insert(0, (along - (along > dim), begin, end))
            source = cast(Node, part.args[0])
        before = (Cast.from_node(source),) if is_dequantize(source) else ()
        origin = source.all_input_nodes[0] if before else source
        return Slice(len(indices) - 1, origin, before, tuple(cuts), dim, casts)

    def _match_first_step(self) -> list[int]:
        """Look at the first step, which may compute with zeros where others read a state."""
        indices: list[int] = []
        for place, node in self.steps[0].items():
            target, structure, *wanted = self.reads[place]
            given = argument_leaves(node)
            if (node.target, pytree.tree_structure((node.args, node.kwargs))) != (target, structure):
                raise _NotALoop("its first step is another one")
            for leaf, read in zip(given, wanted, strict=True):
                if isinstance(read, StepValue) and read.steps_back:
                    self._add_initial_state(read, leaf)
                elif isinstance(read, StepValue) and leaf in self.constants:
                    assert strip_casts(leaf)[0] is self.steps[0][read.slot], leaf
                elif node not in self.constants and self._leaf(leaf, 0, indices) != read:
                    raise _NotALoop("its first step is another one")
        return indices

    def _add_initial_state(self, read: StepValue, leaf: Any) -> None:
        root, casts = strip_casts(leaf)
        port, count = Port.of(read.slot, read.casts), len(read.casts)
        if leaf not in self.constants:
            if root in self._members or casts[len(casts) - count :] != read.casts:
                raise _NotALoop("its first state is rounded in another way")
            for _ in read.casts[1:]:
                leaf = leaf.args[0]
        known = self.initial_states.setdefault(port, [])
        known.append(leaf)
        told = [None if each in self.constants else strip_casts(each) for each in known]
        if told.count(told[0]) < len(told):
            raise _NotALoop("its first step reads two states for one")

    def _find_outputs(self) -> Iterator[StepOutput]:
        """Nodes of steps that others read."""
        for member, (k, place) in self._members.items():
            inside = [member]
            for node in inside:
                inside += [user for user in node.users if strip_casts(user)[0] is member]
            for node in inside:
                casts = strip_casts(node)[1]
                if any(user not in self._members and user not in inside for user in node.users):
                    yield StepOutput(node, k, Port.of(place, casts), casts)

    @cached_property
    def sequences(self) -> list[tuple[Slice, int, int]]:
        """What steps read slices of: one of these, its index in the first step, and what is added from step to step."""
        return list(dict.fromkeys(map(self._sequence, self._slices)))

    @property
    def _slices(self) -> list[Slice]:
        return [read for reads in self.reads.values() for read in reads if isinstance(read, Slice)]

    def _sequence(self, read: Slice) -> tuple[Slice, int, int]:
        plain = read._replace(number=0, cuts=(), casts=())
        return plain, self._first[read.number], self._strides[read.number]

    def sequence_index(self, read: Slice) -> int:
        """The number of the sequence that a slice is of."""
        return self.sequences.index(self._sequence(read))

    def port_meta(self, port: Port) -> torch.Tensor:
        """Shape and type of what is handed on, without numbers."""
        made: torch.Tensor = self.steps[1][port.slot].meta["val"]
        return made if port.cast is None else port.cast.target(made, *port.cast.args)

    def external_readers(self, node: Node) -> list[Node]:
        """What reads a node of a step and is in none."""
        return [user for user in node.users if strip_casts(user)[0] not in self._members]


def _operators_by_slot(program: ExportedProgram) -> dict[tuple[str, str], dict[int, list[Node]]]:
    """Operators of steps: by the layer and what computes a step, by place, in program order."""
    found: dict[tuple[str, str], dict[int, list[Node]]] = {}
    for node in program.graph.nodes:
        place = node.meta.get(TIMESTEP_SLOT)
        if place is not None and strip_casts(node)[0] is node:
            found.setdefault(place[:2], {}).setdefault(place[2], []).append(node)
    return found


def count_steps(program: ExportedProgram) -> list[int]:
    """How many steps are written out, by layer: of all calls of it."""
    return [max(map(len, places.values())) for places in _operators_by_slot(program).values()]


def find_layers(program: ExportedProgram) -> Iterator[UnrolledLayer]:
    """Recurrent layers whose steps are written out, and that are loops.

    Each is looked at when it is asked for: the one before may have been replaced by then.
    """
    constants = set(constants_of(program))
    for node in program.graph.nodes:
        if node.op == "call_function" and is_constant(node, constants):
            constants.add(node)
    for places in _operators_by_slot(program).values():
        if len({len(nodes) for nodes in places.values()}) == 1:
            steps = [dict(zip(places, nodes, strict=True)) for nodes in zip(*places.values(), strict=True)]
            for run in list(_split_calls(steps)):
                with suppress(_NotALoop):
                    yield UnrolledLayer(run, constants)


def _split_calls(steps: list[Step]) -> Iterator[list[Step]]:
    """Steps that follow each other; a layer that is called again begins anew."""
    begin = 0
    for k in range(1, len(steps) + 1):
        before = set(steps[k - 1].values())
        if k == len(steps) or not any(
            strip_casts(x)[0] in before for node in steps[k].values() for x in node.all_input_nodes
        ):
            if k - begin > 2:
                yield steps[begin:k]
            begin = k
