"""Quantized state: mutated buffers hold quantized integers between calls of the program."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import Node

from arm_backend_core.graph_edits import insert_call
from arm_backend_core.nodes import INTERVAL, is_dequantize, is_quantize
from arm_backend_core.program import store_of

aten = torch.ops.aten


#: Assumed interval of mutated int64 buffers (counters of steps, positions).
_COUNTER_INTERVAL = (-(1 << 30), 1 << 30)
#: Operators whose result is filled with their second argument.
_FILLS = (aten.fill.Scalar, aten.full.default, aten.full_like.default)


def keep_state_quantized(program: ExportedProgram) -> None:
    """Store each mutated buffer as integers if all its users quantize it with the parameters of its new value.

    The delegate then reads and writes integers. With a float buffer, the CPU would quantize and dequantize it in every
    call. Counters (mutated int64 buffers) are stored in int32, because delegates have no int64.
    """
    graph, signature = program.graph, program.graph_signature
    buffers = {name: graph_input for graph_input, name in signature.inputs_to_buffers.items()}
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    output = graph.output_node()
    for index, spec in enumerate(signature.output_specs):
        if spec.kind is not OutputKind.BUFFER_MUTATION:
            continue
        buffer, value = placeholders[buffers[str(spec.target)]], output.args[0][index]
        readers = [user for user in buffer.users if user is not output]
        if buffer.meta["val"].dtype is torch.int64:
            _set_output(output, index, _store_counter_as_int32(program, str(spec.target), buffer, value))
        elif is_dequantize(value) and all(_has_same_qparams(reader, value) for reader in readers):
            _store_integers(program, str(spec.target), buffer, readers, value)
            _set_output(output, index, _fill_with_integers(buffer, value.args[0]))
    writes = [
        (placeholders[buffers[str(spec.target)]], value)
        for spec, value in zip(signature.output_specs, output.args[0], strict=True)
        if spec.kind is OutputKind.BUFFER_MUTATION
    ]
    only_reads = all(buffer is value for buffer, value in writes)
    for index, spec in enumerate(signature.output_specs):
        value = output.args[0][index]
        if spec.kind is OutputKind.BUFFER_MUTATION and value.op == "placeholder" and not only_reads:
            # ``value`` may be another mutated buffer. ExecuTorch writes the buffers one after the other, so without
            # the copy, this write may read that buffer's new value.
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (value,))
            copy.meta = {"val": value.meta["val"]}
            _set_output(output, index, copy)
        if isinstance(spec.arg, TensorArgument):
            spec.arg = TensorArgument(output.args[0][index].name)


def _fill_with_integers(buffer: Node, value: Node) -> Node:
    """If ``value`` quantizes a tensor that is filled with a number, fill the buffer with the quantized number instead.

    Without this rewrite, the tensor would take float32 memory at run time, or space in the program as a constant.

    Returns:
        The fill; ``value`` itself if it does not quantize such a tensor.
    """
    filled = value.args[0] if is_quantize(value) else None
    if not isinstance(filled, Node) or filled.target not in (aten.zero.default, *_FILLS):
        return value
    number = torch.tensor([0 if filled.target is aten.zero.default else filled.args[1]], dtype=torch.float32)
    integer = int(cast(Any, value.target)(number, *value.args[1:]))
    with value.graph.inserting_before(value):
        return insert_call(value, aten.fill.Scalar, buffer, integer)


def _set_output(output: Node, index: int, value: Any) -> None:
    results = list(output.args[0])  # type: ignore[arg-type]
    results[index] = value
    output.args = (tuple(results),)


def _has_same_qparams(reader: Node, value: Node) -> bool:
    return is_quantize(reader) and reader.args[1:] == value.args[1:]


def _store_counter_as_int32(program: ExportedProgram, name: str, buffer: Node, value: Node) -> Node:
    """Store a counter's buffer in int32 and return its new value as int32.

    If the magnitude of an initial element exceeds 2**30, the buffer stays int64, and ``value`` is returned.
    """
    store = store_of(program, name)
    buffer.meta[INTERVAL] = (int(store[name].min()), int(store[name].max())) if store[name].numel() else (0, 0)
    if not _COUNTER_INTERVAL[0] <= buffer.meta[INTERVAL][0] <= buffer.meta[INTERVAL][1] <= _COUNTER_INTERVAL[1]:
        return value
    store[name] = store[name].to(torch.int32)
    *_, last = program.graph.find_nodes(op="placeholder")
    with program.graph.inserting_after(last):
        as_int64 = insert_call(buffer, aten._to_copy.default, buffer, dtype=torch.int64)
    buffer.replace_all_uses_with(as_int64, delete_user_cb=lambda user: user is not as_int64)
    buffer.meta = {**buffer.meta, "val": buffer.meta["val"].to(torch.int32), INTERVAL: _COUNTER_INTERVAL}
    with program.graph.inserting_before(program.graph.output_node()):
        return insert_call(value, aten._to_copy.default, as_int64 if value is buffer else value, dtype=torch.int32)


def _store_integers(program: ExportedProgram, name: str, buffer: Node, readers: list[Node], value: Node) -> None:
    store = store_of(program, name)
    quantize: Any = torch.ops.quantized_decomposed.quantize_per_tensor.default
    store[name] = quantize(store[name], *value.args[1:])
    buffer.meta = {**buffer.meta, "val": buffer.meta["val"].to(store[name].dtype)}
    for reader in readers:
        reader.replace_all_uses_with(buffer)
        program.graph.erase_node(reader)
