"""Range reduction of angles in rotary and sinusoidal position embeddings, in integer arithmetic.

The angles, operands of cos and sin, are integers (positions) times constants. Their range is thousands of turns (a turn
is 2 * pi), which a few hundred quantization levels cannot represent. Full turns do not change cos and sin, so integer
arithmetic computes the angle modulo one turn, as a sum over the base-16 digits of the position. The error is below
2**-16 turns for every int32 position.

A phase is an angle modulo one turn, as a fixed-point fraction of a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.fx import GraphModule, Node, map_arg

from arm_backend_core.aten.constant_folding import Constants
from arm_backend_core.graph_edits import add_buffer_node, insert_call
from arm_backend_core.nodes import INTERVAL, is_float, is_integer
from arm_backend_core.ops.catalog import is_cast, is_sinusoid

aten = torch.ops.aten
_DIGIT_BITS = 4  #: bits of a digit; a digit times a 27-bit fraction of a turn stays below 2**31
#: One turn is 2**27 while digits are summed, and 2**16 in the result.
_SUM_BITS, _PHASE_BITS = 27, 16
#: Data movement without arithmetic. ``has_shared_qparams`` is no substitute: it also accepts pooling and maxima.
_DATA_MOVEMENT_OPS = [
    getattr(aten, name).default for name in ("unsqueeze", "view", "reshape", "expand", "permute", "clone", "cat")
]
_DATA_MOVEMENT_OPS += [aten.transpose.int, aten.slice.Tensor, aten.select.int]
_PRODUCT_OPS = (aten.mul.Tensor, aten.mul.Scalar, aten.matmul.default, aten.bmm.default)


def reduce_angle_range(module: GraphModule) -> None:
    """Reduce the operands of float32 cos and sin modulo one turn if they are integers times constants."""
    builder = _PhaseBuilder(module)
    for node in list(filter(is_sinusoid, module.graph.nodes)):
        phases = builder.insert_phases(node.args[0])
        if phases is not None and node.meta["val"].dtype is torch.float32:
            with module.graph.inserting_before(node):
                float_phases = insert_call(
                    node, aten.to.dtype, insert_call(node, aten.to.dtype, phases, torch.int16), torch.float32
                )
                float_phases.meta[INTERVAL] = (-(1 << _PHASE_BITS - 1), 1 << _PHASE_BITS - 1)
                node.args = (insert_call(node, aten.mul.Tensor, float_phases, math.tau / (1 << _PHASE_BITS)),)


class _PhaseBuilder:
    """Inserts integer nodes that compute the phases of angles."""

    def __init__(self, module: GraphModule) -> None:
        self._module, self._constants = module, Constants(module)
        self._phases: dict[Node, Node | None] = {}

    def insert_phases(self, node: Node) -> Node | None:
        """Insert nodes that compute the angle ``node`` in integer units of 2**-16 turns, in [-2**15, 2**15).

        Returns:
            The phases. None if the angle is not a product of integers and a constant. Data movement and casts may
            precede and follow the product.
        """
        if node not in self._phases:
            self._phases[node] = self._insert_product_phases(node) or self._copy_data_movement(node, self.insert_phases)
        return self._phases[node]

    def _find_integer_source(self, node: Node) -> Node | None:
        """Find the integer tensor of which ``node`` is a float cast; None if there is none.

        Copies of the data movement between the cast and ``node`` are applied to the integer tensor.
        """
        source = node.args[0] if is_cast(node) and is_float(node) else node
        if isinstance(source, Node) and is_integer(source):
            return source
        return self._copy_data_movement(node, self._find_integer_source)

    def _copy_data_movement(self, node: Node, convert: Callable[[Node], Node | None]) -> Node | None:
        """Copy a data-movement operator, with ``convert(x)`` for each operand x; for a cast, return ``convert(x)``.

        Returns:
            None if ``node`` is neither data movement nor a cast, or if ``convert`` returns None for an operand.
        """
        if is_cast(node):
            return convert(node.all_input_nodes[0])
        copies = {x: convert(x) for x in node.all_input_nodes} if node.target in _DATA_MOVEMENT_OPS else {}
        if not copies or None in copies.values():
            return None
        with node.graph.inserting_before(node):
            arguments = map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = node.graph.create_node("call_function", node.target, *arguments)
        dtype = next(x.meta["val"].dtype for x in copies.values() if x is not None)
        copy.meta = {**node.meta, "val": torch.empty_like(node.meta["val"], dtype=dtype)}
        return copy

    def _insert_product_phases(self, node: Node) -> Node | None:
        """Insert the phases of a product of integers and a constant.

        Returns:
            None if ``node`` is no such product, or a matrix product that adds several products.
        """
        if node.target not in _PRODUCT_OPS:
            return None
        has_reduction = node.target in _PRODUCT_OPS[2:] and node.all_input_nodes[0].meta["val"].shape[-1] != 1
        for x, factor in (node.args[:2], node.args[1::-1]):
            is_constant = not isinstance(factor, Node) or factor in self._constants
            if has_reduction or not is_constant or x in self._constants:
                continue
            integers = self._find_integer_source(x) if isinstance(x, Node) else None
            if integers is not None:
                value = self._constants.value(factor) if isinstance(factor, Node) else torch.tensor(factor)
                return self._multiply_by_turns(node, integers, value.double() / math.tau)
        return None

    def _multiply_by_turns(self, node: Node, x: Node, turns: torch.Tensor) -> Node:
        """The phases of x * ``turns``: sum over i of ((x >> 4i) & 15) * (turns * 16**i mod 1).

        The last digit, x >> 28, is not masked, because it has the sign of x.
        """
        shifts = torch.arange(0, 32, _DIGIT_BITS, dtype=torch.int32)
        masks = torch.tensor([(1 << _DIGIT_BITS) - 1] * (len(shifts) - 1) + [-1], dtype=torch.int32)
        scaled_turns = torch.remainder(turns[..., None] * 2.0**shifts, 1) * (1 << _SUM_BITS)
        factors = torch.remainder(scaled_turns.round(), 1 << _SUM_BITS).to(torch.int32)
        emit, constant = partial(insert_call, node), partial(add_buffer_node, self._module, f"{node.name}_turns")
        with node.graph.inserting_before(node):
            column = emit(aten.unsqueeze.default, emit(aten.to.dtype, x, torch.int32), -1)
            digits = emit(aten.bitwise_right_shift.Tensor, column, constant(shifts))
            digits = emit(aten.bitwise_and.Tensor, digits, constant(masks))
            terms = emit(
                aten.bitwise_and.Scalar, emit(aten.mul.Tensor, digits, constant(factors)), (1 << _SUM_BITS) - 1
            )
            total = emit(aten.sum.dim_IntList, terms, [-1], dtype=torch.int32)
            shift, half = _SUM_BITS - _PHASE_BITS, 1 << _PHASE_BITS - 1
            rounded = emit(aten.add.Tensor, total, (half << shift) + (1 << shift - 1))
            phases = emit(aten.bitwise_right_shift.Tensor_Scalar, rounded, shift)
            return emit(aten.sub.Tensor, emit(aten.bitwise_and.Scalar, phases, (1 << _PHASE_BITS) - 1), half)
