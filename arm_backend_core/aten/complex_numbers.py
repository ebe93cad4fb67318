"""Operators on complex numbers as operators on pairs of real ones, in a last dimension: TOSA has no complex tensors.

``view_as_complex`` stands behind each pair, so that an operator without a rule here still reads what it did. A discrete
Fourier transform is a product with a matrix, along each dimension in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.errors import Unsupported
from arm_backend_core.nodes import first_result, overload_of
from arm_backend_core.ops.registry import Kind, find

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor."""

    data: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Real and imaginary part."""
        return self.data[..., 0], self.data[..., 1]

    @staticmethod
    def of(real: Tensor, imaginary: Tensor) -> Pair:
        """From its parts."""
        return Pair(torch.stack([real, imaginary], -1))


def concerns(node: Node) -> bool:
    """Whether ``node`` reads or makes complex numbers, and is not what stands behind a pair."""
    if overload_of(node.target) is None or node.target is aten.view_as_complex.default:
        return False
    return any(_is_complex(x) for x in (node, *node.all_input_nodes))


def on_pairs(node: Node, call: Callable[..., Any]) -> Node | None:
    """What ``node`` does, on pairs; None where there is no rule.

    Args:
        call: writes what a function of tensors does, given the nodes of these tensors.
    """
    sources = list(node.all_input_nodes)
    pairs = {
        x: x.args[0] if x.target is aten.view_as_complex.default else call(torch.view_as_real, x)
        for x in filter(_is_complex, sources)
        if x.target is aten.view_as_complex.default or x.op == "get_attr" or x.op == "placeholder"
    }
    rule = _rule(node)
    if rule is None or any(_is_complex(x) and x not in pairs for x in sources):
        return None

    def function(*tensors: Tensor) -> Tensor:
        known: dict[Node, Any] = {x: Pair(t) if x in pairs else t for x, t in zip(sources, tensors, strict=True)}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
        result = rule(*args, **kwargs)
        return torch.view_as_complex(result.data.contiguous()) if isinstance(result, Pair) else result

    written: Node = call(function, *(pairs.get(x, x) for x in sources))
    return written


def _is_complex(node: Node) -> bool:
    first = first_result(node)
    return first is not None and first.dtype.is_complex


def _rule(node: Node) -> Callable[..., Any] | None:
    overload = overload_of(node.target)
    assert overload is not None
    if overload in RULES:
        return RULES[overload]
    record = find(node)
    if record is not None and record.kind is Kind.SHARED and all(map(_is_complex, (node, *node.all_input_nodes))):
        return lambda *args, **kwargs: Pair.of(*(overload(*_part(args, i), **kwargs) for i in (0, 1)))
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        return lambda *args, **kwargs: overload.decompose(*_whole(args), **kwargs)
    return None


def _part(args: Any, i: int) -> Any:
    """Arguments with one of the parts in the place of each pair."""
    if isinstance(args, (list, tuple)):
        return [_part(x, i) for x in args]
    return args.parts[i] if isinstance(args, Pair) else args


def _whole(args: Sequence[Any]) -> list[Any]:
    return [torch.view_as_complex(x.data) if isinstance(x, Pair) else x for x in args]


# -- arithmetic ----------------------------------------------------------------------------------------------------


def _sum(x: Any, y: Any, alpha: float = 1, *, sign: int = 1) -> Pair:
    """A real operand has no imaginary part."""
    (a, b), (c, d) = (z.parts if isinstance(z, Pair) else (z, 0.0) for z in (x, y))
    return Pair.of(a + sign * alpha * c, torch.zeros_like(a + c) + b + sign * alpha * d)


def _cast(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or dtype.is_complex:
        return x if isinstance(x, Pair) else Pair.of(x, torch.zeros_like(x))
    return x.parts[0].to(dtype)


def _product(x: Any, y: Any) -> Pair:
    if not isinstance(x, Pair):
        x, y = y, x
    if isinstance(y, complex):
        raise Unsupported("a product with a complex number; write it as a tensor")
    (a, b), (c, d) = x.parts, y.parts if isinstance(y, Pair) else (y, None)
    return Pair.of(a * c, b * c) if d is None else Pair.of(a * c - b * d, a * d + b * c)


def _quotient(x: Any, y: Any) -> Pair:
    if not isinstance(y, Pair):
        return _product(x, 1 / y)
    c, d = y.parts
    return _product(_product(x, Pair.of(c, -d)), 1 / (c * c + d * d))


# -- Fourier transforms --------------------------------------------------------------------------------------------


def _waves(n: int, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 * pi * j * k / n, [n, count]; rounded, so that they are 0 where they should be."""
    angles = 2 * math.pi * (np.outer(np.arange(n), np.arange(count)) % n) / n
    cosine, sine = (np.round(wave(angles), 15).astype(np.float32) for wave in (np.cos, np.sin))
    return torch.tensor(cosine).to(like.dtype), torch.tensor(sine).to(like.dtype)


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    return torch.matmul(x.transpose(dim, -1), matrix).transpose(dim, -1)


def _transformed(z: Pair, dims: Sequence[int], sign: int) -> Pair:
    """Along ``dims``, with exp(sign * i * angle)."""
    real, imaginary = z.parts
    for dim in dims:
        cosine, sine = _waves(real.shape[dim], real.shape[dim], real)
        real, imaginary = (
            _along(real, dim, cosine) - _along(imaginary, dim, sine) * sign,
            _along(imaginary, dim, cosine) + _along(real, dim, sine) * sign,
        )
    return Pair.of(real, imaginary)


def _factor(sizes: Sequence[int], normalization: int) -> float:
    """ATen's three ways: none, by the root of the number of elements, by that number."""
    return (1.0, math.prod(sizes) ** -0.5, 1 / math.prod(sizes))[normalization]


def _real_to_complex(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Pair:
    n, last = x.shape[dim[-1]], dim[-1]
    cosine, sine = _waves(n, n // 2 + 1 if onesided else n, x)
    first = Pair.of(_along(x, last, cosine), -_along(x, last, sine))
    factor = _factor([x.shape[d] for d in dim], normalization)
    return Pair(_transformed(first, [d % x.dim() for d in dim[:-1]], -1).data * factor)


def _complex_to_complex(z: Pair, dim: Sequence[int], normalization: int, forward: bool) -> Pair:
    axes = [d % (z.data.dim() - 1) for d in dim]
    factor = _factor([z.data.shape[d] for d in axes], normalization)
    return Pair(_transformed(z, axes, -1 if forward else 1).data * factor)


def _complex_to_real(z: Pair, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """Backward. Of the last dimension half is given: all but its ends count twice."""
    axes = [d % (z.data.dim() - 1) for d in dim]
    real, imaginary = _transformed(z, axes[:-1], 1).parts
    cosine, sine = _waves(last_dim_size, real.shape[axes[-1]], real)
    twice = torch.tensor([1.0 if 2 * k % last_dim_size == 0 else 2.0 for k in range(cosine.shape[1])])
    result = _along(real, axes[-1], (cosine * twice).t()) - _along(imaginary, axes[-1], (sine * twice).t())
    return result * _factor([*(z.data.shape[d] for d in axes[:-1]), last_dim_size], normalization)


RULES: dict[Any, Callable[..., Any]] = {
    aten.view_as_real.default: lambda z: z.data.clone(),
    aten._conj.default: lambda z: Pair.of(z.parts[0], -z.parts[1]),
    aten.resolve_conj.default: lambda z: z,
    aten._to_copy.default: _cast,
    aten.abs.default: lambda z: torch.hypot(*z.parts),
    aten.angle.default: lambda z: torch.atan2(z.parts[1], z.parts[0]),
    aten.neg.default: lambda z: Pair(-z.data),
    aten.add.Tensor: _sum,
    aten.sub.Tensor: lambda x, y, alpha=1: _sum(x, y, alpha, sign=-1),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten._fft_r2c.default: _real_to_complex,
    aten._fft_c2c.default: _complex_to_complex,
    aten._fft_c2r.default: _complex_to_real,
}
