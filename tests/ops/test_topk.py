"""topk: the algorithm that is chosen by the target's cycles and memory, and refusals in favour of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.errors import Unsupported
from arm_backend_core.ops.topk import Algorithm, choose_algorithm, select_by_rank, select_iteratively
from arm_backend_core.targets.hardware import HARDWARE
from arm_recipes import ArmRecipeType, ExportRecipe, export

CHOSEN: dict[str, tuple[str, int, int, int, Algorithm]] = {
    # family, rows, elements, k
    "U55 has no comparisons, so pairs cost more than steps": ("ethos-u55", 1, 64, 20, select_iteratively),
    "U85 compares pairs": ("ethos-u85", 1, 64, 20, select_by_rank),
    "the pairs of 300 elements take 1 MB": ("ethos-u85", 1, 300, 20, select_iteratively),
    "one of two": ("ethos-u55", 1, 2, 1, select_iteratively),
    "all of a few": ("ethos-u55", 1, 16, 16, select_by_rank),
    "experts of a router": ("ethos-u85", 128, 8, 2, select_by_rank),
    "other targets": ("tosa", 1, 300, 20, select_by_rank),
    "a small k on other targets": ("vgf", 1, 300, 5, select_iteratively),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_choice_of_form(name: str) -> None:
    """The algorithm with fewer cycles whose pairs fit the memory."""
    family, rows, n, k, algorithm = CHOSEN[name]
    assert choose_algorithm(HARDWARE[family], rows, n, k) is algorithm


@pytest.mark.parametrize(
    ("family", "rows", "n", "k", "reason"),
    [
        ("ethos-u55", 1, 300, 20, "topk of 20 among 300 elements in 1 rows would take about 312,000 cycles"),
        ("ethos-u65", 2100, 12, 8, "about 9,686,000 cycles"),
        ("ethos-u85", 1, 500, 20, "and the CPU is faster; use a smaller k or fewer elements"),
        ("ethos-u85", 1, 513, 6, "k is at most 5, unless"),
        ("tosa", 1, 513, 6, "topk of 6 among 513 elements"),
    ],
)
def test_topk_that_is_faster_on_the_cpu_is_refused(family: str, rows: int, n: int, k: int, reason: str) -> None:
    """The reason names the cycles or the largest possible k."""
    with pytest.raises(Unsupported, match=reason):
        choose_algorithm(HARDWARE[family], rows, n, k)


class Detector(nn.Module):
    """The boxes of the 20 highest scores among 300."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [1, 300, 64]."""
        scores, indices = x.sum(-1).topk(20)
        return scores, self.boxes(x).gather(1, indices[..., None].expand(-1, -1, 4))


@pytest.mark.parametrize(
    ("recipe", "cpu_operator"), [(ArmRecipeType.ETHOSU_U55_INT8, "topk"), (ArmRecipeType.ETHOSU_U85_INT8, "")]
)
def test_a_detector_needs_no_memory_for_pairs(recipe: ArmRecipeType, cpu_operator: str) -> None:
    """With pairs, it took 549,600 bytes of SRAM and a program of 583,907 bytes on U55, 1,110,000 of SRAM on U85."""
    torch.manual_seed(0)
    model, samples = Detector().eval(), [(torch.randn(1, 300, 64),) for _ in range(8)]
    result = export(model, ExportRecipe.get_recipe(recipe), samples)
    assert max(delegate.vela.sram_bytes for delegate in result.report.delegates if delegate.vela) < 150_000
    assert len(result.buffer) < 150_000
    assert cpu_operator in " ".join(operator.operator for operator in result.report.cpu_operators)
    (scores, _), (expected, _) = result.run(*samples[0]), model(*samples[0])
    torch.testing.assert_close(scores, expected, atol=0.5, rtol=0)
