"""Univariate functions: chains of elementwise operators on one quantized tensor, composed into one function.

The lowering represents such a function by a ``Univariate``, without emitting operators. At the quantize node of its
result, the function is emitted by RESCALE (c * x), by RESCALE and CLAMP (some clamps), or by TABLE (``ops/lookup``).
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
from arm_backend_core.fusion.rules import find_common_base, get_scale_factor
from arm_backend_core.nodes import overload_of
from arm_backend_core.ops.fixed_point_value import Q15_MAX
from arm_backend_core.ops.lookup import apply_by_table, evaluate_on_operand, find_sinusoid_phase_step
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.ops.registry import Record
from arm_backend_core.ops.separable_functions import factorize
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value


@dataclass(frozen=True, eq=False)
class Univariate:
    """An elementwise function of one quantized tensor, for which no operators are emitted yet.

    Attributes:
        base: the quantized tensor.
        target: the outermost ATen operator of the function.
        record: the record of ``target``.
        args: arguments of ``target``: ``base``, functions of ``base``, constants of one element, numbers.
        kwargs: keyword arguments of ``target``.
        clamp: (low, high) if the function is exactly clamp(base, low, high), else None.
        factor: c if the function is exactly c * base with c > 0, else None.
        is_discontinuous: whether the function is a single discontinuous operator on an int16 tensor.
        composed: if ``base`` is the int16 result of an oscillating function g(x), this function is f(g), and
            ``composed`` is f(g(x)), whose base is x; else None.
    """

    base: Operand
    target: Any
    record: Record
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    clamp: tuple[float, float] | None = None
    factor: float | None = None
    is_discontinuous: bool = False
    composed: Univariate | None = None

    def evaluate(self, grid: torch.Tensor) -> torch.Tensor:
        """Evaluate the function with PyTorch on ``grid``, which has real values of ``base`` (float64, 1-D)."""
        results: dict[Univariate, torch.Tensor] = {}

        def to_real(x: Any) -> Any:
            if isinstance(x, Univariate):
                return results[x]
            if isinstance(x, Operand):  # the base may be a constant too
                return grid if x is self.base or not x.is_constant else torch.from_numpy(x.float_values.reshape(-1))
            return x

        pending = [self]
        while pending:  # iterative: a chain may exceed Python's recursion limit
            function = pending[-1]
            inner = [x for x in _operands(function.args, function.kwargs) if isinstance(x, Univariate)]
            missing = [x for x in inner if x not in results]
            if not missing:
                pending.pop()
                kwargs = {name: to_real(x) for name, x in function.kwargs.items()}
                evaluate = function.record.evaluate or function.target
                results[function] = evaluate(*map(to_real, function.args), **kwargs)
            pending += missing
        return results[self]

    @cached_property
    def oscillates(self) -> bool:
        """Whether the function is a sine or cosine of int16 with too many periods for the TABLE's interpolation.

        If g(x) oscillates, a function f(g(x)) is not tabulated over x: f reads the int16 result of g.
        """
        q = self.base.q
        return (
            self.record.is_sinusoid
            and q is not None
            and q.dtype is DType.INT16
            and find_sinusoid_phase_step(self.values()) > 0
        )

    def _evaluate_array(self, grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.evaluate(torch.from_numpy(grid)).double().numpy()

    def to_int16_tensor(self, b: Builder) -> Operand:
        """Emit the function. The result is an int16 tensor whose scale covers all finite values of the function."""
        q = self._int16_tensor_qparams(self.values())
        return Operand(self.quantize(b, q), q)

    def int16_tensor_values(self) -> np.ndarray[Any, Any]:
        """The ``values``, rounded to the scale of ``to_int16_tensor``. Ignores errors of the TABLE's interpolation."""
        values = self.values()
        q = self._int16_tensor_qparams(values)
        return q.dequantize(q.quantize(np.nan_to_num(values)))

    def values(self) -> np.ndarray[Any, Any]:
        """The function's values (float64) at the integers -32768 to 32768 of an int16 base.

        32768 is the end of a TABLE's last interval.
        """
        assert self.base.q is not None
        return evaluate_on_operand(self._evaluate_array, self.base.q)

    @staticmethod
    def _int16_tensor_qparams(values: np.ndarray[Any, Any]) -> QParams:
        peak = float(np.abs(values[:-1][np.isfinite(values[:-1])]).max(initial=0.0))
        return QParams(max(peak, 1e-30) / Q15_MAX, 0, DType.INT16, *DType.INT16.range)

    def to_scaled_tensor(self) -> Operand:
        """The result of a function c * base, without an operator: the integers of ``base`` with the scale c * scale.

        Raises:
            Unsupported: the function has another form than c * base, so its result must be quantized.
        """
        if self.factor is None:
            raise Unsupported(f"its operand, the result of {self.target}, is not quantized")
        q = self.base.q
        assert q is not None
        return Operand(self.base.value, replace(q, scale=float(q.scale) * self.factor))

    def quantize(self, b: Builder, q: QParams) -> Value:
        """Emit the function, quantized to ``q``: by RESCALE, by RESCALE and CLAMP, or by TABLE."""
        base, context = self.base, Context(b, None, q)  # type: ignore[arg-type]
        assert base.q is not None
        if self.factor is not None:
            return context.requantize(self.to_scaled_tensor(), q)
        if self.clamp is not None and (base.q.is_equivalent(q) or DType.INT16 in (base.q.dtype, q.dtype)):
            low, high = (int(bound) for bound in q.quantize(np.array(self.clamp)))
            value = context.requantize(base, q)
            return value if (low, high) == q.dtype.range else b.clamp(value, low, high)
        return apply_by_table(b, base, self._evaluate_array, q)


def fuse_into_univariate(
    node: Node,
    record: Record,
    args: list[Any],
    kwargs: dict[str, Any],
    to_int16_tensor: Callable[[Univariate], Operand],
    result_qparams: Callable[[], QParams | None],
) -> tuple[Univariate | None, list[Any]]:
    """Represent ``node`` as a ``Univariate`` if it is an elementwise function of one quantized tensor.

    If an operand oscillates, such as g = sin(base), f(g) becomes a function of the int16 result of g. ``composed`` then
    keeps f(g(base)): a later operator may combine f(g(base)) with another function h(base), and the combination is
    again a function of ``base``.

    Args:
        node: the operator.
        record: its record.
        args: its arguments, lowered.
        kwargs: its keyword arguments, lowered.
        to_int16_tensor: emits a function as an int16 tensor.
        result_qparams: returns the quantization parameters of the result of ``node``; None if it is not quantized, or
            if its readers quantize it with different parameters.

    Returns:
        The function, or None if a rule of ``record`` must lower ``node``; and the arguments for that rule.
    """
    composed_args = [x.composed or x if isinstance(x, Univariate) else x for x in args]
    function = _as_univariate(node, record, composed_args, kwargs)
    if function is None:
        return None, args
    if any(isinstance(x, Univariate) and (x.oscillates or x.composed) for x in args):
        int16_args = [to_int16_tensor(x) if isinstance(x, Univariate) and x.oscillates else x for x in args]
        outer = _as_univariate(node, record, int16_args, kwargs)
        if outer is not None:
            function = replace(outer, composed=function)
        elif (q := result_qparams()) is not None and not _needs_composition(function, args, q):
            return None, [to_int16_tensor(x) if isinstance(x, Univariate) and not x.factor else x for x in args]
    return (None if function.is_discontinuous and result_qparams() is not None else function), args


def _needs_composition(function: Univariate, args: list[Any], q: QParams) -> bool:
    """Whether int16 results of ``args`` are too coarse for ``function``, and ``factorize`` can represent the function.

    For example, the int16 result of 1 / (abs(x) + 0.1) has a relative precision of 0.1% at x = 30. A quotient by this
    int16 result has the same relative error.
    """
    assert function.base.q is not None
    base_q = function.base.q
    exact = function.values()
    grid = torch.from_numpy(base_q.dequantize(np.arange(-32768, 32769)))

    def to_real(x: Any) -> Any:
        if isinstance(x, Univariate):
            x = x.composed or x
            return x.evaluate(grid) if x.factor else torch.from_numpy(x.int16_tensor_values())
        if isinstance(x, Operand):
            return grid if x is function.base else torch.from_numpy(x.float_values.reshape(-1))
        return x

    evaluate = function.record.evaluate or function.target
    rounded = (
        evaluate(*map(to_real, args), **{name: to_real(x) for name, x in function.kwargs.items()}).double().numpy()
    )
    difference = np.clip(rounded, *q.real_range) - np.clip(exact, *q.real_range)
    error = float(np.nan_to_num(np.abs(difference)).max())
    return error > 2 * float(q.scale) and factorize(exact.tobytes(), float(q.scale), error / 4) is not None


def _as_univariate(node: Node, record: Record, args: list[Any], kwargs: dict[str, Any]) -> Univariate | None:
    """Represent ``node`` as a ``Univariate``. None if its operands have no common base that is quantized per tensor."""
    operands = [
        x for x in _operands(args, kwargs) if isinstance(x, Univariate) or not x.is_constant or x.value.size > 1
    ]
    bases = [x.base if isinstance(x, Univariate) else x for x in operands]
    base = find_common_base(node, record, bases, lambda x: x.shape)
    if base is None or base.q is None or base.q.axis is not None:
        return None
    function = Univariate(base, overload_of(node.target), record, tuple(args), kwargs)
    if args[0] is not base:
        return function
    clamp = record.clamp_bounds and record.clamp_bounds(*args, **kwargs)
    is_discontinuous = record.is_discontinuous and base.q.dtype is DType.INT16
    return replace(function, clamp=clamp, factor=get_scale_factor(node, record), is_discontinuous=is_discontinuous)


def _operands(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Operand | Univariate]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, (Operand, Univariate))]
