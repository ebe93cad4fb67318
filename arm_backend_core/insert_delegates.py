"""Delegates put into an ExportedProgram in place of the nodes that they compute, all of them in one go."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.passes.tools_common import stable_topological_sort

from arm_backend_core.nodes import BOUNDARY, boundary_order, boundary_source, eliminate_dead_code
from arm_backend_core.program import build_program

_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
Execute = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class Partition:
    """Nodes that become one delegate.

    Attributes:
        name: of the delegate.
        nodes: in program order.
        inputs: what they read of others and is not constant, in program order, a quantized input where the input is.
        constants: placeholders of parameters, buffers and constants that they read.
        outputs: those that others read, in program order.
    """

    name: str
    nodes: list[Node]
    inputs: list[Node]
    constants: list[Node]
    outputs: list[Node]

    @staticmethod
    def from_nodes(
        name: str, nodes: list[Node], constants: Container[Node], position: Callable[[Node], int]
    ) -> Partition:
        """The part that ``nodes`` are; ``position`` orders nodes as the program does."""
        members = set(nodes)
        read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in members)
        sources = sorted(read, key=lambda x: (position(boundary_source(x)), position(x)))
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        inputs = [source for source in sources if source not in constants]
        return Partition(name, nodes, inputs, [source for source in sources if source in constants], outputs)


@dataclass(frozen=True)
class CompiledPartition:
    """What a part was compiled to; ``execute`` computes it in Python, ``meta`` is kept with the delegate."""

    partition: Partition
    backend_id: str
    payload: bytes
    compile_specs: list[Any]
    execute: Execute
    meta: dict[str, Any]


def insert_delegates(program: ExportedProgram, delegates: Sequence[CompiledPartition]) -> None:
    """Put ``delegates`` into the program, and take out the nodes and the constants that nothing else reads."""
    if not delegates:
        return
    joints = _BoundaryCasts()
    modules = [_lowered_module(program, delegate) for delegate in delegates]  # of the nodes as they are
    for delegate, module in zip(delegates, modules, strict=True):
        _insert_call(program, delegate.partition, module, joints)
    for delegate in delegates:
        for node in reversed(delegate.partition.nodes):
            program.graph.erase_node(node)
    stable_topological_sort(program.graph_module)
    eliminate_dead_code(program.graph)  # casts back to int64 that only delegates would have read
    eliminate_dead_constants(program, {node.name for delegate in delegates for node in delegate.partition.constants})
    program.graph_module.recompile()


class _BoundaryCasts:
    """Nodes on the CPU that bring a tensor across a boundary, one for each tensor however many delegates read it."""

    def __init__(self) -> None:
        self._converted: dict[Node, Node] = {}

    def convert_input(self, source: Node) -> Node:
        """``source`` as delegates take it: int32 in place of int64, in memory as ``boundary_order`` says."""
        if source not in self._converted:
            wide = source.meta["val"].dtype is torch.int64
            self._converted[source] = _to_boundary_layout(_cast(source, torch.int32) if wide else source)
        return self._converted[source]

    def replace_output(self, pick: Node, node: Node) -> None:
        """Have ``pick``, a delegate's result, read in place of ``node``: as int64 where that was its type."""
        self._converted[node] = pick
        wanted = node.meta["val"].dtype
        node.replace_all_uses_with(pick if wanted is pick.meta["val"].dtype else _cast(pick, wanted))


def _to_boundary_layout(source: Node) -> Node:
    value = source.meta["val"]
    if value.permute(boundary_order(source)).is_contiguous():
        return source
    return _insert_after(
        source, torch.ops.aten.clone.default, {"memory_format": torch.contiguous_format}, value.contiguous()
    )


def _cast(source: Node, dtype: torch.dtype) -> Node:
    return _insert_after(source, torch.ops.aten._to_copy.default, {"dtype": dtype}, source.meta["val"].to(dtype))


def _insert_after(source: Node, target: Any, kwargs: dict[str, Any], value: torch.Tensor) -> Node:
    """A node of the boundary behind ``source``; placeholders stay together."""
    behind = source
    while behind.op == "placeholder" and behind.next.op == "placeholder":
        behind = behind.next
    with source.graph.inserting_after(behind):
        node = source.graph.call_function(target, (source,), kwargs)
    node.meta |= {"val": value, BOUNDARY: True, "stack_trace": source.meta.get("stack_trace")}
    return node


def _insert_call(program: ExportedProgram, part: Partition, module: Any, joints: _BoundaryCasts) -> None:
    """The call of the delegate; what read the part's outputs reads the call's results."""
    from executorch.exir.delegate import executorch_call_delegate, get_lowered_module_name

    graph = program.graph
    names = {node.name: node for node in part.outputs}
    with graph.inserting_before(part.nodes[0]):
        lowered = graph.get_attr(get_lowered_module_name(program.graph_module, module))
        sources = [joints.convert_input(node) for node in part.inputs]
        call = graph.call_function(executorch_call_delegate, (lowered, *sources))
        results = [_delegate_result(node.meta["val"]) for node in part.outputs]
        call.meta["val"] = results
        picks = [graph.call_function(operator.getitem, (call, index)) for index in range(len(results))]
    for node, pick, value in zip(part.outputs, picks, results, strict=True):
        pick.meta["val"] = value
        joints.replace_output(pick, node)
    for spec, node in zip(program.graph_signature.output_specs, graph.output_node().args[0], strict=True):
        if spec.arg.name in names:
            spec.arg.name = node.name


def _delegate_result(value: torch.Tensor) -> torch.Tensor:
    """A delegate's result: contiguous, without int64."""
    return (value.to(torch.int32) if value.dtype is torch.int64 else value).contiguous()


def _lowered_module(program: ExportedProgram, delegate: CompiledPartition) -> Any:
    owned = _partition_program(program, delegate.partition)
    stub = _DelegateStub([_delegate_result(node.meta["val"]) for node in delegate.partition.outputs], delegate.execute)
    owned.module = lambda *_, **__: stub  # type: ignore[method-assign,assignment]
    lowered = _lowered_module_class()(owned, delegate.backend_id, delegate.payload, delegate.compile_specs)
    lowered.meta = dict(delegate.meta)
    return lowered


def _partition_program(program: ExportedProgram, part: Partition) -> ExportedProgram:
    """The part as a program of its own, for tools that look into delegates."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in (*part.constants, *part.inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in part.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in part.outputs))
    return build_program(program, graph, {copies[node]: specs[node.name] for node in part.constants})


def eliminate_dead_constants(program: ExportedProgram, names: Container[str]) -> None:
    """Take out the constants called ``names`` that nothing reads any more."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    kept = []
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind not in _CONSTANT_KINDS or spec.arg.name not in names or node.users:
            kept.append(spec)
            continue
        program.graph.erase_node(node)
        for store in (program.state_dict, program.constants):
            store.pop(str(spec.target), None)
    program.graph_signature.input_specs[:] = kept


class _DelegateStub:
    """Stands in for a delegate's original module: gives outputs of the right shape and type, or runs the graph.

    ExecuTorch calls it on fake tensors each time it traces the program (12 times in an export), where only metadata
    are wanted. On real tensors it runs the delegate, so an edge program can be executed in Python.
    """

    def __init__(self, metas: Sequence[torch.Tensor], execute: Execute) -> None:
        self.metas = [(tuple(meta.shape), meta.dtype) for meta in metas]
        self.execute = execute

    def __call__(self, *args: torch.Tensor) -> list[torch.Tensor]:
        if all(type(arg) is torch.Tensor for arg in args) and torch._guards.detect_fake_mode(args) is None:
            return self.execute(args)
        return [torch.empty(shape, dtype=dtype) for shape, dtype in self.metas]


def _lowered_module_class() -> type[Any]:
    from executorch.exir.lowered_backend_module import LoweredBackendModule

    class ArmLoweredModule(LoweredBackendModule):
        """A delegate that is never changed once it is compiled, so it need not be copied."""

        def __deepcopy__(self, memo: dict[int, Any] | None) -> ArmLoweredModule:
            return self

    ArmLoweredModule.__name__ = LoweredBackendModule.__name__  # PyTorch recognizes delegates by the type's name
    return ArmLoweredModule
