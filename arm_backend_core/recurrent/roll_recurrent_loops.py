"""Long recurrent layers as loops: some steps are one delegate, which ExecuTorch's runtime calls again and again.

A layer is written step by step before it is quantized, all steps with the same scales. Here its steps become
``torch.scan`` over chunks of them, so that the weights and the commands of one chunk are stored and compiled once. The
results are those of the steps written out, as calls hand on the integers that steps hand on inside, but for the last
bit of a first step: where that is written out and begins with zeros, it is rounded less often.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from executorch.exir.delegate import executorch_call_delegate
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.fx.passes.tools_common import stable_topological_sort
from torch.utils import _pytree as pytree

from arm_backend_core import events
from arm_backend_core.backends.call_counts import set_call_count
from arm_backend_core.delegate import delegate, prepare_program
from arm_backend_core.insert_delegates import eliminate_dead_constants
from arm_backend_core.nodes import (
    DELEGATE_LOOP,
    TIMESTEP_SLOT,
    add_buffer_node,
    assign_debug_handles,
    eliminate_dead_code,
    evaluate_node,
)
from arm_backend_core.program import (
    avoid_builtin_names,
    build_program,
    constants_of,
    copy_program,
    lift_constants,
    lowered_modules,
)
from arm_backend_core.recurrent.traced_layers import TRACED_LAYERS
from arm_backend_core.recurrent.unrolled_steps import (
    Cast,
    Constant,
    Port,
    Slice,
    Step,
    StepOutput,
    StepValue,
    UnrolledLayer,
    argument_leaves,
    count_steps,
    find_layers,
    strip_casts,
)

if TYPE_CHECKING:
    from arm_backend_core.selection import Predicate
    from arm_backend_core.targets.compile_spec import ArmCompileSpec

aten = torch.ops.aten
SCAN = torch.ops.higher_order.scan

#: The longest layer that is not divided where the user says nothing, the most steps of all layers then, and how many
#: steps a call may compute.
_MAX_UNROLLED_STEPS, _MAX_TOTAL_STEPS, _STEPS_PER_CALL = 64, 256, range(4, 33)


def steps_per_call(total: int, wanted: int | str | None, of_all: int = 0) -> int:
    """How many of ``total`` steps a call computes.

    By default of long layers: few calls of few steps, which are all steps there are, as more are computed in vain and
    take a copy of the input. Where layers have many steps together, fewer of each are compiled.

    Args:
        of_all: steps of all layers of the program.
    """
    if wanted == "auto" and (total > _MAX_UNROLLED_STEPS or of_all > _MAX_TOTAL_STEPS):
        each = 2 if of_all > _MAX_TOTAL_STEPS and total <= _MAX_UNROLLED_STEPS else 8
        return min(_STEPS_PER_CALL, key=lambda n: -(-total // n) + n / each + (-total % n and total / 4 + -total % n))
    return min(wanted, total) if isinstance(wanted, int) else total


@dataclass(frozen=True)
class LoopRolling:
    """What is done to a program before it is delegated: its long layers become loops.

    Attributes:
        steps: that a call computes, "auto", or None for all.
    """

    steps: int | Literal["auto"] | None = "auto"

    def roll_loops(
        self, program: ExportedProgram, spec: ArmCompileSpec, keep_on_cpu: Sequence[Predicate] = ()
    ) -> ExportedProgram:
        """The program with loops; itself where it has none."""
        if self.steps is None:
            return program
        if any(node.target in TRACED_LAYERS for node in program.graph.nodes):  # where they are quantized there are none
            program = copy_program(program)
            assign_debug_handles(program.graph)
            program = prepare_program(program, spec.target)
            _name_outputs(program)
        counts = count_steps(program)
        of_all = sum(counts)
        if all(steps_per_call(count, self.steps, of_all) == count for count in counts):
            return program
        changed, made = copy_program(program), _ChunkCompiler(spec, keep_on_cpu)
        assign_debug_handles(changed.graph)
        avoid_builtin_names(changed)
        _bypass_stacks(changed.graph)
        for layer in find_layers(changed):
            _replace_by_loop(changed, layer, steps_per_call(len(layer.steps), self.steps, of_all), made)
        if not made.loops:
            return program
        stable_topological_sort(changed.graph_module)
        eliminate_dead_constants(changed, {node.name for node in constants_of(changed)})
        lift_constants(changed)
        _name_outputs(changed)
        return changed


def _name_outputs(program: ExportedProgram) -> None:
    """Have the signature name what is returned after other nodes have taken the place of some."""
    for spec, node in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        spec.arg.name = node.name if isinstance(node, Node) else spec.arg.name


class _ChunkCompiler:
    """Compiles chunks of steps, for one target."""

    def __init__(self, spec: ArmCompileSpec, keep_on_cpu: Sequence[Predicate]) -> None:
        self._spec, self._keep_on_cpu = spec, keep_on_cpu
        #: How many there are.
        self.loops = 0

    def next_name(self) -> str:
        """That of the next loop."""
        return f"arm_loop{self.loops}"

    def compile_chunk(self, chunk: ExportedProgram, calls: int) -> GraphModule | None:
        """The call of the delegate that a chunk is; None where it is not one."""
        log = events.current()
        with events.record() as tried:
            body = delegate(chunk, self._spec, keep_on_cpu=self._keep_on_cpu, name=self.next_name()).graph_module
        outside = [x.target for x in body.graph.nodes if x.op == "call_function" and x.target is not operator.getitem]
        if outside != [executorch_call_delegate]:
            return None
        (module,) = lowered_modules(body)
        assert module.meta is not None
        module.meta["arm_delegate"] = set_call_count(module.meta["arm_delegate"], calls)
        log.delegates.append(module.meta["arm_delegate"])
        log.notes += tried.notes
        self.loops += 1
        return body


def _replace_by_loop(program: ExportedProgram, layer: UnrolledLayer, count: int, compiler: _ChunkCompiler) -> None:
    """Put a loop in place of the steps, but where one call computes all, or a chunk cannot be delegated."""
    total, name = len(layer.steps), compiler.next_name()
    starts = _initial_states(program, layer) if count < total else None
    if starts is None:
        return
    calls = -(-total // count)
    last = set(starts) if calls * count == total else set()
    given = list(dict.fromkeys(x.port for x in layer.outputs if x.step < total - 1 or x.port not in last))
    body = compiler.compile_chunk(_Chunk(layer, program, count).build(given), calls)
    if body is not None:
        program.graph_module.add_module(name, body)
        _insert_loop(program, layer, name, starts, given, last, count)


def _bypass_stacks(graph: Graph) -> None:
    """Have what reads one step of a layer's sequence read that, so that no sequence need be kept.

    But for what takes the last states of a layer, by which one layer would go on in another.
    """
    for stack in graph.find_nodes(op="call_function", target=aten.stack.default):
        parts, dim = cast(list[Node], stack.args[0]), cast(int, stack.args[1] if len(stack.args) > 1 else 0)
        if any(TIMESTEP_SLOT not in strip_casts(part)[0].meta for part in parts):
            continue
        pending = list(stack.users)
        for node in pending:
            root, casts = strip_casts(node)
            if root is stack:
                pending += node.users
            elif node.target is aten.select.int and strip_casts(cast(Node, node.args[0]))[0] is stack:
                root, casts = strip_casts(cast(Node, node.args[0]))
                along, index = cast(tuple[int, int], node.args[1:])
                part, rank = parts[index], stack.meta["val"].dim()
                kept = {each.args for each in strip_casts(part)[1][-1:]} == {each.args for each in casts}
                if kept and TIMESTEP_SLOT not in node.meta and along % rank == dim % rank:
                    node.replace_all_uses_with(part)
    eliminate_dead_code(graph)


def _meta(like: Node, value: Any) -> dict[str, Any]:
    return {**{key: held for key, held in like.meta.items() if key != TIMESTEP_SLOT}, "val": value}


class _Writer:
    """Writes into a graph; casts of the same tensor are written once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._casts: dict[tuple[Node, Cast], Node] = {}

    def call(self, target: Any, *args: Any, like: Node) -> Node:
        """One more node, in no place of the steps; it comes from where ``like`` does."""
        node = self.graph.call_function(target, args)
        node.meta = _meta(like, target(*map_arg(args, lambda x: x.meta["val"])))
        return node

    def cast(self, node: Node, casts: Sequence[Cast]) -> Node:
        """``node`` with casts behind it."""
        for each in casts:
            if (node, each) not in self._casts:
                self._casts[node, each] = self.call(each.target, node, *each.args, like=node)
            node = self._casts[node, each]
        return node

    def to_port_type(self, node: Node, port: Port) -> Node:
        """The result of a port's operator as it is handed on."""
        return self.cast(node, [port.cast] if port.cast else [])

    def to_real(self, node: Node, port: Port) -> Node:
        """The reverse: what is handed on as real numbers."""
        return self.cast(node, [port.cast.reverse] if port.cast else [])


class _Chunk(_Writer):
    """Some steps as a program of their own."""

    def __init__(self, layer: UnrolledLayer, program: ExportedProgram, count: int) -> None:
        super().__init__(Graph())
        self._layer, self._program, self._count = layer, program, count
        self._constants: dict[Node, Node] = {}

    def build(self, given: Iterable[Port]) -> ExportedProgram:
        """Takes states and slices [count, ...], gives states and ``given`` [count, ...]."""
        specs = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        held: dict[Node, InputSpec] = {}
        needed = self._needed_constants()
        for node in needed:
            if node.op == "placeholder":
                self._constants[node] = self._input(node.name, node.meta["val"], node)
                held[self._constants[node]] = specs[node.name]
        template = self._layer.steps[1]
        self._states = {
            port: self._input(f"state_{i}", self._layer.port_meta(port), template[port.slot])
            for i, port in enumerate(self._layer.initial_states)
        }
        self._slices = [
            self._input(f"sequence_{i}", _without_axis(read.source.meta["val"], read.dim, self._count), read.source)
            for i, (read, _, _) in enumerate(self._layer.sequences)
        ]
        for node in needed:
            if node.op != "placeholder":
                self._constants[node] = self.graph.node_copy(node, self._constants.__getitem__)
        rows: list[Step] = []
        for k in range(self._count):
            rows.append(self._step(k, rows[-1] if rows else {}))
        results = [self.to_port_type(rows[-1][port.slot], port) for port in self._states]
        for port in given:
            parts = [self.to_real(self.to_port_type(row[port.slot], port), port) for row in rows]
            results.append(self.to_port_type(self.call(aten.stack.default, parts, like=parts[0]), port))
        self.graph.output(tuple(results))
        return build_program(self._program, self.graph, held)

    def _input(self, name: str, value: Tensor, like: Node) -> Node:
        node = self.graph.placeholder(name)
        node.meta = _meta(like, value)
        return node

    def _needed_constants(self) -> list[Node]:
        """What the steps read that is constant, in program order: placeholders come first."""
        pending = [x for node in self._layer.steps[1].values() for x in node.all_input_nodes]
        found = set[Node]()
        for node in pending:
            if node in self._layer.constants and node not in found:
                found.add(node)
                pending += node.all_input_nodes
        return [node for node in self._program.graph.nodes if node in found]

    def _step(self, k: int, before: Step) -> Step:
        step: Step = {}
        for place, node in self._layer.steps[1].items():
            _, structure, *reads = self._layer.reads[place]
            given = [
                self._operand(read, k, step, before) if not isinstance(read, Constant) else self._constants[leaf]
                for read, leaf in zip(reads, argument_leaves(node), strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(given, structure)
            step[place] = self.graph.call_function(cast(Any, node.target), args, kwargs)
            step[place].meta = dict(node.meta)
        return step

    def _operand(self, read: Any, k: int, step: Step, before: Step) -> Any:
        if isinstance(read, StepValue) and read.steps_back and not before:
            return self.cast(self._states[Port.of(read.slot, read.casts)], read.casts[1:])
        if isinstance(read, StepValue):
            return self.cast((before if read.steps_back else step)[read.slot], read.casts)
        if isinstance(read, Slice):
            x = self.cast(self._slices[self._layer.sequence_index(read)], read.before)
            x = self.call(aten.select.int, x, 0, k, like=x)
            for cut in read.cuts:
                x = self.call(aten.slice.Tensor, x, *cut, like=x)
            return self.cast(x, read.casts)
        return read


def _without_axis(value: Tensor, dim: int, *counts: int) -> Tensor:
    return value.new_empty([*counts, *value.shape[:dim], *value.shape[dim + 1 :]])


def _insert_loop(
    program: ExportedProgram,
    layer: UnrolledLayer,
    name: str,
    starts: Mapping[Port, Node | Tensor],
    given: Sequence[Port],
    last: Container[Port],
    count: int,
) -> None:
    """Put the loop ``name`` in place of the steps. Its results are the states, and what is ``given`` in every step."""
    graph, total = program.graph, len(layer.steps)
    first = list(layer.steps[0].values())
    with graph.inserting_before(first[-1].next):
        writer = _Writer(graph)
        states = [_state_node(program, f"{name}_state", x, layer.port_meta(port)) for port, x in starts.items()]
        slices = [_chunked_sequence(writer, total, *of, count) for of in layer.sequences]
        scan = graph.call_function(SCAN, (graph.get_attr(name), states, slices, ()))
        calls = slices[0].meta["val"].shape[0]
        values = [layer.port_meta(port) for port in starts]
        values += [layer.port_meta(port).new_empty([calls, count, *layer.port_meta(port).shape]) for port in given]
        scan.meta = {**_meta(first[0], values), DELEGATE_LOOP: True}
        picks = [graph.call_function(operator.getitem, (scan, i)) for i in range(len(values))]
        for pick, port, value in zip(picks, (*starts, *given), values, strict=True):
            pick.meta = _meta(layer.steps[1][port.slot], value)
        ends = {port: pick for port, pick in zip(starts, picks, strict=False) if port in last}
        rows = zip(given, picks[len(starts) :], strict=True)
        _replace_step_outputs(
            writer, layer, {port: _output_sequence(writer, pick, port, total) for port, pick in rows}, ends
        )
    eliminate_dead_code(graph)


def _initial_states(program: ExportedProgram, layer: UnrolledLayer) -> dict[Port, Node | Tensor] | None:
    """What the first call is given for each state: integers, if the port has a cast; None if these are no zeros."""
    values: dict[Node, Any] = dict(constants_of(program))

    def value(node: Node) -> Any:
        if node not in values:
            values[node] = evaluate_node(node, value)
        return values[node]

    found: dict[Port, Node | Tensor] = {}
    for port, read in layer.initial_states.items():
        found[port] = read[0]
        if read[0] in layer.constants:
            real = value(read[0])
            made = found[port] = real if port.cast is None else port.cast.target(real, *port.cast.args)
            back = made if port.cast is None else port.cast.reverse.target(made, *port.cast.args)
            if not all(torch.equal(back, value(each)) for each in read):
                return None
    return found


def _state_node(program: ExportedProgram, name: str, x: Node | Tensor, value: Tensor) -> Node:
    if isinstance(x, Node):
        return x
    made = add_buffer_node(program.graph_module, name, x)
    made.meta["val"] = value
    return made


def _chunked_sequence(writer: _Writer, total: int, read: Slice, first: int, stride: int, count: int) -> Node:
    """The tensors of all steps in the order of these: [calls, count, ...]."""
    calls = -(-total // count)
    x = writer.cast(read.source, read.before)
    shape = x.meta["val"].shape
    if read.dim:
        order = [read.dim, *(i for i in range(len(shape)) if i != read.dim)]
        x = writer.call(aten.permute.default, x, order, like=x)
    begin = min(first, first + stride * (total - 1))
    if (begin, total) != (0, shape[read.dim]):
        x = writer.call(aten.slice.Tensor, x, 0, begin, begin + total, like=x)
    if stride < 0:
        x = writer.call(aten.flip.default, x, [0], like=x)
    rest = x.meta["val"].shape[1:]
    if calls * count > total:
        x = writer.call(aten.constant_pad_nd.default, x, [0] * (2 * len(rest) + 1) + [calls * count - total], like=x)
    x = writer.call(aten.view.default, x, [calls, count, *rest], like=x)
    return writer.cast(x, [cast.reverse for cast in read.before])


def _output_sequence(writer: _Writer, pick: Node, port: Port, total: int) -> Node:
    """What a port hands out in every step, in their order, as real numbers."""
    x = writer.to_real(pick, port)
    calls, count, *rest = x.meta["val"].shape
    x = writer.call(aten.view.default, x, [calls * count, *rest], like=x)
    return x if calls * count == total else writer.call(aten.slice.Tensor, x, 0, 0, total, like=x)


def _replace_step_outputs(
    writer: _Writer, layer: UnrolledLayer, sequences: dict[Port, Node], last: dict[Port, Node]
) -> None:
    """Have what read results of steps read those of the loop."""
    by_node = {result.node: result for result in layer.outputs}
    readers = dict.fromkeys(user for result in layer.outputs for user in layer.external_readers(result.node))
    for stack in [user for user in readers if user.target is aten.stack.default]:
        parts = [by_node.get(x) for x in cast(list[Node], stack.args[0])]
        whole = _match_whole_sequence(parts, len(layer.steps))
        if whole is not None:
            result, stride = whole
            x = sequences[result.port]
            x = x if stride > 0 else writer.call(aten.flip.default, x, [0], like=x)
            dim = cast(int, stack.args[1] if len(stack.args) > 1 else 0) % x.meta["val"].dim()
            order = [*range(1, dim + 1), 0, *range(dim + 1, x.meta["val"].dim())]
            stack.replace_all_uses_with(writer.call(aten.permute.default, x, order, like=stack) if dim else x)
            writer.graph.erase_node(stack)
    for result in layer.outputs:
        left = layer.external_readers(result.node)
        if not left:
            continue
        if result.step == len(layer.steps) - 1 and result.port in last:
            x = writer.cast(last[result.port], result.casts[1:])
        else:
            whole_sequence = sequences[result.port]
            x = writer.call(aten.select.int, whole_sequence, 0, result.step, like=whole_sequence)
            x = writer.cast(writer.to_port_type(x, result.port), result.casts[1:])
        for reader in left:
            reader.replace_input_with(result.node, x)


def _match_whole_sequence(parts: Sequence[StepOutput | None], total: int) -> tuple[StepOutput, int] | None:
    """What a stack of these is all of, and whether forwards (1) or backwards (-1)."""
    if len(parts) != total or None in parts:
        return None
    known = cast(Sequence[StepOutput], parts)
    numbers, kinds = [part.step for part in known], {(part.port, part.casts) for part in known}
    straight = numbers if numbers[0] == 0 else numbers[::-1]
    if len(kinds) > 1 or straight != list(range(total)) or (known[0].port.cast and len(known[0].casts) != 2):
        return None
    return known[0], 1 if numbers[0] == 0 else -1
