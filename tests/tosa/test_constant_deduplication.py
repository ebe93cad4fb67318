"""Constants that differ only in shape are stored once, and the results are bit-equal."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.dtype import DType
from arm_backend_core.targets.compile_spec import VgfCompileSpec
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Array, Builder
from arm_backend_core.tosa.graph import Graph, Value
from arm_backend_core.tosa.passes import constant_deduplication, pipeline
from arm_backend_core.tosa.passes.constant_deduplication import deduplicate_constants
from arm_backend_core.tosa.serialize import serialize
from arm_recipes import ArmRecipeType, export
from tests.tosa_graphs import build_graph, make_target, validate_by_tosa_opt

FLOAT, INTEGER = (Target.from_tosa_spec(f"TOSA-1.0+{spec}") for spec in ("FP", "INT+int16"))
ROWS, WIDTH = 256, 36
INDICES, IMAGE = ((1, 5), DType.INT32), (1, 3, 3, 4)


def _table(dtype: DType) -> Array:
    rng = np.random.default_rng(0)
    if dtype.is_float:
        return rng.standard_normal(ROWS * WIDTH)
    return rng.integers(-100, 101, ROWS * WIDTH)


def _tied(dtype: DType, table: Callable[[DType], Array] = _table) -> Callable[..., tuple[Value, ...]]:
    """GATHER from a table, and convolutions with two kernel sizes, whose weights have the table's bytes."""

    def body(b: Builder, indices: Value, image: Value) -> tuple[Value, ...]:
        accumulator = DType.FP32 if dtype.is_float else DType.INT32
        bias = b.const(np.zeros(ROWS), accumulator)
        rows = b.gather(b.const(_table(dtype).reshape(1, ROWS, WIDTH), dtype), indices)
        shapes = (ROWS, 1, 1, WIDTH), (ROWS, 3, 3, 4)
        weights = [b.const(table(dtype).reshape(shape), dtype) for shape in shapes]
        row = b.reshape(rows, (1, 5, 1, WIDTH))
        return rows, *(b.conv2d(x, w, bias, pad=[0] * 4) for x, w in zip((row, image), weights, strict=True))

    return body


def _run_passes(dtype: DType, target: Target) -> Graph:
    graph = build_graph(_tied(dtype), INDICES, (IMAGE, dtype), target=target)
    pipeline.run(graph, target)
    return graph


@pytest.mark.parametrize(("dtype", "target"), [(DType.FP32, FLOAT), (DType.INT8, INTEGER)], ids=["float", "int8"])
def test_constants_of_three_shapes_are_stored_once(
    dtype: DType, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _run_passes(dtype, target)
    monkeypatch.setattr(constant_deduplication, "_MIN_BYTES", 1 << 30)
    separate = _run_passes(dtype, target)
    size = ROWS * WIDTH * dtype.bytes
    small, large = serialize(shared), serialize(separate)
    assert size < len(small) < 2 * size
    assert 3 * size < len(large)
    assert [op.kind for op in shared.ops].count("RESHAPE") == [op.kind for op in separate.ops].count("RESHAPE") + 2
    assert all(op.origins for op in shared.ops)
    weights = [op.weight.data is None for op in shared.ops if op.weight is not None]
    assert sorted(weights) == [False, True]
    assert validate_by_tosa_opt(small, target) is None
    rng = np.random.default_rng(1)
    inputs = [rng.integers(0, ROWS, (1, 5)).astype(np.int32), rng.integers(-9, 9, IMAGE).astype(dtype.numpy)]
    for ours, theirs in zip(reference_model.run(small, inputs), reference_model.run(large, inputs), strict=True):
        assert np.unique(ours).size > 1
        assert np.array_equal(ours, theirs)


def test_model_converter_accepts_reshaped_weights() -> None:
    flatbuffer = serialize(_run_passes(DType.FP32, FLOAT))
    payload = compile_payload(VgfCompileSpec(), flatbuffer, delegate="d", find_operator=lambda text: None)
    assert len(payload.data) < 2 * ROWS * WIDTH * 4


def test_constants_with_other_bytes_are_not_shared() -> None:
    graph = build_graph(
        _tied(DType.INT8, lambda dtype: _table(dtype) + 1), INDICES, (IMAGE, DType.INT8), target=INTEGER
    )
    graph.ops = [op for op in graph.ops if op.kind != "CONV2D" or op.inputs[0] is not graph.inputs[1]]
    graph.outputs = graph.outputs[:2]
    kinds = [op.kind for op in graph.ops]
    deduplicate_constants(graph, INTEGER)
    assert [op.kind for op in graph.ops] == kinds


def test_weights_are_not_shared_for_npus() -> None:
    graph = build_graph(_tied(DType.INT8), INDICES, (IMAGE, DType.INT8), target=make_target("ethos-u85"))
    kinds = [op.kind for op in graph.ops]
    deduplicate_constants(graph, make_target("ethos-u85"))
    assert [op.kind for op in graph.ops] == kinds


class Tied(nn.Module):
    """Tied embeddings: the output layer has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.scores = nn.Embedding(200, 48), nn.Linear(48, 200, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.scores(self.table(tokens) * 0.5))


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_FP, ArmRecipeType.VGF_FP], ids=lambda recipe: recipe.name)
def test_tied_embeddings_are_stored_once(recipe: ArmRecipeType) -> None:
    model, tokens = Tied().eval(), torch.tensor([[3, 0, 199, 64]], dtype=torch.int32)
    result = export(model, ExportRecipe.get_recipe(recipe), [(tokens,)])
    (delegate,) = result.report.delegates
    assert 1 < delegate.payload_bytes / (model.table.weight.numel() * 4) < 1.2
    torch.testing.assert_close(result.run(tokens), model(tokens), atol=1e-5, rtol=1e-5)
