"""Node writer: fake results of the nodes that it emits."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.ao.quantization.fx import _decomposed  # noqa: F401, registers the operators
from torch.fx import Graph, Node

from arm_backend_core.recurrent.node_writer import NodeWriter

aten = torch.ops.aten


def _sequence(graph: Graph, *shape: int) -> Node:
    node = graph.placeholder("x")
    with FakeTensorMode():
        node.meta["val"] = torch.empty(shape)
    return node


def test_selections_of_all_steps_compute_one_fake_result() -> None:
    graph = Graph()
    sequence, writer = _sequence(graph, 5, 2, 3), NodeWriter(graph)
    steps = [writer.call(aten.select.int, sequence, 0, step, like=sequence) for step in range(5)]
    qdq_ops = [writer.call(aten.unsqueeze.default, step, 1, like=sequence) for step in steps]
    assert [node.args[2] for node in steps] == [0, 1, 2, 3, 4]
    assert {node.meta["val"].shape for node in steps} == {(2, 3)}
    assert {node.meta["val"].shape for node in qdq_ops} == {(2, 1, 3)}
    assert len({id(node.meta["val"]) for node in (*steps, *qdq_ops)}) == 2


def test_other_arguments_give_other_fake_results() -> None:
    graph = Graph()
    sequence, writer = _sequence(graph, 5, 2, 3), NodeWriter(graph)
    rows = writer.call(aten.select.int, sequence, 0, 1, like=sequence)
    columns = writer.call(aten.select.int, sequence, 1, 1, like=sequence)
    ranges = [writer.call(aten.slice.Tensor, sequence, 0, 0, end, like=sequence) for end in (2, 4)]
    joined = writer.call(aten.stack.default, [rows, rows], 0, like=sequence)
    shapes = [tuple(node.meta["val"].shape) for node in (rows, columns, *ranges, joined)]
    assert shapes == [(2, 3), (5, 3), (2, 2, 3), (4, 2, 3), (2, 2, 3)]
