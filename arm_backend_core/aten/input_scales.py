"""Inputs with several scales: quantize the input once, with the finest scale, and requantize the result for the others.

A concatenation gives all its operands one scale, so an input that is joined again later (a skip connection) has two.
"""

from __future__ import annotations

from typing import Any, cast

from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.program import copy_program, user_inputs


def quantize_inputs_once(_method: str, program: ExportedProgram) -> ExportedProgram:
    """Quantize each input that only quantize operators read with one scale and zero point: those of the finest scale.

    A transform pass of an ``ExportRecipe``.

    Returns:
        ``program`` itself if no input has several scales, else a copy.
    """
    if not any(map(_has_several_scales, user_inputs(program))):
        return program
    program = copy_program(program)
    for node in filter(_has_several_scales, user_inputs(program)):
        _requantize_from_finest(node)
    program.graph_module.recompile()
    return program


def _has_several_scales(node: Node) -> bool:
    """Whether only quantize operators read ``node``, with different parameters per tensor."""
    readers = list(node.users)
    per_tensor = all(is_quantize(reader) and isinstance(reader.args[1], float) for reader in readers)
    return per_tensor and len({reader.args[1:] for reader in readers}) > 1


def _requantize_from_finest(node: Node) -> None:
    finest = min(node.users, key=lambda reader: cast(float, reader.args[1]))
    dequantized = next((user for user in finest.users if is_dequantize(user)), None)
    if dequantized is None:
        return
    # Both move to the front: other quantize operators may come first.
    place: Any = node
    while place.next.op in ("placeholder", "get_attr"):
        place = place.next
    place.append(finest)
    finest.append(dequantized)
    for reader in list(node.users):
        if reader.args[1:] != finest.args[1:]:
            reader.replace_input_with(node, dequantized)
