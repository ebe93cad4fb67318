"""Matrix products with a constant operand become linear layers.

A linear layer has per-channel weight scales and runs as CONV2D. A MATMUL has one scale for each operand, and Ethos-U55
and U65 compute it by elementwise operations: x [1, 32, 256] @ W [256, 64] takes 599,488 cycles as MATMUL and 16,288 as
CONV2D (U55-128, Vela 5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.graph_edits import add_buffer_node, insert_call, replace_node
from arm_backend_core.nodes import TIMESTEP_SLOT, is_float
from arm_backend_core.targets.hardware import Hardware

aten = torch.ops.aten

_PRODUCTS = (aten.matmul.default, aten.mm.default, aten.bmm.default)
#: On Ethos-U55 and U65, a batched product with at most this many constant matrices becomes one layer per matrix.
_MAX_LAYERS = 16
_INT8_MAX = 127


def convert_matmuls_to_linear(
    module: GraphModule, hardware: Hardware, has_int16_activations: Callable[[Node], bool]
) -> None:
    """Replace products with one constant operand by linear layers.

    Args:
        module: the module to edit.
        hardware: the hardware of the target. A constant of several matrices becomes layers on Ethos-U55 and U65 only.
            Elsewhere it stays an operand of MATMUL: 4 heads of [32, 64] @ [64, 32] take 12,408 cycles as MATMUL and
            15,496 as layers on U85-256, but 229,696 and 34,772 on U55-128.
        has_int16_activations: whether a node's activations are going to be int16. A constant that is not a parameter,
            such as a Fourier matrix, then becomes two layers whose int8 weights add up to 16 bits, because no training
            made it robust to 8-bit rounding.
    """
    products = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target in _PRODUCTS and is_float(node)
    ]
    if not products:
        return
    rewriter = _Rewriter(module, hardware, has_int16_activations, Constants(module))
    for node in products:
        rewriter.rewrite(node)


@dataclass(frozen=True)
class _Rewriter:
    module: GraphModule
    hardware: Hardware
    has_int16_activations: Callable[[Node], bool]
    constants: Constants

    def rewrite(self, node: Node) -> None:
        """Replace ``node`` if exactly one operand is constant, and this operand can be the weight of linear layers."""
        left, right = cast("tuple[Node, Node]", node.args[:2])
        if (left in self.constants) == (right in self.constants) or not node.meta["val"].numel():
            return
        is_left = left in self.constants
        x, source = (right, left) if is_left else (left, right)
        matrix = self.constants.value(source)
        if x.meta["val"].dim() == 1 and matrix.dim() > 2:
            return
        if is_left:  # the slot implies an order of the operands, and the rewrite exchanges them
            node.meta.pop(TIMESTEP_SLOT, None)
        with self.module.graph.inserting_before(node):
            result = self._insert_product(node, x, source, matrix, is_left=is_left)
            if result is None:
                return
            shape = list(node.meta["val"].shape)
            if list(result.meta["val"].shape) != shape:
                result = insert_call(node, aten.reshape.default, result, shape)
        replace_node(node, result)

    def _insert_product(self, node: Node, x: Node, source: Node, matrix: Tensor, *, is_left: bool) -> Node | None:
        """Insert ``x @ matrix`` or ``matrix @ x`` = (x.T @ matrix.T).T, up to added or missing dimensions of size 1."""
        weight = matrix[None] if matrix.dim() == 1 else matrix if is_left else matrix.transpose(-1, -2)
        transposes = is_left and x.meta["val"].dim() > 1
        rows = insert_call(node, aten.transpose.int, x, -2, -1) if transposes else x
        result = self._insert_batched_layers(node, rows, source, weight)
        return insert_call(node, aten.transpose.int, result, -2, -1) if transposes and result is not None else result

    def _insert_batched_layers(self, node: Node, x: Node, source: Node, weight: Tensor) -> Node | None:
        """Insert the product of x [.., in] with a weight [.., out, in]; one layer for each matrix of a batched weight.

        Returns:
            The product. None for a batched weight if it has several batch dimensions or too many matrices, if it
            broadcasts over ``x``, or if the target is not an Ethos-U55 or U65.
        """
        batch = [dim for dim in range(-weight.dim(), -2) if weight.shape[dim] > 1]
        if not batch:
            return self._insert_layer(node, x, source, weight.reshape(weight.shape[-2:]))
        dim, count, shape = batch[0], weight.shape[batch[0]], x.meta["val"].shape
        if len(batch) > 1 or count > _MAX_LAYERS or len(shape) < -dim or shape[dim] != count:
            return None
        if not self.hardware.is_ethos_u or self.hardware.splits_matmuls:
            return None
        results = []
        for i, matrix in enumerate(weight.reshape(count, *weight.shape[-2:])):
            rows = insert_call(node, aten.slice.Tensor, x, dim, i, i + 1)
            results.append(self._insert_layer(node, rows, source, matrix))
        result = node.graph.call_function(aten.cat.default, (results, dim))
        first = results[0].meta["val"]
        size = list(first.shape)
        size[dim] = count
        result.meta = {**node.meta, "val": first.new_empty(size)}
        return result

    def _insert_layer(self, node: Node, x: Node, source: Node, weight: Tensor) -> Node:
        parts = [weight]
        if self.has_int16_activations(node) and not self.constants.depends_on_parameter(source):
            parts = _split_into_int8_terms(weight)
        layers = []
        for part in parts:
            attribute = add_buffer_node(self.module, f"{source.name}_weight", part.contiguous().clone())
            layers.append(insert_call(node, aten.linear.default, x, attribute))
        return layers[0] if len(layers) == 1 else insert_call(node, aten.add.Tensor, *layers)


def _split_into_int8_terms(weight: Tensor) -> list[Tensor]:
    """Split ``weight`` into two weights whose int8 values, with per-channel scales, represent it in 16 bits.

    The first is ``weight`` rounded to multiples of its scale. The second is the rounding error, at most half a scale;
    it is omitted if it is zero.
    """
    step = weight.abs().amax(-1, keepdim=True) / _INT8_MAX
    step = torch.where(step > 0, step, torch.ones_like(step))
    upper = (weight / step).round() * step
    return [upper, weight - upper] if bool((weight != upper).any()) else [weight]
