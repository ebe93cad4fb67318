"""Elementwise functions of one quantized tensor, which become one TABLE.

Such a function stays a ``Univariate`` until the lowering reaches its quantize node. Then it becomes a RESCALE, a CLAMP
or one TABLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.fusion.rules import common_base, factor_of
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops.integers import Q15_MAX
from arm_backend_core.ops.lookup import apply_by_table, evaluate_on_operand, find_sinusoid_phase_step
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
            and find_sinusoid_phase_step(evaluate_on_operand(self._evaluate_array, q)) > 0
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
        q = self.base.q
        assert q is not None
        return Tensor(self.base.value, replace(q, scale=float(q.scale) * self.factor))

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
        return apply_by_table(b, base, self._evaluate_array, q)


def fuse_into_function(
    node: Node,
    record: Record,
    args: list[Any],
    kwargs: dict[str, Any],
    table_of: Callable[[Univariate], Tensor],
    is_quantized: Callable[[], bool],
) -> tuple[Univariate | None, list[Any]]:
    """Decide whether ``node`` is fused into a function of one quantized tensor.

    A function of an oscillating function is a function of that function's int16 values, not of its base. ``composed``
    keeps the whole function, because together with another function of that base it is a function of the base again.

    Args:
        node: the operator.
        record: its record.
        args: its arguments, lowered.
        kwargs: the same by name.
        table_of: returns the int16 values of an oscillating function.
        is_quantized: returns whether all readers quantize the result, alike.

    Returns:
        The function, or None, and then the arguments of the operator's own integer rule.
    """
    composed_args = [x.composed or x if isinstance(x, Univariate) else x for x in args]
    function = _as_univariate(node, record, composed_args, kwargs)
    if function is None:
        return None, args
    if any(isinstance(x, Univariate) and (x.oscillates or x.composed) for x in args):
        table_args = [table_of(x) if isinstance(x, Univariate) and x.oscillates else x for x in args]
        outer = _as_univariate(node, record, table_args, kwargs)
        if outer is not None:
            function = replace(outer, composed=function)
        elif is_quantized():
            return None, [table_of(x) if isinstance(x, Univariate) and not x.factor else x for x in args]
    return (None if function.is_discontinuous and is_quantized() else function), args


def _as_univariate(node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Univariate | None:
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
    clamp = record.clamp_bounds and record.clamp_bounds(*args, **kwargs)
    is_discontinuous = record.is_discontinuous and base.q.dtype is DType.INT16
    return replace(function, clamp=clamp, factor=factor_of(node, record), is_discontinuous=is_discontinuous)


def _operands(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor | Univariate]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, Univariate))]
