"""Indexing: limits of gathers by slices."""

from __future__ import annotations

import pytest

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.indexing import gather_constant_indices
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legalize import LegalizingBuilder


def test_limit_of_gathers_by_slices() -> None:
    """Each element of a reversed axis is a run of its own."""
    graph = Graph()
    builder = LegalizingBuilder(graph, EthosUCompileSpec("ethos-u55-128").target)
    x = graph.add_input((1, 1025), DType.INT8, "x")
    assert gather_constant_indices(builder, x, 1, range(1024)[::-1]).shape == (1, 1024)
    with pytest.raises(Unsupported, match="1025 runs of elements"):
        gather_constant_indices(builder, x, 1, range(1025)[::-1])
