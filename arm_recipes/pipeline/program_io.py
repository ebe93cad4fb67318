"""Inputs and outputs of a program: check the outputs, and describe both for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument

from arm_backend_core.program import mutated_buffers
from arm_recipes._internal.errors import ExportError
from arm_recipes.runtime.tensor_info import TensorInfo


def check_outputs(method: str, program: ExportedProgram) -> None:
    """Check that an ExecuTorch program can return the model's outputs.

    Raises:
        ExportError: an output is a string, or no output is a tensor and the program writes no buffer.
    """
    outputs = [spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    for index, value in enumerate(outputs):
        if isinstance(value, ConstantArgument) and isinstance(value.value, str):
            raise ExportError(
                f"output {index} of '{method}' is {value.value!r} (str): a program returns tensors, numbers and None; "
                "remove it, or export it as constant_methods={'name': value}"
            )
    if not any(isinstance(value, TensorArgument) for value in outputs) and not mutated_buffers(program):
        raise ExportError(f"'{method}' returns no tensor, so there is nothing to compile; return at least one tensor")


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
                dtype=str(value.dtype).removeprefix("torch."),
                shape=tuple(value.shape),
                scale=config_methods.get(f"{prefix}{index}_scale"),
                zero_point=config_methods.get(f"{prefix}{index}_zp"),
            )
        )
    return tuple(infos)
