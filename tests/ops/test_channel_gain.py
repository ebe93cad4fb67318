"""Channel gains: products with one constant per channel."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.ops.channel_gain import scale_channels
from arm_backend_core.ops.operands import Context, Operand
from arm_backend_core.qparams import QParams
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize
from tests.tosa_graphs import FULL_TARGET


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 5), (2, 4, 3, 5), (1, 4, 2, 3, 5)])
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT16])
def test_gain_has_the_precision_of_a_multiplier(dtype: DType, shape: tuple[int, ...]) -> None:
    """Gains from 8.1e-4 to 1.25, of both signs and 0: the error is at most half a step of the result."""
    p, out = QParams(0.1, 7 if dtype is DType.INT8 else 0, dtype, *dtype.range), QParams(0.3, 2, DType.INT8, -128, 127)
    rng, graph, gain = np.random.default_rng(0), Graph(), np.array([1.25, -3.7e-1, 0.0, 8.1e-4])
    x = rng.integers(p.qmin, p.qmax, shape, endpoint=True)
    operand = Operand(graph.add_input(shape, dtype, "x"), p)
    node: Any = types.SimpleNamespace()
    graph.outputs = [scale_channels(Context(LegalizingBuilder(graph, FULL_TARGET), node, out), operand, gain, 0.5)]
    got = reference_model.run(serialize(graph), [x.astype(dtype.numpy)])[0]
    exact = p.dequantize(x) * gain.reshape(-1, *(1,) * (len(shape) - 2)) + 0.5
    steps = np.clip(exact / float(out.scale) + out.zero_point, -128, 127)
    assert np.abs(got - steps).max() < 0.51 + 0.05 / float(out.scale)  # half a step, and the rounding of the offset
