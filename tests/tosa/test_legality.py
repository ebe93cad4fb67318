"""The hardware tables against Vela: operators that ``op_refusal`` accepts compile, and those that it refuses do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.hardware import ETHOS_U_FAMILIES
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.legality import op_refusal, type_refusal
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers.vela import installed_release
from tests.tosa_graphs import Body, Input, build_graph, is_compiled_by_vela, make_target

BOOL, I8, I16, I32, I48 = DType.BOOL, DType.INT8, DType.INT16, DType.INT32, DType.INT48
INTEGERS = (I8, I16, I32)
S = (1, 4, 8, 16)
_U55_U65 = ("ethos-u55", "ethos-u65")


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        stricter: families that refuse the operator though Vela compiles it, undocumented or incorrectly.
    """

    name: str
    body: Body
    inputs: tuple[Input, ...]
    stricter: tuple[str, ...] = ()


def _constant(shape: Sequence[int], dtype: DType = I8) -> Value:
    data = np.random.default_rng(0).integers(-50, 50, shape).astype(dtype.numpy)
    return Value(tuple(shape), dtype, "", data)


def _zero_bias(n: int, x: Value) -> Value:
    dtype = I32 if x.dtype is I8 else I48
    return Value((n,), dtype, "", np.zeros(n, dtype.numpy))


def _elementwise() -> Iterator[Case]:
    def unary(kind: str) -> Body:
        return lambda b, x: b.unary(kind, x)

    def call(method: str, **attrs: Any) -> Body:
        return lambda b, *values: getattr(b, method)(*values, **attrs)

    def named(method: str, kind: str) -> Body:
        return lambda b, x, y: getattr(b, method)(kind, x, y)

    for dtype in INTEGERS:
        one, two = ((S, dtype),), ((S, dtype), (S, dtype))
        for kind in ("BITWISE_NOT", "IDENTITY"):
            yield Case(f"{kind} {dtype.value}", unary(kind), one)
        for kind in ("BITWISE_AND", "BITWISE_OR", "BITWISE_XOR"):
            yield Case(f"{kind} {dtype.value}", named("binary", kind), two)
        yield Case(f"NEGATE {dtype.value}", call("negate"), one)
        for rounds in (True, False):
            shift = call("arithmetic_right_shift", round=rounds)
            stricter = dtype is I32 and not rounds
            yield Case(f"ARITHMETIC_RIGHT_SHIFT {dtype.value} {rounds}", shift, two, _U55_U65 if stricter else ())
        yield Case(f"LOGICAL_LEFT_SHIFT {dtype.value}", call("logical_left_shift"), two)
        narrow = () if dtype is I32 else ("ethos-u85",)
        yield Case(f"LOGICAL_RIGHT_SHIFT {dtype.value}", call("logical_right_shift"), two, narrow)
        yield Case(f"MUL {dtype.value}", call("mul"), two)
        yield Case(f"SELECT {dtype.value}", call("select"), ((S, BOOL), *two))
        for other in (BOOL, *INTEGERS):
            if other is not dtype:
                yield Case(f"CAST {dtype.value} {other.value}", call("cast", dtype=other), one)
            if other is not BOOL:
                yield Case(f"RESCALE {dtype.value} {other.value}", call("rescale", dtype=other, scale=0.3), one)
                channels = np.linspace(0.1, 0.9, 16)
                per_channel = call("rescale", dtype=other, scale=channels)
                yield Case(f"RESCALE per channel {dtype.value} {other.value}", per_channel, one)
        yield Case(f"CAST bool {dtype.value}", call("cast", dtype=dtype), ((S, BOOL),))
    pair = ((S, I32), ((1, 4, 1, 16), I32))
    for method in ("add", "sub", "maximum", "minimum"):
        yield Case(method, call(method), pair)
    yield Case("INTDIV", named("binary", "INTDIV"), pair)
    yield Case("MUL shift 31", call("mul", shift=31), pair)
    for kind in ("EQUAL", "GREATER", "GREATER_EQUAL"):
        yield Case(kind, named("compare", kind), pair)
    for kind in ("LOGICAL_AND", "LOGICAL_OR", "LOGICAL_XOR"):
        yield Case(kind, named("binary", kind), ((S, BOOL), (S, BOOL)))
    for kind in ("ABS", "CLZ"):
        yield Case(kind, unary(kind), ((S, I32),))
    yield Case("LOGICAL_NOT", unary("LOGICAL_NOT"), ((S, BOOL),))
    yield Case("TABLE int8", call("table", table=np.arange(-128, 128)), ((S, I8),))
    yield Case("TABLE int16", call("table", table=np.arange(513)), ((S, I16),))
    for dtype in (I8, I16):
        yield Case(f"CLAMP {dtype.value}", call("clamp", low=-3, high=5), ((S, dtype),))


def _movement() -> Iterator[Case]:
    for dtype in (BOOL, *INTEGERS):
        moves: dict[str, Body] = {
            "RESHAPE": lambda b, x: b.reshape(x, (x.size,)),
            "SLICE": lambda b, x: b.slice(x, (0, 1, 1, 1), (1, 2, 3, 9)),
            "CONCAT": lambda b, x: b.concat((x, x), 3),
            "PAD": lambda b, x: b.pad(x, ((0, 0), (1, 0), (0, 1), (1, 1)), 0),
            "TILE": lambda b, x: b.tile(x, (1, 2, 1, 3)),
            "TRANSPOSE": lambda b, x: b.transpose(x, (0, 3, 1, 2)),
        }
        for name, body in moves.items():
            yield Case(f"{name} {dtype.value}", body, ((S, dtype),))
        for axis in range(4):
            # Documented: int8 and int16, height and width. Vela accepts more, but not for every shape.
            reverse: Body = lambda b, x, axis=axis: b.reverse(x, axis)  # noqa: E731
            stricter = (axis == 0 and dtype is not BOOL) or (axis < 3 and dtype is I32)
            yield Case(f"REVERSE {dtype.value} {axis}", reverse, ((S, dtype),), _U55_U65 if stricter else ())
        if dtype is not BOOL:
            yield Case(f"GATHER {dtype.value}", lambda b, x, i: b.gather(x, i), (((2, 8, 16), dtype), ((2, 5), I32)))
    for shape, perms in (
        ((2, 3, 4, 5, 6), (4, 3, 2, 1, 0)),
        ((70000, 4), (1, 0)),
        ((1, 300, 300, 8), (0, 3, 1, 2)),
        ((2, 1, 70000), (2, 1, 0)),
        ((8, 12, 64, 64), (0, 2, 1, 3)),
    ):
        yield Case(f"TRANSPOSE {shape}", lambda b, x, p=perms: b.transpose(x, p), ((shape, I8),))


def _reductions() -> Iterator[Case]:
    for dtype in INTEGERS:
        for kind in ("REDUCE_MAX", "REDUCE_MIN", "REDUCE_SUM"):
            if kind == "REDUCE_SUM" and dtype is not I32:
                continue
            for axis in range(4):
                body: Body = lambda b, x, kind=kind, axis=axis: b.reduce(kind, x, axis)  # noqa: E731
                yield Case(f"{kind} {dtype.value} {axis}", body, ((S, dtype),))
    # The limit is documented for every axis; along the last one Vela accepts more.
    for shape, axis in (((4, 70000), 1), ((70000, 4), 0), ((8, 66000), 0), ((300, 400), 1)):
        body = lambda b, x, axis=axis: b.reduce("REDUCE_SUM", x, axis)  # noqa: E731
        yield Case(f"REDUCE_SUM {shape} {axis}", body, ((shape, I32),), _U55_U65 if shape == (4, 70000) else ())
    for kind in ("REDUCE_ANY", "REDUCE_ALL"):
        yield Case(kind, lambda b, x, kind=kind: b.reduce(kind, x, 3), ((S, BOOL),))
    candidates: tuple[tuple[tuple[int, ...], int, DType], ...] = (
        ((1, 4, 4, 127), 3, I8),
        ((1, 4, 4, 128), 3, I8),
        ((2, 4, 4, 16), 3, I8),
        ((8, 16), 1, I8),
        ((8, 16), 0, I8),
        ((8, 16), 1, I16),
    )
    for image, axis, dtype in candidates:
        body = lambda b, x, axis=axis: b.argmax(x, axis)  # noqa: E731
        yield Case(f"ARGMAX {image} {axis} {dtype.value}", body, ((image, dtype),))


def _biased(bias: int) -> Body:
    def body(b: Builder, x: Value) -> Value:
        wide = b.conv2d(x, _constant((2, 1, 1, 16)), b.const([bias, 0], I48), pad=(0, 0, 0, 0))
        return b.rescale(wide, I16, 2.0**-30)

    return body


def _convolutions() -> Iterator[Case]:
    for bias, stricter in ((2**39 - 1, ()), (-(2**39), ()), (2**39, _U55_U65), (-(2**39) - 1, _U55_U65)):
        yield Case(f"conv int16 bias {bias}", _biased(bias), ((S, I16),), stricter)

    def conv(kernel: tuple[int, int], stride: tuple[int, int], pad: int, depthwise: bool = False) -> Body:
        def body(b: Builder, x: Value) -> Value:
            c = x.shape[3]
            weight = _constant((*kernel, c, 1) if depthwise else (8, *kernel, c))
            bias = _zero_bias(c if depthwise else 8, x)
            write = b.depthwise_conv2d if depthwise else b.conv2d
            return b.rescale(write(x, weight, bias, pad=(pad,) * 4, stride=stride), x.dtype, 0.01)

        return body

    image = (1, 16, 16, 4)
    for dtype in (I8, I16):
        for kernel, stride, pad in (
            ((3, 3), (1, 1), 1),
            ((3, 3), (3, 3), 1),
            ((3, 3), (4, 4), 0),
            ((3, 3), (4, 4), 1),
            ((3, 3), (1, 4), 1),
            ((1, 1), (4, 4), 0),
            ((16, 16), (4, 4), 0),
        ):
            for depthwise in (False, True):
                name = f"conv {dtype.value} {kernel} {stride} {pad} {depthwise}"
                yield Case(name, conv(kernel, stride, pad, depthwise), ((image, dtype),))
        for kernel, stride, shape in (
            ((3, 3), (1, 1), image),
            ((2, 2), (2, 2), image),
            ((3, 3), (1, 2), image),
            ((1, 3), (1, 2), (1, 1, 16, 4)),
            ((3, 1), (2, 1), (1, 16, 1, 4)),
            ((3, 3), (3, 3), image),
        ):
            transposed: Body = lambda b, x, k=kernel, s=stride: b.rescale(  # noqa: E731
                b.transpose_conv2d(x, _constant((8, *k, 4)), _zero_bias(8, x), out_pad=(0, 0, 0, 0), stride=s),
                x.dtype,
                0.01,
            )
            yield Case(f"TRANSPOSE_CONV2D {dtype.value} {kernel} {stride} {shape}", transposed, ((shape, dtype),))
        yield Case(
            f"TRANSPOSE_CONV2D {dtype.value} to a column",
            lambda b, x: b.rescale(
                b.transpose_conv2d(x, _constant((8, 3, 3, 4)), _zero_bias(8, x), out_pad=(-1,) * 4, stride=(2, 2)),
                x.dtype,
                0.01,
            ),
            (((1, 4, 1, 4), dtype),),
            ("ethos-u85",),
        )
        for depth in (1, 3):
            # Vela 5.2 also accepts int16 on U55 and U65; lowering emits no CONV3D.
            stricter = _U55_U65 if dtype is I16 and depth == 1 and installed_release() > (5, 1) else ()
            yield Case(
                f"CONV3D {dtype.value} {depth}",
                lambda b, x, d=depth: _conv3d(b, x, _constant((8, d, 3, 3, 4))),
                (((1, 4, 6, 6, 4), dtype),),
                stricter,
            )
        product: Body = lambda b, x, y: b.rescale(b.matmul(x, y), I8, 0.01)  # noqa: E731
        yield Case(f"MATMUL {dtype.value}", product, (((2, 16, 8), dtype), ((2, 8, 16), dtype)))
    yield Case("MATMUL long", product, (((1, 4, 70000), I8), ((1, 70000, 8), I8)))
    variable = ((8, 3, 3, 4), I8)
    yield Case(
        "CONV2D of variables",
        lambda b, x, w: b.rescale(b.conv2d(x, w, _zero_bias(8, x), pad=(0,) * 4), I8, 0.01),
        ((image, I8), variable),
    )
    yield Case(
        "DEPTHWISE_CONV2D of variables",
        lambda b, x, w: b.rescale(b.depthwise_conv2d(x, w, _zero_bias(4, x), pad=(0,) * 4), I8, 0.01),
        ((image, I8), ((3, 3, 4, 1), I8)),
    )
    yield Case(
        "TRANSPOSE_CONV2D of variables",
        lambda b, x, w: b.rescale(
            b.transpose_conv2d(x, w, _zero_bias(8, x), out_pad=(0,) * 4, stride=(2, 2)), I8, 0.01
        ),
        ((image, I8), variable),
    )
    yield Case(
        "CONV3D of variables",
        lambda b, x, w: _conv3d(b, x, w),
        (((1, 4, 6, 6, 4), I8), ((8, 3, 3, 3, 4), I8)),
    )


def _conv3d(b: Builder, x: Value, weight: Value) -> Value:
    accumulator = I32 if x.dtype is I8 else I48
    attrs = {
        "pad": [0] * 6,
        "stride": [1] * 3,
        "dilation": [1] * 3,
        "local_bound": False,
        "acc_type": accumulator,
    }
    attrs |= {"input_zp": 0, "weight_zp": 0}
    y = b.emit("CONV3D", (x, weight, _zero_bias(8, x)), accumulator, **attrs)
    return b.rescale(y, x.dtype, 0.01)


def _windows() -> Iterator[Case]:
    for method in ("avg_pool2d", "max_pool2d"):
        for dtype in (I8, I16):
            for size, kernel, stride, pad in (
                (16, (2, 2), (2, 2), 0),
                (16, (8, 8), (1, 1), 4),
                (16, (9, 9), (1, 1), 4),
                (18, (2, 2), (4, 4), 0),
                (16, (2, 2), (4, 4), 1),
                (256, (256, 256), (1, 1), 0),
            ):
                name = f"{method} {dtype.value} {size} {kernel} {stride} {pad}"
                yield Case(name, _pool(method, kernel, stride, pad), (((1, size, size, 4), dtype),))
    for mode in ("NEAREST", "BILINEAR"):
        for factor in (2, 3, 4, 8, 16):
            for corners in ("centre", "corner", "neither"):
                yield Case(f"RESIZE {mode} {factor} {corners}", _resize(mode, factor, corners), (((1, 5, 5, 8), I8),))


def _pool(method: str, kernel: tuple[int, int], stride: tuple[int, int], pad: int) -> Body:
    return lambda b, x: getattr(b, method)(x, kernel, stride, (pad,) * 4)


def _resize(mode: str, factor: int, corners: str) -> Body:
    size, n, d, offset, border = {
        "centre": (5 * factor, 2 * factor, 2, 1 - factor, factor - 1),
        "corner": (4 * factor + 1, factor, 1, 0, 0),
        "neither": (5 * factor, factor, 1, 0, factor - 1),
    }[corners]

    def body(b: Builder, x: Value) -> Value:
        y = b.resize(x, (n, d, n, d), (offset, offset), (border, border), mode)
        assert y.shape[1:3] == (size, size)
        return y if mode == "NEAREST" else b.rescale(y, I8, 1 / (n * n))

    return body


_GROUPS: tuple[Callable[[], Iterator[Case]], ...] = (
    _elementwise,
    _movement,
    _reductions,
    _convolutions,
    _windows,
)
_CASES = [case for cases in _GROUPS for case in cases()]


@pytest.mark.parametrize("name", ETHOS_U_FAMILIES)
@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_hardware_table_agrees_with_vela(case: Case, name: str) -> None:
    written = build_graph(case.body, *case.inputs)
    target = make_target(name)
    reasons = [op_refusal(target, op) for op in written.ops]
    refused = next((reason for reason in reasons if reason), None)
    compiled = is_compiled_by_vela(name, serialize(written))
    if name in case.stricter:
        assert refused
        assert compiled  # if not, it is no longer stricter
    else:
        assert compiled == (refused is None), refused


def test_reasons_name_the_target_and_the_operator() -> None:
    u55 = make_target("ethos-u55")
    assert type_refusal(u55, "GATHER", [I8, I32], I8) == f"{u55.name} has no GATHER in hardware"
    assert (
        type_refusal(u55, "MATMUL", [I16, I16], I48) == f"{u55.name} has no MATMUL (int16, int16 -> int48) in hardware"
    )
    assert type_refusal(u55, "CLAMP", [I32], I32) == "TOSA 1.0 has no CLAMP (int32 -> int32)"
    assert type_refusal(u55, "EXP", [DType.FP32], DType.FP32) == (
        f"EXP (fp32 -> fp32) needs TOSA FP, which {u55.name} lacks"
    )
    assert type_refusal(u55, "TRANSPOSE", [BOOL], BOOL) == f"{u55.name} has no boolean tensors in hardware"
