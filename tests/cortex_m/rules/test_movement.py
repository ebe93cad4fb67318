"""Data movement of integers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge
from torch import Tensor, nn

from tests.cortex_m.lowering import Case, LoweredCortexMProgram, Shape, check, check_refused

_F = nn.functional
_MOVEMENT: dict[str, tuple[Callable[[Tensor], Any], Shape]] = {
    "permute 2": (lambda x: x.permute(1, 0), (2, 3)),
    "permute 3": (lambda x: x.permute(2, 0, -2), (2, 3, 4)),
    "permute 4": (lambda x: x.permute(0, 3, 1, 2), (2, 3, 4, 5)),
    "permute 4 all": (lambda x: x.permute(3, 2, 1, 0), (2, 3, 4, 5)),
    "permute 5": (lambda x: x.permute(4, 1, 3, 0, 2), (2, 3, 2, 3, 2)),
    "permute 6": (lambda x: x.permute(0, 3, 1, 5, 2, 4), (2, 3, 2, 3, 2, 2)),
    "permute units": (lambda x: x.permute(2, 1, 0), (1, 3, 1)),
    "t": (lambda x: x.t(), (2, 3)),
    "T": (lambda x: x.mT, (2, 2, 3)),
    "transpose twice": (lambda x: x.transpose(0, 1).transpose(1, 2), (2, 3, 4)),
    "movedim": (lambda x: x.movedim(0, -1), (2, 3, 4)),
    "view": (lambda x: x.view(6, 2, 2), (2, 3, 4)),
    "view of permuted": (lambda x: x.permute(1, 0, 2).reshape(3, 8), (2, 3, 4)),
    "view as permuted": (lambda x: x.permute(1, 0, 2).unsqueeze(1).squeeze(), (2, 3, 4)),
    "view to 0": (lambda x: x.view(()), (1, 1)),
    "flatten": (lambda x: x.flatten(1), (2, 3, 4)),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), (2, 6)),
    "squeeze dim": (lambda x: x.squeeze(1), (2, 1, 3)),
    "squeeze": (lambda x: x.squeeze(), (1, 2, 1, 3)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), (2, 3)),
    "cat": (lambda x: torch.cat([x, x * 2], 1), (2, 3)),
    "cat negative": (lambda x: torch.cat([x, x], -1), (2, 3, 4)),
    "cat of layouts": (lambda x: torch.cat([x.mT, x.reshape(2, 4, 3)], 1), (2, 3, 4)),
    "cat of empty": (lambda x: torch.cat([x, x.new_zeros(0)], 0), (2, 3)),
    "cat of constant": (lambda x: torch.cat([torch.ones(1, 3), x]), (2, 3)),
    "cat of functions": (lambda x: torch.cat([x.sigmoid(), x.tanh(), x], 1), (2, 3)),
    "hstack": (lambda x: torch.hstack([x, x + 1]), (2, 3)),
    "stack": (lambda x: torch.stack([x, -x], 1), (2, 3)),
    "stack last": (lambda x: torch.stack([x, x.relu()], -1), (2, 3)),
    "slice": (lambda x: x[:, 1:3], (2, 5)),
    "slice step": (lambda x: x[:, ::2, 1::3], (2, 5, 7)),
    "slice negative": (lambda x: x[..., -3:-1], (2, 5)),
    "slice of permuted": (lambda x: x.permute(2, 0, 1)[1:3], (2, 3, 4)),
    "narrow": (lambda x: x.narrow(1, 1, 2), (2, 5)),
    "select": (lambda x: x[:, -1], (2, 3, 4)),
    "select of permuted": (lambda x: x.permute(2, 0, 1)[1], (2, 3, 4)),
    "select twice": (lambda x: x[1, :, 2], (2, 3, 4)),
    "select to rank 0": (lambda x: x[1], (3,)),
    "split": (lambda x: x.split(2, 1), (2, 5)),
    "split, a part": (lambda x: x.split(2, 1)[1] + 1, (2, 5)),
    "split sizes": (lambda x: x.split([1, 3], -1), (2, 4)),
    "chunk": (lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1].sigmoid(), (2, 4)),
    "chunk uneven": (lambda x: x.chunk(3, 0), (7, 2)),
    "tensor_split": (lambda x: x.tensor_split(3, 1), (2, 7)),
    "tensor_split at": (lambda x: x.tensor_split((1, 3), 1), (2, 7)),
    "unbind": (lambda x: x.unbind(1), (2, 3, 4)),
    "unbind of permuted": (lambda x: x.permute(1, 2, 0).unbind(0), (2, 3, 4)),
    "chunk of permuted": (lambda x: x.permute(1, 2, 0).chunk(2, 1), (2, 3, 4)),
    "flip": (lambda x: x.flip(0, 2), (2, 3, 4)),
    "roll": (lambda x: x.roll(1, 1), (2, 3)),
    "roll flat": (lambda x: x.roll(2), (2, 3)),
    "roll two": (lambda x: x.roll((1, -1), (0, 1)), (2, 3)),
    "roll by nothing": (lambda x: x.roll((3, 1), (1, 0)), (2, 3)),
    "repeat": (lambda x: x.repeat(2, 1, 3), (2, 3)),
    "tile": (lambda x: x.tile(2), (2, 3)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), (2, 3)),
    "expand": (lambda x: x.expand(4, 2, 3), (2, 1)),
    "expand rank": (lambda x: x.expand(2, -1, 3), (2, 1)),
    "flatten pixels": (lambda x: x.flatten(2).transpose(1, 2), (1, 2, 3, 4)),
    "unflatten pixels": (lambda x: x.permute(2, 1, 0).unflatten(0, (2, 3)), (2, 3, 6)),
    "expand of permuted": (lambda x: x.permute(1, 0).unsqueeze(1).expand(-1, 4, -1), (2, 3)),
    "pad": (lambda x: _F.pad(x, (1, 2)), (2, 3)),
    "pad 2d": (lambda x: _F.pad(x, (1, 0, 2, 1), value=0.7), (1, 2, 3, 3)),
    "pad 4d": (lambda x: _F.pad(x, (1, 0, 0, 1, 2, 1, 1, 1), value=-5.0), (1, 2, 3, 3)),
    "pad one channel": (lambda x: _F.pad(x, (1, 0, 2, 1)), (2, 1, 3, 4)),
    "pad one pixel": (lambda x: _F.pad(x, (1, 0, 2, 1)), (2, 3, 1, 1)),
    "pad after conv": (lambda x: _F.pad(_F.conv2d(x, torch.ones(1, 2, 1, 1)), (1, 0, 2, 1)), (1, 2, 3, 4)),
    "pad channels": (lambda x: _F.pad(x, (0, 0, 0, 0, 1, 2)), (1, 2, 3, 4)),
    "pad rank 5": (lambda x: _F.pad(x, (1, 1)), (1, 2, 3, 2, 3)),
    "pad rank 5, depth": (lambda x: _F.pad(x, (0, 0, 0, 0, 1, 1)), (1, 2, 3, 2, 3)),
    "pad crops": (lambda x: _F.pad(x, (-1, -1)), (2, 5)),
    "pad crops and adds": (lambda x: _F.pad(x, (-1, 2)), (2, 5)),
    "pad by nothing": (lambda x: _F.pad(x, (0, 0)) * 2, (2, 5)),
    "pad reflect": (lambda x: _F.pad(x, (1, 2), mode="reflect"), (1, 2, 5)),
    "pad replicate": (lambda x: _F.pad(x, (1, 1, 2, 0), mode="replicate"), (1, 2, 3, 4)),
    "pad reflect 2d": (lambda x: _F.pad(x, (1, 1, 2, 0), mode="reflect"), (1, 2, 3, 4)),
    "pad reflect crops": (lambda x: _F.pad(x, (-1, 2), mode="reflect"), (1, 2, 5)),
    "pad replicate 3d": (lambda x: _F.pad(x, (1, 0, 2, 1, 0, 3), mode="replicate"), (1, 2, 3, 2, 3)),
    "reflection_pad2d": (lambda x: torch.ops.aten.reflection_pad2d(x, [1, 2, 0, 1]), (1, 2, 3, 4)),
    "pad circular": (lambda x: _F.pad(x, (1, 1), mode="circular"), (1, 2, 5)),
    "index": (lambda x: x[torch.tensor([2, 0, 1])], (3, 2)),
    "index two": (lambda x: x[:, torch.tensor([[1, 0]]), torch.tensor([1, 2])], (3, 2, 4)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([1, 1, 0])), (3, 2)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0, 1], [2, 0]])), (2, 3)),
    "take_along_dim": (lambda x: x.take_along_dim(torch.tensor([[1], [2]]), 1), (2, 3)),
    "nearest": (lambda x: _F.interpolate(x, scale_factor=2), (1, 2, 3, 2)),
    "nearest 2x3": (lambda x: _F.interpolate(x, scale_factor=(2, 3)), (2, 2, 3, 2)),
    "nearest size": (lambda x: _F.interpolate(x, size=(6, 2)), (1, 2, 3, 2)),
    "nearest odd": (lambda x: _F.interpolate(x, size=(5, 3)), (1, 2, 3, 2)),
    "nearest exact": (lambda x: _F.interpolate(x, scale_factor=2, mode="nearest-exact"), (1, 2, 3, 2)),
    "nearest exact odd": (lambda x: _F.interpolate(x, size=(5, 3), mode="nearest-exact"), (1, 2, 3, 2)),
    "nearest 1d": (lambda x: _F.interpolate(x, scale_factor=2), (1, 2, 3)),
    "nearest down": (lambda x: _F.interpolate(x, scale_factor=0.5), (1, 2, 4, 4)),
    "pixel_shuffle": (lambda x: _F.pixel_shuffle(x, 2), (1, 8, 2, 3)),
    "pixel_unshuffle": (lambda x: _F.pixel_unshuffle(x, 2), (1, 2, 4, 6)),
    "channel_shuffle": (lambda x: _F.channel_shuffle(x, 2), (1, 6, 2, 3)),
    "unfold": (lambda x: x.unfold(1, 3, 2), (2, 7)),
    "im2col": (lambda x: _F.unfold(x, 2), (1, 2, 3, 3)),
    "clone": (lambda x: x.clone().contiguous() + 1, (2, 3)),
    "detach": (lambda x: (x * 2).detach(), (2, 3)),
    "amax": (lambda x: x.amax((1, 2)), (2, 3, 4)),
    "amin keepdim": (lambda x: x.amin(-1, keepdim=True), (2, 3, 4)),
    "max dim": (lambda x: x.max(1).values, (2, 3, 4)),
    "max": (lambda x: x.max(), (2, 3, 4)),
    "argmax": (lambda x: (x * 2).argmax(1), (2, 3, 4)),
    "topk": (lambda x: x.topk(2, 1).values, (2, 5)),
    "sort": (lambda x: x.sort(1).values, (2, 5)),
    "cumsum": (lambda x: x.cumsum(1), (2, 5)),
    "diagonal": (lambda x: x.diagonal(), (3, 3)),
    "meshgrid": (lambda x: torch.meshgrid(x, x, indexing="ij")[0], (3,)),
    "rot90": (lambda x: x.rot90(1, (1, 2)), (2, 3, 4)),
    "empty result": (lambda x: torch.cat([x[:, :0], x], 1), (2, 3)),
    "rank 0": (lambda x: x.reshape(1).repeat(3), ()),
}


def _convolved(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda x: function(_F.conv2d(x, torch.eye(2)[:, :, None, None] * 0.9))


CASES = [
    *(Case(name, function, [shape]) for name, (function, shape) in _MOVEMENT.items()),
    # Rank 4, in the layout of a convolution.
    *(
        Case(f"{name} of a convolution", _convolved(function), [shape])
        for name, (function, shape) in _MOVEMENT.items()
        if len(shape) == 4 and shape[1] == 2
    ),
    *(
        Case(f"{name}, channels last", function, [shape], channels_last=True)
        for name, (function, shape) in _MOVEMENT.items()
        if len(shape) == 4
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lowering(case: Case) -> None:
    check(case)


def _index_operators(lowered: LoweredCortexMProgram) -> list[str]:
    """Operators of the edge program that compute from constants alone."""
    manager = to_edge(copy.deepcopy(lowered.program), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    program = manager.exported_program()
    inputs = program.graph_signature.user_inputs
    constants = {node for node in program.graph.nodes if node.op == "placeholder" and node.name not in inputs}
    computed = []
    for node in program.graph.nodes:
        if node.op == "call_function" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
            computed.append(str(node.target))
    return computed


@pytest.mark.parametrize(
    "name", ["pad reflect", "pad reflect 2d", "pad replicate", "pad circular", "roll flat", "index", "take_along_dim"]
)
def test_indices_are_computed_at_export(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert _index_operators(check(case)) == []


def test_a_large_index_is_not_repeated_in_flash() -> None:
    """An index of 2 elements, expanded to the 2,400 elements of the operand."""
    lowered = check(Case("large", lambda x: x.gather(0, torch.tensor([[1], [0]]).expand(2, 1200)), [(2, 1200)]))
    assert any("expand" in name for name in _index_operators(lowered))


@pytest.mark.parametrize(
    "name",
    [
        "pad one channel",
        "pad reflect 2d",
        "pad replicate 3d",
        "pad 4d",
        "pad rank 5",
        "pad crops",
        "nearest odd",
        "roll",
    ],
)
def test_runtime(name: str) -> None:
    """ExecuTorch's runtime accepts the layouts and dtypes of data movement."""
    for case in (case for case in CASES if case.name.removesuffix(", channels last") == name):
        check(case).check_executorch_run(case.sample())


def test_an_index_may_be_one_of_several_results() -> None:
    """The two rows of ``triu_indices`` are the results of one operator."""
    check(Case("", lambda x: torch.ops.aten._pdist_forward.default(x, 1.0), [(2, 10)]))


def test_tensors_without_elements_stay_in_float() -> None:
    check_refused(Case("", lambda x: x * 2, [(0, 3)]), "which has no elements")
    function = lambda x: (torch.cat([x.reshape(-1)[:0], x.reshape(-1)[:0]]), x.relu())  # noqa: E731
    check_refused(Case("", function, [(2, 3)]), "no operand has an element")
