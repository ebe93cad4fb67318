"""Range reduction of angles in rotary and sinusoidal position embeddings, in integer arithmetic.

The angles are integers (positions) times constants, and cos or sin reads them. Quantized as real numbers, thousands of
turns would share a few hundred quantization levels. Full turns do not change cos and sin, so the remainder modulo one
turn is computed exactly in integers, digit by digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.fx import GraphModule, Node, map_arg

from arm_backend_core.aten.batch_norm import insert_call
from arm_backend_core.aten.constants import Constants
from arm_backend_core.nodes import INTERVAL, add_buffer_node, is_float, is_integer

aten = torch.ops.aten
_DIGIT_BITS = 4  #: bits of a digit; digit * fraction of a turn stays below 2**31
_TURN_BITS, _PHASE_BITS = 27, 16  #: log2 of a turn: 2**27 while digits are summed, 2**16 in the result
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default)
_MOVES = [getattr(aten, name).default for name in ("unsqueeze", "view", "reshape", "expand", "permute", "clone", "cat")]
_MOVES += [aten.transpose.int, aten.slice.Tensor, aten.select.int]
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar, aten.matmul.default, aten.bmm.default)


def reduce_angles(module: GraphModule) -> None:
    """Reduce operands of cos and sin modulo one turn, where they are integers times constants (float32 only)."""
    angles = _PhaseComputer(module)
    for target in (aten.cos.default, aten.sin.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            phases = angles.phases(node.args[0])
            if phases is not None and node.meta["val"].dtype is torch.float32:
                with module.graph.inserting_before(node):
                    real_phases = insert_call(
                        node, aten.to.dtype, insert_call(node, aten.to.dtype, phases, torch.int16), torch.float32
                    )
                    real_phases.meta[INTERVAL] = (-(1 << _PHASE_BITS - 1), 1 << _PHASE_BITS - 1)
                    node.args = (insert_call(node, aten.mul.Tensor, real_phases, math.tau / (1 << _PHASE_BITS)),)


class _PhaseComputer:
    """Creates integer copies of nodes that compute angles."""

    def __init__(self, module: GraphModule) -> None:
        self._module, self._constants = module, Constants(module)
        self._known: dict[Node, Node | None] = {}

    def phases(self, node: Node) -> Node | None:
        """Compute the angle ``node`` in integer units of 2**-16 turns, in [-2**15, 2**15).

        Returns:
            None if the angle is not an integer times a constant.
        """
        if node not in self._known:
            self._known[node] = self._product(node) or self._copy_data_movement(node, self.phases)
        return self._known[node]

    def _integer_source(self, node: Node) -> Node | None:
        """The integer tensor that ``node`` holds as real numbers; None if it does not."""
        source = node.args[0] if node.target in _CASTS and is_float(node) else node
        if isinstance(source, Node) and is_integer(source):
            return source
        return self._copy_data_movement(node, self._integer_source)

    def _copy_data_movement(self, node: Node, convert: Callable[[Node], Node | None]) -> Node | None:
        if node.target in _CASTS:
            return convert(node.all_input_nodes[0])
        copies = {x: convert(x) for x in node.all_input_nodes} if node.target in _MOVES else {}
        if not copies or None in copies.values():
            return None
        with node.graph.inserting_before(node):
            arguments = map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = node.graph.create_node("call_function", node.target, *arguments)
        dtype = next(x.meta["val"].dtype for x in copies.values() if x is not None)
        copy.meta = {**node.meta, "val": torch.empty_like(node.meta["val"], dtype=dtype)}
        return copy

    def _product(self, node: Node) -> Node | None:
        if node.target not in _PRODUCTS:
            return None
        has_reduction = node.target in _PRODUCTS[2:] and node.all_input_nodes[0].meta["val"].shape[-1] != 1
        for x, factor in (node.args[:2], node.args[1::-1]):
            is_constant = not isinstance(factor, Node) or factor in self._constants
            if has_reduction or not is_constant or x in self._constants:
                continue
            integers = self._integer_source(x) if isinstance(x, Node) else None
            if integers is not None:
                value = self._constants.value(factor) if isinstance(factor, Node) else torch.tensor(factor)
                return self._multiply_by_turns(node, integers, value.double() / math.tau)
        return None

    def _multiply_by_turns(self, node: Node, x: Node, turns: torch.Tensor) -> Node:
        """The phases of x * ``turns``: sum of ((x >> 4i) & 15) * (turns * 16**i mod 1), with a signed last digit."""
        shifts = torch.arange(0, 32, _DIGIT_BITS, dtype=torch.int32)
        masks = torch.tensor([(1 << _DIGIT_BITS) - 1] * (len(shifts) - 1) + [-1], dtype=torch.int32)
        scaled_turns = torch.remainder(turns[..., None] * 2.0**shifts, 1) * (1 << _TURN_BITS)
        factors = torch.remainder(scaled_turns.round(), 1 << _TURN_BITS).to(torch.int32)
        emit, constant = partial(insert_call, node), partial(add_buffer_node, self._module, f"{node.name}_turns")
        with node.graph.inserting_before(node):
            column = emit(aten.unsqueeze.default, emit(aten.to.dtype, x, torch.int32), -1)
            digits = emit(aten.bitwise_right_shift.Tensor, column, constant(shifts))
            digits = emit(aten.bitwise_and.Tensor, digits, constant(masks))
            terms = emit(
                aten.bitwise_and.Scalar, emit(aten.mul.Tensor, digits, constant(factors)), (1 << _TURN_BITS) - 1
            )
            total = emit(aten.sum.dim_IntList, terms, [-1], dtype=torch.int32)
            shift, half = _TURN_BITS - _PHASE_BITS, 1 << _PHASE_BITS - 1
            rounded = emit(aten.add.Tensor, total, (half << shift) + (1 << shift - 1))
            phases = emit(aten.bitwise_right_shift.Tensor_Scalar, rounded, shift)
            return emit(aten.sub.Tensor, emit(aten.bitwise_and.Scalar, phases, (1 << _PHASE_BITS) - 1), half)
