"""Execute a lowered method in Python.

Our delegates run their TOSA graph on the reference model when they are called with real tensors, those of
other backends run the program that they were made from, and everything else is PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.interpreter import Interpreter
from torch.utils import _pytree as pytree


class HostMethod:
    """A snapshot of a lowered method that can be executed.

    Emitting the ``.pte`` edits the lowered program in place, so the graph is copied; weights are shared.

    Args:
        name: of the method, for error messages.
        program: the lowered method, after all edge passes.
    """

    def __init__(self, name: str, program: ExportedProgram) -> None:
        from arm_backend_core.program import copied_module

        self.name = name
        self.graph_module = copied_module(program.graph_module)
        signature = program.graph_signature
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        values = {**program.constants, **program.state_dict}
        self._constants = {placeholder: values[name] for placeholder, name in names.items()}
        self._mutations = len(signature.output_specs) - len(signature.user_outputs)
        self._out_spec = program.call_spec.out_spec
        self.inputs = [
            node
            for node in self.graph_module.graph.nodes
            if node.op == "placeholder" and node.name not in self._constants
        ]

    def __call__(self, *inputs: Any) -> Any:
        """Run on ``inputs``, given as to the model; returns what the model returns.

        Raises:
            ValueError: wrong number of tensors, shape or dtype.
        """
        leaves = pytree.tree_leaves(inputs)
        self._check(leaves)
        given = iter(leaves)
        placeholders = (node for node in self.graph_module.graph.nodes if node.op == "placeholder")
        arguments = [
            self._constants[node.name] if node.name in self._constants else next(given) for node in placeholders
        ]
        with torch.no_grad():
            outputs = Interpreter(self.graph_module).run(*arguments)
        return pytree.tree_unflatten(list(outputs)[self._mutations :], self._out_spec)

    def _check(self, leaves: list[Any]) -> None:
        if len(leaves) != len(self.inputs):
            raise ValueError(f"method '{self.name}' takes {len(self.inputs)} tensors, got {len(leaves)}")
        for index, (node, value) in enumerate(zip(self.inputs, leaves, strict=True)):
            expected = node.meta["val"]
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"input {index} ('{node.name}') must be a tensor, got {type(value).__name__}")
            if value.dtype != expected.dtype or value.shape != expected.shape:
                raise ValueError(f"input {index} ('{node.name}') must be {_name(expected)}, got {_name(value)}")


def _name(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
