"""Channels that an NPU computes in groups of 16: layers that have a few more than whole groups, tried without these."""

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

_GROUP, _FEW = 16, 4
#: Layers that are tried: each takes about a second.
_MOST = 6
_CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding)


@dataclass(frozen=True)
class _Layer:
    """A convolution or linear layer as it is called; equal ones are tried once."""

    kind: type[nn.Module]
    channels: int
    given: tuple[Any, ...]
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]


class _Alone(nn.Module):
    """A layer that returns what it computes as it lies in memory, so that nothing is moved."""

    def __init__(self, layer: _Layer, channels: int) -> None:
        super().__init__()
        first, *rest = layer.given
        self.layer = layer.kind(first, channels, *rest, **dict(layer.options))

    def forward(self, x: Tensor) -> Tensor:
        """The channels last."""
        y: Tensor = self.layer(x)
        return y if isinstance(self.layer, nn.Linear) else y.movedim(1, -1)


def try_fewer_channels(
    recipe: ExportRecipe | None, spec: EthosUCompileSpec, programs: Mapping[str, ExportedProgram]
) -> tuple[list[Advice], list[str]]:
    """Layers with up to 4 channels more than a multiple of 16, each alone with these and without.

    Returns:
        those that save more than the channels' part of the cycles, and what was not tried.
    """
    found: dict[_Layer, Node] = {}
    for program in programs.values():
        for node, layer in _layers(program):
            found.setdefault(layer, node)
    most = sorted(found, key=_work, reverse=True)
    notes = [f"fewer channels in {len(most) - _MOST} smaller layers"] if len(most) > _MOST else []
    items = []
    for layer in most[:_MOST]:
        fewer = layer.channels // _GROUP * _GROUP
        costs = [_compiled(layer, channels, recipe, spec) for channels in (layer.channels, fewer)]
        now, then = costs
        if now is None or then is None:
            notes.append(f"{fewer} channels in place of {layer.channels}: the layer alone cannot be exported")
            continue
        # One that saves no more than its part of the work is no advice.
        worth = now.cycles - then.cycles > 1.5 * now.cycles * (layer.channels - fewer) / layer.channels
        items.append(_advice(found[layer], layer.channels, fewer, now, then if worth else now))
    return items, notes


def _advice(node: Node, channels: int, fewer: int, now: Cost, then: Cost) -> Advice:
    from arm_backend_core.nodes import modules_of, source_line

    *_, module = ("", *modules_of(node))
    change, note = f"{fewer} channels in place of {channels}", "that layer alone; train it again"
    return Advice(change, now, then, module, source_line(node), note)


def _layers(program: ExportedProgram) -> Iterator[tuple[Node, _Layer]]:
    for node in program.graph.nodes:
        layer = _layer(node)
        if layer is None or not 0 < layer.channels % _GROUP <= _FEW or layer.channels < _GROUP or _is_result(node):
            continue
        yield node, layer


def _layer(node: Node) -> _Layer | None:
    if node.op != "call_function":
        return None
    if node.target is torch.ops.aten.linear.default:
        x, weight = (_shape(argument) for argument in node.args[:2])
        return _Layer(nn.Linear, weight[0], (weight[1],), x, ())
    if node.target not in _CONVOLUTIONS:
        return None
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), node.args, strict=False))
    given |= node.kwargs
    if given.get("groups", 1) != 1:  # their channels are those of the layer before
        return None
    x, weight = _shape(given["input"]), _shape(given["weight"])
    kind = nn.Conv2d if len(weight) == 4 else nn.Conv1d
    options = {name: _hashable(given[name]) for name in ("stride", "padding", "dilation") if name in given}
    return _Layer(kind, weight[0], (weight[1], weight[2:]), x, tuple(options.items()))


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _is_result(node: Node) -> bool:
    """Whether the model returns it: then the number of channels is what it is for."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user.op == "output":
            return True
        if "quantize" in str(user.target):
            waiting += user.users
    return False


def _work(layer: _Layer) -> int:
    elements = 1
    for size in layer.shape:
        elements *= size
    return elements * layer.channels


def _compiled(layer: _Layer, channels: int, recipe: ExportRecipe | None, spec: EthosUCompileSpec) -> Cost | None:
    """What Vela expects of the layer alone, with weights drawn at random."""
    from executorch.export import ExportRecipe

    from arm_backend_core.errors import ArmBackendError
    from arm_recipes._internal.messages import ExportError
    from arm_recipes.pipeline.export import run_export
    from arm_recipes.recipe_types import ArmRecipeType

    kinds = {kind.value: kind for kind in ArmRecipeType}
    family = spec.target.family.removeprefix("ethos-").upper()
    kind = kinds.get((recipe.name if recipe is not None else None) or "", ArmRecipeType[f"ETHOSU_{family}_INT8"])
    chosen = ExportRecipe.get_recipe(
        kind,
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
        model = _Alone(layer, channels).eval()
        x = torch.randn(layer.shape)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    try:
        report = run_export(model, chosen, [(x,)], progress=False).report
    except (ArmBackendError, ExportError):
        return None
    costs = [cost for cost in report.layers if cost.kind == "layer"]
    velas = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    sram = max((vela.sram_bytes for vela in velas), default=0)
    dram, flash = sum(vela.dram_bytes for vela in velas), sum(vela.flash_bytes for vela in velas)
    return Cost(sum(cost.cycles for cost in costs), sram, dram, flash)
