"""Legalization: operators that the builder emits in place of one that TOSA or the target does not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from arm_backend_core.dtype import DType
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.passes.pipeline import run
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import FULL_TARGET, build_and_validate, build_flatbuffer, build_graph, validate_by_tosa_opt


@pytest.mark.parametrize("passes", [False, True])
def test_concat_of_many_values_is_split_into_groups(passes: bool) -> None:
    def body(b: Builder, x: Value) -> Value:
        return b.concat([b.reverse(x, i % 2) for i in range(70)], 0)

    written = build_graph(body, ((2, 3), DType.INT8))
    if passes:
        run(written, FULL_TARGET)
    assert [op.kind for op in written.ops].count("CONCAT") == 3
    assert validate_by_tosa_opt(serialize(written), FULL_TARGET) is None
    x = np.arange(6, dtype=np.int8).reshape(2, 3)
    expected = np.concatenate([np.flip(x, i % 2) for i in range(70)])
    np.testing.assert_array_equal(reference_model.run(serialize(written), [x])[0], expected)


@pytest.mark.parametrize(("kernel", "crop"), [(1, 1), (3, 4)])
def test_transpose_conv2d_crops_its_kernel_size_or_more_by_a_slice(kernel: int, crop: int) -> None:
    weight = np.arange(kernel * kernel).reshape(1, kernel, kernel, 1) + 1

    def body(b: Builder, x: Value) -> Value:
        zeros = b.const(np.zeros(1), DType.INT32)
        pad = (-crop,) * 4
        return b.transpose_conv2d(x, b.const(weight, DType.INT8), zeros, out_pad=pad, stride=(2, 2))

    kinds = build_and_validate(body, ((1, 6, 7, 1), DType.INT8))
    assert kinds == ["TRANSPOSE_CONV2D", "SLICE"]
    x = np.arange(42, dtype=np.int8).reshape(1, 6, 7, 1)
    (result,) = reference_model.run(build_flatbuffer(body, ((1, 6, 7, 1), DType.INT8)), [x])
    expected = torch.nn.functional.conv_transpose2d(
        torch.from_numpy(x.transpose(0, 3, 1, 2)).double(),
        torch.from_numpy(weight.transpose(3, 0, 1, 2)).double(),
        stride=2,
        padding=crop,
    )
    np.testing.assert_array_equal(result.transpose(0, 3, 1, 2), expected.numpy())
