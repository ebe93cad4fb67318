"""Estimates of programs beside published measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from arm_backend_core.cortex_m.cost.estimate import estimate_node
from arm_backend_core.cortex_m.custom_ops import edge_operator
from arm_backend_core.targets.cortex_m import Processor

#: Layers of MobileNetV2 with 224x224 pixels: kernel, pixels of a side, input channels, output channels, window, stride,
#: cycles on a Cortex-M55 (Alif Ensemble E8, https://github.com/pytorch/executorch/issues/17651).
MOBILENET_V2 = (
    ("conv2d", 224, 3, 32, 3, 2, 13_754_047),
    ("depthwise_conv2d", 112, 32, 32, 3, 1, 13_715_766),
    ("conv2d", 112, 32, 16, 1, 1, 4_915_937),
    ("conv2d", 112, 16, 96, 1, 1, 24_249_462),
    ("depthwise_conv2d", 112, 96, 96, 3, 2, 10_286_711),
    ("conv2d", 56, 96, 24, 1, 1, 2_791_555),
    ("conv2d", 56, 24, 144, 1, 1, 10_329_014),
    ("depthwise_conv2d", 56, 144, 144, 3, 1, 15_319_785),
)
M55 = Processor.resolve("cortex-m55")


def _tensor(graph: Graph, *shape: int) -> Node:
    node = graph.placeholder(f"x{len(graph.nodes)}")
    node.meta["val"] = torch.empty(shape, dtype=torch.int8)
    return node


def _layer(kind: str, size: int, inputs: int, outputs: int, window: int, stride: int) -> Node:
    graph = Graph()
    weights = (1, window, window, outputs) if kind.startswith("depthwise") else (outputs, window, window, inputs)
    tensors = [_tensor(graph, 1, size, size, inputs), _tensor(graph, *weights), _tensor(graph, outputs)]
    padding = window // 2
    geometry: list[Any] = [[stride, stride], [padding, padding], [1, 1], *([1] if kind.startswith("depthwise") else [])]
    node = graph.call_function(edge_operator(f"quantized_{kind}_nhwc"), (*tensors, *geometry))
    side = size // stride
    node.meta["val"] = torch.empty((1, side, side, outputs), dtype=torch.int8)
    GraphModule(torch.nn.Module(), graph)
    return node


def test_layers_of_mobilenet_v2_are_near_the_measured_cycles() -> None:
    estimates = [estimate_node(_layer(*layer[:6]), M55).cycles for layer in MOBILENET_V2]
    measured = [layer[6] for layer in MOBILENET_V2]
    assert sum(estimates) == pytest.approx(sum(measured), rel=0.05)
    for layer, estimate in zip(MOBILENET_V2, estimates, strict=True):
        assert 0.7 < estimate / layer[6] < 1.2, layer


def test_bytes_are_those_of_operands_and_result() -> None:
    estimate = estimate_node(_layer("conv2d", 8, 16, 32, 1, 1), M55)
    assert estimate.bytes_read == 8 * 8 * 16 + 16 * 32 + 32
    assert estimate.bytes_written == 8 * 8 * 32
    assert estimate.macs == 8 * 8 * 16 * 32


def test_an_operator_without_kernel_is_estimated_too() -> None:
    graph = Graph()
    x = _tensor(graph, 4, 8)
    node = graph.call_function(torch.ops.aten.permute_copy.default, (x, [1, 0]))
    node.meta["val"] = torch.empty((8, 4), dtype=torch.int8)
    assert estimate_node(node, M55).cycles > 0
