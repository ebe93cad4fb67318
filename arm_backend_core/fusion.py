"""Functions of one quantized tensor: kept as functions until they are quantized, then one TABLE or less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import is_float, overload_of
from arm_backend_core.ops.lookup import lookup
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Record
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value


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
    """

    base: Tensor
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clamp: tuple[float, float] | None = None
    factor: float | None = None

    def evaluate(self, grid: torch.Tensor) -> torch.Tensor:
        """The function on real numbers, by PyTorch's own operators. ``grid`` float64, 1-D."""
        known: dict[Univariate, torch.Tensor] = {}

        def real(x: Any) -> Any:
            if isinstance(x, Univariate):
                return known[x]
            if isinstance(x, Tensor):
                return torch.from_numpy(x.real.reshape(-1)) if x.is_constant else grid
            return x

        waiting = [self]
        while waiting:  # a chain may be longer than Python's stack
            function = waiting[-1]
            inner = [x for x in _operands(function.args, function.kwargs) if isinstance(x, Univariate)]
            missing = [x for x in inner if x not in known]
            if not missing:
                waiting.pop()
                kwargs = {name: real(x) for name, x in function.kwargs.items()}
                known[function] = function.target(*map(real, function.args), **kwargs)
            waiting += missing
        return known[self]

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
        if base.is_constant:
            real = self.evaluate(torch.from_numpy(base.real.reshape(-1))).numpy()
            return b.const(q.quantize(real.reshape(base.shape)), q.dtype)
        return lookup(b, base, lambda grid: self.evaluate(torch.from_numpy(grid)).double().numpy(), q)


def univariate(node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Univariate | None:
    """``node`` as a function of the one quantized tensor that its operands are, or are functions of, if so it is."""
    operands = _operands(args, kwargs)
    bases = {x.base if isinstance(x, Univariate) else x for x in operands if not _is_number(x)}
    if not record.univariate or len(bases) != 1:
        return None
    (base,) = bases
    if base.q is None or base.q.axis is not None or base.shape != tuple(node.meta["val"].shape):
        return None
    if not is_float(node):  # comparisons and casts to integers have no scale to be quantized with
        return None
    function = Univariate(base, overload_of(node.target), tuple(args), kwargs)
    if args[0] is not base:
        return function
    return replace(function, clamp=record.clamp and record.clamp(*args, **kwargs), factor=_factor(node, record))


def scaled_by_reader(node: Node, record: Record, q: QParams) -> QParams | None:
    """Parameters of what ``node`` reads if its own result has ``q`` and it merges into its operand's rescale."""
    if record.clamp is not None:
        return q
    factor = _factor(node, record)
    return None if factor is None else _scaled(q, 1 / factor)


def _factor(node: Node, record: Record) -> float | None:
    return record.factor(*node.args, **node.kwargs) if record.factor is not None else None


def _scaled(q: QParams | None, factor: float) -> QParams:
    assert q is not None
    return replace(q, scale=float(q.scale) * factor)


def _is_number(x: Tensor | Univariate) -> bool:
    return isinstance(x, Tensor) and x.is_constant and x.value.size == 1


def _operands(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor | Univariate]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, Univariate))]
