"""Weight sharing on Ethos-U85: compute shared linear layers with the same number of rows per operation in all methods.

A row is one input vector of a linear layer, for example one token. Vela encodes weights in blocks of output channels.
The block size depends on the number of rows that the accumulators hold: 512 channels with 1 row, 64 with 32 rows. If
one method computes a layer on 1 row and another on 32 rows, the program therefore stores the layer's weight twice, in
different orders. With 256 MACs, an operation on 16 rows takes no longer than an operation on 1 row (see
``_ROWS_PER_GROUP``). This rewrite splits the rows into groups of 16 and pads the last group, so that all methods read
the same bytes.

Measured: the weights of a model of SmolLM2's shape take 161 MiB instead of 261 MiB. The cost: a run on one token takes
0.9 % more cycles, because of padding, and a run on a prompt of 32 tokens takes 1.2 % more. In decoders, the shared
linear layers take a fifth of the cycles. In a network that consists only of these layers, a token takes 5 % more
cycles, and a prompt 15 % more. Therefore, the export applies the rewrite only to methods that share state, such as the
methods of a decoder, and only for the numbers of MACs in ``_ROWS_PER_GROUP``.
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
#: Rows in a group, by the number of MACs of the U85. With 256 MACs, an operation on 16 rows in a layer of SmolLM2 takes
#: 5 to 13 % fewer cycles in total than an operation on 1 row.
_ROWS_PER_GROUP = {256: 16}
#: Minimum number of elements of a weight: for smaller weights, the padding takes about as long as the layer.
_MIN_WEIGHT_ELEMENTS = 1 << 16
#: Input channels in a block. A weight with at most this many input channels has one block along them. Its encoded order
#: is then the same for every block size of output channels, so methods share it without this rewrite.
_INPUT_CHANNEL_BLOCK = 64


def tile_rows_for_weight_sharing(programs: Mapping[str, ExportedProgram], recipe: ExportRecipe) -> None:
    """Split the rows of quantized linear operators whose weight is read with different numbers of rows.

    The operators may belong to several methods or to one. If there is only one method, nothing is changed. A weight is
    skipped if the number of rows of one of its operators exceeds the group size and is not a multiple of it, because
    padding of the last group would cost too much.

    Args:
        programs: programs by method name. They are edited in place. Their results stay bit-equal.
        recipe: recipe of the export, which determines the target.
    """
    group_size = _rows_per_group(recipe) if len(programs) > 1 else None
    if group_size is None:
        return
    linears = [(weight, node) for program in programs.values() for weight, node in _quantized_linears(program)]
    rows: dict[TensorIdentity, set[int]] = defaultdict(set)
    for weight, node in linears:
        rows[weight].add(_count_rows(node))
    operand_groups: dict[tuple[Any, ...], list[Node]] = {}
    for weight, node in linears:
        if len(rows[weight]) > 1 and not any(count > group_size and count % group_size for count in rows[weight]):
            _split_into_groups(node, group_size, operand_groups)


def _rows_per_group(recipe: ExportRecipe) -> int | None:
    """Return the number of rows in a group for the recipe's target; None if the rewrite does not apply to it."""
    from arm_backend_core.partitioner import EthosUPartitioner

    partitioners = recipe.lowering_recipe.partitioners if recipe.lowering_recipe is not None else None
    for partitioner in partitioners if isinstance(partitioners, list) else ():
        if (
            isinstance(partitioner, EthosUPartitioner)
            and partitioner.compile_spec.target.hardware.packs_weights_by_rows
        ):
            return _ROWS_PER_GROUP.get(partitioner.compile_spec.target.macs or 0)
    return None


def _quantized_linears(program: ExportedProgram) -> Iterator[tuple[TensorIdentity, Node]]:
    """Yield (weight identity, node) of linear operators with an int8 input, a large weight and a quantized result."""
    constants = constants_of(program)
    for node in program.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = node.args[:2]
        if not (is_dequantize(x) and is_dequantize(weight) and weight.args[0] in constants):
            continue
        shape = constants[weight.args[0]].shape
        if shape.numel() < _MIN_WEIGHT_ELEMENTS or shape[1] <= _INPUT_CHANNEL_BLOCK:
            continue
        value, users = x.args[0].meta["val"], list(node.users)
        has_equal_quantization = all(is_quantize(user) and user.args[1:] == users[0].args[1:] for user in users)
        is_output = any(reader.op == "output" for user in users for reader in user.users)
        if users and has_equal_quantization and not is_output and value.dtype is torch.int8 and value.is_contiguous():
            yield tensor_identity(constants[weight.args[0]]), node


def _count_rows(node: Node) -> int:
    return prod(node.meta["val"].shape[:-1])


def _split_into_groups(node: Node, group_size: int, operand_groups: dict[tuple[Any, ...], list[Node]]) -> None:
    """Replace a linear operator by one operator per group of rows. ``operand_groups`` caches the grouped operands."""
    (x, *weight_and_bias), quantize, rows = node.args, next(iter(node.users)), _count_rows(node)
    assert isinstance(x, Node)

    def call(target: Any, *args: Any) -> Node:
        new_node = node.graph.call_function(target, args)
        new_node.meta = {**node.meta, "val": target(*map_arg(args, lambda source: source.meta["val"]))}
        return new_node

    groups = -(-rows // group_size)
    with node.graph.inserting_before(node):
        if x.args not in operand_groups:
            source, _, zero_point = x.args[:3]
            flat = call(aten.view.default, source, [1, rows, node.args[1].meta["val"].shape[1]])  # type: ignore[union-attr]
            if rows % group_size:
                flat = call(aten.constant_pad_nd.default, flat, [0, 0, 0, groups * group_size - rows], zero_point)
            image = call(aten.view.default, flat, [1, groups, group_size, flat.meta["val"].shape[-1]])
            parts = [call(aten.slice.Tensor, image, 1, i, i + 1) for i in range(groups)] if groups > 1 else [image]
            operand_groups[x.args] = [call(x.target, part, *x.args[1:]) for part in parts]
        results = [
            call(quantize.target, call(node.target, part, *weight_and_bias), *quantize.args[1:])
            for part in operand_groups[x.args]
        ]
        joined = call(aten.cat.default, results, 1) if groups > 1 else results[0]
        flat = call(aten.view.default, joined, [1, groups * group_size, joined.meta["val"].shape[-1]])
        if rows % group_size:
            flat = call(aten.slice.Tensor, flat, 1, 0, rows)
        result = call(aten.view.default, flat, list(node.meta["val"].shape))
    for user in list(node.users):
        user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    if not x.users:
        node.graph.erase_node(x)
