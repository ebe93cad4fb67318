"""Loop rolling: turn the unrolled steps of long recurrent layers into a loop over one delegate.

A recurrent layer is unrolled before quantization, and all its steps have the same scales. This pass turns the steps
into a ``torch.scan`` over chunks of steps. ExecuTorch's runtime calls the delegate of a chunk repeatedly, so weights
and commands of one chunk are compiled and stored once.

The results are equal to those without loop rolling: one call of the delegate passes the same numbers to the next call
as an unrolled step passes to the next step. One exception: an unrolled first step with a zero state is rounded less
often, so the last bit of its result may differ.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from executorch.exir.delegate import executorch_call_delegate
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.tools_common import stable_topological_sort

from arm_backend_core import compilation_log
from arm_backend_core.backends.call_counts import set_call_count
from arm_backend_core.delegate import delegate, prepare_program
from arm_backend_core.graph_edits import add_buffer_node, eliminate_dead_code
from arm_backend_core.nodes import DELEGATE_LOOP, TIMESTEP_SLOT, assign_debug_handles, evaluate_node
from arm_backend_core.program import (
    avoid_builtin_names,
    constants_of,
    copy_program,
    eliminate_dead_constants,
    lift_constants,
    lowered_modules,
    update_output_names,
)
from arm_backend_core.recurrent.chunk import ChunkBuilder
from arm_backend_core.recurrent.node_writer import NodeWriter, copy_meta
from arm_backend_core.recurrent.recurrent_ops import RECURRENT_OPS
from arm_backend_core.recurrent.unrolled_steps import (
    StepOutput,
    StepSelect,
    UnrolledLayer,
    YieldedValue,
    count_steps,
    find_unrolled_layers,
    strip_qdq_ops,
)

if TYPE_CHECKING:
    from arm_backend_core.selection import Predicate
    from arm_backend_core.targets.compile_spec import ArmCompileSpec

aten = torch.ops.aten
SCAN = torch.ops.higher_order.scan

#: Limits of ``steps_per_call="auto"``, in steps. A layer stays unrolled if it has at most ``_MAX_UNROLLED_STEPS``, and
#: all layers of the program together have at most ``_MAX_TOTAL_STEPS``. Otherwise, the number of steps that one call of
#: the delegate computes is chosen from ``_STEPS_PER_CALL``.
_MAX_UNROLLED_STEPS, _MAX_TOTAL_STEPS, _STEPS_PER_CALL = 64, 256, range(4, 33)


def choose_steps_per_call(total: int, requested: int | str | None, program_steps: int = 0) -> int:
    """Choose the number of steps that one call of the delegate computes.

    For long layers, "auto" minimizes calls + steps per call / 8, plus a penalty if the steps do not divide evenly:
    surplus steps cost time, and padding copies the input. For shorter layers of a program with many steps in total, it
    minimizes calls + steps per call / 2 plus the penalty, so that fewer steps are compiled.

    Args:
        total: steps of the layer.
        requested: a number of steps, "auto", or None to compute all steps in one call.
        program_steps: steps of all layers of the program.

    Returns:
        The number of steps; ``total`` if the layer stays unrolled.
    """
    if requested == "auto" and (total > _MAX_UNROLLED_STEPS or program_steps > _MAX_TOTAL_STEPS):
        step_weight = 2 if program_steps > _MAX_TOTAL_STEPS and total <= _MAX_UNROLLED_STEPS else 8
        return min(
            _STEPS_PER_CALL, key=lambda n: -(-total // n) + n / step_weight + (-total % n and total / 4 + -total % n)
        )
    return min(requested, total) if isinstance(requested, int) else total


@dataclass(frozen=True)
class LoopRolling:
    """Loop rolling of a program, before it is delegated.

    Attributes:
        steps_per_call: number of steps that one call computes, "auto", or None to leave all layers unrolled.
    """

    steps_per_call: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        """Check the number of steps."""
        if isinstance(self.steps_per_call, int) and self.steps_per_call < 1:
            raise ValueError(f'steps_per_call: takes a number of at least 1, "auto" or None, got {self.steps_per_call}')

    def roll_loops(
        self, program: ExportedProgram, spec: ArmCompileSpec, keep_on_cpu: Sequence[Predicate] = ()
    ) -> ExportedProgram:
        """Roll the long layers of ``program`` into loops.

        Returns:
            A new program, in which the long layers are loops. If no layer becomes a loop: ``program`` itself, or, for a
            float program whose recurrent layers are not unrolled yet, a new program in which they are unrolled.
        """
        if self.steps_per_call is None:
            return program
        if any(
            node.target in RECURRENT_OPS for node in program.graph.nodes
        ):  # a float program: quantization unrolls the layers of quantized programs
            program = copy_program(program)
            assign_debug_handles(program.graph)
            program = prepare_program(program, spec.target)
            update_output_names(program)
        counts = count_steps(program)
        program_steps = sum(counts)
        if all(choose_steps_per_call(count, self.steps_per_call, program_steps) == count for count in counts):
            return program
        rolled, compiler = copy_program(program), _ChunkCompiler(spec, keep_on_cpu)
        assign_debug_handles(rolled.graph)
        avoid_builtin_names(rolled)
        _bypass_stacks(rolled.graph)
        for layer in find_unrolled_layers(rolled):
            _replace_by_loop(
                rolled, layer, choose_steps_per_call(len(layer.steps), self.steps_per_call, program_steps), compiler
            )
        if not compiler.loops:
            return program
        stable_topological_sort(rolled.graph_module)
        eliminate_dead_constants(rolled)
        lift_constants(rolled)
        update_output_names(rolled)
        return rolled


class _ChunkCompiler:
    """Compiles chunks of steps for one target.

    Attributes:
        loops: number of loops compiled so far.
    """

    def __init__(self, spec: ArmCompileSpec, keep_on_cpu: Sequence[Predicate]) -> None:
        self._spec, self._keep_on_cpu = spec, keep_on_cpu
        self.loops = 0

    def next_name(self) -> str:
        """Name of the next loop."""
        return f"arm_loop{self.loops}"

    def compile_chunk(self, chunk: ExportedProgram, calls: int) -> GraphModule | None:
        """Compile a chunk; return the module that calls its delegate. None unless one delegate computes all of it."""
        log = compilation_log.current_log()
        with compilation_log.open_log() as attempt:
            body = delegate(chunk, self._spec, keep_on_cpu=self._keep_on_cpu, name=self.next_name()).graph_module
        targets = [x.target for x in body.graph.nodes if x.op == "call_function" and x.target is not operator.getitem]
        if targets != [executorch_call_delegate]:
            return None
        (module,) = lowered_modules(body)
        record = compilation_log.delegate_record(module)
        assert record is not None
        record = set_call_count(record, calls)
        compilation_log.set_delegate_record(module, record)
        log.delegates.append(record)
        log.notes += attempt.notes
        self.loops += 1
        return body


def _replace_by_loop(
    program: ExportedProgram, layer: UnrolledLayer, steps_per_call: int, compiler: _ChunkCompiler
) -> None:
    """Replace the steps by a loop.

    The steps stay if one call computes all of them, if ``_find_initial_states`` returns None, or if one delegate cannot
    compute a whole chunk.
    """
    total, name = len(layer.steps), compiler.next_name()
    initial_states = _find_initial_states(program, layer) if steps_per_call < total else None
    if initial_states is None:
        return
    calls = -(-total // steps_per_call)
    final_carries = set(initial_states) if calls * steps_per_call == total else set()
    stacked = list(
        dict.fromkeys(x.yielded for x in layer.outputs if x.step < total - 1 or x.yielded not in final_carries)
    )
    body = compiler.compile_chunk(ChunkBuilder(layer, program, steps_per_call).build(stacked), calls)
    if body is not None:
        program.graph_module.add_module(name, body)
        _insert_loop(program, layer, name, initial_states, stacked, final_carries, steps_per_call)


def _bypass_stacks(graph: Graph) -> None:
    """Bypass stacks of step outputs: a select of one element of the stack is replaced by the step output itself.

    A select inside a recurrent step is kept. A select is also kept if a quantize node between it and the stack has
    other parameters than the step output. A stack without readers is removed.
    """
    for stack in graph.find_nodes(op="call_function", target=aten.stack.default):
        parts, dim = cast(list[Node], stack.args[0]), cast(int, stack.args[1] if len(stack.args) > 1 else 0)
        if any(TIMESTEP_SLOT not in strip_qdq_ops(part)[0].meta for part in parts):
            continue
        pending = list(stack.users)
        for node in pending:
            root, qdq_ops = strip_qdq_ops(node)
            if root is stack:
                pending += node.users
            elif node.target is aten.select.int and strip_qdq_ops(cast(Node, node.args[0]))[0] is stack:
                root, qdq_ops = strip_qdq_ops(cast(Node, node.args[0]))
                axis, index = cast(tuple[int, int], node.args[1:])
                part, rank = parts[index], stack.meta["val"].dim()
                is_exact = {op.args for op in strip_qdq_ops(part)[1][-1:]} == {op.args for op in qdq_ops}
                if is_exact and TIMESTEP_SLOT not in node.meta and axis % rank == dim % rank:
                    node.replace_all_uses_with(part)
    eliminate_dead_code(graph)


def _insert_loop(
    program: ExportedProgram,
    layer: UnrolledLayer,
    name: str,
    initial_states: Mapping[YieldedValue, Node | Tensor],
    stacked: Sequence[YieldedValue],
    final_carries: Container[YieldedValue],
    steps_per_call: int,
) -> None:
    """Insert the ``scan`` and replace the outputs of the steps by its results.

    Args:
        program: the program to edit.
        layer: the unrolled layer.
        name: name of the loop's body in the program's module.
        initial_states: {loop-carried value: its initial value}.
        stacked: the values that the loop returns for every step.
        final_carries: loop-carried values whose value after the last step is a result of the scan. Empty if the last
            chunk is padded, because the padded steps change these values.
        steps_per_call: number of steps that one call computes.
    """
    graph, total = program.graph, len(layer.steps)
    first = list(layer.steps[0].values())
    with graph.inserting_before(first[-1].next):
        writer = NodeWriter(graph)
        states = [
            _insert_state(program, f"{name}_state", x, layer.yielded_meta(yielded))
            for yielded, x in initial_states.items()
        ]
        slices = [_insert_chunked_sequence(writer, total, *sequence, steps_per_call) for sequence in layer.sequences]
        scan = graph.call_function(SCAN, (graph.get_attr(name), states, slices, ()))
        calls = slices[0].meta["val"].shape[0]
        values = [layer.yielded_meta(yielded) for yielded in initial_states]
        values += [
            layer.yielded_meta(yielded).new_empty([calls, steps_per_call, *layer.yielded_meta(yielded).shape])
            for yielded in stacked
        ]
        scan.meta = {**copy_meta(first[0], values), DELEGATE_LOOP: True}
        getitems = [graph.call_function(operator.getitem, (scan, i)) for i in range(len(values))]
        for getitem, yielded, value in zip(getitems, (*initial_states, *stacked), values, strict=True):
            getitem.meta = copy_meta(layer.steps[1][yielded.slot], value)
        final_states = {
            yielded: getitem
            for yielded, getitem in zip(initial_states, getitems, strict=False)
            if yielded in final_carries
        }
        outputs = zip(stacked, getitems[len(initial_states) :], strict=True)
        _replace_step_outputs(
            writer,
            layer,
            {yielded: _insert_output_sequence(writer, getitem, yielded, total) for yielded, getitem in outputs},
            final_states,
        )
    eliminate_dead_code(graph)


def _find_initial_states(program: ExportedProgram, layer: UnrolledLayer) -> dict[YieldedValue, Node | Tensor] | None:
    """Find the initial value of each loop-carried value, quantized if the loop carries integers.

    Returns:
        {loop-carried value: a node of the program, or a tensor if the initial value is constant}. None if integers
        cannot represent a constant initial value exactly, or if the readers of a value have different constants.
    """
    values: dict[Node, Any] = dict(constants_of(program))

    def value(node: Node) -> Any:
        if node not in values:
            values[node] = evaluate_node(node, value)
        return values[node]

    states: dict[YieldedValue, Node | Tensor] = {}
    for yielded, read in layer.initial_states.items():
        states[yielded] = read[0]
        if read[0] in layer.constants:
            real = value(read[0])
            initial = states[yielded] = (
                real if yielded.quantize is None else yielded.quantize.target(real, *yielded.quantize.args)
            )
            round_trip = (
                initial
                if yielded.quantize is None
                else yielded.quantize.inverse.target(initial, *yielded.quantize.args)
            )
            if not all(torch.equal(round_trip, value(operand)) for operand in read):
                return None
    return states


def _insert_state(program: ExportedProgram, name: str, x: Node | Tensor, value: Tensor) -> Node:
    if isinstance(x, Node):
        return x
    node = add_buffer_node(program.graph_module, name, x)
    node.meta["val"] = value
    return node


def _insert_chunked_sequence(
    writer: NodeWriter, total: int, read: StepSelect, first: int, stride: int, steps_per_call: int
) -> Node:
    """Emit the input sequence in step order, padded with zeros, as [calls, steps_per_call, ...]."""
    calls = -(-total // steps_per_call)
    x = writer.apply_qdq_ops(read.source, read.source_qdq_ops)
    shape = x.meta["val"].shape
    if read.dim:
        order = [read.dim, *(i for i in range(len(shape)) if i != read.dim)]
        x = writer.call(aten.permute.default, x, order, like=x)
    start = min(first, first + stride * (total - 1))
    if (start, total) != (0, shape[read.dim]):
        x = writer.call(aten.slice.Tensor, x, 0, start, start + total, like=x)
    if stride < 0:
        x = writer.call(aten.flip.default, x, [0], like=x)
    inner_shape = x.meta["val"].shape[1:]
    if calls * steps_per_call > total:
        x = writer.call(
            aten.constant_pad_nd.default, x, [0] * (2 * len(inner_shape) + 1) + [calls * steps_per_call - total], like=x
        )
    x = writer.call(aten.view.default, x, [calls, steps_per_call, *inner_shape], like=x)
    return writer.apply_qdq_ops(x, [op.inverse for op in read.source_qdq_ops])


def _insert_output_sequence(writer: NodeWriter, stacked: Node, yielded: YieldedValue, total: int) -> Node:
    """Emit a yielded value of all steps, dequantized, in step order and without padding: [steps, ...]."""
    x = writer.dequantize_yielded(stacked, yielded)
    calls, steps_per_call, *rest = x.meta["val"].shape
    x = writer.call(aten.view.default, x, [calls * steps_per_call, *rest], like=x)
    return x if calls * steps_per_call == total else writer.call(aten.slice.Tensor, x, 0, 0, total, like=x)


def _replace_step_outputs(
    writer: NodeWriter,
    layer: UnrolledLayer,
    sequences: dict[YieldedValue, Node],
    final_states: dict[YieldedValue, Node],
) -> None:
    """Redirect readers of step outputs to the results of the loop."""
    by_node = {result.node: result for result in layer.outputs}
    readers = dict.fromkeys(user for result in layer.outputs for user in layer.external_readers(result.node))
    for stack in [user for user in readers if user.target is aten.stack.default]:
        parts = [by_node.get(x) for x in cast(list[Node], stack.args[0])]
        match = _match_whole_sequence(parts, len(layer.steps))
        if match is not None:
            result, stride = match
            x = sequences[result.yielded]
            x = x if stride > 0 else writer.call(aten.flip.default, x, [0], like=x)
            dim = cast(int, stack.args[1] if len(stack.args) > 1 else 0) % x.meta["val"].dim()
            order = [*range(1, dim + 1), 0, *range(dim + 1, x.meta["val"].dim())]
            stack.replace_all_uses_with(writer.call(aten.permute.default, x, order, like=stack) if dim else x)
            writer.graph.erase_node(stack)
    for result in layer.outputs:
        remaining = layer.external_readers(result.node)
        if not remaining:
            continue
        if result.step == len(layer.steps) - 1 and result.yielded in final_states:
            x = writer.apply_qdq_ops(final_states[result.yielded], result.qdq_ops[1:])
        else:
            whole_sequence = sequences[result.yielded]
            x = writer.call(aten.select.int, whole_sequence, 0, result.step, like=whole_sequence)
            x = writer.apply_qdq_ops(writer.quantize_yielded(x, result.yielded), result.qdq_ops[1:])
        for reader in remaining:
            reader.replace_input_with(result.node, x)


def _match_whole_sequence(parts: Sequence[StepOutput | None], total: int) -> tuple[StepOutput, int] | None:
    """Match a stack of one yielded value of all steps; return its first output and the step order (1 or -1)."""
    if len(parts) != total or None in parts:
        return None
    outputs = cast(Sequence[StepOutput], parts)
    step_indices, distinct_sources = [part.step for part in outputs], {(part.yielded, part.qdq_ops) for part in outputs}
    ascending = step_indices if step_indices[0] == 0 else step_indices[::-1]
    if (
        len(distinct_sources) > 1
        or ascending != list(range(total))
        or (outputs[0].yielded.quantize and len(outputs[0].qdq_ops) != 2)
    ):
        return None
    return outputs[0], 1 if step_indices[0] == 0 else -1
