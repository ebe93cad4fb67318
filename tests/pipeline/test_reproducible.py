"""Reproducible exports: the bytes depend neither on the process, nor on the order of sets, nor on ``dump_dir``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arm_recipes import ArmRecipeType, ExportRecipe, export
from arm_recipes.devtools.debug_artifacts import build_debug_files
from tests.small_models import AttentionBlock


class Everything(AttentionBlock):
    """Several delegates and outputs, a written buffer, attention, operators on the CPU."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.conv(x).flatten(2).transpose(1, 2)
        y = self.norm(y + self.attention(y, y, y)[0])
        self.calls.add_(1)
        return torch.topk(y, 3).values * 2, self.calls * y


def programs(dump_dir: str | None) -> list[bytes]:
    """Export for TOSA and Ethos-U; return the programs, reference programs and debug files."""
    samples = [(torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4) * factor,) for factor in (1, 2)]
    found = []
    for kind in (ArmRecipeType.TOSA_INT8, ArmRecipeType.ETHOSU_U85_INT8):
        recipe = ExportRecipe.get_recipe(kind, dump_dir=dump_dir)
        result = export(Everything().eval(), recipe, samples, constant_methods={"b": 1, "a": 2.5})
        found += [result.buffer, result.reference_program(), *build_debug_files(result, "model", True, None).values()]
    return found


_SCRIPT = """
import sys
from pathlib import Path
from tests.pipeline.test_reproducible import programs
for index, program in enumerate(programs(sys.argv[2])):
    Path(sys.argv[1], str(index)).write_bytes(program)
"""


@pytest.mark.verify
def test_two_exports_give_the_same_bytes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    dump = tmp_path / "dump"
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "1234"}
    script = [sys.executable, "-c", _SCRIPT, str(tmp_path), str(dump)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(dump.iterdir())
    for index, program in enumerate(programs(None)):
        assert (tmp_path / str(index)).read_bytes() == program
        assert str(tmp_path).encode() not in program
