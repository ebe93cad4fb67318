"""Spatial means: their values, and the channel counts of their depthwise convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from arm_backend_core.dtype import DType
from arm_backend_core.nodes import is_only_user_of_operand
from arm_backend_core.ops.spatial_mean import spatial_mean
from arm_backend_core.qparams import QParams
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize

TARGET = Target.from_tosa_spec("TOSA-1.0+INT+int16")
OUT = QParams(0.011, 5, DType.INT8, -128, 127)


@pytest.mark.parametrize("is_only_user", [True, False])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((1, 7, 7, 32), [16]),
        ((2, 7, 7, 24), [24, 24]),
        ((1, 13, 13, 1000), [1000, 40]),
        ((1, 14, 14, 120), [120, 24]),
        ((1, 7, 7, 5), [5, 5]),
        ((1, 1, 30, 16), [16]),
        ((1, 9, 12, 16), [16, 16]),
        ((1, 70, 3, 16), [16, 16, 16, 16]),  # two halves of 35, their sum, then three columns
        ((3, 1, 1, 16), []),
    ],
)
def test_mean_of_an_image(shape: tuple[int, ...], channels: list[int], dtype: DType, is_only_user: bool) -> None:
    low, high = dtype.range
    zero_point = -3 if dtype is DType.INT8 else 0
    q = QParams(0.01 if dtype is DType.INT8 else 0.01 / 256, zero_point, dtype, low, high)
    graph = Graph()
    x = graph.add_input(shape, dtype, "x")
    mean = spatial_mean(LegalizingBuilder(graph, TARGET), x, q, (1, 2), OUT, is_only_user=is_only_user)
    assert mean is not None
    graph.outputs = [mean]
    values = np.random.default_rng(0).integers(low, high + 1, shape).astype(dtype.numpy)
    (found,) = reference_model.run(serialize(graph), [values])
    exact = (values - float(zero_point)).mean((1, 2), keepdims=True) * q.scale / OUT.scale + OUT.zero_point
    assert found.shape == exact.shape
    assert np.abs(found - np.clip(exact, -128, 127)).max() <= 0.51
    weights = [op.inputs[1] for op in graph.ops if op.kind == "DEPTHWISE_CONV2D"]
    if is_only_user:
        assert [weight.shape[2] for weight in weights] == channels


@pytest.mark.parametrize(("dtype", "scale"), [(DType.INT16, 2e-7), (DType.INT8, 1e-5)])
def test_coarse_partial_sums_of_a_small_mean_are_refused(dtype: DType, scale: float) -> None:
    """A mean near 0 over 112 x 112 elements spans few steps of the row sums: SQNR would be 38 dB in A16W8."""
    low, high = dtype.range
    q = QParams(9.0 / (high - low), 0, dtype, low, high)
    for out_scale, is_refused in ((scale, True), (q.scale, False)):
        graph = Graph()
        x = graph.add_input((1, 112, 112, 32), dtype, "x")
        out = QParams(out_scale, 0, dtype, low, high)
        mean = spatial_mean(LegalizingBuilder(graph, TARGET), x, q, (1, 2), out, is_only_user=True)
        assert (mean is None) is is_refused


def test_spatial_mean_reads_a_slice_in_place() -> None:
    graph = Graph()
    b = LegalizingBuilder(graph, TARGET)
    x = b.slice(graph.add_input((1, 8, 7, 32), DType.INT8, "x"), (0, 1, 0, 0), (1, 7, 7, 32))
    assert spatial_mean(b, x, QParams(0.01, 0, DType.INT8, -128, 127), (1, 2), OUT, is_only_user=True) is not None
    first = next(op for op in graph.ops if op.kind == "DEPTHWISE_CONV2D")
    assert first.inputs[0] is x


class _Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(("module", "is_only_user"), [(_Gated(), False), (nn.AdaptiveAvgPool2d(1), True)])
def test_is_only_user_of_operand(module: nn.Module, is_only_user: bool) -> None:
    program = torch.export.export(module, (torch.randn(1, 3, 4, 4),))
    (mean,) = (node for node in program.graph.nodes if "mean" in node.name or "pool" in node.name)
    assert is_only_user_of_operand(mean) is is_only_user
