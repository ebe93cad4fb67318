"""Indexing: limits of gathers by slices, and one-hot matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.indexing import ONE_HOT_ZERO_POINT, gather_constant_indices, one_hot_rows
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.legalize import LegalizingBuilder
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, ExportRecipe, export

_U55 = EthosUCompileSpec("ethos-u55-128")


def test_limit_of_gathers_by_slices() -> None:
    """Each element of a reversed axis is a run of its own."""
    graph = Graph()
    builder = LegalizingBuilder(graph, _U55.target)
    x = graph.add_input((1, 1025), DType.INT8, "x")
    assert gather_constant_indices(builder, x, 1, range(1024)[::-1]).shape == (1, 1024)
    with pytest.raises(Unsupported, match="1025 runs of elements"):
        gather_constant_indices(builder, x, 1, range(1025)[::-1])


@pytest.mark.parametrize("count", [1, 96, 256, 300])
def test_indices_out_of_range_have_one_hot_rows_of_zeros(count: int) -> None:
    indices = np.array([0, count - 1, count, -1, count + 128, -129, 32767, 32768, -(2**29), 2**29 - 1], np.int32)
    graph = Graph()
    x = graph.add_input((2, 5, 1), DType.INT32, "x")
    graph.outputs = [one_hot_rows(LegalizingBuilder(graph, _U55.target), x, count)]
    (result,) = reference_model.run(serialize(graph), [indices.reshape(2, 5, 1)])
    expected = (indices.reshape(2, 5, 1) == np.arange(count)).astype(np.int8)
    assert np.array_equal(result.astype(np.int64) - ONE_HOT_ZERO_POINT, expected)


@pytest.mark.parametrize("recipe", ["ETHOSU_U55_INT8", "ETHOSU_U55_A16W8"])
def test_an_embedding_on_u55_broadcasts_nothing(recipe: str) -> None:
    """Arithmetic that broadcasts indices and numbers takes 566,000 cycles, of which Vela waits for flash most."""
    samples = [(torch.randint(0, 96, (1, 320)),) for _ in range(2)]
    result = export(nn.Embedding(96, 16).eval(), ExportRecipe.get_recipe(ArmRecipeType[recipe], macs=128), samples)
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert delegate.vela.total_cycles < 80_000
