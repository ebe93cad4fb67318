"""Which nodes of a program the target runs, in which delegates, and the TOSA graph of each."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.errors import Fault, ModelError, Unsupported
from arm_backend_core.insert_delegates import Part
from arm_backend_core.lowering import Lowering
from arm_backend_core.nodes import (
    LOOP,
    in_words,
    is_dequantize,
    is_quantize,
    keep_reason,
    operator_name,
    overload_of,
    source_line,
)
from arm_backend_core.ops.loop_markers import LOOP_IN, LOOP_OUT
from arm_backend_core.ops.operands import Tensor
from arm_backend_core.program import constants_of
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.graph import Graph, Value, extract_subgraph

Predicate = Callable[[Node], bool]
#: Buffers that a program writes, and nodes of a delegate for an NPU where there are as many.
_MANY_STATES, _NODES_WITH_STATES = 12, 300


@dataclass(frozen=True)
class Selection:
    """What the walk over a program found.

    Attributes:
        program: the program.
        walk: every operator of the program, lowered once.
        order: operators of the program.
        refusals: why those that are not delegated stay on the CPU.
    """

    program: ExportedProgram
    walk: Lowering
    order: list[Node]
    refusals: dict[Node, Unsupported]

    def rejections(self) -> list[events.Rejected]:
        """Operators that stay on the CPU; what only crosses the boundary is not one."""
        return [
            events.Rejected(
                node.name, operator_name(node), refusal.reason, source_line(node), isinstance(refusal, Fault)
            )
            for node, refusal in self.refusals.items()
            if not (is_quantize(node) or is_dequantize(node) or LOOP in node.meta)
            and node.target is not operator.getitem  # counts with the operator that it picks a result of
        ]

    def parts(self, name: str = "arm") -> list[Part]:
        """The delegates, called ``name`` and a number; each stands behind those that it reads from."""
        chosen = {node for node in self.order if node not in self.refusals}
        placed = self._sink_into_consumers(self._divided(levels(self.order, chosen)), chosen)
        groups: dict[int, list[Node]] = {}
        position = {node: index for index, node in enumerate(self.program.graph.nodes)}
        for node in position:
            if node in placed:
                groups.setdefault(placed[node], []).append(node)
        constants, order = constants_of(self.program), position.__getitem__
        return [Part.of(f"{name}_{i}", groups[level], constants, order) for i, level in enumerate(sorted(groups))]

    def graphs(self, parts: Iterable[Part]) -> Iterable[Graph]:
        """The TOSA graph of each part, cut out of the walk's; inputs and outputs in the part's order."""
        position = {op: index for index, op in enumerate(self.walk.graph.ops)}
        for part in parts:
            inputs = [(self.walk.entry(node)[0], node.name) for node in part.inputs]
            outputs = [self._value(node) for node in part.outputs]
            yield extract_subgraph(inputs, outputs, position.__getitem__)

    def _value(self, node: Node) -> Value:
        result = self.walk.results[node]
        assert isinstance(result, Tensor), node
        return result.value

    def _divided(self, placed: dict[Node, int]) -> dict[Node, int]:
        """Levels, cut into several where Vela's search for addresses would take minutes.

        Buffers of a decoder with many layers are in memory from the first operation to the last: each round of the
        search, of 5000 at least, visits all pairs of them and of what else there is.
        """
        states = len(self.program.graph_signature.buffers_to_mutate)
        if not self.walk.target.hardware.npu or states < _MANY_STATES:
            return placed
        cut = enumerate(placed.items())
        return {node: level * len(placed) + index // _NODES_WITH_STATES for index, (node, level) in cut}

    def _sink_into_consumers(self, placed: dict[Node, int], chosen: set[Node]) -> dict[Node, int]:
        """Levels of the chosen nodes. One whose result no delegate can hand over is where its readers are.

        Where these are on several levels it is copied. What no delegate hands over: real numbers held as integers, and
        what is computed from constants alone, quantized too: its readers were lowered for the values that it has.
        """
        constant = set(self.walk.constants)
        constant |= {node for node in chosen if is_quantize(node) and self._value(node).data is not None}
        for node in reversed(self.order):
            if node not in chosen or not (node in constant or self.walk.is_internal(node)):
                continue
            readers: dict[int | None, list[Node]] = {}  # None: on the CPU
            for user in node.users:
                readers.setdefault(placed.get(user), []).append(user)
            depths = sorted(depth for depth in readers if depth is not None)
            if not depths:
                keep_reason(node, "it computes a constant, which the CPU alone reads")
                del placed[node]
                continue
            placed[node] = depths[0]
            for depth in [*depths[1:], *([None] if None in readers else [])]:
                with node.graph.inserting_after(node):
                    copy = node.graph.node_copy(node)
                self.walk.results[copy] = self.walk.results[node]
                for user in readers[depth]:
                    user.replace_input_with(node, copy)
                if depth is not None:
                    placed[copy] = depth
        return placed


def select(program: ExportedProgram, target: Target, keep_on_cpu: Sequence[Predicate]) -> Selection:
    """Lower the program for ``target``; nodes for which one of ``keep_on_cpu`` holds are left out."""
    order = [node for node in program.graph.nodes if node.op == "call_function"]
    constants = constants_of(program)
    inputs = set(program.graph.find_nodes(op="placeholder")) - set(constants)
    refusals: dict[Node, Unsupported] = {}
    for node in order:
        if any(keep(node) for keep in keep_on_cpu):
            refusals[node] = Unsupported("kept on the CPU as asked")
        elif is_quantize(node) and node.args[0] in inputs:
            refusals[node] = Unsupported("it quantizes a model input")
    given, walk = dict(refusals), Lowering(target, constants)
    walk.run(order, refusals)
    while True:  # ends: every round takes at least one node out, usually there is one round
        refusals |= {node: result for node, result in walk.results.items() if isinstance(result, Unsupported)}
        torn = _unmaterializable(order, walk, refusals)
        if not torn:
            _check_loops(order, refusals, target)
            _check_own(refusals, target)
            return Selection(program, walk, order, refusals)
        floats = {node for node in torn if target.floating and not is_dequantize(node)} - walk.floats
        if floats:  # functions and moved data that are read as real numbers are computed as such
            refusals, walk = dict(given), Lowering(target, constants, walk.floats | floats)
            walk.run(order, refusals)
        else:
            refusals |= torn
            walk.exclude(order, refusals)


def _check_loops(order: Sequence[Node], refusals: dict[Node, Unsupported], target: Target) -> None:
    """ExecuTorch has no loop: one must be in a delegate as a whole.

    Raises:
        ModelError: it is not.
    """
    level = levels(order, set(order) - refusals.keys())
    for last, end in enumerate(order):
        starts = cast(list[Node], end.args[2]) if end.target is LOOP_OUT else []
        inside = order[order.index(starts[0]) : last + 1] if starts else []
        reasons = [f"{operator_name(node)}: {refusals[node].reason}" for node in inside if node in refusals]
        if reasons or len({level[node] for node in (*starts, *inside[-1:])}) > 1:
            why = reasons[0] if reasons else "some of what it reads is computed on the CPU"
            advice = 'a known number of rounds, its body as a method of its own, or extensions=["cf"] for TOSA'
            what = f"a while_loop cannot be exported for {target.name}, and the CPU has none"
            raise ModelError(f"{what}. {why.rstrip('.')}. Choose {advice}")


def _check_own(refusals: dict[Node, Unsupported], target: Target) -> None:
    """What PyTorch has no operator for has no kernel on the CPU.

    Raises:
        ModelError: one stays there.
    """
    for node, refusal in refusals.items():
        overload = overload_of(node.target)
        if overload is not None and overload.namespace == LOOP_OUT.namespace and overload not in (LOOP_IN, LOOP_OUT):
            what = f"{in_words(node)} cannot be exported for {target.name}: {refusal.reason}. The CPU has no kernel"
            raise ModelError(f"{what} for block-scaled layers; TOSA_FP has, with extensions=['mxfp']")


def _unmaterializable(
    order: Sequence[Node], walk: Lowering, refusals: dict[Node, Unsupported]
) -> dict[Node, Unsupported]:
    """Nodes that hold a real number as integers, or not computed yet, although something outside reads it."""
    torn: dict[Node, Unsupported] = {}
    for node in reversed(order):
        if node in refusals or not walk.is_internal(node):
            continue
        reader = next((user for user in node.users if user.op == "output" or user in refusals or user in torn), None)
        if reader is not None and reader.op != "output":
            torn[node] = Unsupported(f"its result is read unquantized by '{reader.name}', which stays on the CPU")
        elif reader is not None or not node.users:
            torn[node] = Unsupported("its result leaves the program without being quantized")
    return torn


def levels(order: Iterable[Node], chosen: set[Node]) -> dict[Node, int]:
    """Chosen nodes as few groups that no path leaves and enters again.

    A node's level counts how often the longest path to it changes from the CPU to the target. A path that leaves a
    level through the CPU comes back at a higher one, so every level is convex.

    Returns:
        the level of each chosen node.
    """
    level: dict[Node, int] = {}  # even inside a delegate, odd on the CPU behind one
    for node in order:
        inside = node in chosen
        depths = [0]
        for source in node.all_input_nodes:
            crosses = source in level and (source in chosen) != inside
            depths.append(level.get(source, 0) + (crosses and level[source] % 2 != (not inside)))
        level[node] = max(depths)
    return {node: depth for node, depth in level.items() if node in chosen}
