"""Integer fusion: which operators are computed as one in integers.

The quantizer uses it to decide where to quantize, the lowering to decide what to merge.

Two rules decide, for a float graph and for a graph with quantize and dequantize operators alike: ``fusible_consumer``
and ``common_base``. ``Regions`` applies them to a graph before quantization. An elementwise function of one quantized
tensor stays a ``Univariate`` until the lowering reaches its quantize node. Then it becomes a RESCALE, a CLAMP or one
TABLE.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import TIMESTEP_SLOT, is_float, overload_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.integers import Q15_MAX
from arm_backend_core.ops.lookup import evaluate_on_operand, find_phase_step, lookup
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, Record
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Base = TypeVar("Base")


def fusible_consumer(node: Node) -> Node | None:
    """The only consumer of ``node``, if it is a clamp or a product with a positive number; else None.

    Such a consumer merges into the RESCALE that requantizes the producer's accumulator.
    """
    users = list(node.users)
    record = find_record(users[0]) if len(users) == 1 else None
    if record is None or not users[0].args or users[0].args[0] is not node:
        return None
    return users[0] if record.clamp is not None or _factor(users[0], record) is not None else None


def common_base(
    node: Node, record: Record, bases: Iterable[Base], shape: Callable[[Base], Iterable[Any]]
) -> Base | None:
    """The one tensor that ``node`` is an elementwise function of; None if there is no such tensor.

    Args:
        node: the operator.
        record: its record.
        bases: for each operand that is not a number, the tensor that it is, or is a function of.
        shape: returns the shape of a base.
    """
    distinct = set(bases)
    if not record.univariate or len(distinct) != 1:
        return None
    (base,) = distinct
    return base if tuple(shape(base)) == tuple(node.meta["val"].shape) else None


def is_summed_product(node: Node) -> bool:
    """Whether ``node`` is a product that only a sum reads; of int16 operands, the sum adds it unrounded in INT32."""
    targets = [overload_of(x.target) for x in (node, *node.users)]
    return targets[0] is aten.mul.Tensor and len(targets) == 2 and targets[1] in (aten.add.Tensor, aten.sub.Tensor)


class Regions:
    """The fusion groups of a graph before quantization.

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
        may_be_int16: whether the configuration of a node offers int16 for such results.
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
        self._discontinuous, added = set[Node](), {node for node in discontinuous if is_int16(node)}
        while True:
            self._discontinuous |= added
            self.chain_base, chained = self._find_chains()
            self.fused = chained | self.merged.keys()
            self.int16_nodes = self._find_int16_nodes(may_be_int16)
            added = {
                node for node in discontinuous - self._discontinuous if self.chain_base.get(node) in self.int16_nodes
            }
            if not added:  # which nodes are int16 depends on the chains, and the reverse: iterate to a fixpoint
                break

    def operands(self, node: Node) -> list[Node]:
        """The float32 operands that are quantized as activations; one-element constants count as numbers."""
        record = self._records[node]
        args = list(node.args) if record.activations is None else [node.args[i] for i in record.activations]
        operands: list[Node] = []
        for arg in _nodes(args):
            is_number = arg in self._constants and arg.meta["val"].numel() == 1 and record.univariate
            if is_float(arg) and arg.meta["val"].dtype is torch.float32 and not is_number and arg not in operands:
                operands.append(arg)
        return operands

    def has_integer_rule(self, node: Node) -> bool:
        """Whether ``node`` alone has an integer lowering rule; a function of one tensor becomes a TABLE instead."""
        record = self._records[node]
        is_table = record.univariate and len(self.operands(node)) == 1
        return record.lower_integer is not None and not is_table

    def _find_merged_producers(self) -> dict[Node, Node]:
        merged: dict[Node, Node] = {}
        merged_consumers: set[Node] = set()
        for node, record in self._records.items():
            reader = fusible_consumer(node) if record.absorbs_activation and node not in merged_consumers else None
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
        fused = {node for node in members if self._discontinuous.isdisjoint((node, *node.users))}
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

    def _find_int16_nodes(self, may_be_int16: Callable[[Node], bool]) -> set[Node]:
        """Find the nodes whose result is int16 in an int8 program.

        Layer normalization and softmax keep precision inside, and so do additions whose own result is int16. These form
        the residual stream of a transformer. A consumer that needs int8 (a matrix product) requantizes its operand.
        """
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
        """The nodes from ``state`` to its new ``value``, if that is elementwise arithmetic of the old value; else none.

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
        record, target, single = self._records[user], overload_of(user.target), user in self.chain_base
        divides = target is aten.div.Tensor and not single  # divisors may be small sums: efficientvit_b0 5 dB -> 11 dB
        if record.reads_int16 or divides or (TIMESTEP_SLOT in user.meta and record.kind is not Kind.CONV):
            return True
        is_offset = not single or target is aten.add.Tensor  # an added number, which keeps a divisor from 0
        arithmetic = (record.absorbs_activation and record.univariate and is_offset) or user in self._feedback
        return (arithmetic or record.kind is Kind.SHARED) and not self.int16_nodes.isdisjoint(
            (user, self.merged.get(user))
        )


@dataclass(frozen=True, eq=False)
class Univariate:
    """An elementwise function of one quantized tensor, not computed yet.

    Attributes:
        base: the tensor.
        target: the ATen operator that is evaluated last.
        record: its record.
        args: its arguments: ``base``, functions of it, constants of one element, numbers.
        kwargs: the same by name.
        clamp: (low, high) when the function is clamp(base, low, high) and nothing else.
        factor: c when the function is c * base, c > 0, and nothing else.
        is_discontinuous: the function is one discontinuous operator on an int16 tensor.
        composed: if ``base`` is an oscillating function, the whole function in terms of that function's base.
    """

    base: Tensor
    target: Any
    record: Record
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clamp: tuple[float, float] | None = None
    factor: float | None = None
    is_discontinuous: bool = False
    composed: Univariate | None = None

    def evaluate(self, grid: torch.Tensor) -> torch.Tensor:
        """Evaluate the function on real numbers, with PyTorch's own operators. ``grid``: float64, 1-D."""
        results: dict[Univariate, torch.Tensor] = {}

        def real(x: Any) -> Any:
            if isinstance(x, Univariate):
                return results[x]
            if isinstance(x, Tensor):  # the base may be a constant too
                return grid if x is self.base or not x.is_constant else torch.from_numpy(x.real.reshape(-1))
            return x

        pending = [self]
        while pending:  # iterative: a chain may exceed Python's recursion limit
            function = pending[-1]
            inner = [x for x in _operands(function.args, function.kwargs) if isinstance(x, Univariate)]
            missing = [x for x in inner if x not in results]
            if not missing:
                pending.pop()
                kwargs = {name: real(x) for name, x in function.kwargs.items()}
                evaluate = function.record.evaluate or function.target
                results[function] = evaluate(*map(real, function.args), **kwargs)
            pending += missing
        return results[self]

    @cached_property
    def oscillates(self) -> bool:
        """Whether it is a sine or cosine of int16 with too many periods for the TABLE's linear interpolation.

        A further function of it is then computed from its int16 value and not from its base.
        """
        q = self.base.q
        return (
            self.record.is_sinusoid
            and q is not None
            and q.dtype is DType.INT16
            and find_phase_step(evaluate_on_operand(self._evaluate_array, q)) > 0
        )

    def _evaluate_array(self, grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.evaluate(torch.from_numpy(grid)).double().numpy()

    def to_int16_table(self, b: Builder) -> Tensor:
        """The function's values as an int16 tensor whose scale covers all of them."""
        assert self.base.q is not None
        real = evaluate_on_operand(self._evaluate_array, self.base.q)[:-1]
        peak = float(np.abs(real[np.isfinite(real)]).max(initial=0.0))
        q = QParams(max(peak, 1e-30) / Q15_MAX, 0, DType.INT16, *DType.INT16.range)
        return Tensor(self.quantize(b, q), q)

    def to_scaled_tensor(self) -> Tensor:
        """The result of a function that only scales: the base's integers with another scale.

        Raises:
            Unsupported: the function does more than scale, so it must be quantized before it is read.
        """
        if self.factor is None:
            raise Unsupported(f"its operand, the result of {self.target}, is not quantized")
        return Tensor(self.base.value, _scaled(self.base.q, self.factor))

    def quantize(self, b: Builder, q: QParams) -> Value:
        """Quantize the function's values to ``q``, with a RESCALE, a RESCALE and a CLAMP, or else a TABLE."""
        base, context = self.base, Context(b, None, q)  # type: ignore[arg-type]
        assert base.q is not None
        if self.factor is not None:
            return context.requantize(self.to_scaled_tensor(), q)
        if self.clamp is not None and (base.q.is_equivalent(q) or DType.INT16 in (base.q.dtype, q.dtype)):
            low, high = (int(bound) for bound in q.quantize(np.array(self.clamp)))
            value = context.requantize(base, q)
            return value if (low, high) == q.dtype.range else b.clamp(value, low, high)
        return lookup(b, base, self._evaluate_array, q)


def as_univariate(node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Univariate | None:
    """``node`` as a function of one quantized tensor; None if its operands have no common per-tensor base."""
    operands = [
        x for x in _operands(args, kwargs) if isinstance(x, Univariate) or not x.is_constant or x.value.size > 1
    ]
    bases = [x.base if isinstance(x, Univariate) else x for x in operands]
    base = common_base(node, record, bases, lambda x: x.shape)
    if base is None or base.q is None or base.q.axis is not None:
        return None
    function = Univariate(base, overload_of(node.target), record, tuple(args), kwargs)
    if args[0] is not base:
        return function
    clamp = record.clamp and record.clamp(*args, **kwargs)
    is_discontinuous = record.is_discontinuous and base.q.dtype is DType.INT16
    return replace(function, clamp=clamp, factor=_factor(node, record), is_discontinuous=is_discontinuous)


def qparams_before_consumer(reader: Node, q: QParams) -> QParams:
    """Quantization parameters of a fusible consumer's operand, given those of its result, ``q``."""
    record = find_record(reader)
    factor = None if record is None or record.clamp is not None else _factor(reader, record)
    return q if factor is None else _scaled(q, 1 / factor)


def _nodes(items: Any) -> list[Node]:
    if isinstance(items, (list, tuple)):
        return [node for item in items for node in _nodes(item)]
    return [items] if isinstance(items, Node) else []


def _factor(node: Node, record: Record) -> float | None:
    return record.factor(*node.args, **node.kwargs) if record.factor is not None else None


def _scaled(q: QParams | None, factor: float) -> QParams:
    assert q is not None
    return replace(q, scale=float(q.scale) * factor)


def _operands(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor | Univariate]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, Univariate))]
