"""Delegation: select nodes, lower them to TOSA, compile them, and insert the delegates into the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core import compilation_log
from arm_backend_core.alternatives.alternatives_pass import make_alternatives_pass
from arm_backend_core.alternatives.size_or_speed import compile_best
from arm_backend_core.aten.decompose import decompose
from arm_backend_core.aten.functionalize import functionalize_program
from arm_backend_core.aten.high_rank import reduce_ranks
from arm_backend_core.aten.higher_order import inline_higher_order_ops
from arm_backend_core.aten.memory_format import normalize_memory_formats
from arm_backend_core.aten.quantized_state import keep_state_quantized
from arm_backend_core.aten.scatter_add import rewrite_scatter_adds
from arm_backend_core.backends import artifacts
from arm_backend_core.backends.payload import Payload
from arm_backend_core.bisect_failure import bisect_failure
from arm_backend_core.dtype import DType
from arm_backend_core.errors import CompileError, Fault, FullDelegationError, compiler_fault
from arm_backend_core.format_count import format_count
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.insert_delegates import CompiledPartition, Executor, Partition, insert_delegates
from arm_backend_core.lowering.fx_to_tosa import Lowering
from arm_backend_core.lowering.uint8_inputs import is_uint8
from arm_backend_core.memory_reduction.patch_search import compile_in_patches, make_graph_saving_pass
from arm_backend_core.nodes import (
    assign_debug_handles,
    debug_handle_of,
    is_quantize,
    operator_name,
    set_refusal_reason,
    source_location,
)
from arm_backend_core.ops.operands import to_tosa_dtype
from arm_backend_core.permutation import Layout
from arm_backend_core.program import (
    avoid_builtin_names,
    constants_of,
    copy_program,
    drop_assertions,
    duplicate_dequantize_nodes,
    eliminate_dead_constants,
    fold_constant_outputs,
    lift_constants,
)
from arm_backend_core.selection import Predicate, select_operators
from arm_backend_core.targets.compile_spec import ArmCompileSpec, CortexMCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.tosa.serialize import serialize


def delegate(
    program: ExportedProgram,
    spec: ArmCompileSpec,
    *,
    keep_on_cpu: Sequence[Predicate] = (),
    require_full_delegation: bool = False,
    name: str = "arm",
) -> ExportedProgram:
    """Delegate every part of an ATen program that the target can run: partition the program and compile the partitions.

    Args:
        program: ATen program, quantized (``quantized_decomposed`` operators) or not; it is not changed.
        spec: the target and the options of its compiler.
        keep_on_cpu: predicates; a node for which any of them is true is not delegated. A ``CortexMCompileSpec`` ignores
            them, because its kernels run on the CPU.
        require_full_delegation: raise if an operator other than quantize and dequantize is not delegated. With a
            ``CortexMCompileSpec``, raise if such an operator has no kernel, or if its lowering to kernels fails.
        name: prefix of the delegates' names, followed by a number.

    Returns:
        A new program that calls the delegates. With a ``CortexMCompileSpec``, it calls int8 kernels instead of
        delegates. With another spec that has an ``isa``, quantized operators outside the delegates become calls of
        these kernels.

    Raises:
        FullDelegationError: ``require_full_delegation`` is set and an operator stays on the CPU.
        ModelError: the model cannot be exported.
        CompileError: Vela, the model converter or a pass failed.
    """
    program = copy_program(program)
    assign_debug_handles(program.graph)
    program = prepare_program(program, spec.target)
    if isinstance(spec, CortexMCompileSpec):
        _report_refused_operators(_lower_to_kernels(program, spec), spec, require_full_delegation)
        return program
    selection = select_operators(program, spec.target, keep_on_cpu)
    for node, refusal in selection.refusals.items():
        set_refusal_reason(node, refusal.reason)
    _report_refused_operators(selection.refused_operators(), spec, require_full_delegation)
    partitions = selection.partitions(name)
    _set_debug_handles(partitions)
    graphs = selection.graphs(partitions)
    insert_delegates(
        program,
        [
            _compile_partition(part, graph, spec, selection.lowering)
            for part, graph in zip(partitions, graphs, strict=True)
        ],
    )
    if spec.isa is not None and selection.refused_operators():
        _lower_to_kernels(program, spec)
    return program


def _lower_to_kernels(program: ExportedProgram, spec: ArmCompileSpec) -> list[compilation_log.RefusedOperator]:
    """Replace quantized operators outside the delegates by int8 kernels of the Cortex-M (``spec.isa``).

    Returns:
        The operators that stay in floating point, because they have no kernel or because their lowering failed.
    """
    from arm_backend_core.cortex_m.lower import (  # registers operators
        find_unquantized_operators,
        lower_to_kernels,
    )

    assert spec.isa is not None
    refusals = lower_to_kernels(program, spec.isa)
    if isinstance(spec, CortexMCompileSpec):  # with an NPU, ``delegate`` has stored why the NPU refuses the operator
        reasons = {node: refusal.reason for node, refusal in refusals.items()}
        for node, reason in {**find_unquantized_operators(program), **reasons}.items():
            set_refusal_reason(node, reason)
    return [
        compilation_log.RefusedOperator(
            node.name, operator_name(node), refusal.reason, source_location(node), isinstance(refusal, Fault)
        )
        for node, refusal in refusals.items()
    ]


def _report_refused_operators(
    refused: list[compilation_log.RefusedOperator], spec: ArmCompileSpec, required: bool
) -> None:
    """Record the operators that stay on the CPU.

    Raises:
        FullDelegationError: ``required`` is set, and there is such an operator.
    """
    compilation_log.current_log().refused_operators.extend(refused)
    if not required or not refused:
        return
    lines = [f"  {r.operator} ({r.node}{', ' + r.source if r.source else ''}): {r.reason}" for r in refused]
    raise FullDelegationError(
        f"require_full_delegation: {format_count(len(refused), 'operator')} cannot run on {spec.target.name}:\n"
        + "\n".join(lines)
    )


def prepare_program(program: ExportedProgram, target: Target) -> ExportedProgram:
    """Functionalize and normalize the program, and decompose the operators for which there is no lowering rule."""
    inline_higher_order_ops(program.graph_module, constants_of(program))
    program = functionalize_program(program)
    keep_state_quantized(program)
    has_new_constants = fold_constant_outputs(program)
    module, constants = program.graph_module, constants_of(program)
    has_new_constants |= rewrite_scatter_adds(module, target.hardware, constants)
    if decompose(module, constants) or has_new_constants:
        lift_constants(program)
    reduce_ranks(program.graph_module)
    drop_assertions(program)
    eliminate_dead_code(program.graph)
    avoid_builtin_names(program)
    duplicate_dequantize_nodes(program)
    normalize_memory_formats(program)
    eliminate_dead_constants(program)
    return program


def _compile_partition(
    partition: Partition, graph: Graph, spec: ArmCompileSpec, lowering: Lowering
) -> CompiledPartition:
    """Optimize the graph of a partition and compile it.

    Raises:
        CompileError: a pass or the backend's compiler failed.
    """
    output_dtypes = [value.dtype for value in graph.outputs]
    try:
        choose, saved_graphs = make_graph_saving_pass(spec, make_alternatives_pass(spec))
        pipeline.run(graph, spec.target, choose)
        assert all(op.origins for op in graph.walk()), "an operator has no origin"
    except Exception as error:
        message = f"optimizing delegate '{partition.name}' raised {type(error).__name__}: {error}"
        raise CompileError(compiler_fault(message, error).reason, delegate=partition.name) from error
    graph, flatbuffer, payload, spec = _compile_payload(partition, graph, spec, saved_graphs)
    artifacts.dump_artifacts(spec, partition.name, flatbuffer, payload, graph)
    extra_specs = payload.extra_compile_specs()
    record = compilation_log.DelegateRecord(
        name=partition.name,
        backend=spec.backend_id,
        operators=tuple(operator_name(node) for node in partition.nodes),
        tosa_operators=tuple(op.kind for op in graph.walk()),
        tosa=flatbuffer,
        payload_bytes=len(payload.data),
        checksum=extra_specs[0].value,
        vela=payload.vela,
        inputs=tuple(
            _make_boundary_tensor(node, value, lowering)
            for node, value in zip(partition.inputs, graph.inputs, strict=True)
        ),
        outputs=tuple(
            _make_boundary_tensor(node, value, lowering)
            for node, value in zip(partition.outputs, graph.outputs, strict=True)
        ),
        origins=tuple(tuple(op.origins.items()) for op in graph.walk()),
        handles=_debug_handles_by_operator(partition, graph),
    )
    compilation_log.current_log().delegates.append(record)
    input_formats = [
        (lowering.boundary_value(node)[1], value.dtype)
        for node, value in zip(partition.inputs, graph.inputs, strict=True)
    ]
    execute = _make_reference_executor(flatbuffer, input_formats, output_dtypes)
    return CompiledPartition(partition, spec.backend_id, payload.data, [*spec.to_list(), *extra_specs], execute, record)


def _set_debug_handles(partitions: Sequence[Partition]) -> None:
    """Copy each node's debug handle to the ``meta`` key in which ExecuTorch expects it."""
    for node in (node for partition in partitions for node in partition.nodes):
        if (handle := debug_handle_of(node)) is not None:
            node.meta["debug_handle"] = handle


def _debug_handles_by_operator(partition: Partition, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Debug handles of each TOSA operator, in the order of the graph.

    In profiles, the runtimes identify a TOSA operator by its index in this order, also after Vela or the model
    converter has compiled the payload.
    """
    handles = {node.name: handle for node in partition.nodes if (handle := debug_handle_of(node)) is not None}
    return tuple(tuple(sorted({handles[o.node] for o in op.origins if o.node in handles})) for op in graph.walk())


def _compile_payload(
    partition: Partition, graph: Graph, spec: ArmCompileSpec, saved_graphs: Sequence[Graph]
) -> tuple[Graph, bytes, Payload, ArmCompileSpec]:
    """Compile the graph for the backend.

    Args:
        partition: the partition.
        graph: the partition's TOSA graph.
        spec: the compile spec.
        saved_graphs: the list from ``make_graph_saving_pass``. If it is empty, patches are not tried.

    Returns:
        The graph, its flatbuffer, the payload, and the compile spec of the payload. With ``optimise="auto"``, the graph
        may be rewritten to patch-based inference, and the spec may have another optimization goal.

    Raises:
        CompileError: the backend's compiler failed. The error names the ATen operator at fault if that can be found.
    """

    def find_operator(text: str) -> tuple[str, str] | None:
        """Return ATen operator and source line of the first TOSA operator whose kind occurs in the message ``text``."""
        for op in graph.ops:
            if op.kind in text.upper() and op.origin is not None:
                return op.origin.operator, op.origin.source
        return None

    read_values = graph.users().keys() | set(graph.outputs)
    unused_inputs = {i: (x.size, x.dtype.bytes) for i, x in enumerate(graph.inputs) if x not in read_values}
    input_bytes, output_bytes = ([x.size * x.dtype.bytes for x in values] for values in (graph.inputs, graph.outputs))
    options: dict[str, Any] = {"delegate": partition.name, "find_operator": find_operator}
    options |= {"unused_inputs": unused_inputs, "input_bytes": input_bytes, "output_bytes": output_bytes}
    with_locations, notes = spec.debug_mode is ArmCompileSpec.DebugMode.TOSA, compilation_log.current_log().notes
    flatbuffer, note_count = serialize(graph, locations=with_locations, target=spec.target), len(notes)
    try:
        payload, chosen = compile_best(spec, flatbuffer, graph=graph, **options)
    except CompileError as error:
        origin = bisect_failure(graph, spec, error) if error.operator is None else None
        raise error if origin is None else error.with_location(origin.operator, origin.source) from error
    patched = compile_in_patches(saved_graphs, payload, spec, options)
    if patched is None:
        return graph, flatbuffer, payload, chosen
    notes[note_count:] = [f"'{partition.name}' is {patched.description}"]
    return patched.graph, serialize(patched.graph, locations=with_locations, target=spec.target), *patched.program


def _make_boundary_tensor(node: Node, value: Value, lowering: Lowering) -> compilation_log.BoundaryTensor:
    """Name, type, shape and quantization parameters of an input or output of a delegate."""
    if is_uint8(node):
        parameters = node.args[1:3] if is_quantize(node) else (None, None)
        return compilation_log.BoundaryTensor(value.name, "uint8", value.shape, *parameters)  # type: ignore[arg-type]
    q = lowering.qparams.read(node) if is_quantize(node) else None
    scale, zero_point = (None, None) if q is None else (float(q.scale), q.zero_point)
    return compilation_log.BoundaryTensor(value.name, value.dtype.value, value.shape, scale, zero_point)


def _make_reference_executor(
    flatbuffer: bytes, input_formats: Sequence[tuple[Layout, DType]], output_dtypes: Sequence[DType]
) -> Executor:
    """Return a function that executes the delegate on the TOSA reference model.

    The function runs when Python calls the delegated ``ExportedProgram``. The ``.pte`` does not contain it.
    """

    def execute(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [
            _to_array(tensor.detach().cpu().permute(order).contiguous(), dtype)
            for tensor, (order, dtype) in zip(tensors, input_formats, strict=True)
        ]
        outputs = reference_model.run(flatbuffer, arrays)
        return [_to_tensor(array, dtype) for array, dtype in zip(outputs, output_dtypes, strict=True)]

    return execute


#: {torch dtype that NumPy lacks: integer dtype of the same width, to which it is bitcast}.
_BITCAST_DTYPES = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
#: {TOSA dtype: torch dtype} for the keys of ``_BITCAST_DTYPES``.
_TORCH_DTYPES = {to_tosa_dtype(dtype): dtype for dtype in _BITCAST_DTYPES}


def _to_array(tensor: torch.Tensor, dtype: DType) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bool and dtype is DType.INT8:  # the int8 input of hardware without boolean tensors
        tensor = tensor.char()
    if tensor.dtype is torch.uint8 and dtype is DType.INT8:  # a RESCALE reads the bits as uint8
        tensor = tensor.view(torch.int8)
    return np.asarray(tensor.view(_BITCAST_DTYPES.get(tensor.dtype, tensor.dtype)).numpy())


def _to_tensor(array: np.ndarray[Any, Any], dtype: DType) -> torch.Tensor:
    if dtype not in _TORCH_DTYPES:
        return torch.from_numpy(np.array(array, dtype=bool if dtype is DType.BOOL else None))
    bits = np.array(array).view(np.int16 if dtype is DType.BF16 else np.uint8)
    return torch.from_numpy(bits).view(_TORCH_DTYPES[dtype])
