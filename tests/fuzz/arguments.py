"""Steps of random programs: calls of every operator with a record, of modules, and of functions.

The arguments of an operator are drawn from its ATen schema and from ``OPERATORS``. This table has the constraints that
schemas do not express. A new record needs no entry if its arguments are plain tensors, numbers and dimensions.

A strategy ``(d, a)`` draws one argument: ``d`` is the program under construction, ``a`` has the arguments drawn before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

from arm_backend_core.ops.catalog import aten_entries
from tests.fuzz.generator import (
    ANY,
    BOOL,
    FLOATS,
    INTEGERS,
    NoValidChoice,
    ProgramBuilder,
    Reference,
    Shape,
    StepDrawer,
    is_finite,
)

Arguments = dict[str, Any]
Strategy = Callable[[ProgramBuilder, Arguments], Any]


def _first_tensor(a: Arguments) -> Reference:
    for value in a.values():
        if isinstance(value, Reference):
            return value
        if isinstance(value, list) and value and isinstance(value[0], Reference):
            return value[0]
    raise NoValidChoice


# -- strategies --------------------------------------------------------------------------------------------------


def _fixed(value: Any) -> Strategy:
    return lambda d, a: value


def _choice_of(*values: Any) -> Strategy:
    return lambda d, a: d.choose(values)


def _tensor_of(dtypes: Sequence[torch.dtype]) -> Strategy:
    return lambda d, a: d.tensor(dtypes=dtypes)


def _broadcastable(dtypes: Sequence[torch.dtype] | None = None) -> Strategy:
    return lambda d, a: d.like(_first_tensor(a), dtypes)


def _finite_tensor(*ranks: int) -> Strategy:
    """A tensor without infinities and NaN, for operators whose kernels in PyTorch handle these differently."""
    return lambda d, a: d.tensor(
        lambda x: (not ranks or x.dim() in ranks) and is_finite(x),
        lambda: d.shape(d.choose(ranks) if ranks else None),
        span=(-2, 2) if d.special else None,
    )


def _finite_of_same_shape(d: ProgramBuilder, a: Arguments) -> Reference:
    first = _first_tensor(a)
    return d.tensor(is_finite, first.shape, (first.tensor.dtype,), span=(-2, 2) if d.special else None)


def _tensor_of_rank(*ranks: int) -> Strategy:
    return lambda d, a: d.tensor(lambda x: x.dim() in ranks, lambda: d.shape(d.choose(ranks)))


def _tensor_of_same_shape(dtypes: Sequence[torch.dtype] = FLOATS) -> Strategy:
    return lambda d, a: d.tensor(shape=_first_tensor(a).shape, dtypes=(_first_tensor(a).tensor.dtype, *dtypes))


def _size_per_dimension(count: int, low: int, high: int) -> Strategy:
    """Draw a size for each of ``count`` dimensions, for example window sizes or strides."""
    return lambda d, a: [d.size(low, high) for _ in range(count)]


def _half_window_padding(count: int) -> Strategy:
    """Draw paddings of at most half the window."""
    return lambda d, a: [d.size(0, size // 2) for size in a["kernel_size"]]


def _view_shape(d: ProgramBuilder, a: Arguments) -> list[int]:
    numel = _first_tensor(a).tensor.numel()
    shape: list[int] = []
    while len(shape) < d.size(0, 5) and numel > 0:
        shape.append(d.choose([n for n in range(1, numel + 1) if numel % n == 0 and n <= 64]))
        numel //= shape[-1]
    shape.append(numel)
    d.rng.shuffle(shape)
    if 0 not in shape and d.chance(0.3):
        shape[d.rng.randrange(len(shape))] = -1
    return shape


def _permutation(d: ProgramBuilder, a: Arguments) -> list[int]:
    rank = _first_tensor(a).rank
    return [axis - rank if d.chance(0.2) else axis for axis in d.rng.sample(range(rank), rank)]


def _expanded_shape(d: ProgramBuilder, a: Arguments) -> list[int]:
    sizes = [d.size(1, 4) if size == 1 else d.choose((size, size, -1)) for size in _first_tensor(a).shape]
    return [d.size(1, 3) for _ in range(d.choose((0, 0, 1)))] + sizes


def _pad_amounts(d: ProgramBuilder, a: Arguments) -> list[int]:
    if a.get("mode", "constant") != "constant":
        x = _first_tensor(a)
        sizes = x.shape[::-1][: d.size(1, min(2, max(1, x.rank - 1)))]
        return [d.size(0, max(0, size - 1)) for size in sizes for _ in range(2)]
    count = d.size(1, max(1, _first_tensor(a).rank))
    return [d.size(-1, 3) if d.chance(0.2) else d.size(0, 3) for _ in range(2 * count)]


def _tensors_to_join(*, equal: bool) -> Strategy:
    """Tensors for ``stack`` (``equal``), or for ``cat`` along an axis that is stored as ``dim``."""

    def strategy(d: ProgramBuilder, a: Arguments) -> list[Reference]:
        first = d.tensor(lambda x: x.dim() > 0 or equal, lambda: d.shape(d.size(0 if equal else 1, 4)))
        axis = d.axis(first) % max(1, first.rank)
        others = []
        for _ in range(d.size(0, 3)):
            length = first.shape[axis : axis + 1] if equal else (d.size(1, 4),)
            shape = partial(tuple, (*first.shape[:axis], *length, *first.shape[axis + 1 :]))
            others.append(d.tensor(partial(_are_equal_except_axis, first.shape, None if equal else axis), shape))
        if not equal:
            a["dim"] = d.choose((axis, axis - first.rank))
        return [first, *others]

    return strategy


def _are_equal_except_axis(shape: Shape, axis: int | None, x: torch.Tensor) -> bool:
    return len(shape) == x.dim() and all(
        i == axis or n == m for i, (n, m) in enumerate(zip(shape, x.shape, strict=True))
    )


def _integer_along_dim(low: int, high: Callable[[int], int]) -> Strategy:
    """An integer from ``low`` to ``high`` of the size of the dimension ``dim``."""

    def strategy(d: ProgramBuilder, a: Arguments) -> int:
        if "dim" not in a:
            a["dim"] = d.axis(_first_tensor(a))
        x = _first_tensor(a)
        length = x.shape[a["dim"]] if x.rank else 1
        return d.size(low, max(low, high(length)))

    return strategy


def _split_sizes(d: ProgramBuilder, a: Arguments) -> list[int]:
    a["dim"] = d.axis(_first_tensor(a))
    left, sizes = _first_tensor(a).shape[a["dim"]], []
    while left:
        sizes.append(d.size(1, left))
        left -= sizes[-1]
    return sizes or [0]


def _slice_bound(d: ProgramBuilder, a: Arguments) -> int | None:
    if "dim" not in a:
        a["dim"] = d.axis(_first_tensor(a))
    length = _first_tensor(a).shape[a["dim"]]
    return d.choose((None, d.size(0, length), d.size(-length, length), 2**63 - 1))


def _index_tensors(d: ProgramBuilder, a: Arguments) -> list[Reference | None]:
    """Draw index tensors of one shape for some of the dimensions."""
    x = _first_tensor(a)
    shape = d.shape(d.size(1, 2))
    picked = [d.size(0, x.rank - 1) for _ in range(d.size(1, 2))] if x.rank else []
    return [
        d.tensor(shape=shape, dtypes=(torch.int64,), span=(0, size), constant=0.7) if axis in picked else None
        for axis, size in enumerate(x.shape[: max(picked, default=-1) + 1])
    ]


def _loss_arguments(*ranks: int) -> dict[str, Strategy]:
    """Arguments of a classification loss: scores, and a class for each position. Class 0 is ignored sometimes."""

    def target(d: ProgramBuilder, a: Arguments) -> Reference:
        *lead, classes = (x := _first_tensor(a)).shape[: 1 if x.rank == 1 else 2]
        if not classes:
            raise NoValidChoice
        return d.tensor(shape=(*lead, *x.shape[2:]), dtypes=(torch.int64,), span=(0, classes), constant=0.7)

    def weight(d: ProgramBuilder, a: Arguments) -> Reference | None:
        return d.choose((None, d.constant(_first_tensor(a).shape[min(1, _first_tensor(a).rank - 1)], span=(0.5, 2))))

    return {
        "self": _tensor_of_rank(*ranks),
        "target": target,
        "weight": weight,
        "reduction": _choice_of(0, 1, 2),
        "ignore_index": _choice_of(-100, 0),
    }


def _multilabel_targets(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw target classes of a multi-label loss, which end at the first -1."""
    if not (shape := _first_tensor(a).shape)[-1]:
        raise NoValidChoice
    return d.tensor(shape=shape, dtypes=(torch.int64,), span=(-1, shape[-1]), constant=0.7)


def _channel_vector(*, positive: bool = False, optional: bool = True) -> Strategy:
    def strategy(d: ProgramBuilder, a: Arguments) -> Reference | None:
        if optional and d.chance(0.15):
            return None
        return d.constant(_first_tensor(a).shape[1], span=(0.5, 2) if positive else (-1, 1))

    return strategy


def _normalized_shape(d: ProgramBuilder, a: Arguments) -> list[int]:
    x = _first_tensor(a)
    if not x.rank:  # PyTorch's norms disagree on normalized shapes of scalars
        raise NoValidChoice
    return list(x.shape[-d.size(1, max(1, min(2, x.rank))) :])


def _norm_parameter(d: ProgramBuilder, a: Arguments) -> Reference | None:
    return None if d.chance(0.3) else d.constant(*a["normalized_shape"])


def _image(spatial: int) -> Strategy:
    return lambda d, a: d.tensor(
        lambda x: is_finite(x) and (x.dim() == spatial + 2 or (x.dim() == spatial + 1 and d.chance(0.2))),
        lambda: (d.size(1, 2), d.size(1, 6), *(d.size(1, 12) for _ in range(spatial))),
        span=(-2, 2) if d.special else None,
    )


def _convolution_weight(spatial: int | None, *, transposed: bool = False) -> Strategy:
    """The weight of a convolution. Also draws ``groups``, and ``transposed`` if the operator has this argument."""

    def strategy(d: ProgramBuilder, a: Arguments) -> Reference:
        x = _first_tensor(a)
        count = x.rank - 2 if spatial is None else spatial
        turned = d.chance(0.3) if spatial is None else transposed
        if spatial is None:
            a["transposed"] = turned
        channels = x.shape[-count - 1]
        groups = d.choose([1, 1, channels, d.choose([n for n in range(1, channels + 1) if channels % n == 0])])
        a["groups"] = groups
        out = groups * d.size(1, 4)
        kernel = [d.size(1, 4) for _ in range(count)]
        shape = (channels, out // groups, *kernel) if turned else (out, channels // groups, *kernel)
        a["_out"] = out
        return d.constant(*shape)

    return strategy


def _optional_bias(d: ProgramBuilder, a: Arguments) -> Reference | None:
    return None if d.chance(0.3) else d.constant(a["_out"])


def _size_per_spatial_dimension(low: int, high: int) -> Strategy:
    return lambda d, a: [d.size(low, high) for _ in range(a["weight"].rank - 2)]


def _convolution_arguments(spatial: int | None, **more: Strategy) -> dict[str, Strategy]:
    image = _image(spatial) if spatial else (lambda d, a: _image(d.choose((1, 2, 2, 3)))(d, a))
    return {
        "input": image,
        "weight": _convolution_weight(spatial),
        "bias": _optional_bias,
        "stride": _size_per_spatial_dimension(1, 3),
        "padding": _size_per_spatial_dimension(0, 2),
        "dilation": _size_per_spatial_dimension(1, 2),
        "output_padding": _size_per_spatial_dimension(0, 1),
        **more,
    }


def _second_factor(*, transposed: bool = False, ranks: Sequence[int] = (1, 2)) -> Strategy:
    """The second factor of a matrix product, whose rows match the columns of the first factor."""

    def strategy(d: ProgramBuilder, a: Arguments) -> Reference:
        x = _first_tensor(a)
        k, n = x.shape[-1], d.size(1, 8)
        lead = x.shape[:-2] if 3 in ranks else ()
        a["_out"] = n
        shape = (*lead, *((n, k) if transposed else (k, n)))
        if x.rank == 2 and 1 in ranks and d.chance(0.2):
            shape = (k,)
        return d.constant(*shape) if d.chance(0.5) else d.tensor(shape=shape)

    return strategy


def _pool_arguments(spatial: int, *ranks: int) -> dict[str, Strategy]:
    """Arguments of pooling and ``unfold``: window, stride, padding, dilation."""
    return {
        "self": lambda d, a: d.tensor(
            lambda x: x.dim() in ranks and min(x.shape) > 0,
            lambda: (1, d.size(1, 6), *(d.size(1, 14) for _ in range(spatial)))[-d.choose(ranks) :],
        ),
        "kernel_size": _size_per_dimension(spatial, 1, 4),
        "stride": lambda d, a: d.choose(([], [d.size(1, 3) for _ in range(spatial)])),
        "padding": _half_window_padding(spatial),
        "dilation": _choice_of([1] * spatial, [1] * spatial, [2] * spatial),
        "divisor_override": _choice_of(None, None, 3),
    }


_SCALE_ARGUMENTS = ("scales", "scales_d", "scales_h", "scales_w")


def _upsample_arguments(spatial: int, *, vec: bool) -> dict[str, Strategy]:
    def output(d: ProgramBuilder, a: Arguments) -> list[int] | None:
        if vec and d.chance(0.5):
            a["scale_factors"] = [d.choose((2.0, 0.5, 1.5, 3.0)) for _ in range(spatial)]
            return None
        a["scale_factors"] = None
        return [d.size(1, 16 // spatial**2 + 4) for _ in range(spatial)]

    first = "input" if vec else "self"
    return {first: _finite_tensor(spatial + 2), "output_size": output, **dict.fromkeys(_SCALE_ARGUMENTS, _fixed(None))}


def _fold_input(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw the operand of ``fold``, and its further arguments: sizes of image and window."""
    kernel, stride, dilation = ([d.size(1, high) for _ in range(2)] for high in (3, 3, 2))
    padding, counts = [d.size(0, size // 2) for size in kernel], [d.size(1, 4) for _ in range(2)]
    a |= {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    a["output_size"] = [
        max((counts[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i], 1) for i in range(2)
    ]
    return d.tensor(shape=(d.size(1, 2), d.size(1, 4) * kernel[0] * kernel[1], counts[0] * counts[1]))


def _recurrent_arguments(gates: int, states: int) -> dict[str, Strategy]:
    """Arguments of a recurrent layer: input, states, and parameters for ``gates`` gates."""

    def parameters(d: ProgramBuilder, a: Arguments) -> list[Reference]:
        x, hidden = _first_tensor(a), d.size(1, 6)
        a |= {"has_biases": d.chance(0.7), "num_layers": d.size(1, 2), "bidirectional": d.chance(0.4)}
        a |= {"batch_first": d.chance(0.5), "train": False, "dropout": 0.0}
        directions = 2 if a["bidirectional"] else 1
        start = (a["num_layers"] * directions, x.shape[0 if a["batch_first"] else 1], hidden)
        first, *more = [d.tensor(shape=start) for _ in range(states)]
        a["hx"] = [first, *more] if states > 1 else first
        made = []
        for layer in range(a["num_layers"]):
            width = hidden * directions if layer else x.shape[-1]
            for _ in range(directions):
                made += [d.constant(gates * hidden, width), d.constant(gates * hidden, hidden)]
                made += [d.constant(gates * hidden) for _ in range(2 * a["has_biases"])]
        return made

    def state(d: ProgramBuilder, a: Arguments) -> Any:
        a["params"] = parameters(d, a)
        return a["hx"]

    return {"input": lambda d, a: d.tensor(shape=(d.size(1, 4), d.size(1, 4), d.size(1, 6))), "hx": state}


def _recurrent_cell_arguments(gates: int, states: int) -> dict[str, Strategy]:
    """Arguments of a recurrent cell; input and states are [batch, features]."""

    def state(d: ProgramBuilder, a: Arguments) -> Any:
        x, hidden = _first_tensor(a), d.size(1, 6)
        a |= {"w_ih": d.constant(gates * hidden, x.shape[1]), "w_hh": d.constant(gates * hidden, hidden)}
        biased = d.chance(0.7)
        a |= {f"b_{side}": d.constant(gates * hidden) if biased else None for side in ("ih", "hh")}
        first, *more = [d.tensor(shape=(x.shape[0], hidden)) for _ in range(states)]
        return [first, *more] if states > 1 else first

    return {"input": lambda d, a: d.tensor(shape=(d.size(1, 4), d.size(1, 6))), "hx": state}


_ATTENTION = {"qkv_weight": "3E E", "qkv_bias": "3E", "proj_weight": "E E", "proj_bias": "E"}
_FEED_FORWARD = {"ffn_weight_1": "F E", "ffn_bias_1": "F", "ffn_weight_2": "E F", "ffn_bias_2": "E"}
_NORMS = {f"norm_{part}_{i}": "E" for part in ("weight", "bias") for i in (1, 2)}


def _attention_arguments(*inputs: str, shapes: dict[str, str]) -> dict[str, Strategy]:
    """Arguments of attention with projections and feed-forward layers; E is the embedding width, F the hidden width."""

    def sized(*shape: str) -> Strategy:
        def strategy(d: ProgramBuilder, a: Arguments) -> Reference:
            width, hidden = a["embed_dim"], a.setdefault("_hidden", d.size(1, 8))
            return d.constant(*({"E": width, "3E": 3 * width, "F": hidden}[size] for size in shape))

        return strategy

    def heads(d: ProgramBuilder, a: Arguments) -> int:
        return d.choose([n for n in (1, 2, 3, 4) if a["embed_dim"] % n == 0])

    first, *others = inputs
    return {
        first: _tensor_of_rank(3),
        **{name: lambda d, a: _first_tensor(a) for name in others},
        "embed_dim": lambda d, a: _first_tensor(a).shape[-1],
        "num_heads": heads,
        "num_head": heads,
        "eps": _choice_of(1e-5),
        "mask": _fixed(None),
        "mask_type": _fixed(None),
        **{name: sized(*shape.split()) for name, shape in shapes.items()},
    }


def _indices_along_dim(low: int = 1, high: int = 6) -> Strategy:
    """A vector of ``low`` to ``high`` indices along ``dim``."""

    def strategy(d: ProgramBuilder, a: Arguments) -> Reference:
        x = _first_tensor(a)
        size = x.shape[a["dim"]] if x.rank else 1
        return d.tensor(shape=(d.size(low, high),), dtypes=(torch.int64,), span=(0, size), constant=0.5)

    return strategy


def _source_slices(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw a source with one slice along ``dim`` for each index."""
    shape = list(_first_tensor(a).shape)
    shape[a["dim"]] = a["index"].shape[0]
    return d.tensor(shape=tuple(shape), dtypes=(_first_tensor(a).tensor.dtype,))


def _scatter_index(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw an index tensor of ``scatter`` and ``gather``: an index along ``dim`` for each element of a part."""
    x = _first_tensor(a)
    shape = [n if d.chance(0.7) else d.size(1, max(n, 1)) for n in x.shape]
    size = x.shape[a["dim"]] if x.rank else 1
    return d.tensor(shape=tuple(shape), dtypes=(torch.int64,), span=(0, max(size, 1)), constant=0.5)


def _tensor_like_index(d: ProgramBuilder, a: Arguments) -> Reference:
    return d.tensor(shape=a["index"].shape, dtypes=(_first_tensor(a).tensor.dtype,))


def _window_size(d: ProgramBuilder, a: Arguments) -> int:
    """Draw a window size of at most the size of the dimension ``dimension``."""
    x = _first_tensor(a)
    return d.size(1, x.shape[a["dimension"]] if x.rank else 1)


def _unshared_leaf(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw a leaf, which shares no memory with other values."""
    return d.tensor(shape=d.shape(d.size(1, 4)), span=(-2, 2))


def _strides(d: ProgramBuilder, a: Arguments) -> list[int]:
    """Draw strides for ``size`` inside the tensor, and ``storage_offset`` from the remaining elements."""
    left, steps = _first_tensor(a).tensor.numel() - 1, []
    for size in a["size"]:
        steps.append(d.size(0, left // max(size - 1, 1)))
        left -= steps[-1] * (size - 1)
    a["storage_offset"] = d.size(0, max(left, 0))
    return steps


_STRIDED: dict[str, Strategy] = {
    "self": _unshared_leaf,
    "size": lambda d, a: [d.size(1, 3) for _ in range(d.size(0, 3))],
    "stride": _strides,
}


def _select_scatter_source(d: ProgramBuilder, a: Arguments) -> Reference:
    a["dim"], x = d.axis(_first_tensor(a)), _first_tensor(a)
    axis = a["dim"] % max(x.rank, 1)
    return d.tensor(shape=(*x.shape[:axis], *x.shape[axis + 1 :]))


def _slice_scatter_source(d: ProgramBuilder, a: Arguments) -> Reference:
    a["dim"], x = d.axis(_first_tensor(a)), _first_tensor(a)
    a |= {"start": _slice_bound(d, a), "end": _slice_bound(d, a), "step": d.choose((1, 1, 2))}
    axis = a["dim"] % max(x.rank, 1)
    length = len(range(x.shape[axis])[a["start"] : a["end"] : a["step"]])
    return d.tensor(shape=(*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _shift_amounts(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw shift amounts in bits."""
    shape = next((x.shape for x in a.values() if isinstance(x, Reference)), (3,))
    return d.tensor(shape=shape, dtypes=(torch.int32,), span=(0, 9))


def _edge_padding_arguments(rank: int) -> dict[str, Strategy]:
    return {
        "self": lambda d, a: d.tensor(shape=tuple(d.size(3, 6) for _ in range(rank + 1))),
        "padding": lambda d, a: [d.size(0, 2) for _ in range(2 * rank)],
    }


def _moderate_dividend(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw a dividend of moderate size: for quotients beyond 2**22, the remainder's rule is inexact."""
    return d.tensor(lambda x: is_finite(x) and bool((x.abs() < 2**18).all()), span=(-1e4, 1e4))


def _nonzero_divisor(d: ProgramBuilder, a: Arguments) -> Reference:
    """Draw a divisor without elements near 0."""
    return d.tensor(shape=_first_tensor(a).shape, dtypes=FLOATS[:1], span=(0.5, 4))


_INDEXED = {"index": _indices_along_dim(), "source": _source_slices, "value": lambda d, a: d.number()}
_SCATTER = {"index": _scatter_index, "src": _tensor_like_index, "value": lambda d, a: d.number()}


_EMBEDDING_BAG: dict[str, Strategy] = {
    "weight": lambda d, a: d.constant(d.size(4, 9), d.size(1, 8)),
    "indices": lambda d, a: d.tensor(shape=(d.size(6, 9),), dtypes=(torch.int64,), span=(0, 4)),
    "offsets": lambda d, a: d.tensor(shape=(1,), dtypes=(torch.int64,), span=(0, 1)),  # more would have to be sorted
    "mode": _choice_of(0, 1, 2),
    "per_sample_weights": _fixed(None),
    "include_last_offset": _fixed(False),
    "padding_idx": _choice_of(-1, 0, 2),
}


def _clamp_maximum(d: ProgramBuilder, a: Arguments) -> float | None:
    return None if a["min"] is not None and d.chance(0.2) else d.choose((0, 0.5, 1.0, 6, 2.5))


# -- the table ---------------------------------------------------------------------------------------------------

_LOGIC = {"self": _tensor_of(INTEGERS + BOOL), "other": _broadcastable(INTEGERS + BOOL)}
_LOGIC_NUMBER = {"other": _choice_of(0, 1, 3, 5, -1)}
_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
_SHIFT = {"self": _tensor_of((torch.int32, torch.int8, torch.int16)), "other": _choice_of(0, 1, 3)}
_BATCH_NORM: dict[str, Strategy] = {
    "input": lambda d, a: d.tensor(lambda x: x.dim() >= 2, lambda: d.shape(d.size(2, 4))),
    "weight": _channel_vector(),
    "bias": _channel_vector(),
    "running_mean": _channel_vector(optional=False),
    "running_var": _channel_vector(positive=True, optional=False),
    "momentum": _fixed(0.1),
    "eps": _choice_of(1e-5, 1e-3),
}
_CAT = {"tensors": _tensors_to_join(equal=False)}
_CONVERT: dict[str, Strategy] = {
    "self": _tensor_of(ANY),
    "dtype": lambda d, a: d.choose([torch.float32] * 2 + [x for x in ANY if not (d.integer and x.is_floating_point)]),
}

_ILL_CONDITIONED = "the error has no bound for random matrices"
_POSITIVE_SCALES = "its scales are positive constants"
_TYPES = "no graphs are drawn with its types, or PyTorch has no CPU kernel"
#: Operators that are not drawn, with the reason; they have rows in ``tests/ops/test_composites.py``.
EXCLUDED_OPERATORS: dict[str, str] = {
    "aten._linalg_slogdet.default": _ILL_CONDITIONED,
    "aten.linalg_inv_ex.default": _ILL_CONDITIONED,
    "aten.linalg_matrix_exp.default": _ILL_CONDITIONED,
    "aten._linalg_solve_ex.default": _ILL_CONDITIONED,
    "aten.linalg_cholesky_ex.default": _ILL_CONDITIONED,
    "aten.geqrf.default": _ILL_CONDITIONED,
    "aten.linalg_householder_product.default": "its factors are another operator's",
    "aten.ormqr.default": "its factors are another operator's",
    "aten.linalg_lu.default": _ILL_CONDITIONED,
    "aten._linalg_eigh.default": _ILL_CONDITIONED,
    "aten._linalg_svd.default": _ILL_CONDITIONED,
    "aten.linalg_pinv.atol_rtol_tensor": _ILL_CONDITIONED,
    "aten.linalg_lu_factor_ex.default": _ILL_CONDITIONED,
    "aten.linalg_lu_solve.default": _ILL_CONDITIONED,
    "aten.lu_unpack.default": "its factors and pivots are another operator's",
    "aten.linalg_solve_triangular.default": _ILL_CONDITIONED,
    "aten.fake_quantize_per_tensor_affine.tensor_qparams": _POSITIVE_SCALES,
    "aten.fake_quantize_per_channel_affine.default": _POSITIVE_SCALES,
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _POSITIVE_SCALES,
    "aten._fake_quantize_learnable_per_tensor_affine.default": _POSITIVE_SCALES,
    "aten._fake_quantize_learnable_per_channel_affine.default": _POSITIVE_SCALES,
    "aten.fake_quantize_per_channel_affine_cachemask.default": _POSITIVE_SCALES,
    "aten.mm.dtype": _TYPES,
    "aten.bmm.dtype": _TYPES,
    "aten.addmm.dtype": _TYPES,
    "aten._scaled_mm.default": _TYPES,
    "aten.max_unpool3d.default": "its indices must be those of a pooling; tests/ops/test_composites.py has them",
    "aten._grouped_mm.default": _TYPES,
}
_FAKE_QUANTIZE: dict[str, Strategy] = {
    "self": _finite_tensor(),  # the integer of NaN or infinity depends on the processor
    "scale": _choice_of(0.1, 0.037, 1.0),
    "zero_point": _choice_of(0, 3, -5),
    "quant_min": _choice_of(-128, -8, 0),
    "quant_max": _choice_of(127, 7),
}
#: Strategies by operator (all its overloads, or one) and argument; common arguments are in ``COMMON_ARGUMENTS``.
OPERATORS: dict[str, dict[str, Strategy]] = {
    "_to_copy": _CONVERT,
    "fake_quantize_per_tensor_affine": _FAKE_QUANTIZE,
    "fake_quantize_per_tensor_affine_cachemask": _FAKE_QUANTIZE,
    "to": {**_CONVERT, "device": _fixed(torch.device("cpu")), "other": _tensor_of(ANY)},
    "type_as": {"self": _tensor_of(ANY), "other": _tensor_of(ANY)},
    "conv1d": _convolution_arguments(1),
    "conv2d": _convolution_arguments(2),
    "conv3d": _convolution_arguments(3),
    "conv1d.padding": _convolution_arguments(1, padding=_choice_of("same", "valid")),
    "conv2d.padding": _convolution_arguments(2, padding=_choice_of("same", "valid")),
    "conv3d.padding": _convolution_arguments(3, padding=_choice_of("same", "valid")),
    "convolution": _convolution_arguments(None),
    "_convolution": _convolution_arguments(None),
    "conv_transpose1d": _convolution_arguments(1, weight=_convolution_weight(1, transposed=True)),
    "conv_transpose2d": _convolution_arguments(2, weight=_convolution_weight(2, transposed=True)),
    "conv_tbc": {
        "self": lambda d, a: d.tensor(shape=(d.size(3, 6), 2, d.size(1, 4))),
        "weight": lambda d, a: d.constant(d.size(1, 3), _first_tensor(a).shape[2], d.size(1, 4)),
        "bias": lambda d, a: d.tensor(shape=(a["weight"].shape[2],)),
        "pad": _choice_of(0, 1),
    },
    "add.Tensor": {"self": _tensor_of(FLOATS + INTEGERS)},
    "sub.Tensor": {"self": _tensor_of(FLOATS + INTEGERS)},
    "mul.Tensor": {"self": _tensor_of(ANY)},
    "pow.Tensor_Tensor": {"other": _broadcastable(FLOATS)},
    "prelu": {
        "weight": lambda d, a: d.constant(d.choose((1, _first_tensor(a).shape[1] if _first_tensor(a).rank > 1 else 1)))
    },
    "_prelu_kernel": {"weight": _broadcastable()},
    "embedding": {
        "weight": lambda d, a: d.constant(d.size(4, 9), d.size(1, 8)),
        "indices": lambda d, a: d.tensor(
            shape=lambda: d.shape(d.size(0, 3)), dtypes=(torch.int64, torch.int32), span=(0, 4)
        ),
        "padding_idx": _choice_of(-1, 0),
    },
    "nll_loss_forward": _loss_arguments(1, 2, 2),
    "nll_loss2d_forward": _loss_arguments(4),
    "multi_margin_loss": {
        **{name: drawn for name, drawn in _loss_arguments(1, 2).items() if name != "ignore_index"},
        "p": _choice_of(1, 2),
        "margin": _choice_of(1, 0.5),
    },
    "multilabel_margin_loss_forward": {
        "self": _tensor_of_rank(1, 2),
        "target": _multilabel_targets,
        "reduction": _choice_of(0, 1, 2),
    },
    "index": {"indices": _index_tensors},
    "_unsafe_index": {"indices": _index_tensors},
    "index_select": {
        "index": lambda d, a: d.tensor(
            shape=(d.size(1, 6),),
            dtypes=(torch.int64,),
            span=(0, max(1, _first_tensor(a).shape[a["dim"]])),
            constant=0.7,
        ),
    },
    "linear": {
        "input": _tensor_of_rank(1, 2, 2, 3, 4),
        "weight": _second_factor(transposed=True),
        "bias": _optional_bias,
    },
    "_int_mm": {
        "self": lambda d, a: d.tensor(shape=(d.size(17, 20), 8), dtypes=(torch.int8,)),
        "mat2": lambda d, a: d.tensor(shape=(8, 8), dtypes=(torch.int8,)),
    },
    "mm": {"self": _tensor_of_rank(2), "mat2": _second_factor(ranks=())},
    "bmm": {"self": _tensor_of_rank(3), "mat2": _second_factor(ranks=(3,))},
    "matmul": {
        "self": _tensor_of_rank(1, 2, 3, 4),
        "other": lambda d, a: _second_factor(ranks=d.choose(((1,), (3,))))(d, a),
    },
    "where": {"condition": _tensor_of(BOOL)},
    "bitwise_and": _LOGIC,
    "bitwise_or": _LOGIC,
    "bitwise_xor": _LOGIC,
    "__and__": _LOGIC,
    "__or__": _LOGIC,
    "__xor__": _LOGIC,
    "bitwise_and.Scalar": _LOGIC_NUMBER,
    "bitwise_and.Scalar_Tensor": {"self": _choice_of(0, 1, 3, 5, -1), "other": _tensor_of(INTEGERS)},
    "__and__.Scalar": {"self": _tensor_of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_or.Scalar": _LOGIC_NUMBER,
    "bitwise_or.Scalar_Tensor": {"self": _choice_of(0, 1, 3, 5, -1), "other": _tensor_of(INTEGERS)},
    "__or__.Scalar": {"self": _tensor_of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_xor.Scalar": _LOGIC_NUMBER,
    "bitwise_xor.Scalar_Tensor": {"self": _choice_of(0, 1, 3, 5, -1), "other": _tensor_of(INTEGERS)},
    "__xor__.Scalar": {"self": _tensor_of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_not": {"self": _tensor_of(INTEGERS + BOOL)},
    "logical_and": {"self": _tensor_of(ANY), "other": _broadcastable(ANY)},
    "logical_or": {"self": _tensor_of(ANY), "other": _broadcastable(ANY)},
    "logical_xor": {"self": _tensor_of(ANY), "other": _broadcastable(ANY)},
    "logical_not": {"self": _tensor_of(ANY)},
    "eq": {"self": _tensor_of(ANY)},
    "ne": {"self": _tensor_of(ANY)},
    "view": {"self": _tensor_of(ANY), "size": _view_shape},
    "reshape": {"shape": _view_shape},
    "_unsafe_view": {"size": _view_shape},
    "view_copy": {"size": _view_shape},
    "unflatten": {
        "sizes": lambda d, a: [1, -1] if d.chance(0.5) else [-1],
        "self": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
    },
    "dropout": {"p": _fixed(0.5)},
    "feature_dropout": {"p": _fixed(0.5)},
    "permute": {"dims": _permutation},
    "permute_copy": {"dims": _permutation},
    "t": {"self": _tensor_of_rank(0, 1, 2, 2)},
    "t_copy": {"self": _tensor_of_rank(0, 1, 2, 2)},
    "numpy_T": {"self": _tensor_of_rank(0, 1, 2, 2)},
    "expand": {"size": _expanded_shape, "implicit": _fixed(False)},
    "expand_copy": {"size": _expanded_shape, "implicit": _fixed(False)},
    "expand_as": {
        "self": lambda d, a: d.tensor(lambda x: 1 in x.shape, lambda: (1, d.size(), 1)[d.size(0, 2) :]),
        "other": lambda d, a: d.tensor(shape=tuple(n if n > 1 else d.size(1, 5) for n in _first_tensor(a).shape)),
    },
    "repeat": {"repeats": lambda d, a: [d.size(1, 3) for _ in range(_first_tensor(a).rank + d.choose((0, 0, 1)))]},
    "cat": _CAT,
    "concat": _CAT,
    "concatenate": _CAT,
    "stack": {"tensors": _tensors_to_join(equal=True)},
    "slice": {"start": _slice_bound, "end": _slice_bound, "step": _choice_of(1, 1, 2, 3)},
    "slice_copy": {"start": _slice_bound, "end": _slice_bound, "step": _choice_of(1, 1, 2, 3)},
    "roll": {
        "dims": lambda d, a: a["_dims"],
        "shifts": lambda d, a: (
            [d.size(-5, 5) for _ in a.setdefault("_dims", d.axes(_first_tensor(a)) if d.chance(0.8) else [])]
            or [d.size(-5, 5)]
        ),
    },
    "select": {"index": _integer_along_dim(0, lambda n: n - 1)},
    "select_copy": {"index": _integer_along_dim(0, lambda n: n - 1)},
    "split.Tensor": {"split_size": _integer_along_dim(1, lambda n: n)},
    "split_copy.Tensor": {"split_size": _integer_along_dim(1, lambda n: n)},
    "split.sizes": {"split_size": _split_sizes},
    "split_with_sizes": {"split_sizes": _split_sizes},
    "split_with_sizes_copy": {"split_sizes": _split_sizes},
    "chunk": {"chunks": _integer_along_dim(1, lambda n: 4)},
    "constant_pad_nd": {"pad": _pad_amounts},
    **{
        f"{kind}_pad{rank}d": _edge_padding_arguments(rank)
        for kind in ("reflection", "replication")
        for rank in (1, 2, 3)
    },
    "alpha_dropout": {"train": _fixed(False), "p": _fixed(0.5)},
    "feature_alpha_dropout": {"train": _fixed(False), "p": _fixed(0.5)},
    "_reshape_copy": {"size": _view_shape},
    "_reshape_alias": {
        "size": lambda d, a: list(_first_tensor(a).shape),
        "stride": lambda d, a: list(torch.empty(_first_tensor(a).shape).stride()),
    },
    "native_batch_norm": _BATCH_NORM,
    "_native_batch_norm_legit.no_stats": {**_BATCH_NORM, "training": _fixed(True)},
    "linalg_qr": {"A": _finite_tensor(2, 3)},  # LAPACK multiplies infinities of other columns by tau = 0
    "_linalg_det": {"A": lambda d, a: d.tensor(shape=(d.size(1, 3), 2, 2), span=(-2, 2))},
    "histc": {"bins": _choice_of(1, 5), "min": _choice_of(-1), "max": _choice_of(2)},
    "polygamma": {"n": _choice_of(1, 2)},
    "_weight_int8pack_mm": {
        "self": lambda d, a: d.tensor(shape=(d.size(1, 4), 8), span=(-2, 2)),
        "mat2": lambda d, a: d.tensor(shape=(8, 8), dtypes=(torch.int8,)),
        "scales": lambda d, a: d.constant(8),
    },
    "_fused_rms_norm": {
        "normalized_shape": _normalized_shape,
        "weight": _norm_parameter,
        "eps": _choice_of(1e-5, None),
    },
    "_scaled_dot_product_flash_attention_for_cpu": {  # without elements the kernel crashes
        "query": lambda d, a: d.tensor(
            lambda x: x.dim() == 4 and x.numel() > 0 and is_finite(x),
            lambda: tuple(d.size(1, 8) for _ in range(4)),
            span=(-2, 2) if d.special else None,
        ),
        "key": lambda d, a: d.tensor(shape=_first_tensor(a).shape),
        "value": lambda d, a: d.tensor(shape=_first_tensor(a).shape),
        "dropout_p": _fixed(0.0),
        "attn_mask": _fixed(None),
        "scale": _choice_of(None, 0.3),
    },
    "scatter.reduce": {"reduce": _choice_of("add", "multiply")},
    "scatter.value_reduce": {"reduce": _choice_of("add", "multiply")},
    # assume_unique=True gives wrong results, because drawn elements are not unique.
    "isin": {"assume_unique": _fixed(False)},
    "isin.Tensor_Scalar": {"test_element": _choice_of(0, 1, 0.5), "assume_unique": _fixed(False)},
    "pad": {"mode": _choice_of("constant", "constant", "reflect", "replicate", "circular"), "pad": _pad_amounts},
    "batch_norm": _BATCH_NORM,
    "scaled_dot_product_attention": {
        "query": _finite_tensor(3, 4),
        "key": _finite_of_same_shape,
        "value": _finite_of_same_shape,
        "attn_mask": _fixed(None),
        "enable_gqa": _fixed(False),
    },
    "var_mean": {"self": _finite_tensor()},
    "_add_relu": {"self": _finite_tensor()},  # for NaN, PyTorch's kernel returns 0 or NaN
    "std_mean": {"self": _finite_tensor()},
    "signbit": {"self": _finite_tensor()},  # PyTorch returns the sign bit of NaN
    "copysign.Tensor": {
        "other": lambda d, a: d.tensor(is_finite, _first_tensor(a).shape, span=(-2, 2) if d.special else None)
    },
    "_native_batch_norm_legit_no_training": _BATCH_NORM,
    "layer_norm": {
        "input": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
        "normalized_shape": _normalized_shape,
        "weight": _norm_parameter,
        "bias": _norm_parameter,
        "eps": _choice_of(1e-5, 1e-3),
    },
    "rms_norm": {"normalized_shape": _normalized_shape, "weight": _norm_parameter, "eps": _choice_of(1e-5, None)},
    "native_group_norm": {
        "input": _tensor_of_rank(3, 4),
        "N": lambda d, a: _first_tensor(a).shape[0],
        "C": lambda d, a: _first_tensor(a).shape[1],
        "HxW": lambda d, a: _first_tensor(a).tensor[0, 0].numel(),
        "group": lambda d, a: d.choose([n for n in range(1, 13) if _first_tensor(a).shape[1] % n == 0]),
        "weight": _channel_vector(),
        "bias": _channel_vector(),
        "eps": _choice_of(1e-5),
    },
    "native_layer_norm": {
        "normalized_shape": _normalized_shape,
        "weight": _norm_parameter,
        "bias": _norm_parameter,
        "eps": _choice_of(1e-5),
    },
    "group_norm": {
        "input": lambda d, a: d.tensor(lambda x: x.dim() >= 2, lambda: d.shape(d.size(3, 4))),
        "num_groups": lambda d, a: d.choose([n for n in range(1, 13) if _first_tensor(a).shape[1] % n == 0]),
        "weight": _channel_vector(),
        "bias": _channel_vector(),
        "eps": _choice_of(1e-5),
    },
    "instance_norm": {
        **_BATCH_NORM,
        "running_mean": _fixed(None),  # the operator would write to it
        "running_var": _fixed(None),
        "use_input_stats": _fixed(True),
    },
    "_softmax": {"half_to_float": _fixed(False)},
    "_log_softmax": {"half_to_float": _fixed(False)},
    "max_pool2d": _pool_arguments(2, 4, 4, 3),
    "max_pool1d": _pool_arguments(1, 3, 3, 2),
    "max_pool2d_with_indices": _pool_arguments(2, 4, 4, 3),
    "avg_pool2d": _pool_arguments(2, 4, 4, 3),
    "avg_pool1d": _pool_arguments(1, 3, 3, 2),
    **{
        f"{kind}_pool{n}d": {
            "self": _tensor_of_rank(n + 2, n + 2, n + 1),
            "output_size": _size_per_dimension(n, 1, 5),
        }
        for kind in ("adaptive_avg", "_adaptive_avg", "adaptive_max")
        for n in (2, 3)
    },
    "adaptive_avg_pool1d": {"self": _tensor_of_rank(3, 3, 2), "output_size": _size_per_dimension(1, 1, 6)},
    "max_pool3d_with_indices": _pool_arguments(3, 5, 5, 4),
    "avg_pool3d": _pool_arguments(3, 5, 5, 4),
    "im2col": _pool_arguments(2, 4, 4, 3),
    "col2im": {"self": _fold_input},
    **{
        f"{kind}{n}d.{form}": _upsample_arguments(n, vec=form == "vec")
        for n, linear in enumerate(("linear", "bilinear", "trilinear"), 1)
        for kind in ("upsample_nearest", "_upsample_nearest_exact", f"upsample_{linear}")
        for form in ("default", "vec")
    },
    # The output has two columns or more: PyTorch fills a single column with its first element.
    **{
        f"_upsample_{kind}2d_aa": {
            **_upsample_arguments(2, vec=False),
            "output_size": lambda d, a: [d.size(1, 9), d.size(2, 9)],
        }
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    **{f"upsample_bicubic2d.{form}": _upsample_arguments(2, vec=form == "vec") for form in ("default", "vec")},
    "lstm": _recurrent_arguments(4, 2),
    "gru": _recurrent_arguments(3, 1),
    "rnn_tanh": _recurrent_arguments(1, 1),
    "rnn_relu": _recurrent_arguments(1, 1),
    "lstm_cell": _recurrent_cell_arguments(4, 2),
    "gru_cell": _recurrent_cell_arguments(3, 1),
    "rnn_tanh_cell": _recurrent_cell_arguments(1, 1),
    "rnn_relu_cell": _recurrent_cell_arguments(1, 1),
    "_transformer_encoder_layer_fwd": _attention_arguments("src", shapes=_ATTENTION | _NORMS | _FEED_FORWARD),
    "_native_multi_head_attention": _attention_arguments("query", "key", "value", shapes=_ATTENTION),
    "addbmm": {
        "self": _tensor_of_rank(2),
        "batch1": lambda d, a: d.constant(d.size(1, 3), _first_tensor(a).shape[0], d.size(1, 6)),
        "batch2": lambda d, a: d.constant(a["batch1"].shape[0], a["batch1"].shape[2], _first_tensor(a).shape[1]),
        "beta": _choice_of(1, 0.5),
    },
    "_cdist_forward": {
        "x1": _tensor_of_rank(2, 3),
        "x2": lambda d, a: d.tensor(shape=(*_first_tensor(a).shape[:-2], d.size(1, 5), _first_tensor(a).shape[-1])),
        "p": _choice_of(2.0, 1.0),
        "compute_mode": _fixed(None),
    },
    "conv_transpose3d": _convolution_arguments(3, weight=_convolution_weight(3, transposed=True)),
    "grid_sampler_2d": {
        "input": _image(2),
        "grid": lambda d, a: d.tensor(
            shape=(_first_tensor(a).shape[0], d.size(1, 4), d.size(1, 4), 2), span=(-1.2, 1.2)
        ),
        "interpolation_mode": _choice_of(0, 0, 1),
        "padding_mode": _choice_of(0, 1, 2),
    },
    "grid_sampler_3d": {
        "input": _image(3),
        "grid": lambda d, a: d.tensor(shape=(_first_tensor(a).shape[0], 2, d.size(1, 3), 2, 3), span=(-1.2, 1.2)),
        "interpolation_mode": _choice_of(0, 0, 1),
        "padding_mode": _choice_of(0, 1, 2),
    },
    "_pdist_forward": {"self": _tensor_of_rank(2), "p": _choice_of(2.0, 1.0)},
    "embedding_bag": _EMBEDDING_BAG,
    "embedding_bag.padding_idx": _EMBEDDING_BAG | {"padding_idx": _choice_of(None, 0, 2)},
    "_embedding_bag": _EMBEDDING_BAG,
    "_embedding_bag_forward_only": _EMBEDDING_BAG
    | {"mode": _fixed(2)},  # in other modes PyTorch's additional results differ from its documentation
    "index_reduce": _INDEXED | {"reduce": _choice_of("mean", "prod", "amax", "amin")},
    "index_fill": _INDEXED,
    "index_fill.int_Tensor": {"value": lambda d, a: d.tensor(shape=())},
    "index_copy": _INDEXED,
    "index_add": _INDEXED,
    "index_put": {
        "indices": lambda d, a: [_indices_along_dim()(d, a | {"dim": 0})],
        "values": lambda d, a: d.tensor(shape=(*a["indices"][0].shape, *_first_tensor(a).shape[1:])),
        "self": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
    },
    "gather": _SCATTER,
    "scatter": _SCATTER,
    "scatter_add": _SCATTER,
    "scatter_reduce": _SCATTER | {"reduce": _choice_of("sum", "prod", "mean", "amax", "amin")},
    "masked_scatter": {"mask": _broadcastable(BOOL), "source": _tensor_of_same_shape()},
    "take": {
        "index": lambda d, a: d.tensor(
            shape=(d.size(1, 5),), dtypes=(torch.int64,), span=(0, _first_tensor(a).tensor.numel())
        )
    },
    "put": {  # accumulate: for equal indices PyTorch may write any of the values
        "index": lambda d, a: d.tensor(
            shape=(d.size(1, 5),), dtypes=(torch.int64,), span=(0, _first_tensor(a).tensor.numel())
        ),
        "source": lambda d, a: d.tensor(shape=a["index"].shape, dtypes=(_first_tensor(a).tensor.dtype,)),
        "accumulate": _fixed(True),
    },
    "_unsafe_masked_index": {
        "self": lambda d, a: d.tensor(lambda x: x.dim() == 1, lambda: d.shape(1)),
        "mask": lambda d, a: d.tensor(shape=(4,), dtypes=BOOL),
        "indices": lambda d, a: [d.tensor(shape=(4,), dtypes=(torch.int64,), span=(-3, 9))],
    },
    "bucketize": {"boundaries": lambda d, a: d.constant(1, span=(-2, 2))},  # more would have to be sorted
    "searchsorted": {
        "sorted_sequence": lambda d, a: d.tensor(shape=(1,), span=(-2, 2)),
        "side": _fixed(None),
        "sorter": _fixed(None),
    },
    "histogram.bins_tensor": {
        "bins": lambda d, a: d.tensor(shape=(2,), span=(-2, 2))
    },  # the first elements of a sample are its minimum and maximum
    "kthvalue": {"k": _integer_along_dim(1, lambda n: n)},
    "topk": {"k": _integer_along_dim(1, lambda n: n)},
    "unfold": {"size": _window_size, "step": _choice_of(1, 2, 3)},
    "unfold_copy": {"size": _window_size, "step": _choice_of(1, 2, 3)},
    "as_strided": _STRIDED,
    "as_strided_copy": _STRIDED,
    "select_scatter": {"index": _integer_along_dim(0, lambda n: n - 1), "src": _select_scatter_source},
    "slice_scatter": {
        "start": _slice_bound,
        "end": _slice_bound,
        "step": _choice_of(1, 1, 2),
        "src": _slice_scatter_source,
    },
    "remainder.Tensor": {"self": _moderate_dividend, "other": _nonzero_divisor},
    "remainder.Scalar": {"self": _moderate_dividend},
    "floor_divide.default": {"other": _nonzero_divisor},
    "div.Tensor_mode": {"other": _nonzero_divisor, "rounding_mode": _choice_of(None, "floor", "trunc")},
    "div.Scalar_mode": {"rounding_mode": _choice_of(None, "floor", "trunc")},
    "meshgrid": {
        "tensors": lambda d, a: [_tensor_of_rank(0, 1, 1)(d, a) for _ in range(d.size(1, 3))],
        "indexing": _choice_of("ij", "xy"),
    },
    "clamp.Tensor": {"min": _broadcastable(), "max": _broadcastable()},
    "clamp": {"min": _choice_of(None, -1, -0.5, 0, -2.5), "max": _clamp_maximum},
    "hardtanh": {"min_val": _choice_of(-1, -0.5, 0), "max_val": _choice_of(1, 0.5, 6)},
    "gelu": {"approximate": _choice_of("none", "tanh")},
    "round.decimals": {"decimals": _choice_of(0, 1, 2, -1)},
    "leaky_relu": {"negative_slope": _choice_of(0.01, 0.2, 1.5, 0)},
    "elu": {"alpha": _choice_of(1, 0.5), "scale": _choice_of(1, 2), "input_scale": _choice_of(1, 0.5)},
    "softplus": {"beta": _choice_of(1, 2.0), "threshold": _choice_of(20, 3.0)},
    "hardshrink": {"lambd": _choice_of(0.5, 0)},
    "softshrink": {"lambd": _choice_of(0.5, 0)},
    "celu": {"alpha": _choice_of(1.0, 0.5)},
    "logit": {"eps": _choice_of(None, 0.1)},
    **{
        str(overload).removeprefix("aten."): {"x": _finite_tensor(), "n": _choice_of(-1, 0, 1, 2, 5)}
        for overload in aten_entries()
        if "polynomial" in str(overload)
    },
    **dict.fromkeys(_SHIFTS, _SHIFT),
    **{f"{name}.Tensor": _SHIFT | {"other": _shift_amounts} for name in _SHIFTS},
    **{
        f"bitwise_{way}_shift.Scalar_Tensor": {"self": _choice_of(1, 5), "other": _shift_amounts}
        for way in ("left", "right")
    },
}

#: Strategies of arguments with the same meaning in all operators.
COMMON_ARGUMENTS: dict[str, Strategy] = {
    "train": _fixed(False),
    "training": _fixed(False),
    "dropout_p": _fixed(0.0),
    "dtype": _choice_of(None, None, None, torch.float32),
    "memory_format": _choice_of(None, None, torch.contiguous_format),
    "layout": _fixed(None),
    "device": _fixed(None),
    "pin_memory": _fixed(None),
    "non_blocking": _fixed(False),
    "copy": _choice_of(False, True),
    "alpha": _choice_of(1, 1, 2, 0.5),
    "cudnn_enabled": _fixed(True),
    "cudnn_enable": _fixed(True),
}


def _draw_by_type(kind: str, d: ProgramBuilder, a: Arguments) -> Any:
    """Draw an argument by its type in the schema."""
    if kind.startswith("Optional[") and d.chance(0.3):
        return None
    kind = kind.removeprefix("Optional[").rstrip("]") if kind.startswith("Optional[") else kind
    if kind == "Tensor":
        first = not any(isinstance(value, Reference) for value in a.values())
        return d.tensor(dtypes=FLOATS if d.chance(0.9) else ANY) if first else _broadcastable()(d, a)
    if kind == "List[Tensor]":
        return _tensors_to_join(equal=True)(d, a)
    if kind == "int":
        return d.axis(_first_tensor(a))
    if kind == "List[int]":
        return d.axes(_first_tensor(a))
    if kind == "bool":
        return d.chance(0.4)
    if kind in ("number", "float", "Scalar"):
        return d.number()
    raise NoValidChoice


def draw_call(overload: OpOverload, d: ProgramBuilder) -> tuple[str, str]:
    """Draw a call of an ATen operator, as source."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    table = OPERATORS.get(packet, {}) | OPERATORS.get(f"{packet}.{name}", {})
    a: Arguments = {}
    for argument in overload._schema.arguments:
        strategy = table.get(argument.name) or COMMON_ARGUMENTS.get(argument.name)
        if argument.name in a:  # drawn together with an earlier argument
            continue
        if strategy is None and argument.has_default_value() and d.chance(0.3):
            a[argument.name] = argument.default_value
        else:
            a[argument.name] = strategy(d, a) if strategy else _draw_by_type(str(argument.type), d, a)
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    words = [argument for argument in overload._schema.arguments if argument.kwarg_only]
    given = [repr(a[name]) for name in names]
    given += [f"{x.name}={a[x.name]!r}" for x in words if not x.has_default_value() or a[x.name] != x.default_value]
    return f"{overload}({', '.join(given)})", ""


# -- modules and functions ---------------------------------------------------------------------------------------


def _fill_template(template: str, d: ProgramBuilder) -> str:
    """Fill the fields of a template with drawn values; ``FUNCTIONS`` describes the fields."""
    a: Arguments = {}

    class Fields(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            kind, rank = name[0], int(name[1:] or -1)
            if kind == "f":
                a[name] = _finite_tensor(*([rank] if rank >= 0 else []))(d, a)
            elif kind == "x":
                a[name] = d.tensor() if rank < 0 else _tensor_of_rank(rank)(d, a)
            elif kind == "y":
                a[name] = _broadcastable()(d, a)
            elif kind == "z":
                a[name] = _tensor_of_same_shape()(d, a)
            elif kind == "b":
                a[name] = _broadcastable(BOOL)(d, a) if a else d.tensor(dtypes=BOOL)
            elif kind == "i":
                a[name] = d.tensor(dtypes=INTEGERS)
            elif kind == "n":
                return d.number()
            elif kind == "k":
                return d.size(1, 4)
            elif kind == "d":
                return d.axis(_first_tensor(a))
            elif kind == "c":
                return _first_tensor(a).shape[1 if rank < 0 else -rank]
            else:
                return bool(d.chance(0.5))
            self[name] = a[name]
            return a[name]

    return template.format_map(Fields())


#: Templates of function calls. Fields: {x} a tensor, {x3} a tensor of rank 3, {f3} a finite tensor of rank 3, {y} a
#: tensor that broadcasts with the first one, {z} a tensor of its shape, {b} booleans that broadcast with it, {i}
#: integers, {d} a dimension, {n} a number, {k} an integer from 1 to 4, {t} True or False.
FUNCTIONS = (
    "{x}[..., :{k}].mul_({n}).sum()",
    "{x}.view(-1)[:{k}].add_(1.5)",
    "{x}.transpose(0, -1).mul_({n})",
    "aten.add_.Tensor({x}, {z})",
    "aten.relu_({x})",
    "torch.neg({x}).unsqueeze_(0).transpose_(0, -1).add_({n})",
    "aten.clamp_({x}, -0.5, 0.5)",
    "aten.copy_({x}, {z})",
    "aten.fill_.Scalar({x}[:1], {n})",
    "{x}.select({d}, 0).zero_()",
    "F.dropout({x}, 0.5, False).add_({n})",
    "{x}[1:, None]",
    "{x}[:, ::2]",
    "{x}[..., -1]",
    "{x}.flip({d})",
    "{x}.unfold({d}, 2, 1)",
    "torch.diagonal({x2})",
    "torch.tril({x2})",
    "torch.std({x}, {d})",
    "torch.var({x}, {d}, unbiased={t}, keepdim={t1})",
    "torch.var_mean({f}, {d})",
    "torch.cumsum({x}, {d})",
    "torch.prod({x}, {d})",
    "torch.norm({x}, dim={d})",
    "torch.logsumexp({x}, {d})",
    "torch.max({x}, {d})",
    "torch.min({x})",
    "torch.argmin({x}, {d})",
    "torch.topk({x2}, 1, 1)",
    "torch.sort({x}, {d})",
    "torch.lerp({x}, {y}, {n})",
    "torch.addcmul({x}, {y}, {y2}, value={n})",
    "torch.where({x} > {n}, {x}, {n1})",
    "torch.where({b}, {n}, {n1}) + {b}",
    "torch.masked_fill({x}, {x} < 0, {n})",
    "{n} - {x} * {n1}",
    "{n} / ({x}.abs() + 1)",
    "{x} / ({y}.abs() + 0.5)",
    "{x} // 2",
    "{x} % 3",
    "{i} * 3 + 1",
    "{i} + {x}.shape[0]",
    "({x} > {y}).float() * {x}",
    "({x} * 10).to(torch.int32)",
    "{x} * {x}.shape[-1]",
    "{x}.numel() + {x}",
    "torch.atan2({x}, {y})",
    "torch.einsum('bij,bkj->bik', {x3}, {x3})",
    "torch.outer({x1}, {x1})",
    "torch.addmm({x2}[0], {x2}, {x2}.t())",
    "torch.full_like({x}, {n}) + {x}",
    "torch.arange({x}.shape[-1]) + {x}",
    "torch.zeros({k}, {k}) + {k1}",
    "F.normalize({x}, dim={d})",
    "F.interpolate({x4}, scale_factor={k}, mode='nearest')",
    "F.interpolate({f4}, size=({k}, {k1}), mode='bilinear', align_corners={t})",
    "F.interpolate({f3}, scale_factor={k}, mode='linear')",
    "F.interpolate({f4}, size=({k}, {k1}), mode='bicubic')",
    "F.pixel_shuffle({x4}.repeat(1, 4, 1, 1), 2)",
    "F.pixel_unshuffle(F.pad({x4}.repeat(1, 1, 2, 2), (0, 0)), 2)",
    "F.glu({x}, {d})",
    "F.unfold({x4}, 2)",
    "F.one_hot({i}.abs() % 4, 4)",
    "F.scaled_dot_product_attention({f4}, {f4}, {f4})",
    "F.scaled_dot_product_attention({f3}, {f3}, {f3}, is_causal=True)",
    "F.softmax({x}.masked_fill({x} > 1, -1e4), {d})",
    "F.cosine_similarity({x}, {z}, dim={d})",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.group_norm({x3}, 1)",
    "F.batch_norm({x4}, {x4}[0, :, 0, 0], {x4}[0, :, 0, 0].abs())",
    "F.adaptive_max_pool2d({x4}, {k})",
    "F.max_pool2d({x4}, 2, 1, return_indices=True)",
    "F.lp_pool2d({x4}, 2.0, {k})",
    "F.local_response_norm({x4}, 3)",
    "torch.cat([{x}, {x}], {d})",
    "torch.cdist({x3}, {x3})",
    "torch.movedim({x3}, 0, 2)",
    "torch.tile({x}, (2,))",
    "torch.repeat_interleave({x}, 2, {d})",
    "torch.index_select({x}, {d}, torch.tensor([0, 0]))",
    "torch.gather({x2}, 1, torch.zeros_like({x2}, dtype=torch.int64))",
    "torch.meshgrid({x1}, {x1}, indexing='ij')",
    "torch.narrow({x}, {d}, 0, 1)",
    "torch.ones_like({x}).logical_not()",
)

#: Templates of modules: (constructor, call). Further fields: sizes of the operand's dimensions, {c} of dimension 1,
#: {c1} of dimension -1, {c2} of dimension -2.
MODULES = (
    ("nn.Conv2d({c}, {k}, {k1}, stride={k2}, padding={k3}, bias={t})", "self.m({x4})"),
    ("nn.Conv2d({c}, {c}, 3, padding=1, groups={c})", "self.m({x4})"),
    ("nn.Conv2d({c}, 4, 3, padding='same', padding_mode='reflect')", "self.m({x4})"),
    ("nn.Conv1d({c}, {k}, {k1}, padding={k2}, dilation={k3})", "self.m({x3})"),
    ("nn.Conv3d({c}, {k}, {k1}, padding=1)", "self.m({x5})"),
    ("nn.ConvTranspose1d({c}, {k}, {k1}, stride=2)", "self.m({x3})"),
    ("nn.ConvTranspose2d({c}, {k}, {k1}, stride={k2}, padding={k3})", "self.m({x4})"),
    ("nn.Linear({c1}, {k}, bias={t})", "self.m({x})"),
    ("nn.Bilinear({c1}, {c1}, {k})", "self.m({x}, {z})"),
    ("nn.BatchNorm1d({c})", "self.m({x3})"),
    ("nn.BatchNorm2d({c}, affine={t})", "self.m({x4})"),
    ("nn.BatchNorm3d({c})", "self.m({x5})"),
    ("nn.LayerNorm({c1}, bias={t})", "self.m({x})"),
    ("nn.RMSNorm({c1})", "self.m({x})"),
    ("nn.GroupNorm(1, {c})", "self.m({x4})"),
    ("nn.InstanceNorm1d({c})", "self.m({x3})"),
    ("nn.InstanceNorm2d({c}, affine={t})", "self.m({x4})"),
    ("nn.MultiheadAttention({c1}, 1, batch_first={t})", "self.m({x3}, {x3}, {x3})[0]"),
    ("nn.TransformerEncoderLayer({c1}, 1, 8, batch_first=True, norm_first={t})", "self.m({x3})"),
    ("nn.LSTM({c1}, {k}, batch_first={t}, bidirectional={t1})", "self.m({x3})[0]"),
    ("nn.LSTM({c1}, {k} + 1, proj_size=1)", "self.m({x3})[1][0]"),
    ("nn.GRU({c1}, {k})", "self.m({x3})[0]"),
    ("nn.RNN({c1}, {k})", "self.m({x3})[0]"),
    ("nn.Embedding(4, {k})", "self.m({i}.abs() % 4)"),
    ("nn.MaxPool2d({k}, stride={k1}, ceil_mode={t})", "self.m({x4})"),
    ("nn.MaxPool1d({k})", "self.m({x3})"),
    ("nn.AvgPool2d({k}, stride={k1}, padding=1, count_include_pad={t})", "self.m({x4})"),
    ("nn.AvgPool3d({k})", "self.m({x5})"),
    ("nn.AdaptiveAvgPool2d({k})", "self.m({x4})"),
    ("nn.AdaptiveAvgPool3d(1)", "self.m({x5})"),
    ("nn.PReLU({c})", "self.m({x4})"),
    ("nn.Softmax({d})", "self.m({x})"),
    ("nn.Softmin({d})", "self.m({x})"),
    ("nn.ReLU(inplace=True)", "self.m({x} * 2)"),
    ("nn.Hardswish()", "self.m({x})"),
    ("nn.SiLU(inplace=True)", "self.m({x} + 1)"),
    ("nn.Upsample(scale_factor={k}, mode='bilinear')", "self.m({f4})"),
    ("nn.ReflectionPad2d({k})", "self.m({x4})"),
    ("nn.ZeroPad2d({k})", "self.m({x4})"),
    ("nn.Flatten()", "self.m({x})"),
    ("nn.Unfold(2)", "self.m({x4})"),
    ("nn.Fold(2, 1)", "self.m({x3})"),
)


def _draw_module(constructor: str, template: str, d: ProgramBuilder) -> tuple[str, str]:
    # The operand is drawn before the constructor, which depends on its sizes.
    expression, _, made = _fill_template(f"{template} @ {constructor}", d).partition(" @ ")
    return expression, made


def _draw_function(template: str, d: ProgramBuilder) -> tuple[str, str]:
    return _fill_template(template, d), ""


@cache
def list_steps() -> list[list[tuple[str, StepDrawer]]]:
    """List the steps to draw from: operators (two thirds of all draws), modules and functions (a sixth each).

    Operators are sorted by name, so that moving a record to another module does not change the graphs.
    """
    operators: list[tuple[str, StepDrawer]] = [
        (str(o), partial(draw_call, o)) for o in sorted(aten_entries(), key=str) if str(o) not in EXCLUDED_OPERATORS
    ]
    modules: list[tuple[str, StepDrawer]] = [(c.split("(")[0], partial(_draw_module, c, t)) for c, t in MODULES]
    functions: list[tuple[str, StepDrawer]] = [(t, partial(_draw_function, t)) for t in FUNCTIONS]
    return [operators] * 4 + [modules, functions]


#: Operators that read the result of data movement.
_READERS = tuple(
    f"aten.{name}"
    for name in (
        *("mm.default", "bmm.default", "matmul.default", "linear.default", "addmm.default", "addbmm.default"),
        *(
            "conv1d.default",
            "conv2d.default",
            "max_pool2d.default",
            "avg_pool2d.default",
            "softmax.int",
            "relu.default",
        ),
        *("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "argmax.default", "add.Tensor", "mul.Tensor"),
        *("cat.default", "flip.default", "index_select.default", "sigmoid.default", "relu.default", "pad.default"),
    )
)


def _draw_moved_tensor(d: ProgramBuilder) -> tuple[str, str]:
    """Draw a slice of a tensor, transposed, and usually transposed back past a dimension of size 1."""
    x = d.tensor(lambda t: 2 <= t.dim() <= 4 and t.numel() > 1, lambda: d.shape(d.size(2, 4)))
    axis = d.rng.randrange(x.rank)
    start = d.rng.randrange(x.shape[axis])
    text = f"{x}[{':, ' * axis}{start}:{d.size(start + 1, x.shape[axis])}]"
    order = d.rng.sample(range(x.rank), x.rank)
    text += f".permute({order})"
    ones = d.chance(0.5)
    if ones:
        place = d.size(0, x.rank)
        text += f".unsqueeze({place})"
        order.insert(place, x.rank)
    if d.chance(0.8):
        back = sorted(range(len(order)), key=order.__getitem__)
        if ones:  # the dimension of size 1 may move anywhere
            back.insert(d.size(0, x.rank), back.pop())
        text += f".permute({back})"
    return text, ""


def _draw_reader(make: StepDrawer, d: ProgramBuilder) -> tuple[str, str]:
    """Draw a step that reads the result of the previous step."""
    last = d.steps[-1].name if d.steps else ""
    expression, module = make(d)
    if last and not re.search(rf"\b{last}\b", expression):
        raise NoValidChoice
    return expression, module


@cache
def list_data_movement_steps() -> list[list[tuple[str, StepDrawer]]]:
    """List data movement and operators that read its results, which Vela and this compiler both rewrite."""
    makes = dict(list_steps()[0])
    readers: list[tuple[str, StepDrawer]] = [(name, partial(_draw_reader, makes[name])) for name in _READERS]
    return [[("moved", _draw_moved_tensor)], readers]
