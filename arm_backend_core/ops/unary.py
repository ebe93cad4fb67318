"""Functions of one tensor, a row each: the floating-point formula.

Quantized, none of them has a rule of its own: the function (or a chain of them) is evaluated by PyTorch on every value
that the quantized operand can have, and becomes a TABLE (``arm_backend_core.lowering.Univariate``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from arm_backend_core.ops.expression import Float
from arm_backend_core.ops.operands import Context, Tensor
from arm_backend_core.ops.registry import Kind, Record, register
from arm_backend_core.tosa.graph import Value

aten = torch.ops.aten
Formula = Callable[..., Float]


def unary(overload: OpOverload, formula: Formula, **facts: Any) -> Record:
    """Register ``formula(x, *further arguments of the operator)``."""

    def lower(cx: Context, x: Tensor, *args: Any, **kwargs: Any) -> Value:
        return formula(Float(cx.b, cx.operand(x, cx.dtype)), *args, **kwargs).value

    return register(Record((overload,), Kind.ELEMENTWISE, lower, univariate=True, **facts))


def _bounds(x: Any, low: float | None = None, high: float | None = None) -> tuple[float, float]:
    return (-math.inf if low is None else low, math.inf if high is None else high)


unary(aten.relu.default, lambda x: x.clamp(0.0, None), clamp=lambda x: (0.0, math.inf))
unary(aten.relu6.default, lambda x: x.clamp(0.0, 6.0), clamp=lambda x: (0.0, 6.0))
unary(
    aten.hardtanh.default,
    lambda x, low=-1.0, high=1.0: x.clamp(low, high),
    clamp=lambda x, low=-1.0, high=1.0: (low, high),
)
unary(aten.clamp.default, lambda x, min=None, max=None: x.clamp(min, max), clamp=lambda x, min=None, max=None: _bounds(x, min, max))
unary(aten.sigmoid.default, lambda x: x.unary("SIGMOID"))
unary(aten.tanh.default, lambda x: x.unary("TANH"))
unary(aten.silu.default, lambda x: x * x.unary("SIGMOID"))
unary(aten.hardsigmoid.default, lambda x: (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
unary(aten.hardswish.default, lambda x: x * (x * (1 / 6) + 0.5).clamp(0.0, 1.0))
unary(aten.exp.default, lambda x: x.unary("EXP"))


def _gelu(x: Float, approximate: str = "none") -> Float:
    if approximate == "tanh":
        return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).unary("TANH"))
    return 0.5 * x * (1 + (x * math.sqrt(0.5)).unary("ERF"))


unary(aten.gelu.default, _gelu)
