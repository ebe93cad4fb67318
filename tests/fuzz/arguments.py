"""What can be drawn: every operator with a record, by its ATen schema and the constraints below; modules; functions.

``OPERATORS`` is the one place for what a schema does not say. An operator that is not in it is drawn from its schema
alone, so a new record is drawn without an entry here if its arguments are plain tensors, numbers and dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload

from arm_backend_core.ops.catalog import records
from tests.fuzz.generator import ANY, BOOL, FLOATS, INTEGERS, Draw, Impossible, Make, Reference, Shape, finite

Arguments = dict[str, Any]
Strategy = Callable[[Draw, Arguments], Any]


def _first(a: Arguments) -> Reference:
    for value in a.values():
        if isinstance(value, Reference):
            return value
        if isinstance(value, list) and value and isinstance(value[0], Reference):
            return value[0]
    raise Impossible


# -- strategies --------------------------------------------------------------------------------------------------


def _always(value: Any) -> Strategy:
    return lambda d, a: value


def _one(*values: Any) -> Strategy:
    return lambda d, a: d.choose(values)


def _of(dtypes: Sequence[torch.dtype]) -> Strategy:
    return lambda d, a: d.tensor(dtypes=dtypes)


def _like(dtypes: Sequence[torch.dtype] | None = None) -> Strategy:
    return lambda d, a: d.like(_first(a), dtypes)


def _finite(*ranks: int) -> Strategy:
    """A tensor without infinities and NaN, of which kernels that PyTorch chooses between make different things."""
    return lambda d, a: d.tensor(
        lambda x: (not ranks or x.dim() in ranks) and finite(x),
        lambda: d.shape(d.choose(ranks) if ranks else None),
        span=(-2, 2) if d.special else None,
    )


def _one_like_it(d: Draw, a: Arguments) -> Reference:
    first = _first(a)
    return d.tensor(finite, first.shape, (first.tensor.dtype,), span=(-2, 2) if d.special else None)


def _rank(*ranks: int) -> Strategy:
    return lambda d, a: d.tensor(lambda x: x.dim() in ranks, lambda: d.shape(d.choose(ranks)))


def _same(dtypes: Sequence[torch.dtype] = FLOATS) -> Strategy:
    return lambda d, a: d.tensor(shape=_first(a).shape, dtypes=(_first(a).tensor.dtype, *dtypes))


def _positions(count: int, low: int, high: int) -> Strategy:
    """Window sizes, strides and the like: one for each of ``count`` dimensions."""
    return lambda d, a: [d.size(low, high) for _ in range(count)]


def _padding(count: int) -> Strategy:
    """At most half a window."""
    return lambda d, a: [d.size(0, size // 2) for size in a["kernel_size"]]


def _reshaped(d: Draw, a: Arguments) -> list[int]:
    numel = _first(a).tensor.numel()
    shape: list[int] = []
    while len(shape) < d.size(0, 5) and numel > 0:
        shape.append(d.choose([n for n in range(1, numel + 1) if numel % n == 0 and n <= 64]))
        numel //= shape[-1]
    shape.append(numel)
    d.rng.shuffle(shape)
    if 0 not in shape and d.chance(0.3):
        shape[d.rng.randrange(len(shape))] = -1
    return shape


def _permutation(d: Draw, a: Arguments) -> list[int]:
    rank = _first(a).rank
    return [axis - rank if d.chance(0.2) else axis for axis in d.rng.sample(range(rank), rank)]


def _expanded(d: Draw, a: Arguments) -> list[int]:
    sizes = [d.size(1, 4) if size == 1 else d.choose((size, size, -1)) for size in _first(a).shape]
    return [d.size(1, 3) for _ in range(d.choose((0, 0, 1)))] + sizes


def _pad(d: Draw, a: Arguments) -> list[int]:
    if a.get("mode", "constant") != "constant":
        x = _first(a)
        sizes = x.shape[::-1][: d.size(1, min(2, max(1, x.rank - 1)))]
        return [d.size(0, max(0, size - 1)) for size in sizes for _ in range(2)]
    count = d.size(1, max(1, _first(a).rank))
    return [d.size(-1, 3) if d.chance(0.2) else d.size(0, 3) for _ in range(2 * count)]


def _joined(*, equal: bool) -> Strategy:
    """Tensors for ``stack``, or for ``cat`` along an axis that is noted for ``dim``."""

    def strategy(d: Draw, a: Arguments) -> list[Reference]:
        first = d.tensor(lambda x: x.dim() > 0 or equal, lambda: d.shape(d.size(0 if equal else 1, 4)))
        axis = d.axis(first) % max(1, first.rank)
        others = []
        for _ in range(d.size(0, 3)):
            length = first.shape[axis : axis + 1] if equal else (d.size(1, 4),)
            shape = partial(tuple, (*first.shape[:axis], *length, *first.shape[axis + 1 :]))
            others.append(d.tensor(partial(_equal_but, first.shape, None if equal else axis), shape))
        if not equal:
            a["dim"] = d.choose((axis, axis - first.rank))
        return [first, *others]

    return strategy


def _equal_but(shape: Shape, axis: int | None, x: torch.Tensor) -> bool:
    return len(shape) == x.dim() and all(
        i == axis or n == m for i, (n, m) in enumerate(zip(shape, x.shape, strict=True))
    )


def _along(low: int, high: Callable[[int], int]) -> Strategy:
    """An integer that depends on how long the dimension ``dim`` is."""

    def strategy(d: Draw, a: Arguments) -> int:
        if "dim" not in a:
            a["dim"] = d.axis(_first(a))
        x = _first(a)
        length = x.shape[a["dim"]] if x.rank else 1
        return d.size(low, max(low, high(length)))

    return strategy


def _parts(d: Draw, a: Arguments) -> list[int]:
    a["dim"] = d.axis(_first(a))
    left, sizes = _first(a).shape[a["dim"]], []
    while left:
        sizes.append(d.size(1, left))
        left -= sizes[-1]
    return sizes or [0]


def _bounds(d: Draw, a: Arguments) -> int | None:
    if "dim" not in a:
        a["dim"] = d.axis(_first(a))
    length = _first(a).shape[a["dim"]]
    return d.choose((None, d.size(0, length), d.size(-length, length), 2**63 - 1))


def _picked(d: Draw, a: Arguments) -> list[Reference | None]:
    """Indices for some of the dimensions, the same shape for all."""
    x = _first(a)
    shape = d.shape(d.size(1, 2))
    picked = [d.size(0, x.rank - 1) for _ in range(d.size(1, 2))] if x.rank else []
    return [
        d.tensor(shape=shape, dtypes=(torch.int64,), span=(0, size), constant=0.7) if axis in picked else None
        for axis, size in enumerate(x.shape[: max(picked, default=-1) + 1])
    ]


def _loss(*ranks: int) -> dict[str, Strategy]:
    """Scores and a class for each position; now and then class 0 counts for nothing."""

    def target(d: Draw, a: Arguments) -> Reference:
        *lead, classes = (x := _first(a)).shape[: 1 if x.rank == 1 else 2]
        if not classes:
            raise Impossible
        return d.tensor(shape=(*lead, *x.shape[2:]), dtypes=(torch.int64,), span=(0, classes), constant=0.7)

    def weight(d: Draw, a: Arguments) -> Reference | None:
        return d.choose((None, d.constant(_first(a).shape[min(1, _first(a).rank - 1)], span=(0.5, 2))))

    return {
        "self": _rank(*ranks),
        "target": target,
        "weight": weight,
        "reduction": _one(0, 1, 2),
        "ignore_index": _one(-100, 0),
    }


def _labels(d: Draw, a: Arguments) -> Reference:
    """As many classes as there are, of which those before the first -1 count."""
    if not (shape := _first(a).shape)[-1]:
        raise Impossible
    return d.tensor(shape=shape, dtypes=(torch.int64,), span=(-1, shape[-1]), constant=0.7)


def _channels(*, positive: bool = False, optional: bool = True) -> Strategy:
    def strategy(d: Draw, a: Arguments) -> Reference | None:
        if optional and d.chance(0.15):
            return None
        return d.constant(_first(a).shape[1], span=(0.5, 2) if positive else (-1, 1))

    return strategy


def _suffix(d: Draw, a: Arguments) -> list[int]:
    x = _first(a)
    if not x.rank:  # PyTorch's norms disagree on whether there is such a thing
        raise Impossible
    return list(x.shape[-d.size(1, max(1, min(2, x.rank))) :])


def _normalized(d: Draw, a: Arguments) -> Reference | None:
    return None if d.chance(0.3) else d.constant(*a["normalized_shape"])


def _image(spatial: int) -> Strategy:
    return lambda d, a: d.tensor(
        lambda x: finite(x) and (x.dim() == spatial + 2 or (x.dim() == spatial + 1 and d.chance(0.2))),
        lambda: (d.size(1, 2), d.size(1, 6), *(d.size(1, 12) for _ in range(spatial))),
        span=(-2, 2) if d.special else None,
    )


def _filter(spatial: int | None, *, transposed: bool = False) -> Strategy:
    """The weight of a convolution; notes ``groups`` for later, and ``transposed`` where the operator has it."""

    def strategy(d: Draw, a: Arguments) -> Reference:
        x = _first(a)
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


def _bias(d: Draw, a: Arguments) -> Reference | None:
    return None if d.chance(0.3) else d.constant(a["_out"])


def _spatial(low: int, high: int) -> Strategy:
    return lambda d, a: [d.size(low, high) for _ in range(a["weight"].rank - 2)]


def _convolution(spatial: int | None, **more: Strategy) -> dict[str, Strategy]:
    image = _image(spatial) if spatial else (lambda d, a: _image(d.choose((1, 2, 2, 3)))(d, a))
    return {
        "input": image,
        "weight": _filter(spatial),
        "bias": _bias,
        "stride": _spatial(1, 3),
        "padding": _spatial(0, 2),
        "dilation": _spatial(1, 2),
        "output_padding": _spatial(0, 1),
        **more,
    }


def _inner(*, transposed: bool = False, ranks: Sequence[int] = (1, 2)) -> Strategy:
    """The second factor of a matrix product: the first one's last dimension meets its last but one."""

    def strategy(d: Draw, a: Arguments) -> Reference:
        x = _first(a)
        k, n = x.shape[-1], d.size(1, 8)
        lead = x.shape[:-2] if 3 in ranks else ()
        a["_out"] = n
        shape = (*lead, *((n, k) if transposed else (k, n)))
        if x.rank == 2 and 1 in ranks and d.chance(0.2):
            shape = (k,)
        return d.constant(*shape) if d.chance(0.5) else d.tensor(shape=shape)

    return strategy


def _pool(spatial: int, *ranks: int) -> dict[str, Strategy]:
    """Window, stride, padding and dilation of pooling, of ``fold`` and of its reverse."""
    return {
        "self": lambda d, a: d.tensor(
            lambda x: x.dim() in ranks and min(x.shape) > 0,
            lambda: (1, d.size(1, 6), *(d.size(1, 14) for _ in range(spatial)))[-d.choose(ranks) :],
        ),
        "kernel_size": _positions(spatial, 1, 4),
        "stride": lambda d, a: d.choose(([], [d.size(1, 3) for _ in range(spatial)])),
        "padding": _padding(spatial),
        "dilation": _one([1] * spatial, [1] * spatial, [2] * spatial),
        "divisor_override": _one(None, None, 3),
    }


_FACTORS = ("scales", "scales_d", "scales_h", "scales_w")


def _upsample(spatial: int, *, vec: bool) -> dict[str, Strategy]:
    def output(d: Draw, a: Arguments) -> list[int] | None:
        if vec and d.chance(0.5):
            a["scale_factors"] = [d.choose((2.0, 0.5, 1.5, 3.0)) for _ in range(spatial)]
            return None
        a["scale_factors"] = None
        return [d.size(1, 16 // spatial**2 + 4) for _ in range(spatial)]

    first = "input" if vec else "self"
    return {first: _finite(spatial + 2), "output_size": output, **dict.fromkeys(_FACTORS, _always(None))}


def _windows(d: Draw, a: Arguments) -> Reference:
    """What ``fold`` lays into an image; notes the image's size and the window's."""
    kernel, stride, dilation = ([d.size(1, high) for _ in range(2)] for high in (3, 3, 2))
    padding, counts = [d.size(0, size // 2) for size in kernel], [d.size(1, 4) for _ in range(2)]
    a |= {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    a["output_size"] = [
        max((counts[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i], 1) for i in range(2)
    ]
    return d.tensor(shape=(d.size(1, 2), d.size(1, 4) * kernel[0] * kernel[1], counts[0] * counts[1]))


def _recurrent(gates: int, states: int) -> dict[str, Strategy]:
    """Input, states and parameters of a recurrent layer with ``gates`` gates."""

    def parameters(d: Draw, a: Arguments) -> list[Reference]:
        x, hidden = _first(a), d.size(1, 6)
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

    def state(d: Draw, a: Arguments) -> Any:
        a["params"] = parameters(d, a)
        return a["hx"]

    return {"input": lambda d, a: d.tensor(shape=(d.size(1, 4), d.size(1, 4), d.size(1, 6))), "hx": state}


def _recurrent_cell(gates: int, states: int) -> dict[str, Strategy]:
    """One step, [batch, features] each."""

    def state(d: Draw, a: Arguments) -> Any:
        x, hidden = _first(a), d.size(1, 6)
        a |= {"w_ih": d.constant(gates * hidden, x.shape[1]), "w_hh": d.constant(gates * hidden, hidden)}
        biased = d.chance(0.7)
        a |= {f"b_{side}": d.constant(gates * hidden) if biased else None for side in ("ih", "hh")}
        first, *more = [d.tensor(shape=(x.shape[0], hidden)) for _ in range(states)]
        return [first, *more] if states > 1 else first

    return {"input": lambda d, a: d.tensor(shape=(d.size(1, 4), d.size(1, 6))), "hx": state}


_ATTENTION = {"qkv_weight": "3E E", "qkv_bias": "3E", "proj_weight": "E E", "proj_bias": "E"}
_FEED_FORWARD = {"ffn_weight_1": "F E", "ffn_bias_1": "F", "ffn_weight_2": "E F", "ffn_bias_2": "E"}
_NORMS = {f"norm_{part}_{i}": "E" for part in ("weight", "bias") for i in (1, 2)}


def _attention(*inputs: str, shapes: dict[str, str]) -> dict[str, Strategy]:
    """Attention with its projections and what follows; E is the width, F that of what is hidden."""

    def sized(*shape: str) -> Strategy:
        def strategy(d: Draw, a: Arguments) -> Reference:
            width, hidden = a["embed_dim"], a.setdefault("_hidden", d.size(1, 8))
            return d.constant(*({"E": width, "3E": 3 * width, "F": hidden}[size] for size in shape))

        return strategy

    def heads(d: Draw, a: Arguments) -> int:
        return d.choose([n for n in (1, 2, 3, 4) if a["embed_dim"] % n == 0])

    first, *others = inputs
    return {
        first: _rank(3),
        **{name: lambda d, a: _first(a) for name in others},
        "embed_dim": lambda d, a: _first(a).shape[-1],
        "num_heads": heads,
        "num_head": heads,
        "eps": _one(1e-5),
        "mask": _always(None),
        "mask_type": _always(None),
        **{name: sized(*shape.split()) for name, shape in shapes.items()},
    }


def _places(low: int = 1, high: int = 6) -> Strategy:
    """Indices along ``dim``."""

    def strategy(d: Draw, a: Arguments) -> Reference:
        x = _first(a)
        size = x.shape[a["dim"]] if x.rank else 1
        return d.tensor(shape=(d.size(low, high),), dtypes=(torch.int64,), span=(0, size), constant=0.5)

    return strategy


def _rows(d: Draw, a: Arguments) -> Reference:
    """As many rows as there are indices, along ``dim``."""
    shape = list(_first(a).shape)
    shape[a["dim"]] = a["index"].shape[0]
    return d.tensor(shape=tuple(shape), dtypes=(_first(a).tensor.dtype,))


def _scattered(d: Draw, a: Arguments) -> Reference:
    """An index along ``dim`` for each element of a part of the tensor."""
    x = _first(a)
    shape = [n if d.chance(0.7) else d.size(1, max(n, 1)) for n in x.shape]
    size = x.shape[a["dim"]] if x.rank else 1
    return d.tensor(shape=tuple(shape), dtypes=(torch.int64,), span=(0, max(size, 1)), constant=0.5)


def _of_index(d: Draw, a: Arguments) -> Reference:
    return d.tensor(shape=a["index"].shape, dtypes=(_first(a).tensor.dtype,))


def _of_dimension(d: Draw, a: Arguments) -> int:
    """A length of the dimension ``dimension`` at most."""
    x = _first(a)
    return d.size(1, x.shape[a["dimension"]] if x.rank else 1)


def _memory(d: Draw, a: Arguments) -> Reference:
    """A tensor whose memory is its own."""
    return d.tensor(shape=d.shape(d.size(1, 4)), span=(-2, 2))


def _steps(d: Draw, a: Arguments) -> list[int]:
    """Strides for ``size`` that stay inside; ``storage_offset`` is what is left."""
    left, steps = _first(a).tensor.numel() - 1, []
    for size in a["size"]:
        steps.append(d.size(0, left // max(size - 1, 1)))
        left -= steps[-1] * (size - 1)
    a["storage_offset"] = d.size(0, max(left, 0))
    return steps


_STRIDED: dict[str, Strategy] = {
    "self": _memory,
    "size": lambda d, a: [d.size(1, 3) for _ in range(d.size(0, 3))],
    "stride": _steps,
}


def _selected(d: Draw, a: Arguments) -> Reference:
    a["dim"], x = d.axis(_first(a)), _first(a)
    axis = a["dim"] % max(x.rank, 1)
    return d.tensor(shape=(*x.shape[:axis], *x.shape[axis + 1 :]))


def _sliced(d: Draw, a: Arguments) -> Reference:
    a["dim"], x = d.axis(_first(a)), _first(a)
    a |= {"start": _bounds(d, a), "end": _bounds(d, a), "step": d.choose((1, 1, 2))}
    axis = a["dim"] % max(x.rank, 1)
    length = len(range(x.shape[axis])[a["start"] : a["end"] : a["step"]])
    return d.tensor(shape=(*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _amounts(d: Draw, a: Arguments) -> Reference:
    """By how many bits numbers are shifted."""
    shape = next((x.shape for x in a.values() if isinstance(x, Reference)), (3,))
    return d.tensor(shape=shape, dtypes=(torch.int32,), span=(0, 9))


def _edges(rank: int) -> dict[str, Strategy]:
    return {
        "self": lambda d, a: d.tensor(shape=tuple(d.size(3, 6) for _ in range(rank + 1))),
        "padding": lambda d, a: [d.size(0, 2) for _ in range(2 * rank)],
    }


def _countable(d: Draw, a: Arguments) -> Reference:
    """Quotients that float32 counts: beyond 2**22 a remainder is off, as its rule says."""
    return d.tensor(lambda x: finite(x) and bool((x.abs() < 2**18).all()), span=(-1e4, 1e4))


def _divisor(d: Draw, a: Arguments) -> Reference:
    """No element is near 0."""
    return d.tensor(shape=_first(a).shape, dtypes=FLOATS[:1], span=(0.5, 4))


_INDEXED = {"index": _places(), "source": _rows, "value": lambda d, a: d.number()}
_SCATTER = {"index": _scattered, "src": _of_index, "value": lambda d, a: d.number()}


_BAG: dict[str, Strategy] = {
    "weight": lambda d, a: d.constant(d.size(4, 9), d.size(1, 8)),
    "indices": lambda d, a: d.tensor(shape=(d.size(6, 9),), dtypes=(torch.int64,), span=(0, 4)),
    "offsets": lambda d, a: d.tensor(shape=(1,), dtypes=(torch.int64,), span=(0, 1)),  # more would have to be sorted
    "mode": _one(0, 1, 2),
    "per_sample_weights": _always(None),
    "include_last_offset": _always(False),
    "padding_idx": _one(-1, 0, 2),
}


def _ordered(d: Draw, a: Arguments) -> float | None:
    return None if a["min"] is not None and d.chance(0.2) else d.choose((0, 0.5, 1.0, 6, 2.5))


# -- the table ---------------------------------------------------------------------------------------------------

_LOGIC = {"self": _of(INTEGERS + BOOL), "other": _like(INTEGERS + BOOL)}
_LOGIC_NUMBER = {"other": _one(0, 1, 3, 5, -1)}
_SHIFTS = ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
_SHIFT = {"self": _of((torch.int32, torch.int8, torch.int16)), "other": _one(0, 1, 3)}
_BATCH_NORM: dict[str, Strategy] = {
    "input": lambda d, a: d.tensor(lambda x: x.dim() >= 2, lambda: d.shape(d.size(2, 4))),
    "weight": _channels(),
    "bias": _channels(),
    "running_mean": _channels(optional=False),
    "running_var": _channels(positive=True, optional=False),
    "momentum": _always(0.1),
    "eps": _one(1e-5, 1e-3),
}
_CAT = {"tensors": _joined(equal=False)}
_CONVERT: dict[str, Strategy] = {
    "self": _of(ANY),
    "dtype": lambda d, a: d.choose([torch.float32] * 2 + [x for x in ANY if not (d.integer and x.is_floating_point)]),
}

_ILL = "the error of what a random matrix gives has no bound"
_SCALES = "its scales are constants above 0"
_TYPES = "graphs are not drawn in its types, or no CPU has a kernel for it"
#: Operators that no graph is drawn with, and why; they have rows in ``tests/ops/test_composites.py``.
UNDRAWN: dict[str, str] = {
    "aten._linalg_slogdet.default": _ILL,
    "aten.linalg_inv_ex.default": _ILL,
    "aten.linalg_matrix_exp.default": _ILL,
    "aten._linalg_solve_ex.default": _ILL,
    "aten.linalg_cholesky_ex.default": _ILL,
    "aten.geqrf.default": _ILL,
    "aten.linalg_householder_product.default": "its factors are another operator's",
    "aten.ormqr.default": "its factors are another operator's",
    "aten.linalg_lu.default": _ILL,
    "aten._linalg_eigh.default": _ILL,
    "aten._linalg_svd.default": _ILL,
    "aten.linalg_pinv.atol_rtol_tensor": _ILL,
    "aten.linalg_lu_factor_ex.default": _ILL,
    "aten.linalg_lu_solve.default": _ILL,
    "aten.lu_unpack.default": "its factors and pivots are another operator's",
    "aten.linalg_solve_triangular.default": _ILL,
    "aten.fake_quantize_per_tensor_affine.tensor_qparams": _SCALES,
    "aten.fake_quantize_per_channel_affine.default": _SCALES,
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _SCALES,
    "aten._fake_quantize_learnable_per_tensor_affine.default": _SCALES,
    "aten._fake_quantize_learnable_per_channel_affine.default": _SCALES,
    "aten.fake_quantize_per_channel_affine_cachemask.default": _SCALES,
    "aten.mm.dtype": _TYPES,
    "aten.bmm.dtype": _TYPES,
    "aten.addmm.dtype": _TYPES,
    "aten._scaled_mm.default": _TYPES,
    "aten.max_unpool3d.default": "its indices must be those of a pooling; tests/ops/test_composites.py has them",
    "aten._grouped_mm.default": _TYPES,
}
_FAKE: dict[str, Strategy] = {
    "self": _finite(),  # of others each processor makes another integer
    "scale": _one(0.1, 0.037, 1.0),
    "zero_point": _one(0, 3, -5),
    "quant_min": _one(-128, -8, 0),
    "quant_max": _one(127, 7),
}
#: Constraints by operator (all its overloads, or one) and argument; ``dim`` and other usual names are below.
OPERATORS: dict[str, dict[str, Strategy]] = {
    "_to_copy": _CONVERT,
    "fake_quantize_per_tensor_affine": _FAKE,
    "fake_quantize_per_tensor_affine_cachemask": _FAKE,
    "to": {**_CONVERT, "device": _always(torch.device("cpu")), "other": _of(ANY)},
    "type_as": {"self": _of(ANY), "other": _of(ANY)},
    "conv1d": _convolution(1),
    "conv2d": _convolution(2),
    "conv3d": _convolution(3),
    "conv1d.padding": _convolution(1, padding=_one("same", "valid")),
    "conv2d.padding": _convolution(2, padding=_one("same", "valid")),
    "conv3d.padding": _convolution(3, padding=_one("same", "valid")),
    "convolution": _convolution(None),
    "_convolution": _convolution(None),
    "conv_transpose1d": _convolution(1, weight=_filter(1, transposed=True)),
    "conv_transpose2d": _convolution(2, weight=_filter(2, transposed=True)),
    "conv_tbc": {
        "self": lambda d, a: d.tensor(shape=(d.size(3, 6), 2, d.size(1, 4))),
        "weight": lambda d, a: d.constant(d.size(1, 3), _first(a).shape[2], d.size(1, 4)),
        "bias": lambda d, a: d.tensor(shape=(a["weight"].shape[2],)),
        "pad": _one(0, 1),
    },
    "add.Tensor": {"self": _of(FLOATS + INTEGERS)},
    "sub.Tensor": {"self": _of(FLOATS + INTEGERS)},
    "mul.Tensor": {"self": _of(ANY)},
    "pow.Tensor_Tensor": {"other": _like(FLOATS)},
    "prelu": {"weight": lambda d, a: d.constant(d.choose((1, _first(a).shape[1] if _first(a).rank > 1 else 1)))},
    "_prelu_kernel": {"weight": _like()},
    "embedding": {
        "weight": lambda d, a: d.constant(d.size(4, 9), d.size(1, 8)),
        "indices": lambda d, a: d.tensor(
            shape=lambda: d.shape(d.size(0, 3)), dtypes=(torch.int64, torch.int32), span=(0, 4)
        ),
        "padding_idx": _one(-1, 0),
    },
    "nll_loss_forward": _loss(1, 2, 2),
    "nll_loss2d_forward": _loss(4),
    "multi_margin_loss": {
        **{name: drawn for name, drawn in _loss(1, 2).items() if name != "ignore_index"},
        "p": _one(1, 2),
        "margin": _one(1, 0.5),
    },
    "multilabel_margin_loss_forward": {"self": _rank(1, 2), "target": _labels, "reduction": _one(0, 1, 2)},
    "index": {"indices": _picked},
    "_unsafe_index": {"indices": _picked},
    "index_select": {
        "index": lambda d, a: d.tensor(
            shape=(d.size(1, 6),), dtypes=(torch.int64,), span=(0, max(1, _first(a).shape[a["dim"]])), constant=0.7
        ),
    },
    "linear": {"input": _rank(1, 2, 2, 3, 4), "weight": _inner(transposed=True), "bias": _bias},
    "_int_mm": {
        "self": lambda d, a: d.tensor(shape=(d.size(17, 20), 8), dtypes=(torch.int8,)),
        "mat2": lambda d, a: d.tensor(shape=(8, 8), dtypes=(torch.int8,)),
    },
    "mm": {"self": _rank(2), "mat2": _inner(ranks=())},
    "bmm": {"self": _rank(3), "mat2": _inner(ranks=(3,))},
    "matmul": {"self": _rank(1, 2, 3, 4), "other": lambda d, a: _inner(ranks=d.choose(((1,), (3,))))(d, a)},
    "where": {"condition": _of(BOOL)},
    "bitwise_and": _LOGIC,
    "bitwise_or": _LOGIC,
    "bitwise_xor": _LOGIC,
    "__and__": _LOGIC,
    "__or__": _LOGIC,
    "__xor__": _LOGIC,
    "bitwise_and.Scalar": _LOGIC_NUMBER,
    "bitwise_and.Scalar_Tensor": {"self": _one(0, 1, 3, 5, -1), "other": _of(INTEGERS)},
    "__and__.Scalar": {"self": _of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_or.Scalar": _LOGIC_NUMBER,
    "bitwise_or.Scalar_Tensor": {"self": _one(0, 1, 3, 5, -1), "other": _of(INTEGERS)},
    "__or__.Scalar": {"self": _of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_xor.Scalar": _LOGIC_NUMBER,
    "bitwise_xor.Scalar_Tensor": {"self": _one(0, 1, 3, 5, -1), "other": _of(INTEGERS)},
    "__xor__.Scalar": {"self": _of(INTEGERS), **_LOGIC_NUMBER},
    "bitwise_not": {"self": _of(INTEGERS + BOOL)},
    "logical_and": {"self": _of(ANY), "other": _like(ANY)},
    "logical_or": {"self": _of(ANY), "other": _like(ANY)},
    "logical_xor": {"self": _of(ANY), "other": _like(ANY)},
    "logical_not": {"self": _of(ANY)},
    "eq": {"self": _of(ANY)},
    "ne": {"self": _of(ANY)},
    "view": {"self": _of(ANY), "size": _reshaped},
    "reshape": {"shape": _reshaped},
    "_unsafe_view": {"size": _reshaped},
    "view_copy": {"size": _reshaped},
    "unflatten": {
        "sizes": lambda d, a: [1, -1] if d.chance(0.5) else [-1],
        "self": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
    },
    "dropout": {"p": _always(0.5)},
    "feature_dropout": {"p": _always(0.5)},
    "permute": {"dims": _permutation},
    "permute_copy": {"dims": _permutation},
    "t": {"self": _rank(0, 1, 2, 2)},
    "t_copy": {"self": _rank(0, 1, 2, 2)},
    "numpy_T": {"self": _rank(0, 1, 2, 2)},
    "expand": {"size": _expanded, "implicit": _always(False)},
    "expand_copy": {"size": _expanded, "implicit": _always(False)},
    "expand_as": {
        "self": lambda d, a: d.tensor(lambda x: 1 in x.shape, lambda: (1, d.size(), 1)[d.size(0, 2) :]),
        "other": lambda d, a: d.tensor(shape=tuple(n if n > 1 else d.size(1, 5) for n in _first(a).shape)),
    },
    "repeat": {"repeats": lambda d, a: [d.size(1, 3) for _ in range(_first(a).rank + d.choose((0, 0, 1)))]},
    "cat": _CAT,
    "concat": _CAT,
    "concatenate": _CAT,
    "stack": {"tensors": _joined(equal=True)},
    "slice": {"start": _bounds, "end": _bounds, "step": _one(1, 1, 2, 3)},
    "slice_copy": {"start": _bounds, "end": _bounds, "step": _one(1, 1, 2, 3)},
    "roll": {
        "dims": lambda d, a: a["_dims"],
        "shifts": lambda d, a: (
            [d.size(-5, 5) for _ in a.setdefault("_dims", d.axes(_first(a)) if d.chance(0.8) else [])]
            or [d.size(-5, 5)]
        ),
    },
    "select": {"index": _along(0, lambda n: n - 1)},
    "select_copy": {"index": _along(0, lambda n: n - 1)},
    "split.Tensor": {"split_size": _along(1, lambda n: n)},
    "split_copy.Tensor": {"split_size": _along(1, lambda n: n)},
    "split.sizes": {"split_size": _parts},
    "split_with_sizes": {"split_sizes": _parts},
    "split_with_sizes_copy": {"split_sizes": _parts},
    "chunk": {"chunks": _along(1, lambda n: 4)},
    "constant_pad_nd": {"pad": _pad},
    **{f"{kind}_pad{rank}d": _edges(rank) for kind in ("reflection", "replication") for rank in (1, 2, 3)},
    "alpha_dropout": {"train": _always(False), "p": _always(0.5)},
    "feature_alpha_dropout": {"train": _always(False), "p": _always(0.5)},
    "_reshape_copy": {"size": _reshaped},
    "_reshape_alias": {
        "size": lambda d, a: list(_first(a).shape),
        "stride": lambda d, a: list(torch.empty(_first(a).shape).stride()),
    },
    "native_batch_norm": _BATCH_NORM,
    "_native_batch_norm_legit.no_stats": {**_BATCH_NORM, "training": _always(True)},
    "_linalg_det": {"A": lambda d, a: d.tensor(shape=(d.size(1, 3), 2, 2), span=(-2, 2))},
    "histc": {"bins": _one(1, 5), "min": _one(-1), "max": _one(2)},
    "polygamma": {"n": _one(1, 2)},
    "_weight_int8pack_mm": {
        "self": lambda d, a: d.tensor(shape=(d.size(1, 4), 8), span=(-2, 2)),
        "mat2": lambda d, a: d.tensor(shape=(8, 8), dtypes=(torch.int8,)),
        "scales": lambda d, a: d.constant(8),
    },
    "_fused_rms_norm": {"normalized_shape": _suffix, "weight": _normalized, "eps": _one(1e-5, None)},
    "_scaled_dot_product_flash_attention_for_cpu": {  # of no elements it ends the process
        "query": lambda d, a: d.tensor(
            lambda x: x.dim() == 4 and x.numel() > 0 and finite(x),
            lambda: tuple(d.size(1, 8) for _ in range(4)),
            span=(-2, 2) if d.special else None,
        ),
        "key": lambda d, a: d.tensor(shape=_first(a).shape),
        "value": lambda d, a: d.tensor(shape=_first(a).shape),
        "dropout_p": _always(0.0),
        "attn_mask": _always(None),
        "scale": _one(None, 0.3),
    },
    "scatter.reduce": {"reduce": _one("add", "multiply")},
    "scatter.value_reduce": {"reduce": _one("add", "multiply")},
    # Elements drawn are not unique, for which PyTorch's other way has wrong answers.
    "isin": {"assume_unique": _always(False)},
    "isin.Tensor_Scalar": {"test_element": _one(0, 1, 0.5), "assume_unique": _always(False)},
    "pad": {"mode": _one("constant", "constant", "reflect", "replicate", "circular"), "pad": _pad},
    "batch_norm": _BATCH_NORM,
    "scaled_dot_product_attention": {
        "query": _finite(3, 4),
        "key": _one_like_it,
        "value": _one_like_it,
        "attn_mask": _always(None),
        "enable_gqa": _always(False),
    },
    "var_mean": {"self": _finite()},
    "_add_relu": {"self": _finite()},  # of NaN, PyTorch's kernel makes 0 or NaN
    "std_mean": {"self": _finite()},
    "signbit": {"self": _finite()},  # PyTorch tells the sign of NaN
    "copysign.Tensor": {"other": lambda d, a: d.tensor(finite, _first(a).shape, span=(-2, 2) if d.special else None)},
    "_native_batch_norm_legit_no_training": _BATCH_NORM,
    "layer_norm": {
        "input": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
        "normalized_shape": _suffix,
        "weight": _normalized,
        "bias": _normalized,
        "eps": _one(1e-5, 1e-3),
    },
    "rms_norm": {"normalized_shape": _suffix, "weight": _normalized, "eps": _one(1e-5, None)},
    "native_group_norm": {
        "input": _rank(3, 4),
        "N": lambda d, a: _first(a).shape[0],
        "C": lambda d, a: _first(a).shape[1],
        "HxW": lambda d, a: _first(a).tensor[0, 0].numel(),
        "group": lambda d, a: d.choose([n for n in range(1, 13) if _first(a).shape[1] % n == 0]),
        "weight": _channels(),
        "bias": _channels(),
        "eps": _one(1e-5),
    },
    "native_layer_norm": {"normalized_shape": _suffix, "weight": _normalized, "bias": _normalized, "eps": _one(1e-5)},
    "group_norm": {
        "input": lambda d, a: d.tensor(lambda x: x.dim() >= 2, lambda: d.shape(d.size(3, 4))),
        "num_groups": lambda d, a: d.choose([n for n in range(1, 13) if _first(a).shape[1] % n == 0]),
        "weight": _channels(),
        "bias": _channels(),
        "eps": _one(1e-5),
    },
    "instance_norm": {
        **_BATCH_NORM,
        "running_mean": _always(None),  # it would be written to
        "running_var": _always(None),
        "use_input_stats": _always(True),
    },
    "_softmax": {"half_to_float": _always(False)},
    "_log_softmax": {"half_to_float": _always(False)},
    "max_pool2d": _pool(2, 4, 4, 3),
    "max_pool1d": _pool(1, 3, 3, 2),
    "max_pool2d_with_indices": _pool(2, 4, 4, 3),
    "avg_pool2d": _pool(2, 4, 4, 3),
    "avg_pool1d": _pool(1, 3, 3, 2),
    **{
        f"{kind}_pool{n}d": {"self": _rank(n + 2, n + 2, n + 1), "output_size": _positions(n, 1, 5)}
        for kind in ("adaptive_avg", "_adaptive_avg", "adaptive_max")
        for n in (2, 3)
    },
    "adaptive_avg_pool1d": {"self": _rank(3, 3, 2), "output_size": _positions(1, 1, 6)},
    "max_pool3d_with_indices": _pool(3, 5, 5, 4),
    "avg_pool3d": _pool(3, 5, 5, 4),
    "im2col": _pool(2, 4, 4, 3),
    "col2im": {"self": _windows},
    **{
        f"{kind}{n}d.{form}": _upsample(n, vec=form == "vec")
        for n, linear in enumerate(("linear", "bilinear", "trilinear"), 1)
        for kind in ("upsample_nearest", "_upsample_nearest_exact", f"upsample_{linear}")
        for form in ("default", "vec")
    },
    # PyTorch fills a column that is resized alone with its first element.
    **{
        f"_upsample_{kind}2d_aa": {**_upsample(2, vec=False), "output_size": lambda d, a: [d.size(1, 9), d.size(2, 9)]}
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    **{f"upsample_bicubic2d.{form}": _upsample(2, vec=form == "vec") for form in ("default", "vec")},
    "lstm": _recurrent(4, 2),
    "gru": _recurrent(3, 1),
    "rnn_tanh": _recurrent(1, 1),
    "rnn_relu": _recurrent(1, 1),
    "lstm_cell": _recurrent_cell(4, 2),
    "gru_cell": _recurrent_cell(3, 1),
    "rnn_tanh_cell": _recurrent_cell(1, 1),
    "rnn_relu_cell": _recurrent_cell(1, 1),
    "_transformer_encoder_layer_fwd": _attention("src", shapes=_ATTENTION | _NORMS | _FEED_FORWARD),
    "_native_multi_head_attention": _attention("query", "key", "value", shapes=_ATTENTION),
    "addbmm": {
        "self": _rank(2),
        "batch1": lambda d, a: d.constant(d.size(1, 3), _first(a).shape[0], d.size(1, 6)),
        "batch2": lambda d, a: d.constant(a["batch1"].shape[0], a["batch1"].shape[2], _first(a).shape[1]),
        "beta": _one(1, 0.5),
    },
    "_cdist_forward": {
        "x1": _rank(2, 3),
        "x2": lambda d, a: d.tensor(shape=(*_first(a).shape[:-2], d.size(1, 5), _first(a).shape[-1])),
        "p": _one(2.0, 1.0),
        "compute_mode": _always(None),
    },
    "conv_transpose3d": _convolution(3, weight=_filter(3, transposed=True)),
    "grid_sampler_2d": {
        "input": _image(2),
        "grid": lambda d, a: d.tensor(shape=(_first(a).shape[0], d.size(1, 4), d.size(1, 4), 2), span=(-1.2, 1.2)),
        "interpolation_mode": _one(0, 0, 1),
        "padding_mode": _one(0, 1, 2),
    },
    "grid_sampler_3d": {
        "input": _image(3),
        "grid": lambda d, a: d.tensor(shape=(_first(a).shape[0], 2, d.size(1, 3), 2, 3), span=(-1.2, 1.2)),
        "interpolation_mode": _one(0, 0, 1),
        "padding_mode": _one(0, 1, 2),
    },
    "_pdist_forward": {"self": _rank(2), "p": _one(2.0, 1.0)},
    "embedding_bag": _BAG,
    "embedding_bag.padding_idx": _BAG | {"padding_idx": _one(None, 0, 2)},
    "_embedding_bag": _BAG,
    "_embedding_bag_forward_only": _BAG | {"mode": _always(2)},  # of others its further results are not as it says
    "index_reduce": _INDEXED | {"reduce": _one("mean", "prod", "amax", "amin")},
    "index_fill": _INDEXED,
    "index_fill.int_Tensor": {"value": lambda d, a: d.tensor(shape=())},
    "index_copy": _INDEXED,
    "index_add": _INDEXED,
    "index_put": {
        "indices": lambda d, a: [_places()(d, a | {"dim": 0})],
        "values": lambda d, a: d.tensor(shape=(*a["indices"][0].shape, *_first(a).shape[1:])),
        "self": lambda d, a: d.tensor(lambda x: x.dim() > 0, lambda: d.shape(d.size(1, 4))),
    },
    "gather": _SCATTER,
    "scatter": _SCATTER,
    "scatter_add": _SCATTER,
    "scatter_reduce": _SCATTER | {"reduce": _one("sum", "prod", "mean", "amax", "amin")},
    "masked_scatter": {"mask": _like(BOOL), "source": _same()},
    "take": {
        "index": lambda d, a: d.tensor(shape=(d.size(1, 5),), dtypes=(torch.int64,), span=(0, _first(a).tensor.numel()))
    },
    "put": {  # of equal indices PyTorch lets any count
        "index": lambda d, a: d.tensor(
            shape=(d.size(1, 5),), dtypes=(torch.int64,), span=(0, _first(a).tensor.numel())
        ),
        "source": lambda d, a: d.tensor(shape=a["index"].shape, dtypes=(_first(a).tensor.dtype,)),
        "accumulate": _always(True),
    },
    "_unsafe_masked_index": {
        "self": lambda d, a: d.tensor(lambda x: x.dim() == 1, lambda: d.shape(1)),
        "mask": lambda d, a: d.tensor(shape=(4,), dtypes=BOOL),
        "indices": lambda d, a: [d.tensor(shape=(4,), dtypes=(torch.int64,), span=(-3, 9))],
    },
    "bucketize": {"boundaries": lambda d, a: d.constant(1, span=(-2, 2))},  # more would have to be sorted
    "searchsorted": {
        "sorted_sequence": lambda d, a: d.tensor(shape=(1,), span=(-2, 2)),
        "side": _always(None),
        "sorter": _always(None),
    },
    "histogram.bins_tensor": {"bins": lambda d, a: d.tensor(shape=(2,), span=(-2, 2))},  # a sample begins with its span
    "kthvalue": {"k": _along(1, lambda n: n)},
    "topk": {"k": _along(1, lambda n: n)},
    "unfold": {"size": _of_dimension, "step": _one(1, 2, 3)},
    "unfold_copy": {"size": _of_dimension, "step": _one(1, 2, 3)},
    "as_strided": _STRIDED,
    "as_strided_copy": _STRIDED,
    "select_scatter": {"index": _along(0, lambda n: n - 1), "src": _selected},
    "slice_scatter": {"start": _bounds, "end": _bounds, "step": _one(1, 1, 2), "src": _sliced},
    "remainder.Tensor": {"self": _countable, "other": _divisor},
    "remainder.Scalar": {"self": _countable},
    "floor_divide.default": {"other": _divisor},
    "div.Tensor_mode": {"other": _divisor, "rounding_mode": _one(None, "floor", "trunc")},
    "div.Scalar_mode": {"rounding_mode": _one(None, "floor", "trunc")},
    "meshgrid": {
        "tensors": lambda d, a: [_rank(0, 1, 1)(d, a) for _ in range(d.size(1, 3))],
        "indexing": _one("ij", "xy"),
    },
    "clamp.Tensor": {"min": _like(), "max": _like()},
    "clamp": {"min": _one(None, -1, -0.5, 0, -2.5), "max": _ordered},
    "hardtanh": {"min_val": _one(-1, -0.5, 0), "max_val": _one(1, 0.5, 6)},
    "gelu": {"approximate": _one("none", "tanh")},
    "round.decimals": {"decimals": _one(0, 1, 2, -1)},
    "leaky_relu": {"negative_slope": _one(0.01, 0.2, 1.5, 0)},
    "elu": {"alpha": _one(1, 0.5), "scale": _one(1, 2), "input_scale": _one(1, 0.5)},
    "softplus": {"beta": _one(1, 2.0), "threshold": _one(20, 3.0)},
    "hardshrink": {"lambd": _one(0.5, 0)},
    "softshrink": {"lambd": _one(0.5, 0)},
    "celu": {"alpha": _one(1.0, 0.5)},
    "logit": {"eps": _one(None, 0.1)},
    **{
        str(overload).removeprefix("aten."): {"x": _finite(), "n": _one(-1, 0, 1, 2, 5)}
        for overload in records()
        if "polynomial" in str(overload)
    },
    **dict.fromkeys(_SHIFTS, _SHIFT),
    **{f"{name}.Tensor": _SHIFT | {"other": _amounts} for name in _SHIFTS},
    **{f"bitwise_{way}_shift.Scalar_Tensor": {"self": _one(1, 5), "other": _amounts} for way in ("left", "right")},
}

#: Arguments that mean the same wherever they occur.
NAMED: dict[str, Strategy] = {
    "train": _always(False),
    "training": _always(False),
    "dropout_p": _always(0.0),
    "dtype": _one(None, None, None, torch.float32),
    "memory_format": _one(None, None, torch.contiguous_format),
    "layout": _always(None),
    "device": _always(None),
    "pin_memory": _always(None),
    "non_blocking": _always(False),
    "copy": _one(False, True),
    "alpha": _one(1, 1, 2, 0.5),
    "cudnn_enabled": _always(True),
    "cudnn_enable": _always(True),
}


def _by_type(kind: str, d: Draw, a: Arguments) -> Any:
    """An argument of which only the type in the schema is known."""
    if kind.startswith("Optional[") and d.chance(0.3):
        return None
    kind = kind.removeprefix("Optional[").rstrip("]") if kind.startswith("Optional[") else kind
    if kind == "Tensor":
        first = not any(isinstance(value, Reference) for value in a.values())
        return d.tensor(dtypes=FLOATS if d.chance(0.9) else ANY) if first else _like()(d, a)
    if kind == "List[Tensor]":
        return _joined(equal=True)(d, a)
    if kind == "int":
        return d.axis(_first(a))
    if kind == "List[int]":
        return d.axes(_first(a))
    if kind == "bool":
        return d.chance(0.4)
    if kind in ("number", "float", "Scalar"):
        return d.number()
    raise Impossible


def call(overload: OpOverload, d: Draw) -> tuple[str, str]:
    """A call of an ATen operator as source."""
    packet, _, name = str(overload).removeprefix("aten.").partition(".")
    table = OPERATORS.get(packet, {}) | OPERATORS.get(f"{packet}.{name}", {})
    a: Arguments = {}
    for argument in overload._schema.arguments:
        strategy = table.get(argument.name) or NAMED.get(argument.name)
        if argument.name in a:  # decided together with an earlier one
            continue
        if strategy is None and argument.has_default_value() and d.chance(0.3):
            a[argument.name] = argument.default_value
        else:
            a[argument.name] = strategy(d, a) if strategy else _by_type(str(argument.type), d, a)
    names = [argument.name for argument in overload._schema.arguments if not argument.kwarg_only]
    words = [argument for argument in overload._schema.arguments if argument.kwarg_only]
    given = [repr(a[name]) for name in names]
    given += [f"{x.name}={a[x.name]!r}" for x in words if not x.has_default_value() or a[x.name] != x.default_value]
    return f"{overload}({', '.join(given)})", ""


# -- modules and functions ---------------------------------------------------------------------------------------


def _filled(template: str, d: Draw) -> str:
    """A template with its fields drawn: see ``FUNCTIONS``."""
    a: Arguments = {}

    class Fields(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            kind, rank = name[0], int(name[1:] or -1)
            if kind == "f":
                a[name] = _finite(*([rank] if rank >= 0 else []))(d, a)
            elif kind == "x":
                a[name] = d.tensor() if rank < 0 else _rank(rank)(d, a)
            elif kind == "y":
                a[name] = _like()(d, a)
            elif kind == "z":
                a[name] = _same()(d, a)
            elif kind == "b":
                a[name] = _like(BOOL)(d, a) if a else d.tensor(dtypes=BOOL)
            elif kind == "i":
                a[name] = d.tensor(dtypes=INTEGERS)
            elif kind == "n":
                return d.number()
            elif kind == "k":
                return d.size(1, 4)
            elif kind == "d":
                return d.axis(_first(a))
            elif kind == "c":
                return _first(a).shape[1 if rank < 0 else -rank]
            else:
                return bool(d.chance(0.5))
            self[name] = a[name]
            return a[name]

    return template.format_map(Fields())


#: Source of functions: {x} any tensor, {x3} one of rank 3, {f3} a finite one,
#: {y} broadcasts with it, {z} is of its shape, {b} likewise of booleans, {i} integers, {d} a dimension, {n} a number,
#: {k} 1 to 4, {t} True or False.
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

#: (constructor, call) of modules; {c} is the size of dimension 1 of the operand, {c1} of the last, {c2} the last but 1.
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


def _module(constructor: str, template: str, d: Draw) -> tuple[str, str]:
    # The operand is drawn first: the constructor's sizes are its.
    expression, _, made = _filled(f"{template} @ {constructor}", d).partition(" @ ")
    return expression, made


def _function(template: str, d: Draw) -> tuple[str, str]:
    return _filled(template, d), ""


@cache
def menu() -> list[list[tuple[str, Make]]]:
    """What steps are drawn from: records make up two thirds, modules and functions a sixth each.

    By name, so that a record that is moved does not draw all graphs anew.
    """
    operators: list[tuple[str, Make]] = [
        (str(o), partial(call, o)) for o in sorted(records(), key=str) if str(o) not in UNDRAWN
    ]
    modules: list[tuple[str, Make]] = [(c.split("(")[0], partial(_module, c, t)) for c, t in MODULES]
    functions: list[tuple[str, Make]] = [(t, partial(_function, t)) for t in FUNCTIONS]
    return [operators] * 4 + [modules, functions]


#: What reads data that was moved about.
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


def _moved(d: Draw) -> tuple[str, str]:
    """A part of a tensor, turned, and most often turned back past dimensions of size 1: what compilers take apart."""
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
        if ones:  # it may lie anywhere
            back.insert(d.size(0, x.rank), back.pop())
        text += f".permute({back})"
    return text, ""


def _reading(make: Make, d: Draw) -> tuple[str, str]:
    """A step that reads what the last one gave."""
    last = d.steps[-1].name if d.steps else ""
    expression, module = make(d)
    if last and not re.search(rf"\b{last}\b", expression):
        raise Impossible
    return expression, module


@cache
def moving_menu() -> list[list[tuple[str, Make]]]:
    """Data movement, and what reads it: where Vela's and our own rewritings meet."""
    makes = dict(menu()[0])
    readers: list[tuple[str, Make]] = [(name, partial(_reading, makes[name])) for name in _READERS]
    return [[("moved", _moved)], readers]
