"""Channel advice: try layers with the next smaller multiple of 16 channels.

The NPU computes channels in groups of 16; a few channels more than a multiple cost a whole group.
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

_CHANNEL_GROUP, _MAX_EXCESS = 16, 4
#: Most layers to try; each takes about one second.
_MAX_LAYERS = 6
_CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)


@dataclass(frozen=True)
class _Layer:
    """A convolution or linear layer with its input; equal layers are tried once."""

    kind: type[nn.Module]
    channels: int
    input_sizes: tuple[Any, ...]
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


class _SingleLayer(nn.Module):
    """A layer that returns its result in memory order, so that no transpose is needed."""

    def __init__(self, layer: _Layer, channels: int) -> None:
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
    """Compile each layer with up to 4 channels beyond a multiple of 16 by itself, with and without these channels.

    Returns:
        Advice for the layers whose savings exceed the share of the channels, and notes on layers that were not tried.
    """
    nodes: dict[_Layer, Node] = {}
    for program in programs.values():
        for node, layer in _find_layers(program):
            nodes.setdefault(layer, node)
    largest_first = sorted(nodes, key=_work_size, reverse=True)
    notes = (
        [f"fewer channels in {len(largest_first) - _MAX_LAYERS} smaller layers"]
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
        # Savings of no more than the channels' share of the work are no advice.
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


def _find_layers(program: ExportedProgram) -> Iterator[tuple[Node, _Layer]]:
    for node in program.graph.nodes:
        layer = _as_layer(node)
        if (
            layer is None
            or not 0 < layer.channels % _CHANNEL_GROUP <= _MAX_EXCESS
            or layer.channels < _CHANNEL_GROUP
            or _is_model_output(node)
        ):
            continue
        yield node, layer


def _as_layer(node: Node) -> _Layer | None:
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten.linear.default:
        x, weight = (_shape(argument) for argument in node.args[:2])
        return _Layer(nn.Linear, weight[0], (weight[1],), x, ())
    if node.target not in _CONVOLUTIONS:
        return None
    arguments = dict(
        zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), node.args, strict=False)
    )
    arguments |= node.kwargs
    if arguments.get("groups", 1) != 1:  # their channels are determined by the preceding layer
        return None
    x, weight = _shape(arguments["input"]), _shape(arguments["weight"])
    kind = nn.Conv2d if len(weight) == 4 else nn.Conv1d
    options = {name: _hashable(arguments[name]) for name in ("stride", "padding", "dilation") if name in arguments}
    return _Layer(kind, weight[0], (weight[1], weight[2:]), x, tuple(options.items()))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _is_model_output(node: Node) -> bool:
    """Whether the node is a model output, whose number of channels is fixed by the task."""
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output":
            return True
        if "quantize" in str(user.target):
            pending += user.users
    return False


def _work_size(layer: _Layer) -> int:
    elements = 1
    for size in layer.shape:
        elements *= size
    return elements * layer.channels


def _compile_layer(layer: _Layer, channels: int, recipe: ExportRecipe | None, spec: EthosUCompileSpec) -> Cost | None:
    """Estimate the cost of the isolated layer with random weights; None if it cannot be exported."""
    from executorch.export import ExportRecipe

    from arm_backend_core.errors import ArmBackendError
    from arm_recipes._internal.messages import ExportError
    from arm_recipes.pipeline.export import run_export
    from arm_recipes.recipe_types import ArmRecipeType
    from arm_recipes.report.ram import npu_parts

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
        x = torch.randn(layer.shape)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    try:
        report = run_export(model, layer_recipe, [(x,)], progress=False).report
    except (ArmBackendError, ExportError):
        return None
    costs = [cost for cost in report.layers if cost.kind == "layer"]
    estimates = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    sram = sum(part.bytes for part in npu_parts(estimates) if part.memory == "SRAM") if estimates else 0
    dram, flash = sum(vela.dram_bytes for vela in estimates), sum(vela.flash_bytes for vela in estimates)
    return Cost(sum(cost.cycles for cost in costs), sram, dram, flash)
