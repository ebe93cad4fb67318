"""Channel advice: compile layers with their number of channels reduced to a multiple of 16.

The NPU computes channels in groups of 16. A few channels beyond a multiple of 16 cost as much as a whole group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from arm_recipes.explore.advice.result import Advice, Cost

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_backend_core.targets.compile_spec import EthosUCompileSpec

#: Number of channels that the NPU computes together.
_CHANNEL_GROUP = 16
#: Maximum number of channels beyond a multiple of 16. Layers with more excess channels are not tried.
_MAX_EXCESS_CHANNELS = 4
#: Maximum number of layers to try. Each takes about one second.
_MAX_LAYERS = 6
_CONVOLUTION_OPERATORS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)


@dataclass(frozen=True)
class _LayerSpec:
    """Specification of a convolution or linear layer. Equal layers are compiled only once.

    Attributes:
        kind: class of the layer.
        channels: number of output channels, or output features of a linear layer.
        input_sizes: number of input channels or features, and for convolutions the kernel size.
        input_shape: shape of the input tensor.
        options: (name, value) pairs of the stride, padding and dilation of a convolution. Options that its node does
            not specify are missing.
    """

    kind: type[nn.Module]
    channels: int
    input_sizes: tuple[Any, ...]
    input_shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


class _SingleLayer(nn.Module):
    """A model of one layer. It returns the channels in the last dimension, so that the NPU needs no transpose."""

    def __init__(self, layer: _LayerSpec, channels: int) -> None:
        super().__init__()
        first, *rest = layer.input_sizes
        self.layer = layer.kind(first, channels, *rest, **dict(layer.options))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer; return the channels in the last dimension."""
        y: Tensor = self.layer(x)
        return y if isinstance(self.layer, nn.Linear) else y.movedim(1, -1)


def try_fewer_channels(
    recipe: ExportRecipe | None, spec: EthosUCompileSpec, programs: Mapping[str, ExportedProgram]
) -> tuple[list[Advice], list[str]]:
    """Compile layers separately, with and without the channels beyond a multiple of 16.

    Compiles the 6 largest layers whose number of channels exceeds a positive multiple of 16 by 1 to 4, for example 33.
    Grouped convolutions and layers that compute an output of the model are excluded.

    Returns:
        An ``Advice`` for each compiled layer, whose ``saves`` is False if the change is not worthwhile, and notes on
        layers that were not compiled.
    """
    nodes: dict[_LayerSpec, Node] = {}
    for program in programs.values():
        for node, layer in _find_layers(program):
            nodes.setdefault(layer, node)
    largest_first = sorted(nodes, key=_estimate_work, reverse=True)
    notes = (
        [f"fewer channels in {len(largest_first) - _MAX_LAYERS} smaller layers: not tried, to save time"]
        if len(largest_first) > _MAX_LAYERS
        else []
    )
    items = []
    for layer in largest_first[:_MAX_LAYERS]:
        fewer = layer.channels // _CHANNEL_GROUP * _CHANNEL_GROUP
        costs = [_compile_layer(layer, channels, recipe, spec) for channels in (layer.channels, fewer)]
        current, reduced = costs
        if current is None or reduced is None:
            notes.append(f"{fewer} channels in place of {layer.channels}: the isolated layer cannot be exported")
            continue
        # If the NPU did not compute whole groups, cycles would be proportional to channels. Advise the change only if
        # it saves more than 1.5 times as many cycles as this proportion predicts.
        is_worthwhile = (
            current.cycles - reduced.cycles > 1.5 * current.cycles * (layer.channels - fewer) / layer.channels
        )
        items.append(_make_advice(nodes[layer], layer.channels, fewer, current, reduced if is_worthwhile else current))
    return items, notes


def _make_advice(node: Node, channels: int, fewer: int, current: Cost, changed: Cost) -> Advice:
    from arm_backend_core.nodes import modules_of, source_line

    *_, module = ("", *modules_of(node))
    change, note = f"{fewer} channels in place of {channels}", "for this layer alone; requires retraining"
    return Advice(change, current, changed, module, source_line(node), note)


def _find_layers(program: ExportedProgram) -> Iterator[tuple[Node, _LayerSpec]]:
    for node in program.graph.nodes:
        layer = _layer_spec_of(node)
        if (
            layer is None
            or not 0 < layer.channels % _CHANNEL_GROUP <= _MAX_EXCESS_CHANNELS
            or layer.channels < _CHANNEL_GROUP
            or _is_model_output(node)
        ):
            continue
        yield node, layer


def _layer_spec_of(node: Node) -> _LayerSpec | None:
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten.linear.default:
        x, weight = (_shape(argument) for argument in node.args[:2])
        return _LayerSpec(nn.Linear, weight[0], (weight[1],), x, ())
    if node.target not in _CONVOLUTION_OPERATORS:
        return None
    arguments = dict(
        zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), node.args, strict=False)
    )
    arguments |= node.kwargs
    if arguments.get("groups", 1) != 1:  # the preceding layer determines the channels of grouped convolutions
        return None
    x, weight = _shape(arguments["input"]), _shape(arguments["weight"])
    kind = nn.Conv2d if len(weight) == 4 else nn.Conv1d
    options = {name: _as_hashable(arguments[name]) for name in ("stride", "padding", "dilation") if name in arguments}
    return _LayerSpec(kind, weight[0], (weight[1], weight[2:]), x, tuple(options.items()))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _as_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _is_model_output(node: Node) -> bool:
    """Whether a node computes a model output, whose number of channels the task determines.

    Quantize and dequantize operators may follow the node.
    """
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output":
            return True
        if "quantize" in str(user.target):
            pending += user.users
    return False


def _estimate_work(layer: _LayerSpec) -> int:
    """Return the number of input elements times the number of output channels. Layers are sorted by this product."""
    elements = 1
    for size in layer.input_shape:
        elements *= size
    return elements * layer.channels


def _compile_layer(
    layer: _LayerSpec, channels: int, recipe: ExportRecipe | None, spec: EthosUCompileSpec
) -> Cost | None:
    """Estimate the cost of the isolated layer, with random weights; None if the layer cannot be exported."""
    from executorch.export import ExportRecipe

    from arm_backend_core.errors import ArmBackendError
    from arm_recipes._internal.errors import ExportError
    from arm_recipes.pipeline.export import run_export
    from arm_recipes.recipe_types import ArmRecipeType
    from arm_recipes.report.ram import npu_ram_parts

    recipe_types = {recipe_type.value: recipe_type for recipe_type in ArmRecipeType}
    family = spec.target.family.removeprefix("ethos-").upper()
    recipe_type = recipe_types.get(
        (recipe.name if recipe is not None else None) or "", ArmRecipeType[f"ETHOSU_{family}_INT8"]
    )
    layer_recipe = ExportRecipe.get_recipe(
        recipe_type,
        macs=spec.target.macs,
        system_config=spec.system_config,
        memory_mode=spec.memory_mode,
        extra_flags=list(spec.extra_flags),
        config_ini=spec.config_ini,
        quantized_io=True,
        require_runnable=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _SingleLayer(layer, channels).eval()
        x = torch.randn(layer.input_shape)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    try:
        report = run_export(model, layer_recipe, [(x,)], progress=False).report
    except (ArmBackendError, ExportError):
        return None
    costs = [cost for cost in report.layers if cost.kind == "layer"]
    estimates = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    sram = sum(part.bytes for part in npu_ram_parts(estimates) if part.memory == "SRAM")
    dram, flash = sum(vela.dram_bytes for vela in estimates), sum(vela.flash_bytes for vela in estimates)
    return Cost(sum(cost.cycles for cost in costs), sram, dram, flash)
