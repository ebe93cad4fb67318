"""Constant folding: evaluate nodes that depend only on parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node

from arm_backend_core.graph_edits import add_buffer_node, eliminate_dead_code
from arm_backend_core.nodes import PARAMETER, constant_nodes, evaluate_node, is_written, modules_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.program import constants_of, drop_assertions, eliminate_dead_constants


class Constants:
    """The constant nodes of a graph and their values.

    Constant nodes are attributes (parameters, buffers) that the graph does not write, the placeholders in ``tensors``,
    and operators that depend only on these.

    Attributes:
        module: the module of the graph.
    """

    def __init__(self, module: GraphModule, tensors: Mapping[Node, Tensor] | None = None) -> None:
        """Find the constant nodes.

        Args:
            module: the module of the graph.
            tensors: the values of placeholders that are parameters, buffers or lifted constants. The caller omits those
                that the graph writes.
        """
        self.module = module
        self._values: dict[Node, Tensor] = dict(tensors or {})
        self._nodes = constant_nodes(module.graph, self._values)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def value(self, node: Node) -> Tensor:
        """The value of a constant node. Values of operators are cached; values of attributes are not."""
        if node.op == "get_attr":
            tensor: Tensor = attrgetter(str(node.target))(self.module)
            return tensor.detach()
        if node not in self._values:
            self._values[node] = evaluate_node(node, self.value)
        return self._values[node]

    def channel_values(self, node: Any, shape: Sequence[int], axis: int = 1) -> Tensor | None:
        """The elements [C] of a constant that has one element for each channel of a tensor.

        Args:
            node: the constant, an operand of an operator.
            shape: the shape of the tensor that has the channels.
            axis: the dimension of the channels in ``shape``.

        Returns:
            None if ``node`` is not constant, or if its shape, extended by leading ones to the rank of ``shape``, is not
            [1, ..., C, ..., 1] with C along ``axis``.
        """
        if node not in self:
            return None
        size, rank = node.meta["val"].shape, len(shape)
        expected = [shape[i] if i == axis % rank else 1 for i in range(rank)]
        is_aligned = [1] * (rank - len(size)) + list(size) == expected
        return self.value(node).reshape(-1).contiguous() if is_aligned else None

    def depends_on_parameter(self, node: Node) -> bool:
        """Whether a parameter is among the attributes that ``node`` is computed from."""
        nodes = [node]
        for source in nodes:  # the loop appends to ``nodes``
            nodes += [x for x in source.all_input_nodes if x not in nodes]
        return any(self._is_parameter(source) for source in nodes if source.op == "get_attr")

    def _is_parameter(self, attribute: Node) -> bool:
        if attribute.meta.get(PARAMETER):
            return True
        return isinstance(attrgetter(str(attribute.target))(self.module), torch.nn.Parameter)


def fold_constant_weights(module: GraphModule) -> None:
    """Fold weights and biases that the graph computes from constants into buffers. Example: weight standardization."""
    constants = Constants(module)
    for source in _find_foldable_weights(module.graph, constants):
        with module.graph.inserting_before(source):
            folded = add_buffer_node(module, f"{source.name}_value", constants.value(source).clone())
        source.replace_all_uses_with(folded)


def fold_constant_weights_of_program(program: ExportedProgram) -> None:
    """Fold weights and biases that the program computes from constants into parameters of the program.

    Constants are parameters, buffers and lifted constants that the program does not write.

    ``torch.nn.utils.prune`` multiplies a weight by its mask in each call until ``prune.remove``. After folding, the
    product is a parameter, so the quantized program is the same as after ``prune.remove``.
    """
    graph = program.graph
    unwritten = {node: tensor for node, tensor in constants_of(program).items() if not is_written(node)}
    constants = Constants(program.graph_module, unwritten)
    sources = _find_foldable_weights(graph, constants)
    if not sources:
        return
    first = next(iter(graph.nodes))
    for source, name in sources.items():
        value = constants.value(source).detach().clone()
        with graph.inserting_before(first):
            folded = graph.placeholder(f"p_{source.name}")
        folded.meta, folded.target = dict(source.meta), folded.name
        while name in program.state_dict or name in program.constants:
            name += "_computed"
        program.graph_signature.input_specs.insert(
            graph.find_nodes(op="placeholder").index(folded),
            InputSpec(InputKind.PARAMETER, TensorArgument(folded.name), name),
        )
        program.state_dict[name] = torch.nn.Parameter(value, requires_grad=False)
        source.replace_all_uses_with(folded)
    drop_assertions(program)  # else they would keep the operands of the folded operators in the program
    eliminate_dead_code(graph)
    eliminate_dead_constants(program)
    program.graph_module.recompile()


def _find_foldable_weights(graph: Graph, constants: Constants) -> dict[Node, str]:
    """Find the operators whose constant results are weights or biases of convolutions and linear layers.

    Returns:
        {operator: name of the weight or bias in the layer that reads it, such as "body.0.weight"}.
    """
    sources: dict[Node, str] = {}
    for node in graph.nodes:
        record = find_record(node)
        if record is None or record.kind is not AnnotationKind.CONV:
            continue
        for position, role in ((record.weight, "weight"), (record.bias, "bias")):
            source: Any = node.args[position] if position < len(node.args) else None
            if isinstance(source, Node) and source.op == "call_function" and source in constants:
                *_, module = ("", *modules_of(node))
                sources.setdefault(source, f"{module}.{role}" if module else role)
    return sources
