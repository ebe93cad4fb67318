"""Linear layers that methods for an Ethos-U85 have in common, in as many rows at a time in each, to share weights.

Vela writes weights in blocks of output channels, of which there are as many as the accumulators have room for beside
the rows: 512 beside one row, 64 beside 32. So a weight that one method reads with one row and another one with 32 is
there twice, in different order. Up to a number of rows a layer takes no longer than with one: in groups of that many,
one row filled up, all methods read the same bytes. SmolLM2's shape: 161 MiB in place of 261, 0.9 % more cycles for a
token (for filling up), 1.2 % for a prompt of 32. Networks of nothing but such layers take 5 % and 15 % more, which is
why this is for methods that go on from each other's state: decoders, of which the layers are a fifth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node, map_arg

from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.program import TensorIdentity, constants_of, tensor_identity

if TYPE_CHECKING:
    from executorch.export import ExportRecipe

aten = torch.ops.aten
#: Rows in a group, by MACs of the U85. At 256, 16 rows of SmolLM2's layers take 5 to 13 % fewer cycles than one.
_ROWS = {256: 16}
#: Elements of a weight that is worth it: filling up the rows takes about as long for a small one.
_MANY = 1 << 16
#: Input channels in a block. Where there is one such block, the order does not depend on the output channels' blocks.
_BLOCK = 64


def arrange_rows(programs: Mapping[str, ExportedProgram], recipe: ExportRecipe) -> None:
    """Rewrite quantized linear operators whose weight several methods read, each with another number of rows.

    Operators with more rows than a group has, and not a multiple of it, stay as they are: their last one would be dear.

    Args:
        programs: are edited. A group's numbers are those that its rows had in the whole.
    """
    size = _group(recipe) if len(programs) > 1 else None
    if size is None:
        return
    found = [(weight, node) for program in programs.values() for weight, node in _linear(program)]
    rows: dict[TensorIdentity, set[int]] = defaultdict(set)
    for weight, node in found:
        rows[weight].add(_rows(node))
    made: dict[tuple[Any, ...], list[Node]] = {}
    for weight, node in found:
        if len(rows[weight]) > 1 and not any(count > size and count % size for count in rows[weight]):
            _in_groups(node, size, made)


def _group(recipe: ExportRecipe) -> int | None:
    """Rows in a group on the recipe's target, if it is one that this helps."""
    from arm_backend_core.partitioner import EthosUPartitioner

    partitioners = recipe.lowering_recipe.partitioners if recipe.lowering_recipe is not None else None
    for partitioner in partitioners if isinstance(partitioners, list) else ():
        if (
            isinstance(partitioner, EthosUPartitioner)
            and partitioner.compile_spec.target.hardware.packs_weights_by_rows
        ):
            return _ROWS.get(partitioner.compile_spec.target.macs or 0)
    return None


def _linear(program: ExportedProgram) -> Iterator[tuple[TensorIdentity, Node]]:
    """Linear operators from int8 to integers, and which weight each reads."""
    constants = constants_of(program)
    for node in program.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = node.args[:2]
        if not (is_dequantize(x) and is_dequantize(weight) and weight.args[0] in constants):
            continue
        shape = constants[weight.args[0]].shape
        if shape.numel() < _MANY or shape[1] <= _BLOCK:
            continue
        value, users = x.args[0].meta["val"], list(node.users)
        alike = all(is_quantize(user) and user.args[1:] == users[0].args[1:] for user in users)
        returned = any(reader.op == "output" for user in users for reader in user.users)
        if users and alike and not returned and value.dtype is torch.int8 and value.is_contiguous():
            yield tensor_identity(constants[weight.args[0]]), node


def _rows(node: Node) -> int:
    return prod(node.meta["val"].shape[:-1])


def _in_groups(node: Node, size: int, made: dict[tuple[Any, ...], list[Node]]) -> None:
    """Put groups in the operator's place; ``made`` has those of operands that others read too."""
    (x, *held), first, rows = node.args, next(iter(node.users)), _rows(node)
    assert isinstance(x, Node)

    def call(target: Any, *args: Any) -> Node:
        made_node = node.graph.call_function(target, args)
        made_node.meta = {**node.meta, "val": target(*map_arg(args, lambda source: source.meta["val"]))}
        return made_node

    groups = -(-rows // size)
    with node.graph.inserting_before(node):
        if x.args not in made:
            source, _, zero_point = x.args[:3]
            flat = call(aten.view.default, source, [1, rows, node.args[1].meta["val"].shape[1]])  # type: ignore[union-attr]
            if rows % size:
                flat = call(aten.constant_pad_nd.default, flat, [0, 0, 0, groups * size - rows], zero_point)
            image = call(aten.view.default, flat, [1, groups, size, flat.meta["val"].shape[-1]])
            parts = [call(aten.slice.Tensor, image, 1, i, i + 1) for i in range(groups)] if groups > 1 else [image]
            made[x.args] = [call(x.target, part, *x.args[1:]) for part in parts]
        results = [call(first.target, call(node.target, part, *held), *first.args[1:]) for part in made[x.args]]
        joined = call(aten.cat.default, results, 1) if groups > 1 else results[0]
        flat = call(aten.view.default, joined, [1, groups * size, joined.meta["val"].shape[-1]])
        if rows % size:
            flat = call(aten.slice.Tensor, flat, 1, 0, rows)
        whole = call(aten.view.default, flat, list(node.meta["val"].shape))
    for user in list(node.users):
        user.replace_all_uses_with(whole)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    if not x.users:
        node.graph.erase_node(x)
