"""The smallest flatbuffers that Vela compiles to something else: ``docs/vela.md`` describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arm_backend_core.dtype import DType
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from tests.graphs import Input

_OLD = ("ethos-u55-128", "ethos-u65-256")


@dataclass(frozen=True)
class Mistake:
    """A graph, and the accelerators whose programs do not compute it."""

    name: str
    body: Callable[..., Value]
    inputs: tuple[Input, ...]
    wrong: tuple[str, ...]


def _narrow(b: Builder, x: Value) -> Value:
    return b.cast(b.add(b.cast(x, DType.INT32), b.cast(x, DType.INT32)), DType.INT8)


def _difference(b: Builder, x: Value, y: Value) -> Value:
    wide = b.sub(b.rescale(x, DType.INT32, 4.0), b.rescale(y, DType.INT32, 8.0))
    return b.rescale(wide, DType.INT16, 1 / 16)


def _minimum(b: Builder, x: Value) -> Value:
    return b.reshape(b.reduce("REDUCE_MIN", x, 1), (2, 4))


def _sliced(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 5).reshape(1, 2, 2, 1), DType.INT8)
    part = b.slice(x, (0, 0, 0, 1), (2, 2, 2, 1))
    return b.rescale(b.conv2d(part, weight, b.const([0], DType.INT32), pad=(1, 1, 1, 1)), DType.INT8, 0.125)


def _transposed(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(1, 10).reshape(1, 3, 3, 1), DType.INT8)
    part = b.slice(x, (0, 0, 0, 1), (1, 2, 2, 1))
    whole = b.transpose_conv2d(part, weight, b.const([0], DType.INT32), out_pad=(0, 0, 0, 0), stride=(2, 2))
    return b.rescale(whole, DType.INT8, 0.125)


def _tables(b: Builder, x: Value, y: Value) -> Value:
    rising, falling = np.arange(-256, 257) * 100, np.arange(256, -257, -1) * 90
    first = b.rescale(b.table(x, rising), DType.INT16, 1 / 128)
    product = b.rescale(b.mul(first, y), DType.INT16, 2.0**-15)
    return b.rescale(b.table(product, falling), DType.INT16, 1 / 128)


MISTAKES = (
    Mistake("narrowing_cast", _narrow, (((2, 8), DType.INT8),), _OLD),
    Mistake("unequal_scales", _difference, (((2, 8), DType.INT16), ((2, 8), DType.INT16)), _OLD),
    Mistake("reduce_min", _minimum, (((2, 3, 4), DType.INT8),), _OLD),
    Mistake("sliced_batches", _sliced, (((2, 2, 2, 2), DType.INT8),), (*_OLD, "ethos-u85-256")),
    Mistake("sliced_transposed", _transposed, (((1, 2, 2, 2), DType.INT8),), _OLD),
    Mistake("two_tables", _tables, (((2, 8), DType.INT16), ((2, 8), DType.INT16)), ("ethos-u85-256",)),
)
