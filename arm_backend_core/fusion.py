"""Which operators are computed as one in integers: the quantizer asks it where to quantize, the lowering what to merge.

Two rules say it, for a graph of real numbers and for one with quantize and dequantize operators alike:
``merging_reader`` and ``common_base``. ``Regions`` applies them to a graph that is going to be quantized. A function of
one quantized tensor is ``Univariate`` until the lowering meets where it is quantized: then it is one TABLE or less.
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
from arm_backend_core.ops.lookup import evaluate_on_operand, lookup, sinusoid_angle
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, Record
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Base = TypeVar("Base")
_WAVES = (aten.sin.default, aten.cos.default)
#: A tensor of one element may be its own slope: of the grid's numbers each has another.
_EVALUATED: dict[Any, Callable[..., torch.Tensor]] = {aten.prelu.default: aten._prelu_kernel.default}


def merging_reader(node: Node) -> Node | None:
    """The only reader of ``node``, if it is a clamp or a product with a positive number.

    It then merges into the RESCALE that the producer's integers leave through.
    """
    users = list(node.users)
    record = find_record(users[0]) if len(users) == 1 else None
    if record is None or not users[0].args or users[0].args[0] is not node:
        return None
    return users[0] if record.clamp is not None or _factor(users[0], record) is not None else None


def common_base(
    node: Node, record: Record, bases: Iterable[Base], shape: Callable[[Base], Iterable[Any]]
) -> Base | None:
    """The one tensor that ``node`` is an elementwise function of, None if it is not.

    Args:
        bases: the tensors that its operands are, or are functions of; numbers left out.
    """
    distinct = set(bases)
    if not record.univariate or len(distinct) != 1:
        return None
    (base,) = distinct
    return base if tuple(shape(base)) == tuple(node.meta["val"].shape) else None


def is_term(node: Node) -> bool:
    """Whether ``node`` is a product that only a sum reads: of int16 it is then added as it is, in INT32."""
    targets = [overload_of(x.target) for x in (node, *node.users)]
    return targets[0] is aten.mul.Tensor and len(targets) == 2 and targets[1] in (aten.add.Tensor, aten.sub.Tensor)


class Regions:
    """What will be computed as one of a graph that is going to be quantized.

    Attributes:
        merged: producers that merge with their only reader: {producer: reader}.
        readers: these readers.
        chain_base: for every elementwise function: the tensor it is a function of.
        fused: nodes that are computed together with their reader, so that they have no parameters of their own:
            producers in ``merged``, all but the last of a chain of functions of one tensor, terms within recurrent
            layers.
        int16_nodes: nodes whose result is int16 in an int8 program, as some reader keeps precision inside.

    Args:
        records: the operators that will be quantized, in program order.
        constants: nodes that are parameters or computed from them alone.
        may_be_wide: whether the configuration of a node has int16 for such results.
        is_wide: whether a node is int16 by its configuration.
        states: buffers that the program writes, and what it writes into each.
    """

    def __init__(
        self,
        records: Mapping[Node, Record],
        constants: Container[Node],
        may_be_wide: Callable[[Node], bool],
        is_wide: Callable[[Node], bool],
        states: Mapping[Node, Node] = MappingProxyType({}),
    ) -> None:
        self._records = records
        self._constants = constants
        self._feedback = {node for state in states for node in self._fed_back(state, states[state])}
        self.merged = self._merged_producers()
        self.readers = set(self.merged.values())
        jumps = {node for node, record in records.items() if record.is_discontinuous}
        self._jumps, late = set[Node](), {node for node in jumps if is_wide(node)}
        while True:
            self._jumps |= late
            self.chain_base, chained = self._chains()
            self.fused = chained | self.merged.keys()
            self.int16_nodes = self._wide(may_be_wide)
            late = {node for node in jumps - self._jumps if self.chain_base.get(node) in self.int16_nodes}
            if not late:  # what is int16 in an int8 program depends on what is one function
                break

    def operands(self, node: Node) -> list[Node]:
        """float32 operands that are quantized as activations; constants of one element count as numbers."""
        record = self._records[node]
        args = list(node.args) if record.activations is None else [node.args[i] for i in record.activations]
        found: list[Node] = []
        for arg in _nodes(args):
            number = arg in self._constants and arg.meta["val"].numel() == 1 and record.univariate
            if is_float(arg) and arg.meta["val"].dtype is torch.float32 and not number and arg not in found:
                found.append(arg)
        return found

    def has_integer_rule(self, node: Node) -> bool:
        """Whether ``node`` can be lowered on integers by itself; a function of one tensor is a TABLE."""
        record = self._records[node]
        alone = record.univariate and len(self.operands(node)) == 1
        return record.lower_integer is not None and not alone

    def _merged_producers(self) -> dict[Node, Node]:
        merged: dict[Node, Node] = {}
        readers: set[Node] = set()
        for node, record in self._records.items():
            reader = merging_reader(node) if record.absorbs_activation and node not in readers else None
            if reader in self._records and reader is not None and self.has_integer_rule(node):
                merged[node] = reader
                readers.add(reader)
        return merged

    def _chains(self) -> tuple[dict[Node, Node], set[Node]]:
        """Origins, and the functions that are interior.

        Starts with all of them interior, but for what jumps in int16 and its operands, and takes out, until nothing
        changes, those that someone reads who is not a function of the same tensor.
        """
        members = [node for node, record in self._records.items() if record.univariate and node not in self.readers]
        interior = {node for node in members if self._jumps.isdisjoint((node, *node.users))}
        while True:
            origin: dict[Node, Node] = {}
            for node in members:
                bases = [origin.get(x, x) if x in interior else x for x in self.operands(node)]
                base = common_base(node, self._records[node], bases, lambda x: x.meta["val"].shape)
                if base is not None:
                    origin[node] = base
            kept = {
                node
                for node in interior
                if node in origin and node.users and all(origin.get(user) is origin[node] for user in node.users)
            }
            if kept == interior:
                return origin, interior
            interior = kept

    def _wide(self, may_be: Callable[[Node], bool]) -> set[Node]:
        """Layer normalization and softmax keep precision inside, and so do additions that are wide themselves.

        These are the residual stream of a transformer. A reader that needs int8 (a matrix product) quantizes its own
        operand once more.
        """
        wide = self.int16_nodes = {node for node in self._feedback if node not in self._records or may_be(node)}
        places = set[Any]()
        for node in reversed(list(self._records)):
            readers = [user for user in node.users if user in self._records]
            free = self._records[node].fixed_range is None and may_be(node)
            if free and any(map(self.reads_wide, readers)):
                wide.add(node)
                places.add(node.meta.get(TIMESTEP_SLOT))
        return wide | {
            node for node in self._records if TIMESTEP_SLOT in node.meta and node.meta[TIMESTEP_SLOT] in places
        }

    def _fed_back(self, state: Node, value: Node) -> set[Node]:
        """``state`` and what is between it and its new value, where that is arithmetic of the old, element by element.

        What is rounded there adds up from call to call: a mean that moves by less than half a step would not move.
        """
        reached = {state}
        for node, record in self._records.items():
            if (record.univariate or record.kind is Kind.SHARED) and not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        between, waiting = set[Node](), [value]
        while waiting:
            node = waiting.pop()
            if node in reached and node not in between:
                between.add(node)
                waiting += node.all_input_nodes
        computes = any(node in self._records and self._records[node].univariate for node in between)
        return between if computes else set()

    def reads_wide(self, user: Node) -> bool:
        """Whether int16 operands are worth having for ``user`` in an int8 program."""
        record, target, single = self._records[user], overload_of(user.target), user in self.chain_base
        divides = target is aten.div.Tensor and not single  # by sums that may be small: efficientvit_b0 5 dB, now 11
        if record.reads_int16 or divides or (TIMESTEP_SLOT in user.meta and record.kind is not Kind.CONV):
            return True
        adds = not single or target is aten.add.Tensor  # with a number, which keeps a divisor from 0
        arithmetic = (record.absorbs_activation and record.univariate and adds) or user in self._feedback
        return (arithmetic or record.kind is Kind.SHARED) and not self.int16_nodes.isdisjoint(
            (user, self.merged.get(user))
        )


@dataclass(frozen=True, eq=False)
class Univariate:
    """An elementwise function of one quantized tensor, not computed yet.

    Attributes:
        base: the tensor.
        target: the ATen operator that is evaluated last.
        args: its arguments: ``base``, functions of it, constants of one element, numbers.
        kwargs: the same by name.
        clamp: (low, high) when the function is clamp(base, low, high) and nothing else.
        factor: c when the function is c * base, c > 0, and nothing else.
        is_discontinuous: it is a function of int16 that jumps, and nothing else.
        composed: where ``base`` is a wave of many turns, the function of that wave's base.
    """

    base: Tensor
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clamp: tuple[float, float] | None = None
    factor: float | None = None
    is_discontinuous: bool = False
    composed: Univariate | None = None

    def evaluate(self, grid: torch.Tensor) -> torch.Tensor:
        """The function on real numbers, by PyTorch's own operators. ``grid`` float64, 1-D."""
        known: dict[Univariate, torch.Tensor] = {}

        def real(x: Any) -> Any:
            if isinstance(x, Univariate):
                return known[x]
            if isinstance(x, Tensor):  # the base may be a constant too
                return grid if x is self.base or not x.is_constant else torch.from_numpy(x.real.reshape(-1))
            return x

        waiting = [self]
        while waiting:  # a chain may be longer than Python's stack
            function = waiting[-1]
            inner = [x for x in _operands(function.args, function.kwargs) if isinstance(x, Univariate)]
            missing = [x for x in inner if x not in known]
            if not missing:
                waiting.pop()
                kwargs = {name: real(x) for name, x in function.kwargs.items()}
                known[function] = _EVALUATED.get(function.target, function.target)(*map(real, function.args), **kwargs)
            waiting += missing
        return known[self]

    @cached_property
    def oscillates(self) -> bool:
        """Whether it is a sine or cosine of int16 with so many turns that lines miss what is a function of it."""
        q = self.base.q
        return (
            self.target in _WAVES
            and q is not None
            and q.dtype is DType.INT16
            and sinusoid_angle(evaluate_on_operand(self._values, q)) > 0
        )

    def _values(self, grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.evaluate(torch.from_numpy(grid)).double().numpy()

    def tabulated(self, b: Builder) -> Tensor:
        """In int16 steps that hold all its values."""
        assert self.base.q is not None
        real = evaluate_on_operand(self._values, self.base.q)[:-1]
        peak = float(np.abs(real[np.isfinite(real)]).max(initial=0.0))
        q = QParams(max(peak, 1e-30) / Q15_MAX, 0, DType.INT16, *DType.INT16.range)
        return Tensor(self.quantized(b, q), q)

    def settled(self) -> Tensor:
        """A function that only scales: the same integers in another scale.

        Raises:
            Unsupported: any other must be quantized before it is read.
        """
        if self.factor is None:
            raise Unsupported(f"its operand, the result of {self.target}, is not quantized")
        return Tensor(self.base.value, _scaled(self.base.q, self.factor))

    def quantized(self, b: Builder, q: QParams) -> Value:
        """The function's values in parameters ``q``: by a RESCALE, a CLAMP after one, or else a TABLE."""
        base, context = self.base, Context(b, None, q)  # type: ignore[arg-type]
        assert base.q is not None
        if self.factor is not None:
            return context.requantize(self.settled(), q)
        if self.clamp is not None and (base.q.same(q) or DType.INT16 in (base.q.dtype, q.dtype)):
            low, high = (int(bound) for bound in q.quantize(np.array(self.clamp)))
            value = context.requantize(base, q)
            return value if (low, high) == q.dtype.range else b.clamp(value, low, high)
        return lookup(b, base, self._values, q)


def univariate(node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Univariate | None:
    """``node`` as a function of the one quantized tensor that its operands are, or are functions of, if so it is."""
    operands = [
        x for x in _operands(args, kwargs) if isinstance(x, Univariate) or not x.is_constant or x.value.size > 1
    ]
    bases = [x.base if isinstance(x, Univariate) else x for x in operands]
    base = common_base(node, record, bases, lambda x: x.shape)
    if base is None or base.q is None or base.q.axis is not None:
        return None
    function = Univariate(base, overload_of(node.target), tuple(args), kwargs)
    if args[0] is not base:
        return function
    clamp = record.clamp and record.clamp(*args, **kwargs)
    jumps = record.is_discontinuous and base.q.dtype is DType.INT16
    return replace(function, clamp=clamp, factor=_factor(node, record), is_discontinuous=jumps)


def before_reader(reader: Node, q: QParams) -> QParams:
    """Parameters of the operand of a ``merging_reader`` whose result has ``q``."""
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
