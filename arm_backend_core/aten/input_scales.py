"""Quantization of program inputs: one scale per input, and uint8 in place of int8.

A concatenation gives all its operands one scale. An input that a concatenation and another operator read (a skip
connection) therefore has two scales. The input is quantized once, with the smaller scale. Readers that need the larger
scale read the requantized result.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.dtype import UINT8_OFFSET
from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.program import copy_program, user_inputs


def quantize_inputs_once(_method: str, program: ExportedProgram) -> ExportedProgram:
    """Quantize each input once, with the smallest of its scales, if only per-tensor quantize operators read the input.

    A transform pass of an ``ExportRecipe``.

    Returns:
        ``program`` itself if no input has several scales, else a copy.
    """
    if not any(map(_has_several_scales, user_inputs(program))):
        return program
    program = copy_program(program)
    for node in filter(_has_several_scales, user_inputs(program)):
        _requantize_from_smallest_scale(node)
    program.graph_module.recompile()
    return program


def quantize_inputs_as_uint8(_method: str, program: ExportedProgram) -> ExportedProgram:
    """Quantize each input to uint8 that only int8 quantize operators with equal parameters read.

    Inputs that the program writes are not changed. uint8 and int8 have the same scale; the zero point of uint8 is
    larger by 128. A transform pass of an ``ExportRecipe``.

    Returns:
        ``program`` itself if it has no such input, else a copy.
    """
    if not any(_is_int8_input(node, program) for node in user_inputs(program)):
        return program
    program = copy_program(program)
    for node in [node for node in user_inputs(program) if _is_int8_input(node, program)]:
        _insert_uint8(node)
    program.graph_module.recompile()
    return program


def _is_int8_input(node: Node, program: ExportedProgram) -> bool:
    """Whether ``node`` is quantized to int8 with one set of parameters, and the program does not write it."""
    readers = list(node.users)
    is_read_only = node.name not in program.graph_signature.user_inputs_to_mutate.values()
    return (
        is_read_only
        and bool(readers)
        and all(is_quantize(reader) and isinstance(reader.args[1], float) for reader in readers)
        and len({reader.args[1:] for reader in readers}) == 1
        and readers[0].args[5] is torch.int8
    )


def _insert_uint8(node: Node) -> None:
    """Insert a quantize operator to uint8 and a dequantize operator between an input and its quantize operators."""
    readers = list(node.users)
    scale, *integers, _ = cast(tuple[Any, ...], readers[0].args[1:])
    parameters = (scale, *(number + UINT8_OFFSET for number in integers), torch.uint8)
    operators = torch.ops.quantized_decomposed  # registered already, because the graph has operators of this library
    graph, last_input, value = node.graph, _last_input_after(node), node.meta["val"]
    with graph.inserting_after(last_input):
        quantized = graph.call_function(operators.quantize_per_tensor.default, (node, *parameters))
    with graph.inserting_after(quantized):
        dequantized = graph.call_function(operators.dequantize_per_tensor.default, (quantized, *parameters))
    quantized.meta = {**readers[0].meta, "val": torch.empty_like(value, dtype=torch.uint8)}
    dequantized.meta = {**readers[0].meta, "val": torch.empty_like(value)}
    for reader in readers:
        reader.replace_input_with(node, dequantized)


def _has_several_scales(node: Node) -> bool:
    """Whether only per-tensor quantize operators read ``node``, and their parameters differ."""
    readers = list(node.users)
    per_tensor = all(is_quantize(reader) and isinstance(reader.args[1], float) for reader in readers)
    return per_tensor and len({reader.args[1:] for reader in readers}) > 1


def _requantize_from_smallest_scale(node: Node) -> None:
    finest = min(node.users, key=lambda reader: cast(float, reader.args[1]))
    dequantized = next((user for user in finest.users if is_dequantize(user)), None)
    if dequantized is None:
        return
    # Both operators move in front of all other readers of the input, which may precede them in the graph.
    _last_input_after(node).append(finest)
    finest.append(dequantized)
    for reader in list(node.users):
        if reader.args[1:] != finest.args[1:]:
            reader.replace_input_with(node, dequantized)


def _last_input_after(node: Node) -> Node:
    """The end of the run of placeholders and attributes that follows ``node``; ``node`` itself if none follows."""
    last_input: Any = node
    while last_input.next.op in ("placeholder", "get_attr"):
        last_input = last_input.next
    return cast(Node, last_input)
