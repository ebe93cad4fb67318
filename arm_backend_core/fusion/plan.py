"""Fusion plan: which operators of a graph are computed as one, so that results between them are not quantized."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from arm_backend_core.fusion.rules import absorbed_consumer, common_base, is_summed_product
from arm_backend_core.nodes import TIMESTEP_SLOT, is_float, overload_of
from arm_backend_core.ops.registry import Kind, Record

aten = torch.ops.aten


class FusionPlan:
    """The groups of float operators that the quantized program computes as one integer operator each.

    Attributes:
        merged: producers that merge with their only consumer: {producer: consumer}.
        merged_consumers: these consumers.
        chain_base: {elementwise function: the tensor that it is a function of}.
        fused: nodes that are computed together with their consumer and have no quantization parameters of their own:
            producers in ``merged``, all but the last of a chain of functions of one tensor, and products that a sum
            reads within recurrent layers.
        int16_nodes: nodes whose result is int16 in an int8 program, because a consumer keeps more precision.

    Args:
        records: the operators that will be quantized, in program order.
        constants: nodes that are parameters or computed from parameters alone.
        may_be_int16: whether the configuration of a node permits an int16 result in an int8 program.
        is_int16: whether a node is int16 by its configuration.
        states: {buffer that the program writes: its new value}.
    """

    def __init__(
        self,
        records: Mapping[Node, Record],
        constants: Container[Node],
        may_be_int16: Callable[[Node], bool],
        is_int16: Callable[[Node], bool],
        states: Mapping[Node, Node] = MappingProxyType({}),
    ) -> None:
        self._records = records
        self._constants = constants
        self._feedback = {node for state in states for node in self._find_feedback_path(state, states[state])}
        self.merged = self._find_merged_producers()
        self.merged_consumers = set(self.merged.values())
        discontinuous = {node for node, record in records.items() if record.is_discontinuous}
        self._int16_discontinuous, added = set[Node](), {node for node in discontinuous if is_int16(node)}
        while True:
            self._int16_discontinuous |= added
            self.chain_base, chained = self._find_chains()
            self.fused = chained | self.merged.keys()
            self.int16_nodes = self._find_int16_nodes(may_be_int16)
            added = {
                node
                for node in discontinuous - self._int16_discontinuous
                if self.chain_base.get(node) in self.int16_nodes
            }
            if not added:  # the int16 nodes depend on the chains, and the chains on the int16 nodes: a fixpoint
                break
        self.fused |= {node for node in records if self._is_exact_product(node, is_int16)}

    def chains(self) -> list[list[Node]]:
        """The functions of each tensor, if any of them is fused."""
        chains: dict[Node, list[Node]] = {}
        for node, base in self.chain_base.items():
            chains.setdefault(base, []).append(node)
        return [functions for functions in chains.values() if not self.fused.isdisjoint(functions)]

    def operands(self, node: Node) -> list[Node]:
        """The float32 operands that are quantized as activations, without the scalars of an elementwise function.

        A constant of one element is such a scalar.
        """
        record = self._records[node]
        args = list(node.args) if record.activations is None else [node.args[i] for i in record.activations]
        operands: list[Node] = []
        for arg in _nodes(args):
            is_scalar = arg in self._constants and arg.meta["val"].numel() == 1 and record.univariate
            if is_float(arg) and arg.meta["val"].dtype is torch.float32 and not is_scalar and arg not in operands:
                operands.append(arg)
        return operands

    def is_computed_in_integers(self, node: Node) -> bool:
        """Whether ``node`` is computed in integers, alone or with others."""
        return node in self.chain_base or node in self.merged_consumers or self.has_integer_rule(node)

    def has_integer_rule(self, node: Node) -> bool:
        """Whether ``node`` alone has an integer lowering rule; a function of one tensor becomes a TABLE instead."""
        record = self._records[node]
        is_table = record.univariate and len(self.operands(node)) == 1
        return record.lower_integer is not None and not is_table

    def _find_merged_producers(self) -> dict[Node, Node]:
        merged: dict[Node, Node] = {}
        merged_consumers: set[Node] = set()
        for node in self._records:
            reader = absorbed_consumer(node) if node not in merged_consumers else None
            if reader in self._records and reader is not None and self.has_integer_rule(node):
                merged[node] = reader
                merged_consumers.add(reader)
        return merged

    def _find_chains(self) -> tuple[dict[Node, Node], set[Node]]:
        """Find chains of functions of one tensor; returns {function: base} and the fused functions.

        Greatest fixpoint: all functions start as fused, except int16 functions that are discontinuous and their
        operands. A function with a reader that is not a function of the same tensor is removed, until nothing changes.
        """
        members = [
            node for node, record in self._records.items() if record.univariate and node not in self.merged_consumers
        ]
        fused = {node for node in members if self._int16_discontinuous.isdisjoint((node, *node.users))}
        while True:
            base_of: dict[Node, Node] = {}
            for node in members:
                bases = [base_of.get(x, x) if x in fused else x for x in self.operands(node)]
                base = common_base(node, self._records[node], bases, lambda x: x.meta["val"].shape)
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
        """Whether an int16 product within a recurrent layer is added without rounding."""
        int16 = node in self.int16_nodes or is_int16(node)
        return TIMESTEP_SLOT in node.meta and int16 and is_summed_product(node) and len(self.operands(node)) == 2

    def _find_int16_nodes(self, may_be_int16: Callable[[Node], bool]) -> set[Node]:
        """Find the nodes whose result is int16 in an int8 program.

        They are operands of consumers that compute with more than 8 bits: layer normalization, softmax, and additions
        whose own result is int16. These additions form the residual stream of a transformer. A consumer that needs int8
        (a matrix product) requantizes its operand.
        """
        # ``benefits_from_int16`` reads ``self.int16_nodes``, which grows in this loop: consumers precede producers.
        int16_nodes = self.int16_nodes = {
            node for node in self._feedback if node not in self._records or may_be_int16(node)
        }
        slots = set[Any]()
        for node in reversed(list(self._records)):
            readers = [user for user in node.users if user in self._records]
            is_candidate = self._records[node].fixed_range is None and may_be_int16(node)
            if is_candidate and any(map(self.benefits_from_int16, readers)):
                int16_nodes.add(node)
                slots.add(node.meta.get(TIMESTEP_SLOT))
        return int16_nodes | {
            node for node in self._records if TIMESTEP_SLOT in node.meta and node.meta[TIMESTEP_SLOT] in slots
        }

    def _find_feedback_path(self, state: Node, value: Node) -> set[Node]:
        """The nodes on the path from ``state`` to its new ``value``; none if no elementwise arithmetic is on the path.

        Rounding errors on this path accumulate from call to call: a running mean that moves by less than half a
        quantization step would never move.
        """
        reached = {state}
        for node, record in self._records.items():
            if (record.univariate or record.kind is Kind.SHARED) and not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        path, pending = set[Node](), [value]
        while pending:
            node = pending.pop()
            if node in reached and node not in path:
                path.add(node)
                pending += node.all_input_nodes
        computes = any(node in self._records and self._records[node].univariate for node in path)
        return path if computes else set()

    def benefits_from_int16(self, user: Node) -> bool:
        """Whether ``user`` gains accuracy from int16 operands in an int8 program."""
        record, target, is_of_one_tensor = self._records[user], overload_of(user.target), user in self.chain_base
        # Divisors may be small sums: efficientvit_b0 5 dB -> 11 dB.
        divides = target is aten.div.Tensor and not is_of_one_tensor
        if record.prefers_int16_input or divides or (TIMESTEP_SLOT in user.meta and record.kind is not Kind.CONV):
            return True
        # Of the functions of one tensor, only x + number counts: it may be an epsilon that keeps a divisor from 0.
        is_binary_or_add = not is_of_one_tensor or target is aten.add.Tensor
        arithmetic = (record.absorbs_activation and record.univariate and is_binary_or_add) or user in self._feedback
        return (arithmetic or record.kind is Kind.SHARED) and not self.int16_nodes.isdisjoint(
            (user, self.merged.get(user))
        )


def _nodes(items: Any) -> list[Node]:
    if isinstance(items, (list, tuple)):
        return [node for item in items for node in _nodes(item)]
    return [items] if isinstance(items, Node) else []
