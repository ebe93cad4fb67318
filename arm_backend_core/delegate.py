"""The whole delegation: which nodes a target can run, lowered to TOSA, compiled, put back as delegates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import events
from arm_backend_core.alternatives.chooser import make_alternatives_pass
from arm_backend_core.alternatives.size_or_speed import compile_best
from arm_backend_core.aten.decompose import decompose
from arm_backend_core.aten.functionalize import functional
from arm_backend_core.aten.high_rank import lower_ranks
from arm_backend_core.aten.higher_order import inline_higher_order_ops
from arm_backend_core.aten.memory_format import settle_memory_formats
from arm_backend_core.aten.state import keep_state_quantized
from arm_backend_core.backends import artifacts
from arm_backend_core.backends.payload import Payload
from arm_backend_core.bisect_failure import bisect_failure
from arm_backend_core.dtype import DType
from arm_backend_core.errors import CompileError, FullDelegationError, fault
from arm_backend_core.insert_delegates import Compiled, Part, insert_delegates
from arm_backend_core.lowering import Lowering
from arm_backend_core.nodes import drop_unread, handle_of, is_quantize, keep_reason, number, operator_name
from arm_backend_core.ops.operands import dtype_of
from arm_backend_core.permutation import Layout
from arm_backend_core.program import (
    avoid_builtin_names,
    compute_constant_outputs,
    constants_of,
    copied,
    drop_assertions,
    lift_constants,
    split_dequantize,
)
from arm_backend_core.selection import Predicate, select
from arm_backend_core.targets.compile_spec import ArmCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import passes, reference
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.serialize import serialize

_Executor = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def delegate(
    program: ExportedProgram,
    spec: ArmCompileSpec,
    *,
    keep_on_cpu: Sequence[Predicate] = (),
    require_full_delegation: bool = False,
    name: str = "arm",
) -> ExportedProgram:
    """Compile every part of an ATen program that the target can run.

    Args:
        program: ATen program, quantized (``quantized_decomposed`` operators) or not; it is left as it is.
        spec: the target and how to compile for it.
        keep_on_cpu: nodes for which one of these holds are not delegated.
        require_full_delegation: raise if any operator but boundary casts stays on the CPU.
        name: what the delegates are called, with a number.

    Raises:
        FullDelegationError: as asked for by ``require_full_delegation``.
        CompileError: Vela or the model converter failed.
    """
    program = copied(program)
    number(program.graph)
    program = prepared(program, spec.target)
    selection = select(program, spec.target, keep_on_cpu)
    for node, refusal in selection.refusals.items():
        keep_reason(node, refusal.reason)
    rejected = selection.rejections()
    events.current().rejected.extend(rejected)
    if require_full_delegation and rejected:
        lines = [f"  {r.operator} ({r.node}{', ' + r.source if r.source else ''}): {r.reason}" for r in rejected]
        raise FullDelegationError(
            f"require_full_delegation: {len(rejected)} operator(s) cannot run on {spec.target.name}:\n"
            + "\n".join(lines)
        )
    parts = selection.parts(name)
    _set_debug_handles(parts)
    graphs = selection.graphs(parts)
    insert_delegates(
        program, [_compiled(part, graph, spec, selection.walk) for part, graph in zip(parts, graphs, strict=True)]
    )
    return program


def prepared(program: ExportedProgram, target: Target) -> ExportedProgram:
    """Functional, and decomposed where there is no record."""
    inline_higher_order_ops(program.graph_module, constants_of(program))
    program = functional(program)
    keep_state_quantized(program)
    computed = compute_constant_outputs(program)
    if decompose(program.graph_module, constants_of(program)) or computed:
        lift_constants(program)
    lower_ranks(program.graph_module)
    drop_assertions(program)
    drop_unread(program.graph)
    avoid_builtin_names(program)
    split_dequantize(program)
    settle_memory_formats(program)
    return program


def _compiled(part: Part, graph: Graph, spec: ArmCompileSpec, walk: Lowering) -> Compiled:
    """Optimize a part's graph and compile it."""
    results = [value.dtype for value in graph.outputs]
    try:
        passes.run(graph, spec.target, make_alternatives_pass(spec))
        assert all(op.origins for op in graph.walk()), "nobody knows where an operator comes from"
    except Exception as error:
        what = f"optimizing delegate '{part.name}' raised {type(error).__name__}: {error}"
        raise CompileError(fault(what, error).reason, delegate=part.name) from error
    flatbuffer = serialize(graph, locations=spec.debug_mode is ArmCompileSpec.DebugMode.TOSA)
    payload, spec = _payload(part, graph, flatbuffer, spec)
    artifacts.dump(spec, part.name, flatbuffer, payload, graph)
    told = payload.told()
    record = events.Delegate(
        name=part.name,
        backend=spec.backend_id,
        operators=tuple(operator_name(node) for node in part.nodes),
        tosa_operators=tuple(op.kind for op in graph.walk()),
        tosa=flatbuffer,
        payload_bytes=len(payload.data),
        checksum=told[0].value,
        vela=payload.vela,
        inputs=tuple(_io(node, value, walk) for node, value in zip(part.inputs, graph.inputs, strict=True)),
        outputs=tuple(_io(node, value, walk) for node, value in zip(part.outputs, graph.outputs, strict=True)),
        origins=tuple(tuple(op.origins.items()) for op in graph.walk()),
        handles=_handles(part, graph),
    )
    events.current().delegates.append(record)
    inputs = [(walk.entry(node)[1], value.dtype) for node, value in zip(part.inputs, graph.inputs, strict=True)]
    execute = _executor(flatbuffer, inputs, results)
    meta = {"arm_delegate": record, "debug_handle_map": dict(enumerate(record.handles))}
    return Compiled(part, spec.backend_id, payload.data, [*spec.to_list(), *told], execute, meta)


def _set_debug_handles(parts: Sequence[Part]) -> None:
    """What ExecuTorch knows nodes inside of delegates by."""
    for node in (node for part in parts for node in part.nodes):
        if (handle := handle_of(node)) is not None:
            node.meta["debug_handle"] = handle


def _handles(part: Part, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Debug handles by TOSA operator: its number is what a runtime calls it by, for a compiled delegate too."""
    known = {node.name: handle for node in part.nodes if (handle := handle_of(node)) is not None}
    return tuple(tuple(sorted({known[o.node] for o in op.origins if o.node in known})) for op in graph.walk())


def _payload(part: Part, graph: Graph, flatbuffer: bytes, spec: ArmCompileSpec) -> tuple[Payload, ArmCompileSpec]:
    def locate(text: str) -> tuple[str, str] | None:
        """The ATen operator behind a TOSA operator that a tool's message names."""
        for op in graph.ops:
            if op.kind in text.upper() and op.origin is not None:
                return op.origin.operator, op.origin.source
        return None

    read = graph.users().keys() | set(graph.outputs)
    unread = {i: (x.size, x.dtype.bytes) for i, x in enumerate(graph.inputs) if x not in read}
    inputs, results = ([x.size * x.dtype.bytes for x in values] for values in (graph.inputs, graph.outputs))
    try:
        return compile_best(
            spec, flatbuffer, delegate=part.name, locate=locate, unread=unread, inputs=inputs, results=results
        )
    except CompileError as error:
        origin = bisect_failure(graph, spec, error) if error.operator is None else None
        raise error if origin is None else error.at(origin.operator, origin.source) from error


def _io(node: Node, value: Value, walk: Lowering) -> events.Io:
    q = walk.node_qparams(node) if is_quantize(node) else None
    scale, zero_point = (None, None) if q is None else (float(q.scale), q.zero_point)
    return events.Io(value.name, value.dtype.value, value.shape, scale, zero_point)


def _executor(flatbuffer: bytes, inputs: Sequence[tuple[Layout, DType]], results: Sequence[DType]) -> _Executor:
    def execute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [
            _array(tensor.detach().cpu().permute(order).contiguous(), dtype)
            for tensor, (order, dtype) in zip(tensors, inputs, strict=True)
        ]
        return [_tensor(*made) for made in zip(reference.run(flatbuffer, arrays), results, strict=True)]

    return execute


#: Types that numpy lacks: integers with their bits stand for them.
_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_TYPES = {dtype_of(kind): kind for kind in _BITS}


def _array(tensor: torch.Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bool and dtype is DType.INT8:  # on hardware without booleans
        tensor = tensor.char()
    return np.asarray(tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).numpy())


def _tensor(array: np.ndarray[Any, Any], dtype: DType) -> torch.Tensor:
    if dtype not in _TYPES:
        return torch.from_numpy(np.array(array, dtype=bool if dtype is DType.BOOL else None))
    bits = np.array(array).view(np.int16 if dtype is DType.BF16 else np.uint8)
    return torch.from_numpy(bits).view(_TYPES[dtype])
