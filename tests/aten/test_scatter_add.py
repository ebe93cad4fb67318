"""Scatter-adds: rewrites for constant indices, and operators that stay on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from arm_backend_core.aten.scatter_add import find_frames, rewrite_scatter_adds
from arm_backend_core.nodes import KEEP_COMPOSITE
from arm_backend_core.ops.composites.windows import col2im
from arm_backend_core.targets.hardware import HARDWARE
from arm_recipes import ArmRecipeType, ExportRecipe, export

aten = torch.ops.aten
SCATTERS = {
    *(aten.index_put.default, aten.index_add.default, aten.scatter_add.default, aten.scatter_reduce.two),
    aten.scatter.reduce,
}
FRAMES = torch.arange(5)[:, None] * 3 + torch.arange(7)  # 5 frames of 7 elements, hop 3
RANDOM = torch.randint(0, 2000, (600,), generator=torch.Generator().manual_seed(0))
PERMUTED = torch.randperm(900, generator=torch.Generator().manual_seed(0))[:600]


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function."""
        return self.function(*inputs)


def _rewrite(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], family: str = "ethos-u85", *, quantized: bool = True
) -> GraphModule:
    module = torch.export.export(Function(function), tuple(inputs)).run_decompositions({}).module(check_guards=False)
    rewrite_scatter_adds(module, HARDWARE[family], quantized=quantized)
    module.graph.lint()
    module.recompile()
    return module


def _targets(module: GraphModule) -> set[Any]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


# -- constant indices ----------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[Callable[..., Tensor], Sequence[Sequence[int]], Any]] = {
    "overlap-add": (lambda x: torch.zeros(24).index_put((FRAMES,), x, accumulate=True), [(5, 7)], aten.col2im.default),
    "overlap-add to a tensor": (
        lambda x, y: y.index_put((FRAMES + 2,), x, accumulate=True),
        [(5, 7), (30,)],
        aten.col2im.default,
    ),
    "frames last": (
        lambda x: torch.zeros(20).index_put((FRAMES.t() - 20,), x, accumulate=True),
        [(7, 5)],
        aten.col2im.default,
    ),
    "frames of rows": (
        lambda x: torch.zeros(2, 20, 3).index_add(1, FRAMES.reshape(-1), x, alpha=2),
        [(2, 35, 3)],
        aten.col2im.default,
    ),
    "frames of a batch": (
        lambda x: torch.zeros(2, 20).scatter_add(1, FRAMES.reshape(1, -1).expand(2, -1), x),
        [(2, 35)],
        aten.col2im.default,
    ),
    "every third": (lambda x: torch.zeros(30).index_add(0, torch.arange(9) * 3, x), [(9,)], aten.col2im.default),
    "broadcast values": (
        lambda x: torch.zeros(20).index_put((FRAMES,), x, accumulate=True),
        [(1, 7)],
        aten.col2im.default,
    ),
    "two indices": (
        lambda x: torch.zeros(4, 9).index_put((torch.tensor([[0], [3]]), torch.tensor([1, 1, -2])), x, accumulate=True),
        [(2, 3)],
        aten.matmul.default,
    ),
    "index of each element": (
        lambda x: torch.zeros(3, 4).scatter_add(0, torch.tensor([[0, 2, 1, 1], [0, 0, 1, 2]]), x),
        [(2, 4)],
        aten.matmul.default,
    ),
    "sum": (
        lambda x, y: y.scatter_reduce(1, torch.tensor([[0, 2, 0]]).expand(2, 3), x, "sum"),
        [(2, 3), (2, 4)],
        aten.matmul.default,
    ),
    "permutation": (lambda x: torch.zeros(900).index_add(0, PERMUTED, x), [(600,)], aten.index_select.default),
    "segments": (
        lambda x: torch.zeros(500).index_add(0, torch.arange(1500) // 3, x),
        [(1500,)],
        aten.index_select.default,
    ),
    "unequal counts": (
        lambda x: torch.zeros(2000).index_add(0, RANDOM, x),
        [(600,)],
        aten.index_select.default,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_constant_indices_take_a_form_without_mask(name: str) -> None:
    """Overlap-add, a product or gathers give the sums of PyTorch."""
    function, shapes, form = FORMS[name]
    inputs = [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    module = _rewrite(function, inputs)
    targets = _targets(module)
    assert form in targets
    assert not targets & SCATTERS
    torch.testing.assert_close(module(*inputs), function(*inputs))


def test_zeros_are_not_added() -> None:
    """A scatter-add to zeros is the sums alone."""
    function, shapes, _ = FORMS["overlap-add"]
    assert aten.add.Tensor not in _targets(_rewrite(function, [torch.randn(*shapes[0])]))


def test_float_programs_have_no_product() -> None:
    """0 * inf is NaN: few pairs are left to the decomposition, many are gathered."""
    function, shapes, _ = FORMS["sum"]
    assert _targets(_rewrite(function, [torch.randn(*shape) for shape in shapes], quantized=False)) & SCATTERS
    function, shapes, form = FORMS["unequal counts"]
    x = torch.randn(*shapes[0])
    x[3] = torch.inf
    module = _rewrite(function, [x], quantized=False)
    assert form in _targets(module)
    torch.testing.assert_close(module(x), function(x))


@pytest.mark.parametrize(
    "indices",
    [[0, 1, 1, 3], [0, 1, 2, 1, 2], [0, 1, 4, 5, 9, 10], [3, 2, 1], [0, 0, 1, 1], [0, 1, 0, 1]],
    ids=str,
)
def test_other_indices_are_no_frames(indices: list[int]) -> None:
    """Irregular, incomplete, descending and repeated positions are no overlap-add."""
    assert find_frames(np.array(indices)) is None


@pytest.mark.parametrize("recipe", [ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8])
def test_overlap_add_by_indices_costs_what_fold_does(recipe: ArmRecipeType) -> None:
    """It was 8,064,167 cycles and a program of 7,167,576 bytes on U55, 1,030,903 and 6,880,856 on U85."""
    index = torch.arange(61)[:, None] * 64 + torch.arange(256)
    model = Function(lambda x: torch.zeros(4096).index_put((index,), x, accumulate=True))
    samples = [(torch.randn(61, 256, generator=torch.Generator().manual_seed(i)),) for i in range(4)]
    result = export(model.eval(), ExportRecipe.get_recipe(recipe), samples)
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert delegate.vela.total_cycles < 50_000
    assert len(result.buffer) < 10_000
    assert not result.report.cpu_operators
    error = result.run(*samples[0]) - model(*samples[0])
    assert error.square().mean() < 1e-3 * model(*samples[0]).square().mean()


# -- the CPU -------------------------------------------------------------------------------------------------------

CPU_SCATTERS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "random": (lambda x, _: torch.zeros(2000).index_add(0, RANDOM.repeat(20), x.repeat(20)), aten.index_add.default),
    "computed": (lambda x, i: torch.zeros(2000).index_put((i,), x, accumulate=True), aten.index_put.default),
    "computed scatter": (lambda x, i: torch.zeros(2000).scatter_add(0, i, x), aten.scatter_add.default),
    "computed reduction": (lambda x, i: torch.zeros(2000).scatter_reduce(0, i, x, "sum"), aten.scatter_add.default),
}


@pytest.mark.parametrize("name", CPU_SCATTERS)
def test_many_pairs_are_left_to_the_cpu(name: str) -> None:
    """The operator that stays has a CPU kernel, and its reason says how many elements a mask would take."""
    function, kept = CPU_SCATTERS[name]
    inputs = [torch.randn(600), RANDOM]
    module = _rewrite(function, inputs)
    (node,) = [node for node in module.graph.nodes if KEEP_COMPOSITE in node.meta]
    assert node.target is kept
    torch.testing.assert_close(module(*inputs), function(*inputs))


def test_the_bound_depends_on_the_hardware() -> None:
    """A mask element takes 78 cycles on Ethos-U55, which has no comparison, and 3 on U85."""

    def function(x: Tensor, i: Tensor) -> Tensor:
        return torch.zeros(100).scatter_add(0, i, x)

    inputs = [torch.randn(100), torch.randint(0, 100, (100,))]
    kept = {
        family: any(KEEP_COMPOSITE in node.meta for node in _rewrite(function, inputs, family).graph.nodes)
        for family in ("ethos-u55", "ethos-u85", "tosa")
    }
    assert kept == {"ethos-u55": True, "ethos-u85": False, "tosa": False}


def test_the_report_names_the_reason() -> None:
    """The report names the operator on the CPU with the number of elements."""
    samples = [(torch.randn(600), RANDOM) for _ in range(2)]
    model = Function(lambda x, i: torch.zeros(2000).index_add(0, i, x * 2) + 1)
    result = export(model.eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)
    reasons = " ".join(operator.reason for operator in result.report.cpu_operators)
    assert "it adds 600 elements at 2000 positions: without a scatter operator, it would take 1200000" in reasons
    torch.testing.assert_close(result.run(*samples[0]), model(*samples[0]), atol=0.1, rtol=0.1)


# -- fold ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hop", "quantized"), [(7, 3, False), (8, 4, False), (3, 5, False), (600, 150, True)]
)
def test_windows_of_one_row_are_added_in_pieces(length: int, hop: int, quantized: bool) -> None:
    """``col2im`` of long windows, and in float, takes one addition for each piece of ``hop`` elements."""
    windows = torch.randn(2, 2 * length, 5)
    size = (1, length + 4 * hop + 1)
    actual = col2im(windows, size, [1, length], [1, 1], [0, 0], [1, hop], quantized=quantized)
    torch.testing.assert_close(actual, nn.functional.fold(windows, size, (1, length), stride=(1, hop)))
