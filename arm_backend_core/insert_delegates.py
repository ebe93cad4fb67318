"""Delegate insertion: replace partitions of an ExportedProgram by delegate calls, all in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.passes.tools_common import stable_topological_sort

from arm_backend_core.backends.payload import PLANNED_SCRATCH_KEYS
from arm_backend_core.compilation_log import DelegateRecord, set_delegate_record
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.nodes import BOUNDARY, boundary_dim_order, boundary_source
from arm_backend_core.program import build_program, eliminate_dead_constants

if TYPE_CHECKING:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

Executor = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Partition:
    """Nodes that become one delegate.

    Attributes:
        name: name of the delegate.
        nodes: the nodes, in program order.
        inputs: the nodes outside of the partition that its nodes or its TOSA graph read, without constants. They are
            sorted by the program order of their sources: if a node only quantizes, dequantizes, casts or copies a
            tensor at the boundary, its source is this tensor (``boundary_source``). Inputs of the program thus keep
            their order.
        constants: the placeholders of parameters, buffers and constants that the partition reads.
        outputs: the nodes of the partition that a node outside of it or the TOSA graph of a later partition reads, in
            program order.
    """

    name: str
    nodes: list[Node]
    inputs: list[Node]
    constants: list[Node]
    outputs: list[Node]

    @staticmethod
    def from_nodes(
        name: str,
        nodes: list[Node],
        constants: Container[Node],
        position: Callable[[Node], int],
        indirect_inputs: Iterable[Node] = (),
    ) -> Partition:
        """Build the partition of ``nodes``.

        Args:
            name: name of the delegate.
            nodes: the nodes, in program order.
            constants: all placeholders of constants of the program.
            position: returns a node's index in the program.
            indirect_inputs: nodes outside of the partition that its TOSA graph reads, although none of ``nodes`` does.
        """
        members = set(nodes)
        operands = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in members)
        sources = sorted(
            {**operands, **dict.fromkeys(indirect_inputs)}, key=lambda x: (position(boundary_source(x)), position(x))
        )
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        inputs = [source for source in sources if source not in constants]
        return Partition(name, nodes, inputs, [source for source in sources if source in constants], outputs)


@dataclass(frozen=True)
class CompiledPartition:
    """A compiled partition.

    Attributes:
        partition: the partition.
        backend_id: ExecuTorch's id of the backend.
        payload: the bytes that the backend's runtime loads.
        compile_specs: compile specs stored with the delegate.
        execute: computes the partition in Python.
        record: the delegate's record in the compilation log; stored in the lowered module.
    """

    partition: Partition
    backend_id: str
    payload: bytes
    compile_specs: list[Any]
    execute: Executor
    record: DelegateRecord


def insert_delegates(program: ExportedProgram, delegates: Sequence[CompiledPartition]) -> None:
    """Insert ``delegates`` into the program; remove the nodes that they replace, and constants that become unused."""
    if not delegates:
        return
    casts = _BoundaryCasts()
    modules = [_make_lowered_module(program, delegate) for delegate in delegates]  # before the nodes are replaced
    for delegate, module in zip(delegates, modules, strict=True):
        _insert_call(program, delegate.partition, module, casts)
    for delegate in delegates:
        for node in reversed(delegate.partition.nodes):
            program.graph.erase_node(node)
    stable_topological_sort(program.graph_module)
    eliminate_dead_code(program.graph)  # for example casts back to int64 whose only readers became delegates
    eliminate_dead_constants(program)
    program.graph_module.recompile()


class _BoundaryCasts:
    """CPU nodes that cast or copy tensors at delegate boundaries; one for each tensor, shared by all delegates."""

    def __init__(self) -> None:
        self._converted: dict[Node, Node] = {}

    def convert_input(self, source: Node) -> Node:
        """Convert ``source`` to a delegate's input: int64 to int32, with the memory layout of ``boundary_dim_order``.

        If a delegate that is already inserted computes ``source``, return that delegate's result without a conversion.
        """
        if source not in self._converted:
            is_int64 = source.meta["val"].dtype is torch.int64
            self._converted[source] = _to_boundary_layout(_cast(source, torch.int32) if is_int64 else source)
        return self._converted[source]

    def replace_output(self, result: Node, node: Node) -> None:
        """Replace ``node`` by ``result``, a delegate's result. If ``node`` is int64, cast the int32 result back."""
        self._converted[node] = result
        dtype = node.meta["val"].dtype
        node.replace_all_uses_with(result if dtype is result.meta["val"].dtype else _cast(result, dtype))


def _to_boundary_layout(source: Node) -> Node:
    value = source.meta["val"]
    if value.permute(boundary_dim_order(source)).is_contiguous():
        return source
    return _insert_after(
        source, torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}, value.contiguous()
    )


def _cast(source: Node, dtype: torch.dtype) -> Node:
    return _insert_after(source, torch.ops.aten._to_copy.default, {"dtype": dtype}, source.meta["val"].to(dtype))


def _insert_after(source: Node, target: Any, kwargs: dict[str, Any], value: torch.Tensor) -> Node:
    """Insert a boundary node after ``source``, or after the last placeholder if ``source`` is one."""
    position = source
    while position.op == "placeholder" and position.next.op == "placeholder":
        position = position.next
    with source.graph.inserting_after(position):
        node = source.graph.call_function(target, (source,), kwargs)
    node.meta |= {"val": value, BOUNDARY: True, "stack_trace": source.meta.get("stack_trace")}
    return node


def _insert_call(program: ExportedProgram, partition: Partition, module: Any, casts: _BoundaryCasts) -> None:
    """Insert the call of the delegate, and redirect readers of the partition's outputs to its results."""
    from executorch.exir.delegate import executorch_call_delegate, get_lowered_module_name

    graph = program.graph
    names = {node.name: node for node in partition.outputs}
    with graph.inserting_before(partition.nodes[0]):
        lowered = graph.get_attr(get_lowered_module_name(program.graph_module, module))
        sources = [casts.convert_input(node) for node in partition.inputs]
        call = graph.call_function(executorch_call_delegate, (lowered, *sources))
        results = [_result_meta(node.meta["val"]) for node in partition.outputs]
        call.meta["val"] = results
        getitems = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for node, getitem, value in zip(partition.outputs, getitems, results, strict=True):
        getitem.meta["val"] = value
        casts.replace_output(getitem, node)
    for spec, node in zip(program.graph_signature.output_specs, graph.output_node().args[0], strict=True):
        if spec.arg.name in names:
            spec.arg.name = node.name


def _result_meta(value: torch.Tensor) -> torch.Tensor:
    """Metadata of a delegate's result: contiguous, int32 in place of int64."""
    return (value.to(torch.int32) if value.dtype is torch.int64 else value).contiguous()


def _make_lowered_module(program: ExportedProgram, delegate: CompiledPartition) -> Any:
    part_program = _extract_program(program, delegate.partition)
    metas = [_result_meta(node.meta["val"]) for node in delegate.partition.outputs]
    eager = _EagerDelegate(metas, delegate.execute)
    part_program.module = lambda *_, **__: eager  # type: ignore[method-assign,assignment]
    lowered = _make_lowered_module_class()(part_program, delegate.backend_id, delegate.payload, delegate.compile_specs)
    eager.lowered = lowered
    lowered.meta = {"debug_handle_map": dict(enumerate(delegate.record.handles))}
    set_delegate_record(lowered, delegate.record)
    return lowered


def _extract_program(program: ExportedProgram, partition: Partition) -> ExportedProgram:
    """The partition as an ExportedProgram, for tools that inspect delegates."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in (*partition.constants, *partition.inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in partition.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in partition.outputs))
    return build_program(program, graph, {copies[node]: specs[node.name] for node in partition.constants})


class _EagerDelegate:
    """Python implementation of a delegate, in place of its original module.

    If called with fake tensors, it returns empty tensors of the right shapes and types. ExecuTorch makes such a call
    each time it traces the program (12 times in an export). If called with real tensors, it executes the delegate, so
    that an edge program can be executed in Python.

    ``to_executorch`` traces the program before it plans the memory. Each trace removes the compile specs
    ``PLANNED_SCRATCH_KEYS``, which an earlier run of this project's memory planning wrote. ExecuTorch's own planning
    may run next and would leave the old values.

    Attributes:
        lowered: the module of the compiled delegate, which holds its compile specs.
    """

    lowered: LoweredBackendModule

    def __init__(self, metas: Sequence[torch.Tensor], execute: Executor) -> None:
        self.metas = [(tuple(meta.shape), meta.dtype) for meta in metas]
        self.execute = execute

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        if all(type(arg) is torch.Tensor for arg in args) and torch._guards.detect_fake_mode(args) is None:
            return self.execute(args)
        specs = self.lowered.compile_specs
        if any(spec.key in PLANNED_SCRATCH_KEYS for spec in specs):
            self.lowered._compile_specs = [spec for spec in specs if spec.key not in PLANNED_SCRATCH_KEYS]
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.metas]


def _make_lowered_module_class() -> type[Any]:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    class ArmLoweredModule(LoweredBackendModule):
        """A compiled delegate. ``deepcopy`` returns the delegate itself: copies of a program share it."""

        def __deepcopy__(self, memo: dict[int, Any] | None) -> ArmLoweredModule:
            return self

    ArmLoweredModule.__name__ = LoweredBackendModule.__name__  # PyTorch recognizes delegates by the type's name
    return ArmLoweredModule
