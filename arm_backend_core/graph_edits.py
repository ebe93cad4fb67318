"""Edits of fx graphs: insert calls and buffers, replace nodes, remove dead ones."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from arm_backend_core.nodes import FEEDS_DROPOUT, REPLACED_NAME


def insert_call(origin: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert an operator that computes part of ``origin``. It has ``origin``'s metadata, but its own fake tensor."""
    node = origin.graph.call_function(target, args, kwargs)
    node.meta = dict(origin.meta)
    values = [x.meta["val"] if isinstance(x, Node) else x for x in args]
    like = next(value for value in values if isinstance(value, Tensor))
    meta_args = [torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in values]
    result = target(*meta_args, **kwargs)
    node.meta["val"] = like.new_empty(result.shape, dtype=result.dtype)
    return node


def replace_node(node: Node, results: Any) -> None:
    """Replace ``node`` by ``results`` and erase it. For an operator with several results, ``results`` is a sequence."""
    if isinstance(results, (tuple, list)):
        for getitem in list(node.users):
            assert getitem.target is operator.getitem, getitem
            if getitem.users:
                getitem.replace_all_uses_with(results[cast(int, getitem.args[1])])
            node.graph.erase_node(getitem)
    else:
        node.replace_all_uses_with(results)
    node.graph.erase_node(node)


def propagate_dropout_metadata(node: Node, result: Node) -> None:
    """Copy the mark ``FEEDS_DROPOUT`` from ``node`` to ``result``, which replaces ``node``.

    Training then inserts the dropout after ``result``.
    """
    if node.meta.get(FEEDS_DROPOUT):
        result.meta |= {FEEDS_DROPOUT: True, REPLACED_NAME: node.meta.get(REPLACED_NAME, node.name)}


def eliminate_dead_code(graph: Graph) -> None:
    """Erase unused nodes without side effects. Unlike fx's ``Graph.eliminate_dead_code``, it skips the graph's lint."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def add_buffer_node(module: GraphModule, name: str, tensor: Tensor) -> Node:
    """Register ``tensor`` as a buffer and insert a ``get_attr`` node for it, at the graph's insertion point."""
    node = module.graph.get_attr(add_buffer(module, name, tensor))
    node.meta["val"] = tensor
    return node


def add_buffer(module: GraphModule, name: str, tensor: Tensor) -> str:
    """Register ``tensor`` as a buffer of the module; returns its name: ``name``, with underscores to make it unique."""
    while hasattr(module, name):
        name += "_"
    module.register_buffer(name, tensor)
    return name
