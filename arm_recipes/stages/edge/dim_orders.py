"""Dim orders outside the delegates: ExecuTorch's kernels read and write contiguous tensors.

A program input keeps the memory format of its sample, because a delegate reads ``torch.channels_last`` directly. The
kernels of ExecuTorch's libraries need operands and results of one dim order. Some kernels check the dim orders, and the
program stops with an error. ``flip``, ``cat``, ``gather``, ``constant_pad_nd`` and ``topk`` do not: they return wrong
values, or write outside their tensors. This module therefore copies operands that are not contiguous to contiguous
tensors, except for operators that are known to handle other dim orders.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExportedProgram, memory
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass
from executorch.exir.tensor import TensorSpec, contiguous_stride_from_shape, dim_order_from_stride
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils import _pytree as pytree

from arm_backend_core.cortex_m.kernels.registry import LIBRARY_NAMESPACE, NAMESPACE
from arm_backend_core.nodes import operator_name, overload_of, source_location
from arm_backend_core.permutation import Layout, identity, inverse
from arm_backend_core.program import store_of, update_output_names
from arm_recipes._internal.errors import ExportError

_COPY = exir_ops.edge.dim_order_ops._to_dim_order_copy.default
#: Operators with a dim order as argument: conversions between dim orders, casts and clones.
_DIM_ORDER_COPIES = frozenset({"dim_order_ops::_to_dim_order_copy", "dim_order_ops::_clone_dim_order"})
#: Quantize and dequantize operators, whose result has the operand's dim order, and the copy to a mutated input.
_LAYOUT_PRESERVING = frozenset(
    {
        *("quantized_decomposed::quantize_per_tensor", "quantized_decomposed::dequantize_per_tensor"),
        *(f"{LIBRARY_NAMESPACE}::quantize_per_tensor", f"{LIBRARY_NAMESPACE}::dequantize_per_tensor"),
        "aten::copy_",
    }
)
#: Operator whose result, the indices [n, rank], is column-major in PyTorch and row-major in ExecuTorch's kernel. Each
#: retrace of a program sets PyTorch's column-major strides in the metadata again.
_NONZERO = "aten::nonzero"
#: Namespaces of the Cortex-M kernels. Their lowering has already transposed operands where a kernel needs it.
_KERNEL_NAMESPACES = (LIBRARY_NAMESPACE, NAMESPACE)


def legalize_dim_orders(manager: EdgeProgramManager) -> Sequence[Any]:
    """Edge manager pass: insert layout copies, so that CPU operators read contiguous tensors.

    A copy also converts the new value of a mutated input or buffer to the dim order of the old value. Dim order
    copies, ``quantize_per_tensor`` and ``dequantize_per_tensor`` accept any dim order. Delegates and Cortex-M kernels
    read the dim order for which they were compiled. A constant is stored contiguous unless a delegate, a Cortex-M
    kernel, a dim order copy or control flow reads it, or it is an output. Inputs keep their layout. An output is
    contiguous if a CPU operator that needs contiguous tensors computes it. Otherwise, it keeps its layout.
    """
    for method in manager.methods:
        program = manager.exported_program(method)
        former_orders = _store_constants_contiguous(program)
        module, *control_flow_bodies = _graph_modules(program.graph_module)
        _legalize(module, _mutated_orders(program), former_orders)
        update_output_names(program)
        for body in control_flow_bodies:
            _legalize(body, {}, {})
    return []


class RowMajorNonzeroShapePass(ConstraintBasedSymShapeEvalPass):
    """ExecuTorch's evaluation of symbolic shapes. It also makes the specs of ``nonzero``'s result row-major.

    No later pass traces the program again, so the specs stay row-major. ``legalize_dim_orders`` has inserted a layout
    copy before each reader of the result.
    """

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Edit the specs of a method in place."""
        result: PassResult = super().call(graph_module)
        for module in _graph_modules(graph_module):
            for node in module.graph.nodes:
                if node.op == "call_function" and _name(node) == _NONZERO:
                    for spec in _tensor_specs(node):
                        spec.stride = contiguous_stride_from_shape(torch.Size(spec.shape))
                        spec.dim_order = list(identity(len(spec.shape)))
        return result


def check_dim_orders(manager: Any, methods: Iterable[str]) -> None:
    """Check the emitted programs: the postcondition of ``legalize_dim_orders``.

    Args:
        manager: ExecuTorch's manager of the emitted program.
        methods: names of the methods.

    Raises:
        ExportError: an operator outside the delegates reads or writes a tensor in a dim order that its kernel does not
            support. The message names the operator, the tensor and its dim order.
    """
    for method in methods:
        for module in _graph_modules(manager.exported_program(method).graph_module):
            for node in module.graph.nodes:
                if node.op == "call_function" and (problem := _describe_unsupported_order(node)) is not None:
                    raise ExportError(f"'{method}': {problem}")


def _describe_unsupported_order(node: fx.Node) -> str | None:
    if node.target is operator.getitem or _handles_layouts(node):
        return None
    results = [] if "out" in node.kwargs else [node]  # the result of an out variant is one of its operands
    specs = [(x.name, spec) for x in (*node.all_input_nodes, *results) for spec in _tensor_specs(x)]
    orders = [(name, _without_unit_dimensions(spec)) for name, spec in specs]
    if _name(node) in _LAYOUT_PRESERVING:
        rank = max((len(order) for _, order in orders), default=0)  # scales have rank 0
        unsupported = [(name, order) for name, order in orders if len(order) == rank and order != orders[0][1]]
    else:
        unsupported = [(name, order) for name, order in orders if list(order) != sorted(order)]
    if not unsupported:
        return None
    name = unsupported[0][0]
    order = next(list(map(int, spec.dim_order)) for x, spec in specs if x == name)
    location = source_location(node)
    return (
        f"{operator_name(node)}{f' ({location})' if location else ''} stays on the CPU, and its kernel does not "
        f"support the dim order {order} of '{name}': call contiguous() in the model, before and after it"
    )


def _tensor_specs(node: fx.Node) -> list[TensorSpec]:
    return [spec for spec in pytree.tree_leaves(node.meta.get("spec")) if isinstance(spec, TensorSpec)]


def _without_unit_dimensions(spec: TensorSpec) -> Layout:
    """The dim order without dimensions of size 1, which do not change the layout."""
    return tuple(axis for axis in map(int, spec.dim_order) if spec.shape[axis] != 1)


def _graph_modules(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and the bodies of its control flow, without the graphs of delegates."""
    yield module
    for node in module.graph.find_nodes(op="get_attr"):
        body = getattr(module, str(node.target), None)
        if isinstance(body, fx.GraphModule):
            yield from _graph_modules(body)


def _legalize(
    module: fx.GraphModule, output_orders: dict[int, Layout], former_orders: Mapping[fx.Node, Layout]
) -> None:
    """Insert layout copies.

    Args:
        module: the graph.
        output_orders: required dim orders of outputs, by position of the output.
        former_orders: former dim orders of the constants that ``_store_constants_contiguous`` changed.
    """
    copies = _LayoutCopies(module.graph, former_orders)
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            copies.convert_operands(node)
    output = module.graph.output_node()
    values = list(output.args[0]) if isinstance(output.args[0], (tuple, list)) else []
    for position, order in output_orders.items():
        if isinstance(values[position], fx.Node):
            values[position] = copies.convert(values[position], order)
    if output_orders:
        output.args = (tuple(values),)
    if copies.changed:
        module.recompile()


class _LayoutCopies:
    """Layout copies of one graph. A tensor is copied at most once to each dim order.

    Attributes:
        changed: whether the graph changed.
    """

    def __init__(self, graph: fx.Graph, former_orders: Mapping[fx.Node, Layout]) -> None:
        self.changed = False
        self._graph = graph
        self._copies: dict[tuple[fx.Node, Layout], fx.Node] = {}
        #: Former dim orders of the constants and results that became contiguous. None for a node with several results.
        self._former_orders: dict[fx.Node, Layout | None] = {**former_orders}

    def convert_operands(self, node: fx.Node) -> None:
        """Convert the operands of a CPU operator to contiguous tensors, and update the metadata of its result.

        If an operand has become contiguous, the results of these operators become contiguous too: the operators in
        ``_LAYOUT_PRESERVING``, and a dim order copy to the operand's former order. For delegates and Cortex-M kernels,
        a copy restores the order for which they were compiled.
        """
        converted = [operand for operand in node.all_input_nodes if operand in self._former_orders]
        if node.target is operator.getitem or _name(node) in _LAYOUT_PRESERVING:
            if converted:
                self._mark_contiguous(node)
        elif _name(node) in _DIM_ORDER_COPIES:
            if converted and _target_order(node) in (self._former_orders[converted[0]], _contiguous_order(node)):
                node.update_kwarg("dim_order", list(_contiguous_order(node)))
                self._mark_contiguous(node)
        elif _handles_layouts(node):
            for operand in converted:
                order = self._former_orders[operand]
                if order is not None:
                    node.replace_input_with(operand, self.convert(operand, order))
        else:
            operands = [operand for operand in node.all_input_nodes if _is_not_contiguous(operand)]
            for operand in operands:
                node.replace_input_with(operand, self.convert(operand, _contiguous_order(operand)))
            if (operands or converted) and _name(node) != _NONZERO:
                self._mark_contiguous(node)

    def _mark_contiguous(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        self._former_orders[node] = _dim_order(value) if isinstance(value, torch.Tensor) else None
        _set_contiguous(node)

    def convert(self, node: fx.Node, order: Layout) -> fx.Node:
        """Return the tensor ``node`` in a dim order: ``node`` itself if it has this order, else a layout copy."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != len(order) or _dim_order(value) == order:
            return node
        if (node, order) not in self._copies:
            self.changed = True
            self._copies[node, order] = self._insert_copy(node, order)
        return self._copies[node, order]

    def _insert_copy(self, node: fx.Node, order: Layout) -> fx.Node:
        position = node
        while position.op == "placeholder" and position.next.op == "placeholder":
            position = position.next
        with self._graph.inserting_after(position):
            copied = self._graph.call_function(_COPY, (node,), {"dim_order": list(order)})
        copied.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        copied.meta["val"] = _empty_with_dim_order(node.meta["val"], order)
        return copied


def _store_constants_contiguous(program: ExportedProgram) -> dict[fx.Node, Layout]:
    """Store parameters, buffers and constants contiguous.

    A tensor keeps its layout if a delegate, dim order copy, Cortex-M kernel, control flow or the output reads it.

    Returns:
        former dim orders of the tensors whose layout changed, by placeholder.
    """
    former_orders: dict[fx.Node, Layout] = {}
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name not in names or not _is_not_contiguous(node):
            continue
        readers = [user for user in node.users if overload_of(user.target) is not None and not _handles_layouts(user)]
        if len(readers) == len(node.users):
            store = store_of(program, names[node.name])
            stored = store[names[node.name]].detach()
            store[names[node.name]] = torch.empty_like(stored, memory_format=torch.contiguous_format).copy_(stored)
            former_orders[node] = _dim_order(node.meta["val"])
            _set_contiguous(node)
    return former_orders


def _mutated_orders(program: ExportedProgram) -> dict[int, Layout]:
    """The dim orders of mutated inputs and buffers, by the output position of their new value."""
    signature = program.graph_signature
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    buffers = {name: placeholder for placeholder, name in signature.inputs_to_buffers.items()}
    orders = {}
    for position, spec in enumerate(signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            target = placeholders.get(buffers.get(str(spec.target), ""))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            target = placeholders.get(str(spec.target))
        else:
            continue
        if target is not None and isinstance(value := target.meta.get("val"), torch.Tensor):
            orders[position] = _dim_order(value)
    return orders


def _name(node: fx.Node) -> str:
    """Name of an operator without its overload, for example ``aten::add``."""
    overload = overload_of(node.target)
    return "" if overload is None else overload.name().split(".")[0]


def _handles_layouts(node: fx.Node) -> bool:
    """Whether an operator supports any dim order, or needs the dim orders that its lowering has chosen."""
    name = _name(node)
    is_kernel = name.partition("::")[0] in _KERNEL_NAMESPACES and name not in _LAYOUT_PRESERVING
    return is_kernel or name in _DIM_ORDER_COPIES or node.target in (executorch_call_delegate, memory.alloc)


def _dim_order(value: torch.Tensor) -> Layout:
    """The dim order that ExecuTorch's emitter writes for a tensor; contiguous for an expanded tensor."""
    if any(isinstance(stride, int) and stride == 0 for stride in value.stride()):
        return identity(value.dim())
    return tuple(map(int, dim_order_from_stride(value.stride())))


def _target_order(node: fx.Node) -> Layout:
    """The dim order of a layout copy's result."""
    order: Any = node.kwargs.get("dim_order")
    return tuple(order) if order else _dim_order(node.meta["val"])


def _is_not_contiguous(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and _dim_order(value) != identity(value.dim())


def _contiguous_order(node: fx.Node) -> Layout:
    return identity(node.meta["val"].dim())


def _empty_with_dim_order(value: torch.Tensor, order: Layout) -> torch.Tensor:
    """Create a tensor with the shape and dtype of ``value`` in a dim order. Its elements are not initialized."""
    stored = torch.empty_like(value.permute(order), memory_format=torch.contiguous_format)
    return stored.permute(inverse(order))


def _set_contiguous(node: fx.Node) -> None:
    """Make the metadata of a node's results contiguous."""
    node.meta["val"] = pytree.tree_map_only(
        torch.Tensor, lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), node.meta["val"]
    )
