"""Fusion plan: decides before quantization which operators of a graph are fused, and which results are int16."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from arm_backend_core.fusion.rules import find_common_base, find_consumer_fused_into_accumulator, is_summed_product
from arm_backend_core.nodes import TIMESTEP_SLOT, is_float, overload_of
from arm_backend_core.ops.registry import AnnotationKind, Record

aten = torch.ops.aten


class FusionPlan:
    """The groups of float operators that the quantized program computes as one integer operator each.

    Attributes:
        fused_consumer_of: {producer: consumer}. The two become one integer operator, such as a convolution and its
            ReLU. No other node reads the producer.
        fused_consumers: the values of ``fused_consumer_of``.
        chain_base: {elementwise node: the tensor that it is a function of}. Functions of the same tensor form a chain.
        fused: nodes that are computed together with their consumers, so that their results are not quantized. They are
            the keys of ``fused_consumer_of``, those functions of a chain whose consumers are all in the same chain, and
            products in recurrent layers that a sum reads without rounding.
        int16_nodes: nodes of an int8 program whose result is int16 (see ``_find_int16_nodes``).

    Args:
        records: the operators that will be quantized, in program order.
        constants: parameters, buffers that the program does not write, and nodes computed from these alone.
        may_be_int16: returns whether the configuration of a node permits an int16 result in an int8 program.
        is_int16: returns whether the configuration of a node requires an int16 result.
        state_updates: {buffer that the program writes: its new value}.
    """

    def __init__(
        self,
        records: Mapping[Node, Record],
        constants: Container[Node],
        may_be_int16: Callable[[Node], bool],
        is_int16: Callable[[Node], bool],
        state_updates: Mapping[Node, Node] = MappingProxyType({}),
    ) -> None:
        self._records = records
        self._constants = constants
        self._feedback_nodes = {
            node for state, value in state_updates.items() for node in self._find_feedback_path(state, value)
        }
        self.fused_consumer_of = self._find_fused_consumers()
        self.fused_consumers = set(self.fused_consumer_of.values())
        discontinuous = {node for node, record in records.items() if record.is_discontinuous}
        self._int16_discontinuous, new_int16 = set[Node](), {node for node in discontinuous if is_int16(node)}
        while True:  # the int16 nodes depend on the chains, and the chains on the int16 nodes: iterate to a fixpoint
            self._int16_discontinuous |= new_int16
            self.chain_base, chained = self._find_chains()
            self.fused = chained | self.fused_consumer_of.keys()
            self.int16_nodes = self._find_int16_nodes(may_be_int16)
            new_int16 = {
                node
                for node in discontinuous - self._int16_discontinuous
                if self.chain_base.get(node) in self.int16_nodes
            }
            if not new_int16:
                break
        self.fused |= {node for node in records if self._is_exact_product(node, is_int16)}

    def fused_chains(self) -> list[list[Node]]:
        """The chains that contain a fused node; a chain is the list of elementwise functions of one tensor."""
        chains: dict[Node, list[Node]] = {}
        for node, base in self.chain_base.items():
            chains.setdefault(base, []).append(node)
        return [functions for functions in chains.values() if not self.fused.isdisjoint(functions)]

    def activation_operands(self, node: Node) -> list[Node]:
        """The distinct float32 operands that are quantized as activations.

        Constants with one element are excluded if ``node`` is an elementwise function, which takes them as scalars.
        """
        record = self._records[node]
        args = (
            list(node.args)
            if record.activation_operands is None
            else [node.args[i] for i in record.activation_operands]
        )
        operands: list[Node] = []
        for arg in _flatten_nodes(args):
            is_scalar = arg in self._constants and arg.meta["val"].numel() == 1 and record.is_univariate
            if is_float(arg) and arg.meta["val"].dtype is torch.float32 and not is_scalar and arg not in operands:
                operands.append(arg)
        return operands

    def is_computed_in_integers(self, node: Node) -> bool:
        """Whether an integer operator computes ``node``, alone or fused with other nodes."""
        return node in self.chain_base or node in self.fused_consumers or self.has_integer_rule(node)

    def has_integer_rule(self, node: Node) -> bool:
        """Whether ``node`` alone lowers to integer operators other than a TABLE.

        False for an elementwise function of one tensor, which becomes a TABLE.
        """
        record = self._records[node]
        is_table = record.is_univariate and len(self.activation_operands(node)) == 1
        return record.lower_integer is not None and not is_table

    def _find_fused_consumers(self) -> dict[Node, Node]:
        consumer_of: dict[Node, Node] = {}
        consumers: set[Node] = set()
        for node in self._records:
            consumer = find_consumer_fused_into_accumulator(node) if node not in consumers else None
            if consumer in self._records and consumer is not None and self.has_integer_rule(node):
                consumer_of[node] = consumer
                consumers.add(consumer)
        return consumer_of

    def _find_chains(self) -> tuple[dict[Node, Node], set[Node]]:
        """Find elementwise functions of the same base tensor.

        The set of fused functions is a greatest fixpoint. It starts with all functions except discontinuous int16
        functions and their operands. A function is removed if it has no base or no reader, or if a reader is not a
        function of the same base.

        Returns:
            {function: base}, and the fused functions.
        """
        functions = [
            node for node, record in self._records.items() if record.is_univariate and node not in self.fused_consumers
        ]
        fused = {node for node in functions if self._int16_discontinuous.isdisjoint((node, *node.users))}
        while True:
            base_of: dict[Node, Node] = {}
            for node in functions:
                bases = [base_of.get(x, x) if x in fused else x for x in self.activation_operands(node)]
                base = find_common_base(node, self._records[node], bases, lambda x: x.meta["val"].shape)
                if base is not None:
                    base_of[node] = base
            remaining = {
                node
                for node in fused
                if node in base_of and node.users and all(base_of.get(user) is base_of[node] for user in node.users)
            }
            if remaining == fused:
                return base_of, fused
            fused = remaining

    def _is_exact_product(self, node: Node, is_int16: Callable[[Node], bool]) -> bool:
        """Whether ``node`` is an int16 product in a recurrent layer that its consumer adds without rounding."""
        int16 = node in self.int16_nodes or is_int16(node)
        return (
            TIMESTEP_SLOT in node.meta
            and int16
            and is_summed_product(node)
            and len(self.activation_operands(node)) == 2
        )

    def _find_int16_nodes(self, may_be_int16: Callable[[Node], bool]) -> set[Node]:
        """Find the nodes of an int8 program whose result is int16.

        At least one of their consumers gains accuracy from int16 operands (``benefits_from_int16``), for example layer
        normalization, softmax, or an addition with an int16 result. In a transformer, these additions form the residual
        stream. Nodes on the path from a state to its new value are int16 too. If a node in a step of a recurrent layer
        is int16, so are the corresponding nodes of the other steps (same ``TIMESTEP_SLOT``). A consumer that needs
        int8, such as a matrix product, requantizes its operand.
        """
        # The loop visits consumers before producers: ``benefits_from_int16`` reads the ``int16_nodes`` found so far.
        int16_nodes = self.int16_nodes = {
            node for node in self._feedback_nodes if node not in self._records or may_be_int16(node)
        }
        int16_slots = set[Any]()
        for node in reversed(list(self._records)):
            readers = [user for user in node.users if user in self._records]
            is_candidate = self._records[node].fixed_range is None and may_be_int16(node)
            if is_candidate and any(map(self.benefits_from_int16, readers)):
                int16_nodes.add(node)
                int16_slots.add(node.meta.get(TIMESTEP_SLOT))
        return int16_nodes | {
            node for node in self._records if TIMESTEP_SLOT in node.meta and node.meta[TIMESTEP_SLOT] in int16_slots
        }

    def _find_feedback_path(self, state: Node, value: Node) -> set[Node]:
        """The nodes on the path from ``state`` to its new ``value``; empty if none of them is elementwise arithmetic.

        Rounding errors on this path accumulate over calls. For example, a running mean never changes if each update is
        less than half a quantization step.
        """
        derived = {state}
        for node, record in self._records.items():
            if (record.is_univariate or record.kind is AnnotationKind.SHARED) and not derived.isdisjoint(
                node.all_input_nodes
            ):
                derived.add(node)
        path, pending = set[Node](), [value]
        while pending:
            node = pending.pop()
            if node in derived and node not in path:
                path.add(node)
                pending += node.all_input_nodes
        has_arithmetic = any(node in self._records and self._records[node].is_univariate for node in path)
        return path if has_arithmetic else set()

    def benefits_from_int16(self, user: Node) -> bool:
        """Whether ``user`` gains accuracy from int16 operands in an int8 program."""
        record, target, has_chain_base = self._records[user], overload_of(user.target), user in self.chain_base
        # A divisor may be a small sum, which int8 represents poorly. With int16, efficientvit_b0 has 11 dB SQNR, not 5.
        is_division = target is aten.div.Tensor and not has_chain_base
        if (
            record.prefers_int16_input
            or is_division
            or (TIMESTEP_SLOT in user.meta and record.kind is not AnnotationKind.CONV)
        ):
            return True
        # Functions of one tensor do not benefit, except x + number, which may be a divisor with an added epsilon.
        is_binary_or_add = not has_chain_base or target is aten.add.Tensor
        is_elementwise = record.absorbs_activation and record.is_univariate and is_binary_or_add
        return (
            is_elementwise or user in self._feedback_nodes or record.kind is AnnotationKind.SHARED
        ) and not self.int16_nodes.isdisjoint((user, self.fused_consumer_of.get(user)))


def _flatten_nodes(items: Any) -> list[Node]:
    if isinstance(items, (list, tuple)):
        return [node for item in items for node in _flatten_nodes(item)]
    return [items] if isinstance(items, Node) else []
