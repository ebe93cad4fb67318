"""Complex decomposition: rewrite operators on complex tensors as operators on real tensors [..., 2].

TOSA has no complex tensors. A complex tensor becomes a real tensor [..., 2] of real and imaginary parts
(``ComplexAsReal``). A ``view_as_complex`` of the real tensor follows, so that an operator without a rule still reads a
complex tensor. ``aten/fourier.py`` has the rules of the Fourier transforms.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from arm_backend_core.aten import fourier
from arm_backend_core.aten.fourier import STFT_DECOMPOSITIONS, ComplexAsReal
from arm_backend_core.nodes import is_complex, is_composite_implicit, is_float, overload_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.composites import replace_zero_by_one
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.scalar_kind import ScalarKind, kind_of

aten = torch.ops.aten


def involves_complex(node: Node) -> bool:
    """Whether ``node`` reads, returns or internally computes complex numbers; False for ``view_as_complex``."""
    if overload_of(node.target) is None or node.target is aten.view_as_complex.default:
        return False
    return node.target in STFT_DECOMPOSITIONS or any(is_complex(x) for x in (node, *node.all_input_nodes))


def decompose_complex(node: Node, call: Callable[..., Any], constants: Container[Node]) -> Node | None:
    """Emit the decomposition of ``node`` on real tensors [..., 2].

    Args:
        node: an operator that involves complex numbers.
        call: emits the trace of a function. Its arguments are the operator, its decomposition and the operand nodes.
        constants: nodes that are parameters or computed from constants alone.

    Returns:
        The result. None if there is no rule, or if a complex operand is the result of an operator that was not
        decomposed.
    """
    sources = list(node.all_input_nodes)
    real_views = {
        x: x.args[0]
        if x.target is aten.view_as_complex.default
        else call(aten.view_as_real.default, torch.view_as_real, x)
        for x in filter(is_complex, sources)
        if x.target is aten.view_as_complex.default or x.op == "placeholder" or x in constants
    }
    rule = _find_rule(node)
    if rule is None or any(is_complex(x) and x not in real_views for x in sources):
        return None

    def decomposition(*tensors: Tensor) -> Tensor:
        operands: dict[Node, Any] = {
            x: ComplexAsReal(t) if x in real_views else t for x, t in zip(sources, tensors, strict=True)
        }
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        result = rule(*args, **kwargs)
        return torch.view_as_complex(result.data.contiguous()) if isinstance(result, ComplexAsReal) else result

    # The first argument of ``call`` is an operator that is not decomposed again inside the decomposition. But if a rule
    # in ``COMPLEX_DECOMPOSITIONS`` emits ``node.target`` on real tensors, this real operator must be decomposed. For
    # such a rule, the first argument is therefore the rule, which is no operator.
    is_generic_rule = node.target not in COMPLEX_DECOMPOSITIONS
    result: Node = call(
        node.target if is_generic_rule else rule, decomposition, *(real_views.get(x, x) for x in sources)
    )
    return result


def _find_rule(node: Node) -> Callable[..., Any] | None:
    overload = overload_of(node.target)
    assert overload is not None
    if overload in COMPLEX_DECOMPOSITIONS:
        return COMPLEX_DECOMPOSITIONS[overload]
    record = find_record(node)
    # The operator is applied to the real and to the imaginary part with the same integer and boolean operands (indices,
    # masks). This would be wrong for a real floating-point operand, because its imaginary part is 0.
    has_float_operand = any(map(is_float, node.all_input_nodes))
    if record is not None and record.kind is AnnotationKind.SHARED and is_complex(node) and not has_float_operand:
        return lambda *args, **kwargs: ComplexAsReal.from_parts(
            *(overload(*_select_part(args, i), **kwargs) for i in (0, 1))
        )
    if is_composite_implicit(overload):
        return lambda *args, **kwargs: overload.decompose(*_to_complex(args), **kwargs)
    return None


def _select_part(args: Any, i: int) -> Any:
    """Replace each ``ComplexAsReal`` in the arguments by its real (0) or imaginary (1) part."""
    if isinstance(args, (list, tuple)):
        return [_select_part(x, i) for x in args]
    return args.parts[i] if isinstance(args, ComplexAsReal) else args


def _to_complex(args: Any) -> Any:
    if isinstance(args, (list, tuple)):
        return [_to_complex(x) for x in args]
    return torch.view_as_complex(args.data) if isinstance(args, ComplexAsReal) else args


# -- arithmetic ----------------------------------------------------------------------------------------------------


def _parts(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part of a tensor or a number; the imaginary part of a real tensor is 0."""
    if isinstance(x, ComplexAsReal):
        return x.parts
    return (x, 0.0) if isinstance(x, Tensor) else (complex(x).real, complex(x).imag)


def _sum(x: Any, y: Any, alpha: float = 1, *, sign: int = 1) -> ComplexAsReal:
    (a, b), (c, d) = _parts(x), _parts(y)
    return ComplexAsReal.from_parts(a + sign * alpha * c, torch.zeros_like(a + c) + b + sign * alpha * d)


def _cast(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or kind_of(dtype) is ScalarKind.COMPLEX:
        return x if isinstance(x, ComplexAsReal) else ComplexAsReal.from_parts(x, torch.zeros_like(x))
    return x.parts[0].to(dtype)


def _bilinear_rule(function: Callable[..., Any]) -> Callable[..., ComplexAsReal]:
    """The rule of a bilinear operator (product, matmul); one operand may be real."""

    def rule(x: Any, y: Any) -> ComplexAsReal:
        (a, b), (c, d) = _parts(x), _parts(y)
        if not isinstance(y, (ComplexAsReal, complex)):
            return ComplexAsReal.from_parts(function(a, y), function(b, y))
        if not isinstance(x, (ComplexAsReal, complex)):
            return ComplexAsReal.from_parts(function(x, c), function(x, d))
        return ComplexAsReal.from_parts(function(a, c) - function(b, d), function(a, d) + function(b, c))

    return rule


_product = _bilinear_rule(operator.mul)


def _linear_layer_rule(function: Callable[..., Any]) -> Callable[..., ComplexAsReal]:
    """The rule of a linear layer or convolution with complex weight and bias."""

    def rule(x: ComplexAsReal, weight: ComplexAsReal, bias: ComplexAsReal | None = None, *args: Any) -> ComplexAsReal:
        (a, b), (c, d), (p, q) = x.parts, weight.parts, (None, None) if bias is None else bias.parts
        real = function(a, c, p, *args) - function(b, d, None, *args)
        return ComplexAsReal.from_parts(real, function(a, d, q, *args) + function(b, c, None, *args))

    return rule


def _multiply_add(
    x: Any, y: ComplexAsReal, z: ComplexAsReal, *, beta: float = 1, alpha: float = 1, product: Any = torch.mm
) -> ComplexAsReal:
    return _sum(_product(x, beta), _bilinear_rule(product)(y, z), alpha)


def _quotient(x: Any, y: Any) -> ComplexAsReal:
    if not isinstance(y, ComplexAsReal):
        return _product(x, 1 / y)
    c, d = y.parts
    return _product(_product(x, ComplexAsReal.from_parts(c, -d)), 1 / (c * c + d * d))


def _partwise_rule(overload: Any, *positions: int) -> Callable[..., ComplexAsReal]:
    """The rule of an operator that is applied to the real and to the imaginary parts separately.

    Args:
        overload: the operator.
        positions: positions of the complex operands. A real tensor at one of them is cast to complex.
    """

    def rule(*args: Any, **kwargs: Any) -> ComplexAsReal:
        operands = [_cast(x) if i in positions and isinstance(x, Tensor) else x for i, x in enumerate(args)]
        parts = [_parts(x) if i in positions else (x, x) for i, x in enumerate(operands)]
        return ComplexAsReal.from_parts(*(overload(*(x[i] for x in parts), **kwargs) for i in (0, 1)))

    return rule


def _polar(magnitude: Tensor, angle: Tensor) -> ComplexAsReal:
    return ComplexAsReal.from_parts(magnitude * torch.cos(angle), magnitude * torch.sin(angle))


def _cos_or_sin(z: ComplexAsReal, index: int) -> ComplexAsReal:
    """cos(z) for index 0, sin(z) for index 1."""
    a, b = z.parts
    first, second = (torch.cos(a), -torch.sin(a)) if index == 0 else (torch.sin(a), torch.cos(a))
    return ComplexAsReal.from_parts(first * torch.cosh(b), second * torch.sinh(b))


def _sinh_or_cosh(z: ComplexAsReal, index: int) -> ComplexAsReal:
    """sinh(z) for index 0, cosh(z) for index 1."""
    a, b = z.parts
    first, second = (torch.sinh(a), torch.cosh(a)) if index == 0 else (torch.cosh(a), torch.sinh(a))
    return ComplexAsReal.from_parts(first * torch.cos(b), second * torch.sin(b))


def _tanh(z: ComplexAsReal) -> ComplexAsReal:
    """tanh(a + ib) = (t + i sin b cos b (1 - t * t)) / (cos b ** 2 + (t sin b) ** 2) with t = tanh a.

    Unlike sinh and cosh, t does not overflow for large a.
    """
    t, cosine, sine = torch.tanh(z.parts[0]), torch.cos(z.parts[1]), torch.sin(z.parts[1])
    denominator = cosine * cosine + t * t * sine * sine
    return ComplexAsReal.from_parts(t / denominator, sine * cosine * (1 - t * t) / denominator)


def _log(z: ComplexAsReal, base: float = math.e) -> ComplexAsReal:
    return ComplexAsReal(ComplexAsReal.from_parts(torch.log(_abs(z)), _angle(z)).data / math.log(base))


def _tan(z: ComplexAsReal) -> ComplexAsReal:
    """tan(z) = tanh(iz) / i."""
    real, imaginary = _tanh(ComplexAsReal.from_parts(-z.parts[1], z.parts[0])).parts
    return ComplexAsReal.from_parts(imaginary, -real)


def _prod(z: ComplexAsReal, dim: int, keepdim: bool = False, **_: Any) -> ComplexAsReal:
    """The product along a dimension, multiplied one element at a time."""
    parts = (ComplexAsReal.from_parts(*(part.select(dim, i) for part in z.parts)) for i in range(z.parts[0].shape[dim]))
    product: ComplexAsReal = functools.reduce(_product, parts)
    return ComplexAsReal.from_parts(*(part.unsqueeze(dim) for part in product.parts)) if keepdim else product


def _abs(z: ComplexAsReal) -> Tensor:
    return torch.hypot(*z.parts)


def _angle(z: ComplexAsReal) -> Tensor:
    return torch.atan2(z.parts[1], z.parts[0])


def _full(size: Sequence[int], number: complex = 0, *, dtype: torch.dtype | None = None, **_: Any) -> ComplexAsReal:
    real = torch.get_default_dtype() if dtype is None else dtype.to_real()
    return ComplexAsReal.from_parts(*(torch.full(size, part, dtype=real) for part in _parts(number)))


def _full_like(x: Any, number: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    like = _parts(x)[0]
    if dtype is not None and kind_of(dtype) is not ScalarKind.COMPLEX:
        return torch.full(like.shape, number, dtype=dtype)
    return _full(like.shape, number, dtype=dtype or like.dtype.to_complex())


def _power(z: ComplexAsReal, exponent: Any) -> ComplexAsReal:
    if exponent in range(1, 9):
        return functools.reduce(_product, [z] * int(exponent.real))
    c, d = _parts(exponent)
    if d == 0:  # log(0) is infinite, and its product with 0 would be NaN
        return _polar(torch.pow(_abs(z), c), c * _angle(z))
    magnitude = torch.log(_abs(z))
    return _polar(torch.exp(c * magnitude - d * _angle(z)), d * magnitude + c * _angle(z))


def _sign(z: ComplexAsReal) -> ComplexAsReal:
    magnitude = _abs(z)
    return _product(z, 1 / replace_zero_by_one(magnitude))


COMPLEX_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.complex.default: ComplexAsReal.from_parts,
    aten.polar.default: _polar,
    aten.view_as_real.default: lambda z: z.data.clone(),
    aten._conj.default: lambda z: ComplexAsReal.from_parts(z.parts[0], -z.parts[1]),
    aten.resolve_conj.default: lambda z: z,
    aten._to_copy.default: _cast,
    aten.full.default: _full,
    aten.zeros.default: _full,
    aten.zeros_like.default: functools.partial(_full_like, number=0),
    aten.abs.default: _abs,
    aten.linalg_vector_norm.default: lambda z, *args, **named: torch.linalg.vector_norm(_abs(z), *args, **named),
    aten.angle.default: _angle,
    aten.sgn.default: _sign,
    aten.exp.default: lambda z: _polar(torch.exp(z.parts[0]), z.parts[1]),
    aten.exp2.default: lambda z: _polar(torch.exp2(z.parts[0]), z.parts[1] * math.log(2)),
    aten.log.default: _log,
    aten.log2.default: functools.partial(_log, base=2.0),
    aten.log10.default: functools.partial(_log, base=10.0),
    aten.sqrt.default: lambda z: _polar(torch.sqrt(_abs(z)), _angle(z) / 2),
    aten.rsqrt.default: lambda z: _polar(torch.rsqrt(_abs(z)), _angle(z) / -2),
    aten.sigmoid.default: lambda z: _sum(ComplexAsReal(_tanh(ComplexAsReal(z.data / 2)).data / 2), 0.5),
    aten.tan.default: _tan,
    aten.pow.Tensor_Scalar: _power,
    aten.neg.default: lambda z: ComplexAsReal(-z.data),
    aten.reciprocal.default: lambda z: _quotient(1.0, z),
    aten.add.Tensor: _sum,
    aten.sub.Tensor: lambda x, y, alpha=1: _sum(x, y, alpha, sign=-1),
    aten.rsub.Scalar: lambda x, y, alpha=1: _sum(y, x, alpha, sign=-1),
    aten.rsub.Tensor: lambda x, y, alpha=1: _sum(y, x, alpha, sign=-1),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _quotient,
    aten.addmm.default: _multiply_add,
    aten.baddbmm.default: functools.partial(_multiply_add, product=torch.bmm),
    aten.addcmul.default: lambda x, y, z, value=1: _sum(x, _product(y, z), value),
    aten.ones_like.default: functools.partial(_full_like, number=1),
    aten.full_like.default: _full_like,
    aten.eq.Tensor: lambda x, y: functools.reduce(torch.logical_and, map(operator.eq, _parts(x), _parts(y))),
    aten.ne.Tensor: lambda x, y: functools.reduce(torch.logical_or, map(operator.ne, _parts(x), _parts(y))),
    aten.sin.default: lambda z: _cos_or_sin(z, 1),
    aten.cos.default: lambda z: _cos_or_sin(z, 0),
    aten.sinh.default: lambda z: _sinh_or_cosh(z, 0),
    aten.cosh.default: lambda z: _sinh_or_cosh(z, 1),
    aten.tanh.default: _tanh,
    aten.prod.dim_int: _prod,
    **{overload: _bilinear_rule(overload) for overload in (aten.mm.default, aten.bmm.default, aten.matmul.default)},
    **{
        overload: _linear_layer_rule(overload)
        for overload in (aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    },
    **{
        overload: _partwise_rule(overload, 0)
        for overload in (
            *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default),
            *(aten.tril.default, aten.triu.default, aten.rot90.default, aten.diag_embed.default, aten.roll.default),
            *(aten.diagonal.default, aten.unfold.default),
        )
    },
    **{
        overload: _partwise_rule(overload, 0, 1)
        for overload in (aten.copy.default, aten.slice_scatter.default, aten.select_scatter.default, aten.lerp.Scalar)
    },
    **{overload: _partwise_rule(overload, 0, 2) for overload in (aten.masked_fill.Scalar, aten.masked_fill.Tensor)},
    aten.index_add.default: _partwise_rule(aten.index_add.default, 0, 3),
    aten.where.self: _partwise_rule(aten.where.self, 1, 2),
    aten._fft_r2c.default: fourier.real_to_complex,
    aten._fft_c2c.default: fourier.complex_to_complex,
    aten._fft_c2r.default: fourier.complex_to_real,
    **STFT_DECOMPOSITIONS,
}
