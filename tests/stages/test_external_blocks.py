"""External blocks: of one method, of methods that share weights, from the cache, and in comparisons."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import arm_recipes
from arm_recipes import ArmRecipeType, ExportRecipe
from arm_recipes.runtime.data_file import external_data_keys, read_data_file
from arm_recipes.runtime.ethosu_blocks import BlockName, read_blocks
from arm_recipes.runtime.pte import read_program
from tests.runtime.host_programs import Small, export_small
from tests.small_models import images

U85 = ArmRecipeType.ETHOSU_U85_INT8


class _Mirrored(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return torch.as_tensor(self.model(image.flip(-1)))


def test_option_external_selects_blocks() -> None:
    for external in ((), ("weights",), ("commands",), ("weights", "commands")):
        outside = {{"weights": BlockName.WEIGHTS, "commands": BlockName.COMMANDS}[name] for name in external}
        (delegate,) = read_program(export_small(U85, external=external).buffer).methods["forward"].delegates
        assert {name for name, block in read_blocks(delegate.data).items() if block.external} == outside
        assert ("cmd_data_crc32" in delegate.compile_specs) == (BlockName.COMMANDS in outside)
        assert ("weight_data_crc32" in delegate.compile_specs) == (BlockName.WEIGHTS in outside)


def test_weights_that_methods_share_are_external_too() -> None:
    model = Small().eval()
    methods = {"once": model, "mirrored": _Mirrored(model).eval()}
    samples = {method: images() for method in methods}
    inline, outside = (
        arm_recipes.export(methods, ExportRecipe.get_recipe(U85, external=external), samples)
        for external in (False, True)
    )
    assert outside.data_file is not None
    keys, program = read_data_file(outside.data_file), read_program(outside.buffer)
    (weights,) = [key for key in keys if key.startswith("arm_weights_")]
    assert weights not in program.named_data
    assert set(external_data_keys(program)) == set(keys)
    assert outside.report.program_bytes < inline.report.program_bytes - len(keys[weights])
    for method in methods:
        assert torch.equal(*(result.run(*images()[0], method=method) for result in (inline, outside)))


def test_the_cache_keeps_the_data_file(tmp_path: Path) -> None:
    model, samples = Small().eval(), images()
    first, second = (
        arm_recipes.export(model, ExportRecipe.get_recipe(U85, external=True), samples, cache_dir=tmp_path / "cache")
        for _ in range(2)
    )
    assert second.report.cached
    assert first.data_file is not None
    assert second.data_file == first.data_file
    assert second.stored_bytes == first.stored_bytes
    second.save(tmp_path / "model.pte")
    ((x,), *_) = samples
    assert torch.equal(arm_recipes.load(tmp_path / "model.pte").run(x), first.run(x))


def test_comparisons_load_the_data_file(tmp_path: Path) -> None:
    result = export_small(U85, external=True)
    (output,) = result.compare(images(), progress=False).outputs
    assert output.gap is not None
    assert output.gap.sqnr > 20
    result.save(tmp_path / "model.pte")
    (output,) = arm_recipes.compare(tmp_path / "model.pte", result, images(), progress=False).outputs
    assert output.gap is not None
    assert output.gap.sqnr == float("inf")
