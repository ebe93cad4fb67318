"""Random small graphs of RESCALEs and their neighbours: arithmetic, CASTs, windows and operators that move elements.

Most bugs of Vela 5.2 are wrong fusions of these operators (``docs/contributors/vela.md``).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value
from tests.tosa_graphs import build_graph

_SHAPE = (1, 2, 3, 4)
_TYPES = (DType.INT8, DType.INT8, DType.INT16, DType.INT32)
_MAX_ELEMENTS = 400
#: Scales with which the results of a RESCALE cover the type's range without all being clipped.
_SCALES = {
    (DType.INT32, DType.INT8): (2.0**-24, 1.0, 1e-7, 2.0**-6),
    (DType.INT32, DType.INT16): (2.0**-16, 1.0, 1e-4),
    (DType.INT32, DType.INT32): (1.0, 0.5),
}
_OTHER_SCALES = (1.0, 1.0, 3.0, 0.6, 2.0**-6)
_Emit = Callable[[Builder, Value, Value, random.Random], Value]


def draw(seed: int, target: Target) -> Graph:
    """Build graph number ``seed`` from operators that the target supports; a seed determines the graph."""
    rng = random.Random(seed)
    while True:
        inputs = tuple((_SHAPE, rng.choice(_TYPES)) for _ in range(rng.randint(1, 2)))
        drawn = build_graph(lambda b, *values: _body(b, values, rng), *inputs, target=target)
        drawn.remove_dead()
        if drawn.ops and drawn.users().keys() >= set(drawn.inputs):
            return drawn


def _body(b: Builder, inputs: tuple[Value, ...], rng: random.Random) -> tuple[Value, ...]:
    """Emit two to six operators, most of which read the previous one; return the values that no operator reads."""
    values, read = list(inputs), set[Value]()
    for _ in range(rng.randint(2, 6)):
        x = values[-1] if rng.random() < 0.6 else rng.choice(values)
        equal = [value for value in values if value.dtype is x.dtype and value.shape == x.shape]
        y = rng.choice(equal) if rng.random() < 0.6 else _constant(b, x, rng.choice((1, 3, 7)))
        emit_operator = rng.choice(
            (_rescale, rng.choice(_DATA_MOVEMENT), rng.choice(_INT32 if x.dtype is DType.INT32 else _INT8_OR_INT16))
        )
        try:
            result = emit_operator(b, x, y, rng)
        except Unsupported:  # the operator does not support this type, rank or size
            continue
        if result.size <= _MAX_ELEMENTS:
            values.append(result)
            read |= {x, y}
    results = tuple(value for value in values if value not in read and value not in inputs)
    return results or (b.rescale(inputs[0], DType.INT8, 0.5),)


def _constant(b: Builder, x: Value, number: int, dtype: DType | None = None) -> Value:
    return b.const(np.full((1,) * x.rank, number), dtype or x.dtype)


def _shift_right(b: Builder, x: Value, places: int) -> Value:
    return b.arithmetic_right_shift(x, _constant(b, x, places), round=True)


def _rescale(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    dtype = rng.choice(_TYPES[1:])
    is_int32 = x.dtype is DType.INT32
    if is_int32 and (dtype is DType.INT32 or rng.random() < 0.5):
        x = _shift_right(b, x, 2)  # the RESCALE supports no larger values
    zero_points = [rng.choice((0, 0, 0, 5)) if kind is DType.INT8 else 0 for kind in (x.dtype, dtype)]
    return b.rescale(x, dtype, rng.choice(_SCALES.get((x.dtype, dtype), _OTHER_SCALES)), *zero_points)


def _reshape(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    flat = [(rows, x.size // rows) for rows in range(1, x.size + 1) if x.size % rows == 0]
    return b.reshape(x, rng.choice([(x.size,), (1, *x.shape), x.shape[1:] if x.shape[0] == 1 else x.shape, *flat]))


def _slice(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    return _slices(b, (x,), rng)[0]


def _slices(b: Builder, values: tuple[Value, ...], rng: random.Random) -> list[Value]:
    """Slice tensors of equal shape at random positions; all slices have the same size."""
    shape = values[0].shape
    size = [rng.randint(max(1, length - 1), length) for length in shape]
    room = [length - part for length, part in zip(shape, size, strict=True)]
    return [b.slice(value, [rng.randint(0, largest) for largest in room], size) for value in values]


def _transpose(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    return b.transpose(x, rng.sample(range(x.rank), x.rank))


def _pad(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    return b.pad(x, [(rng.randint(0, 1), rng.randint(0, 1)) for _ in x.shape], 0)


def _rescaled_sum(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    """Emit a 32-bit sum or difference of narrow tensors, mostly rescaled, sometimes shifted as in quantized sums."""
    if x.shape == y.shape and rng.random() < 0.3:
        x, y = _slices(b, (x, y), rng)
    first = rng.choice((1.0, 4.0, 0.5, 3.0, 2.0**14 if x.dtype is DType.INT16 else 2.0**19))
    second = rng.choice((first, 0.7 * first, 1.0, 0.7))
    total = rng.choice((b.add, b.sub))(b.rescale(x, DType.INT32, first), b.rescale(y, DType.INT32, second))
    if rng.random() < 0.4:
        return total
    result = b.rescale(total, x.dtype, rng.choice((1.0, 0.3, 0.25)) / max(first, 1.0))
    return b.rescale(result, DType.INT32, 1.0) if rng.random() < 0.3 else result


def _shared_product(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    """Emit two operators that read a rescaled product, mostly reshaped and widened, as in rotary embeddings."""
    zero_point = rng.choice((0, 0, 5))
    dtype = DType.INT8 if zero_point else rng.choice((DType.INT8, DType.INT16))
    product = b.rescale(b.mul(x, y), dtype, rng.choice((0.3, 2.0**-6, 1.0)), 0, zero_point)
    for _ in range(rng.randint(0, 2)):
        product = rng.choice((_reshape, _reshape, _reshape, _slice, _transpose))(b, product, product, rng)
    if dtype is DType.INT8 and rng.random() < 0.3:
        product, zero_point = b.rescale(product, DType.INT16, rng.choice((1.0, 3.0)), zero_point), 0
    term = b.rescale(product, DType.INT32, rng.choice((1.0, 1.0, 0.7)), zero_point) if rng.random() < 0.9 else product
    term = _reshape(b, term, term, rng) if rng.random() < 0.2 else term
    terms = [b.mul(term, rng.choice((term, _constant(b, term, number)))) for number in (3, 7)]
    narrow = [b.rescale(term, DType.INT8, 2.0**-6) for term in terms]
    return b.concat(terms if rng.random() < 0.3 else narrow, 0)


def _table(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    if x.dtype is DType.INT8:
        return b.table(x, np.arange(127, -129, -1).astype(np.int8))
    return b.rescale(b.table(x, (np.arange(513) * 60 - 15000).astype(np.int16)), DType.INT16, 2.0**-7)


def _conv2d(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    channels = _require_image(x).shape[3]
    weight = np.arange(channels * channels).reshape(channels, 1, 1, channels) % 19 - 9
    sums = b.conv2d(x, b.const(weight, DType.INT8), b.const([3] * channels, DType.INT32), pad=(0, 0, 0, 0))
    return b.rescale(sums, DType.INT8, 0.02) if rng.random() < 0.6 else sums


def _pool(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    return rng.choice((b.max_pool2d, b.avg_pool2d))(_require_image(x), (1, 2), (1, 1), (0, 0, 0, 0))


def _select(b: Builder, x: Value, y: Value, rng: random.Random) -> Value:
    if "SELECT" in b.target.hardware.unsupported:  # an earlier pass lowers SELECT to arithmetic
        raise Unsupported("no SELECT")
    return b.select(b.compare("GREATER", b.cast(x, DType.INT32), _constant(b, x, 5, DType.INT32)), x, y)


def _require_image(x: Value) -> Value:
    if x.rank != 4 or x.dtype is not DType.INT8 or x.shape[2] < 2:
        raise Unsupported("no image")
    return x


_DATA_MOVEMENT: tuple[_Emit, ...] = (
    *(_reshape, _reshape, _slice, _slice, _transpose, _pad),
    lambda b, x, y, rng: b.concat([x, x], rng.randrange(x.rank)),
    lambda b, x, y, rng: b.tile(x, [rng.choice((1, 1, 2)) for _ in x.shape]),
    lambda b, x, y, rng: b.reverse(x, rng.randrange(x.rank)),
)
_ANY_TYPE: tuple[_Emit, ...] = (
    lambda b, x, y, rng: b.cast(x, rng.choice([dtype for dtype in _TYPES[1:] if dtype is not x.dtype])),
    lambda b, x, y, rng: b.binary(rng.choice(("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR")), x, y),
    _select,
)
_INT8_OR_INT16: tuple[_Emit, ...] = (
    *(*_ANY_TYPE, _rescaled_sum, _rescaled_sum, _shared_product, _shared_product, _table, _conv2d, _pool),
    lambda b, x, y, rng: b.mul(x, y),
    lambda b, x, y, rng: b.reduce("REDUCE_MAX", x, rng.randrange(x.rank)),
    lambda b, x, y, rng: b.clamp(x, -20, 90),
)
_INT32: tuple[_Emit, ...] = (
    *_ANY_TYPE,
    lambda b, x, y, rng: b.mul(_shift_right(b, x, 20), _shift_right(b, y, 20)),
    lambda b, x, y, rng: rng.choice((b.add, b.sub))(_shift_right(b, x, 2), _shift_right(b, y, 2)),
    lambda b, x, y, rng: rng.choice((b.maximum, b.minimum))(x, y),
    lambda b, x, y, rng: _shift_right(b, x, rng.choice((1, 5, 12))),
    lambda b, x, y, rng: b.emit(rng.choice(("ABS", "CLZ")), (x,), x.dtype),
    lambda b, x, y, rng: b.reduce("REDUCE_SUM", _shift_right(b, x, 4), rng.randrange(x.rank)),
)
