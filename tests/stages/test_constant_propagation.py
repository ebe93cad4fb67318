"""Lengths, sizes and positions that follow from constants, buffers and shapes are numbers in the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportError, ExportRecipe, export
from arm_recipes.samples.call_inputs import Inputs
from arm_recipes.stages.capture.capture import Capture

Function = Callable[[Any, Tensor], Tensor]


class _Packed(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.start: Tensor
        self.lengths: Tensor
        self.register_buffer("start", torch.tensor(1))
        self.register_buffer("lengths", torch.tensor([1, 2, 1]))
        self.constant = torch.tensor([1, 3])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _means(x: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([rows.mean(0, keepdim=True) for rows in torch.split(x, lengths)])


def _of_slices(m: Any, x: Tensor) -> Tensor:
    ends = torch.zeros(3, dtype=torch.int64)
    ends[1:] = m.constant.cumsum(0)
    return torch.cat([x[a:b].mean(0, keepdim=True) for a, b in itertools.pairwise(ends)])


def _of_views(m: Any, x: Tensor) -> Tensor:
    lengths = m.lengths.clone()
    view = lengths[1:]
    torch.relu_(x * 1)
    view += 1
    return _means(x.repeat(2, 1)[:6], lengths.tolist())


def _of_rows(m: Any, x: Tensor) -> Tensor:
    grid = torch.repeat_interleave(m.constant[:, None], m.constant, dim=0)
    grid[:, 0] = 1
    return x * grid.sum().item()


def _of_shape(_: Any, x: Tensor) -> Tensor:
    ends = torch.nn.functional.pad(torch.tensor([x.shape[0] // 4, x.shape[0]]), (1, 0))
    return _means(x, (ends[1:] - ends[:-1]).tolist())


_KNOWN: dict[str, Function] = {
    "tolist": lambda m, x: _means(x, (m.lengths + 0).tolist()),
    "attribute": lambda m, x: _means(x, (m.constant * 1).tolist()),
    "array": lambda _, x: _means(x, torch.tensor(np.array([1, 3])).tolist()),
    "item": lambda m, x: x[: m.lengths.sum().item() - 1] * m.start.float().exp().item(),
    "int": lambda m, x: x.reshape(int(m.lengths.max()), -1) * 2,
    "range": lambda m, x: torch.cat([x[i : i + 1] * i for i in range(m.lengths.sum())]),
    "arange": lambda m, x: x + torch.arange(m.start + 3)[:, None],
    "narrow": lambda m, x: x.narrow(0, m.start, m.start + 1) * 2,
    "split": lambda m, x: torch.stack(x.split(m.start * 2)),
    "tensor_split": lambda m, x: x.tensor_split(m.lengths[:2].cumsum(0))[1] * 2,
    "repeat": lambda m, x: torch.repeat_interleave(x[:3], m.lengths + 1, dim=0).reshape(7, -1) * 2,
    "repeat_one": lambda m, x: x.repeat_interleave(m.lengths[1], 1) + x.repeat_interleave(m.lengths[1:2], dim=1),
    "repeat_flat": lambda m, x: x.repeat_interleave(m.constant.repeat(8)) * 2,
    "unique": lambda m, x: x[torch.unique_consecutive(m.lengths)[:2]] * 2,
    "selected": lambda m, x: x[m.lengths[m.lengths > 1]] * 2,
    "slices": _of_slices,
    "views": _of_views,
    "rows": _of_rows,
    "shape": _of_shape,
    "shape_of_input": lambda _, x: _means(x, x.new_ones(2, dtype=torch.int64).mul(2).tolist()),
    "float": lambda _, x: x[: int(torch.full_like(x[0], 2.0).sum().sqrt())] * float(torch.linspace(0, 4, 3)[1]),
    "vmap": lambda _, x: torch.vmap(lambda row: row * torch.tensor([1, 2]).sum().item())(x),
}


@pytest.mark.parametrize("name", _KNOWN)
@torch.no_grad()
def test_sizes_that_follow_from_known_values_are_constants(name: str) -> None:
    model, x = _Packed(_KNOWN[name]).eval(), torch.linspace(-2, 2, 16).reshape(4, 4)
    expected = model(x)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x,)])
    assert not result.report.cpu_operators
    torch.testing.assert_close(result.run(x), expected, atol=1e-5, rtol=1e-5)


class _VisionAttention(nn.Module):
    """Attention within packed images, as vision encoders of transformers compute it."""

    def __init__(self, ends: Tensor | None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.ends: Tensor | None
        self.register_buffer("ends", ends)

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        ends = self.ends if ends is None else ends
        assert ends is not None
        q, k, v = self.qkv(x).reshape(x.shape[0], 3, 2, 8).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        parts = [torch.split(each, (ends[1:] - ends[:-1]).tolist(), dim=2) for each in (q, k, v)]
        attention = nn.functional.scaled_dot_product_attention
        joined = torch.cat([attention(*each) for each in zip(*parts, strict=True)], dim=2)
        return self.out(joined.transpose(1, 2).reshape(x.shape[0], -1))


_KINDS = ("TOSA_FP", "TOSA_INT8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8")


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("ends", [[0, 12], [0, 4, 12]], ids=str)
@torch.no_grad()
def test_attention_within_packed_images_is_delegated(ends: list[int], kind: str) -> None:
    torch.manual_seed(0)
    model = _VisionAttention(torch.tensor(ends, dtype=torch.int32)).eval()
    _check_attention(model, [(torch.randn(12, 16),) for _ in range(8)], kind)


@pytest.mark.parametrize("kind", _KINDS)
@torch.no_grad()
def test_a_split_into_one_piece_has_the_size_of_its_input(kind: str) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 12], dtype=torch.int32)
    _check_attention(_VisionAttention(None).eval(), [(torch.randn(12, 16), ends) for _ in range(8)], kind)


def _check_attention(model: nn.Module, samples: list[Any], kind: str) -> None:
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType[kind]), samples)
    assert not result.report.cpu_operators
    assert len(result.report.delegates) == 1
    expected = model(*samples[0])
    tolerance = 1e-5 if kind == "TOSA_FP" else 0.06 * float(expected.abs().max())
    torch.testing.assert_close(result.run(*samples[0]), expected, rtol=0, atol=tolerance)


def test_split_lengths_in_an_input_are_refused() -> None:
    sample = (torch.randn(12, 16), torch.tensor([0, 4, 12]))
    with pytest.raises(ExportError, match=r"depends on data .* must not depend on the values of tensors: use"):
        export(_VisionAttention(None).eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [sample])


@torch.library.custom_op("arm_recipes_tests::overwrite", mutates_args=("x",))
def _overwrite(x: Tensor, y: Tensor) -> None:
    x.copy_(y.flatten()[: x.numel()].to(x.dtype))


def _written_view(m: Any, x: Tensor) -> Tensor:
    lengths = m.lengths.clone()
    lengths[1:].copy_(x[0, :2])
    return x[: lengths[1]]


def _written_data(m: Any, x: Tensor) -> Tensor:
    m.lengths.data[0] = x[0, 0].long()
    return x[: m.lengths[0]]


def _written_by_operator(m: Any, x: Tensor) -> Tensor:
    lengths = m.lengths.clone()
    _overwrite(lengths, x)
    return x[: lengths[0]]


@pytest.mark.parametrize(
    "function",
    [
        _written_view,
        _written_by_operator,
        lambda _, x: x[: torch.randint(1, 3, ()).item()],
        lambda _, x: x[: torch.rand(1).mul(2).long().add(1).item()],
        lambda _, x: x[: torch.empty(1, dtype=torch.int64).clamp(1, 2).item()],
        lambda _, x: x[: torch.full((), 0.5).bernoulli_().long().add(1).item()],
        lambda _, x: x[: x.long().max().item()],
    ],
    ids=["view", "operator", "randint", "rand", "empty", "bernoulli", "input"],
)
def test_sizes_from_data_or_random_numbers_are_no_constants(function: Function) -> None:
    state = torch.get_rng_state()
    program = Capture(strict=False)("forward", _Packed(function).eval(), Inputs(torch.ones(4, 4)))
    assert any(node.target is torch.ops.aten.item.default for node in program.graph.nodes)
    assert torch.equal(torch.get_rng_state(), state)


def test_sizes_from_a_buffer_that_the_model_writes_are_no_constants() -> None:
    program = Capture(None)("forward", _Packed(_written_data).eval(), Inputs(torch.ones(4, 4)))
    assert any(node.target is torch.ops.aten.item.default for node in program.graph.nodes)


def test_capture_does_not_change_tensors_of_the_model() -> None:
    """In-place operators on known values write to copies."""

    def function(m: Any, x: Tensor) -> Tensor:
        return x * (m.lengths + 0).add_(5).sum().item() + torch.ones_like(m.constant).add_(m.constant).sum().item()

    model = _Packed(function).eval()
    Capture(None)("forward", model, Inputs(torch.ones(4, 4)))
    assert (model.lengths.tolist(), model.constant.tolist()) == ([1, 2, 1], [1, 3])
