"""Inputs and outputs of a program: check the outputs, and describe both for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

from arm_backend_core.program import mutated_buffers
from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.errors import ExportError
from arm_recipes.runtime.tensor_info import TensorInfo


def check_outputs(method: str, program: ExportedProgram) -> None:
    """Check that an ExecuTorch program can return the model's outputs.

    Raises:
        ExportError: an output is a string, the program computes a complex output or buffer value, or no output is a
            tensor and the program writes no buffer.
    """
    _reject_complex_outputs(method, program)
    outputs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    for index, value in enumerate(outputs):
        if isinstance(value, ConstantArgument) and isinstance(value.value, str):
            raise ExportError(
                f"output {index} of '{method}' is {value.value!r} (str): a program returns tensors, numbers and None; "
                "remove it, or export it as constant_methods={'name': value}"
            )
    if not any(isinstance(value, TensorArgument) for value in outputs) and not mutated_buffers(program):
        raise ExportError(f"'{method}' returns no tensor, so there is nothing to compile; return at least one tensor")


def _reject_complex_outputs(method: str, program: ExportedProgram) -> None:
    """Refuse complex results: programs compute real and imaginary parts separately, and ExecuTorch cannot join them."""
    from arm_backend_core.nodes import is_complex, source_line

    results = torch.utils._pytree.tree_leaves(program.graph.output_node().args[0])
    index = 0
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        is_result = spec.kind is OutputKind.USER_OUTPUT
        if isinstance(node, torch.fx.Node) and is_complex(node) and node.op != "placeholder":
            dtype, line = dtype_name(node.meta["val"].dtype), source_line(node)
            subject = f"output {index} of '{method}'" if is_result else f"the new value of '{spec.target}'"
            remedy = "return torch.view_as_real(y)" if is_result else "store torch.view_as_real(x) in the buffer"
            raise ExportError(
                f"{subject} is a {dtype} tensor{line and f' ({line})'}: ExecuTorch has no kernel that joins the real "
                f"and imaginary parts; {remedy}, of shape [..., 2], and call torch.view_as_complex on the result"
            )
        index += is_result


def make_tensor_infos(
    values: Iterable[tuple[str, Any]], config_methods: Mapping[str, Any], prefix: str
) -> tuple[TensorInfo, ...]:
    """Make the ``TensorInfo`` of inputs or outputs.

    Args:
        values: (name, node) of each input or output; for a constant, its value in place of the node.
        config_methods: constant methods of the program, with scale and zero point for ``quantized_io``.
        prefix: start of the names of these constant methods.
    """
    infos = []
    for index, (name, node) in enumerate(values):
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if not isinstance(value, torch.Tensor):
            infos.append(TensorInfo(name, type(value).__name__, ()))
            continue
        infos.append(
            TensorInfo(
                name=name,
                dtype=dtype_name(value.dtype),
                shape=tuple(value.shape),
                scale=config_methods.get(f"{prefix}{index}_scale"),
                zero_point=config_methods.get(f"{prefix}{index}_zp"),
            )
        )
    return tuple(infos)
