"""The whole delegation: which nodes a target can run, cut out, lowered to TOSA, compiled, put back as delegates."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.aten.decompose import decompose
from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.aten.int64 import BOUNDARY, narrow_int64_inputs, narrow_int64_results, widen_int64_outputs
from arm_backend_core.aten.memory_format import settle_memory_formats
from arm_backend_core.backends.artifacts import Origin
from arm_backend_core.backends.payload import checksum
from arm_backend_core.culprit import culprit
from arm_backend_core.errors import CompileError, FullDelegationError, Unsupported
from arm_backend_core.lowering import Lowering, Univariate
from arm_backend_core.nodes import is_dequantize, is_quantize, memory_order, overload_of, source_line
from arm_backend_core.ops.operands import Tensor
from arm_backend_core.permutation import Layout
from arm_backend_core.program import (
    Partition,
    avoid_builtin_names,
    clear_tags,
    constants_of,
    copied,
    drop_assertions,
    lift_constants,
    split_dequantize,
    tag_groups,
)
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import passes, reference
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.serialize import serialize

Predicate = Callable[[Node], bool]


def delegate(
    program: ExportedProgram,
    spec: ArmCompileSpec,
    *,
    keep_on_cpu: Sequence[Predicate] = (),
    require_full_delegation: bool = False,
) -> ExportedProgram:
    """Compile every part of an ATen program that the target can run.

    Args:
        program: ATen program, quantized (``quantized_decomposed`` operators) or not; it is left as it is.
        spec: the target and how to compile for it.
        keep_on_cpu: nodes for which one of these holds are not delegated.
        require_full_delegation: raise if any operator but boundary casts stays on the CPU.

    Raises:
        FullDelegationError: as asked for by ``require_full_delegation``.
        CompileError: Vela or the model converter failed.
    """
    program = _prepared(copied(program))
    selection = _select(program, spec.target, keep_on_cpu)
    rejected = selection.rejections()
    log = events.current()
    if log is not None:
        log.rejected.extend(rejected)
    if require_full_delegation and rejected:
        lines = [f"  {r.operator} ({r.node}{', ' + r.source if r.source else ''}): {r.reason}" for r in rejected]
        raise FullDelegationError(
            f"require_full_delegation: {len(rejected)} operator(s) cannot run on {spec.target.name}:\n"
            + "\n".join(lines)
        )
    groups = selection.groups()
    chosen = {node for group in groups for node in group}
    narrow_int64_results(program, chosen)
    settle_memory_formats(program, chosen)
    for tag in tag_groups(program, groups):
        _compile(Partition(program, tag), spec)
    clear_tags(program)
    program.graph_module.recompile()
    return program


def _prepared(program: ExportedProgram) -> ExportedProgram:
    """Functional, decomposed where there is no record, int64 inputs narrowed."""
    if not functionalize(program.graph_module.graph):
        program = program.run_decompositions({})
    if decompose(program.graph_module, constants_of(program)):
        lift_constants(program)
    drop_assertions(program)
    program.graph_module.graph.eliminate_dead_code()
    avoid_builtin_names(program)
    narrow_int64_inputs(program)
    widen_int64_outputs(program)
    split_dequantize(program)
    return program


@dataclass
class _Selection:
    """What one walk over the program found.

    Attributes:
        order: operators of the program.
        chosen: those that the target runs.
        reasons: why the others stay on the CPU.
        bound: chosen nodes whose result no delegate can hand over: real numbers held as integers, constants.
    """

    order: list[Node]
    chosen: set[Node]
    reasons: dict[Node, str]
    bound: set[Node]

    def rejections(self) -> list[events.Rejected]:
        """Operators that stay on the CPU; what only crosses the boundary is not one."""
        return [
            events.Rejected(node.name, str(overload_of(node.target) or node.target), reason, source_line(node))
            for node, reason in self.reasons.items()
            if not (is_quantize(node) or is_dequantize(node) or node.meta.get(BOUNDARY))
            and node.target is not operator.getitem  # counts with the operator that it picks a result of
        ]

    def groups(self) -> list[list[Node]]:
        """Chosen nodes as few groups that no path leaves and enters again.

        A node's level counts how often the longest path to it changes from the CPU to the target. A path that leaves a
        level through the CPU comes back at a higher one, so every level is convex.
        """
        level: dict[Node, int] = {}  # even inside a delegate, odd on the CPU behind one
        for node in self.order:
            inside = node in self.chosen
            depths = [0]
            for source in node.all_input_nodes:
                crosses = source in level and (source in self.chosen) != inside
                depths.append(level.get(source, 0) + (crosses and level[source] % 2 != (not inside)))
            level[node] = max(depths)
        groups: dict[int, list[Node]] = {}
        for node, depth in self._joined_to_readers(level).items():
            groups.setdefault(depth, []).append(node)
        return [groups[depth] for depth in sorted(groups)]

    def _joined_to_readers(self, level: dict[Node, int]) -> dict[Node, int]:
        """Levels of the chosen nodes; a bound one is where its readers are, copied if these are on several levels."""
        placed = {node: level[node] for node in self.order if node in self.chosen}
        for node in reversed(self.order):
            if node not in self.bound:
                continue
            readers: dict[int | None, list[Node]] = {}  # None: on the CPU
            for user in node.users:
                readers.setdefault(placed.get(user), []).append(user)
            depths = sorted(depth for depth in readers if depth is not None)
            if not depths:  # a constant that the CPU alone reads is computed there
                del placed[node]
                continue
            placed[node] = depths[0]
            for depth in [*depths[1:], *([None] if None in readers else [])]:
                with node.graph.inserting_after(node):
                    copy = node.graph.node_copy(node)
                for user in readers[depth]:
                    user.replace_input_with(node, copy)
                if depth is not None:
                    placed[copy] = depth
        return placed


def _select(program: ExportedProgram, target: Target, keep_on_cpu: Sequence[Predicate]) -> _Selection:
    order = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    constants = constants_of(program)
    inputs = {n for n in program.graph_module.graph.nodes if n.op == "placeholder" and n not in constants}
    reasons = {node: "it quantizes a model input" for node in order if is_quantize(node) and node.args[0] in inputs}
    reasons |= {node: "kept on the CPU as asked" for node in order if any(keep(node) for keep in keep_on_cpu)}
    reasons |= {node: "it crosses the boundary" for node in order if node.meta.get(BOUNDARY)}
    while True:  # ends: every round takes at least one node out, usually there is one round
        walk = Lowering(target, constants)
        walk.run(order, reasons)
        # The first reason is the true one: later rounds see the operands that the earlier ones left on the CPU.
        reasons |= {node: r.reason for node, r in walk.results.items() if isinstance(r, Unsupported)}
        torn = _torn(order, walk, set(reasons))
        if not torn:
            break
        reasons |= {node: _torn_reason(node, reasons) for node in torn}
    chosen = {node for node in order if node not in reasons}
    fixed: set[Node] = set(constants)
    for node in order:
        if node in chosen and all(source in fixed for source in node.all_input_nodes):
            fixed.add(node)
    return _Selection(order, chosen, reasons, {node for node in chosen if node in fixed or _held(walk, node)})


def _held(walk: Lowering, node: Node) -> bool:
    """Whether ``node``'s result is a real number held as integers, or not computed yet."""
    result = walk.results.get(node)
    if isinstance(result, list):
        return any(not isinstance(item, Tensor) or item.q is not None for item in result)
    return isinstance(result, Univariate) or (isinstance(result, Tensor) and result.q is not None)


def _torn(order: Sequence[Node], walk: Lowering, outside: set[Node]) -> set[Node]:
    """Nodes that hold a real number as integers, or not computed yet, although something outside reads it."""
    outside = set(outside)
    torn = set()
    for node in reversed(order):
        escapes = not node.users or any(user.op == "output" or user in outside for user in node.users)
        if node not in outside and escapes and _held(walk, node):
            torn.add(node)
            outside.add(node)
    return torn


def _torn_reason(node: Node, reasons: dict[Node, str]) -> str:
    reader = next((user for user in node.users if user.op == "output" or user in reasons), None)
    if reader is None or reader.op == "output":
        return "its result leaves the program without being quantized"
    return f"its result is read unquantized by '{reader.name}', which stays on the CPU"


def _compile(partition: Partition, spec: ArmCompileSpec) -> None:
    """Lower a partition to TOSA, compile it, and put the delegate in its place."""
    name = partition.tag
    operators = [node for node in partition.program.graph_module.graph.nodes if node.op == "call_function"]
    graph = _tosa_graph(partition, spec.target)
    flatbuffer = serialize(graph, locations=spec.debug_mode is ArmCompileSpec.DebugMode.TOSA)
    kinds = tuple(op.kind for op in graph.ops)

    def locate(text: str) -> tuple[str, str] | None:
        """The ATen operator behind a TOSA operator that a tool's message names."""
        for op in graph.ops:
            if op.kind in text.upper() and op.origin is not None:
                return op.origin.operator, op.origin.source
        return None

    try:
        payload = spec.compile(flatbuffer, delegate=name, locate=locate)
    except CompileError as error:
        origin = culprit(graph, spec, error) if error.operator is None else None
        raise error if origin is None else error.at(origin.operator, origin.source) from error
    spec.dump(name, flatbuffer, payload, _origins(graph))
    check = checksum(payload.data)
    record = events.Delegate(
        name=name,
        backend=spec.backend_id,
        operators=tuple(str(overload_of(node.target) or node.target) for node in operators),
        tosa_operators=kinds,
        tosa=flatbuffer,
        payload_bytes=len(payload.data),
        checksum=check.value,
        vela=payload.vela,
        inputs=tuple(_io(value) for value in graph.inputs),
        outputs=tuple(_io(value) for value in graph.outputs),
    )
    log = events.current()
    if log is not None:
        log.delegates.append(record)
    specs = [*spec.to_list(), check]
    orders = [memory_order(node.meta["val"]) for node in partition.inputs]
    partition.insert(spec.backend_id, payload.data, specs, _executor(flatbuffer, orders), {"arm_delegate": record})


def _origins(graph: Graph) -> list[Origin]:
    """Where each operator of the flatbuffer comes from; a pass's own operators come from nowhere."""
    return [
        Origin(
            op.kind,
            op.output.name,
            op.origin.operator if op.origin else "",
            op.origin.node if op.origin else "",
            op.origin.source if op.origin else "",
        )
        for op in graph.ops
    ]


def _io(value: Value) -> events.Io:
    return events.Io(value.name, value.dtype.value, value.shape)


def _tosa_graph(partition: Partition, target: Target) -> Graph:
    """The partition as an optimized TOSA graph, inputs and outputs in the order of its program."""
    program = partition.program
    nodes = list(program.graph_module.graph.nodes)
    walk = Lowering(target, constants_of(program))
    for node in partition.inputs:
        walk.read(node)
    walk.run(nodes)
    for node, result in walk.results.items():
        if isinstance(result, Unsupported):  # the selection ran the same walk, so this is a fault of ours
            raise CompileError(
                f"{node.target} was selected but cannot be lowered: {result.reason}",
                delegate=partition.tag,
                operator=str(node.target),
                source=source_line(node),
            )
    graph = walk.graph
    graph.outputs = [_output(walk, node) for node in partition.outputs]
    passes.run(graph, target)
    return graph


def _output(walk: Lowering, node: Node) -> Value:
    result = walk.read(node)
    assert isinstance(result, Tensor), node
    return result.value


def _executor(flatbuffer: bytes, orders: Sequence[Layout]) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    def execute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [
            tensor.detach().cpu().permute(order).contiguous().numpy()
            for tensor, order in zip(tensors, orders, strict=True)
        ]
        return [torch.from_numpy(np.array(array)) for array in reference.run(flatbuffer, arrays)]

    return execute
