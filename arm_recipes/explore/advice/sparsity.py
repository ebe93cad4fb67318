"""2:4 structured sparsity: of each four consecutive weights along the input channels, keep at most two nonzero.

With such weights, Ethos-U85 needs half of the multiply-accumulates for convolutions and linear layers (Mishra et al.
2021 describe the pattern). Vela finds the pattern by itself. On every Ethos-U, zeros in the encoded weights are
compressed, so the NPU reads fewer bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from arm_backend_core.nodes import is_dequantize, is_quantize, overload_of
from arm_backend_core.program import constants_of, copy_program, store_of
from arm_recipes._internal.executorch_programs import normalize_call_signature

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from arm_recipes.types import Model, Samples

_GROUP_SIZE, _MAX_NONZERO = 4, 2
#: Layers with fewer input channels are not pruned: the NPU computes channels in groups of 16, and the first layer of a
#: network is sensitive to pruning.
_MIN_INPUT_CHANNELS = 16
aten = torch.ops.aten
#: Operators whose weight has the shape [output channels, input channels, ...]: ``{operator: position of its
#: argument named groups}``, with None for an operator without this argument.
_PRUNABLE_OPERATORS: dict[Any, int | None] = {
    aten.linear.default: None,
    aten.conv1d.default: 6,
    aten.conv2d.default: 6,
    aten.conv2d.padding: 6,
}


def compute_sparsity_masks(model: Model, samples: Samples | None = None) -> dict[str, Tensor]:
    """Compute masks for 2:4 structured sparsity, for ``torch.nn.utils.prune.custom_from_mask``.

    Of each four consecutive weights along the input channels, a mask keeps the two of the largest magnitude. If a
    linear layer reads a flattened image, the four weights belong to four channels of one pixel, as in the NPU's order
    of the inputs. There are no masks for layers with fewer than 16 input channels, for grouped, transposed and 3D
    convolutions, and for weights that are already pruned or otherwise computed from parameters.

    Args:
        model: as for ``export``, with one method. It does not change.
        samples: as for ``export``; only the first sample is used.

    Returns:
        ``{name of a weight: mask}``, for example ``{"body.0.weight": mask}``. A mask has the shape and dtype of the
        weight, and the values 0 and 1.

    Raises:
        ValueError: the model has several methods, or the samples are missing or do not fit the model.
        TypeError: ``model`` has the wrong type.
        ExportError: the model cannot be captured.

    Example::

        >>> for name, mask in compute_sparsity_masks(model, samples).items():
        ...     module, _, parameter = name.rpartition(".")
        ...     prune.custom_from_mask(model.get_submodule(module), parameter, mask)
    """
    from arm_recipes.explore.sweep.sweep import capture_model

    program, *_ = capture_model(model, samples, "compute_sparsity_masks")
    tensors, names = constants_of(program), program.graph_signature.inputs_to_parameters
    return {
        names[node.name]: compute_mask(tensors[node], channels).to(tensors[node].dtype)
        for node, channels in find_prunable_weights(program).items()
        if node.name in names
    }


def compute_mask(weight: Tensor, channels: int | None = None) -> Tensor:
    """Mark, of each four weights along the input channels, the two with the largest magnitude.

    Args:
        weight: weight [output channels, input channels, ...], in floating point or integers.
        channels: number of channels of the flattened image that a linear layer reads; None for other inputs.

    Returns:
        A boolean mask of the weight's shape.
    """
    groups = weight.detach().float().abs().movedim(1, -1)
    if channels is not None:  # from [channel, pixel] to the NPU's order [pixel, channel]
        groups = groups.unflatten(-1, (channels, -1)).transpose(-1, -2).flatten(-2)
    count = groups.shape[-1]
    groups = nn.functional.pad(groups, (0, -count % _GROUP_SIZE)).unflatten(-1, (-1, _GROUP_SIZE))
    kept = groups.topk(_MAX_NONZERO, dim=-1).indices
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, kept, True).flatten(-2)[..., :count]
    if channels is not None:
        mask = mask.unflatten(-1, (-1, channels)).transpose(-1, -2).flatten(-2)
    return mask.movedim(-1, 1).contiguous()


def find_prunable_weights(program: ExportedProgram) -> dict[Node, int | None]:
    """Find the weights of linear layers and of 1D and 2D convolutions without groups, with at least 16 input channels.

    Returns:
        ``{placeholder of the weight: channels}``: the number of channels of the flattened image that the layer reads;
        None for other inputs.
    """
    constants = constants_of(program)
    weights: dict[Node, int | None] = {}
    for node in program.graph.nodes:
        if node.target not in _PRUNABLE_OPERATORS:
            continue
        groups = _PRUNABLE_OPERATORS[node.target]
        weight: Any = _skip_dequantize(node.args[1])
        is_grouped = groups is not None and len(node.args) > groups and node.args[groups] != 1
        if weight in constants and not is_grouped and weight.meta["val"].shape[1] >= _MIN_INPUT_CHANNELS:
            weights[weight] = _flattened_channels(node) if node.target is aten.linear.default else None
    return weights


def prune_weights(program: ExportedProgram) -> ExportedProgram | None:
    """Set the two smallest of each four weights to 0, in the prunable weights (``find_prunable_weights``) of a program.

    Returns:
        A changed copy of the program; None if it has no prunable weight, or all are 2:4 sparse already.
    """
    program = copy_program(program)
    normalize_call_signature(program)
    tensors = constants_of(program)
    targets = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    is_changed = False
    for node, channels in find_prunable_weights(program).items():
        pruned = torch.where(compute_mask(tensors[node], channels), tensors[node], 0).to(tensors[node].dtype)
        is_changed |= not torch.equal(pruned, tensors[node])
        name = targets[node.name]
        store = store_of(program, name)
        store[name] = nn.Parameter(pruned, requires_grad=False) if name in program.state_dict else pruned
    return program if is_changed else None


def _skip_dequantize(node: Any) -> Any:
    return node.args[0] if isinstance(node, Node) and node.op == "call_function" and is_dequantize(node) else node


def _flattened_channels(linear: Node) -> int | None:
    """Return C if a linear layer reads a flattened image [N, C, H, W] of several pixels; otherwise None.

    Quantization and elementwise functions may follow the flattening.
    """
    features = linear.args[1].meta["val"].shape[1]  # type: ignore[union-attr]
    node: Any = linear.args[0]
    while isinstance(node, Node) and node.op == "call_function":
        sources = node.all_input_nodes
        if len(sources) != 1 and not (is_quantize(node) or is_dequantize(node)):
            return None
        source: Any = node.args[0]
        before, after = (x.meta["val"].shape for x in (source, node))
        if len(before) == 4 and len(after) == 2:
            is_view = "aten" in str(overload_of(node.target)) and before[1:].numel() == after[1] == features
            return int(before[1]) if is_view and before[2] * before[3] > 1 else None
        if before != after:
            return None
        node = source
    return None
