"""Chunk of a recurrent layer: the program of several consecutive steps, which is the body of the rolled loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from arm_backend_core.program import build_program
from arm_backend_core.recurrent.node_writer import NodeWriter, copy_meta
from arm_backend_core.recurrent.unrolled_steps import (
    Constant,
    Step,
    StepSelect,
    StepValue,
    UnrolledLayer,
    YieldedValue,
    argument_leaves,
)

aten = torch.ops.aten


class ChunkBuilder(NodeWriter):
    """Builds the program of one chunk: the steps that one call of its delegate computes."""

    def __init__(self, layer: UnrolledLayer, program: ExportedProgram, steps_per_call: int) -> None:
        super().__init__(Graph())
        self._layer, self._program, self._steps_per_call = layer, program, steps_per_call
        self._constants: dict[Node, Node] = {}

    def build(self, stacked: Iterable[YieldedValue]) -> ExportedProgram:
        """Build the loop body, which maps states and input sequences to new states and ``stacked`` outputs.

        Sequences and outputs have the shape [steps_per_call, ...].

        Args:
            stacked: the values that the loop returns for every step.
        """
        specs = {spec.arg.name: spec for spec in self._program.graph_signature.input_specs}
        constant_specs: dict[Node, InputSpec] = {}
        needed = self._needed_constants()
        for node in needed:
            if node.op == "placeholder":
                self._constants[node] = self._add_input(node.name, node.meta["val"], node)
                constant_specs[self._constants[node]] = specs[node.name]
        template = self._layer.steps[1]
        self._states = {
            yielded: self._add_input(f"state_{i}", self._layer.yielded_meta(yielded), template[yielded.slot])
            for i, yielded in enumerate(self._layer.initial_states)
        }
        self._sequences = [
            self._add_input(
                f"sequence_{i}",
                _with_leading_dims(read.source.meta["val"], read.dim, self._steps_per_call),
                read.source,
            )
            for i, (read, _, _) in enumerate(self._layer.sequences)
        ]
        for node in needed:
            if node.op != "placeholder":
                self._constants[node] = self.graph.node_copy(node, self._constants.__getitem__)
        steps: list[Step] = []
        for k in range(self._steps_per_call):
            steps.append(self._emit_step(k, steps[-1] if steps else {}))
        results = [self.quantize_yielded(steps[-1][yielded.slot], yielded) for yielded in self._states]
        for yielded in stacked:
            parts = [
                self.dequantize_yielded(self.quantize_yielded(step[yielded.slot], yielded), yielded) for step in steps
            ]
            results.append(self.quantize_yielded(self.call(aten.stack.default, parts, like=parts[0]), yielded))
        self.graph.output(tuple(results))
        return build_program(self._program, self.graph, constant_specs)

    def _add_input(self, name: str, value: Tensor, like: Node) -> Node:
        node = self.graph.placeholder(name)
        node.meta = copy_meta(like, value)
        return node

    def _needed_constants(self) -> list[Node]:
        """The constant nodes that the steps read, in program order; placeholders come first."""
        pending = [x for node in self._layer.steps[1].values() for x in node.all_input_nodes]
        needed = set[Node]()
        for node in pending:
            if node in self._layer.constants and node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        return [node for node in self._program.graph.nodes if node in needed]

    def _emit_step(self, k: int, previous: Step) -> Step:
        step: Step = {}
        for slot, node in self._layer.steps[1].items():
            _, structure, *reads = self._layer.reads[slot]
            operands = [
                self._operand(read, k, step, previous) if not isinstance(read, Constant) else self._constants[leaf]
                for read, leaf in zip(reads, argument_leaves(node), strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(operands, structure)
            step[slot] = self.graph.call_function(cast(Any, node.target), args, kwargs)
            step[slot].meta = dict(node.meta)
        return step

    def _operand(self, read: Any, k: int, step: Step, previous: Step) -> Any:
        if isinstance(read, StepValue) and read.steps_back and not previous:
            return self.apply_qdq_ops(
                self._states[YieldedValue.from_qdq_ops(read.slot, read.qdq_ops)], read.qdq_ops[1:]
            )
        if isinstance(read, StepValue):
            return self.apply_qdq_ops((previous if read.steps_back else step)[read.slot], read.qdq_ops)
        if isinstance(read, StepSelect):
            x = self.apply_qdq_ops(self._sequences[self._layer.sequence_index(read)], read.source_qdq_ops)
            x = self.call(aten.select.int, x, 0, k, like=x)
            for arguments in read.slices:
                x = self.call(aten.slice.Tensor, x, *arguments, like=x)
            return self.apply_qdq_ops(x, read.qdq_ops)
        return read


def _with_leading_dims(value: Tensor, dim: int, *counts: int) -> Tensor:
    """Make a tensor like ``value``, with dimension ``dim`` removed and dimensions of the sizes ``counts`` in front."""
    return value.new_empty([*counts, *value.shape[:dim], *value.shape[dim + 1 :]])
