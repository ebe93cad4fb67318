"""Weights that are stored in int4, and those that are not; the results are bit-equal."""

from __future__ import annotations

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes.pipeline import run
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import Body, build_graph, make_target, validate_by_tosa_opt

INT4 = Target.from_tosa_spec("TOSA-1.0+INT+int16+int4")
_RNG = np.random.default_rng(0)
_INT4_WEIGHTS = _RNG.integers(-7, 8, (4, 3, 3, 8))
_INT4_WEIGHTS[0, 0, 0, :2] = -7, 7


def _conv2d(weights: np.ndarray, zero_point: int = 0, dtype: DType = DType.INT8) -> Body:
    def body(b: Builder, x: Value) -> Value:
        zps = (0 if dtype is DType.INT16 else 3, zero_point)
        bias = b.const(np.arange(len(weights)), DType.INT48 if dtype is DType.INT16 else DType.INT32)
        y = b.conv2d(x, b.const(weights, DType.INT8), bias, pad=(1, 1, 1, 1), zps=zps)
        return b.rescale(y, dtype, 1 / 64)

    return body


def _depthwise(b: Builder, x: Value) -> Value:
    weights = b.const(_RNG.integers(-7, 8, (3, 3, 8, 2)), DType.INT8)
    y = b.depthwise_conv2d(x, weights, b.const(np.arange(16), DType.INT32), pad=(1, 1, 1, 1), zps=(3, 0))
    return b.rescale(y, DType.INT8, 1 / 16)


def _transposed(b: Builder, x: Value) -> Value:
    bias = b.const(np.arange(4), DType.INT32)
    y = b.transpose_conv2d(x, b.const(_INT4_WEIGHTS, DType.INT8), bias, out_pad=(0, 0, 0, 0), stride=(2, 2), zps=(3, 0))
    return b.rescale(y, DType.INT8, 1 / 64)


def _matmul(b: Builder, x: Value) -> Value:
    matrix = b.const(_INT4_WEIGHTS.reshape(1, 8, 36), DType.INT8)
    return b.rescale(b.matmul(b.reshape(x, (1, 64, 8)), matrix, (3, 0)), DType.INT8, 1 / 64)


def _computed(b: Builder, x: Value) -> Value:
    """A convolution with weights that the program computes from its input."""
    weights = b.rescale(b.slice(x, (0, 0, 0, 0), (1, 3, 3, 8)), DType.INT8, 1 / 32)
    y = b.conv2d(x, weights, b.const([1], DType.INT32), pad=(1, 1, 1, 1))
    return b.rescale(y, DType.INT8, 1 / 64)


def _with_element(value: int) -> np.ndarray:
    weights = _INT4_WEIGHTS.copy()
    weights[1, 2, 0, 3] = value
    return weights


CASES: dict[str, tuple[Body, DType, Target, bool]] = {
    "CONV2D": (_conv2d(_INT4_WEIGHTS), DType.INT8, INT4, True),
    "DEPTHWISE_CONV2D": (_depthwise, DType.INT8, INT4, True),
    "TRANSPOSE_CONV2D": (_transposed, DType.INT8, INT4, True),
    "8 does not fit": (_conv2d(_with_element(8)), DType.INT8, INT4, False),
    "TOSA's int4 has no -8": (_conv2d(_with_element(-8)), DType.INT8, INT4, False),
    "-128, whose magnitude int8 cannot represent": (_conv2d(_with_element(-128)), DType.INT8, INT4, False),
    "int4 has no zero point": (_conv2d(_INT4_WEIGHTS, zero_point=1), DType.INT8, INT4, False),
    "TOSA has no int16 times int4": (_conv2d(_INT4_WEIGHTS, dtype=DType.INT16), DType.INT16, INT4, False),
    "MATMUL has no int4": (_matmul, DType.INT8, INT4, False),
    "computed weights": (_computed, DType.INT8, INT4, False),
    "no extension": (_conv2d(_INT4_WEIGHTS), DType.INT8, Target.from_tosa_spec("TOSA-1.0+INT+int16"), False),
    "VGF": (
        _conv2d(_INT4_WEIGHTS),
        DType.INT8,
        Target.from_tosa_spec("TOSA-1.0+INT+FP+int16+int4", family="vgf"),
        True,
    ),
    "Vela encodes int8 in as few bits": (_conv2d(_INT4_WEIGHTS), DType.INT8, make_target("ethos-u85"), False),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_become_int4_if_values_target_and_operator_allow(case: str) -> None:
    body, dtype, target, is_int4 = CASES[case]
    written = build_graph(body, ((1, 8, 8, 8), dtype), target=target)
    low, high = dtype.range
    x = np.random.default_rng(1).integers(low, high + 1, (1, 8, 8, 8)).astype(dtype.numpy)
    (before,) = reference_model.run(serialize(written), [x])
    run(written, target)
    flatbuffer = serialize(written)
    assert [op.inputs[1].dtype for op in written.ops if len(op.inputs) > 1 and op.inputs[1].dtype is DType.INT4] == (
        [DType.INT4] if is_int4 else []
    )
    assert validate_by_tosa_opt(flatbuffer, target) is None
    np.testing.assert_array_equal(reference_model.run(flatbuffer, [x])[0], before)
    without = Target(target.name, target.profiles, target.extensions - {"int4"})
    assert (validate_by_tosa_opt(flatbuffer, without) is not None) == is_int4


@pytest.mark.parametrize("size", [64, 65])
def test_two_int4_weights_take_one_byte(size: int) -> None:
    weights = np.random.default_rng(2).integers(-7, 8, (size, 1, 1, size))

    def body(b: Builder, x: Value) -> Value:
        return b.rescale(b.conv2d(x, b.const(weights, DType.INT8), b.const([0], DType.INT32), pad=[0] * 4), x.dtype, 1)

    def length(extension: str) -> int:
        target = Target.from_tosa_spec(f"TOSA-1.0+INT{extension}")
        written = build_graph(body, ((1, 4, 4, size), DType.INT8), target=target)
        run(written, target)
        return len(serialize(written))

    saved = length("") - length("+int4")
    assert abs(saved - size * size // 2) < 200  # the zero points are two constants
