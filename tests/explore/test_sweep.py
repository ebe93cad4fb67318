"""``sweep``: estimates, failures as rows, cache, parallel backends, boards, text and plot."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.targets import vela_config
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied
from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportRecipe, Sweep, export, sweep
from arm_recipes.explore.sweep import result_store
from arm_recipes.explore.sweep.configurations import SweepConfiguration, list_configurations
from arm_recipes.explore.sweep.rows import ProgramEstimates, Row
from arm_recipes.recipe.boards import BOARDS
from tests.small_models import ConstantHeads, MovingAverage, Small, Sorting, images, vectors
from tests.sqnr import sqnr

U55, U85 = "Ethos_U55_High_End_Embedded", "Ethos_U85_SYS_DRAM_Mid"
#: Eight configurations: two NPUs of each of two families in two memory modes.
EIGHT: dict[str, Any] = {
    "macs": [128, 256],
    "system_configs": [U55, U85],
    "memory_modes": ["Sram_Only", "Shared_Sram"],
}


class Masking(nn.Module):
    """BITWISE_AND, which Ethos-U55 lacks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the bits that both have."""
        return torch.bitwise_and(x, y)


@pytest.fixture(scope="module")
def eight() -> Sweep:
    with joblib.parallel_config(n_jobs=1):
        return sweep(Small().eval(), None, images(), **EIGHT)


def _list_configurations(result: Sweep) -> list[tuple[str, str, str]]:
    return [(row.target, row.system_config, row.memory_mode) for row in result.rows]


def test_every_possible_combination_has_a_row(eight: Sweep) -> None:
    npus = [("ethos-u55", 128, U55), ("ethos-u55", 256, U55), ("ethos-u85", 128, U85), ("ethos-u85", 256, U85)]
    modes = EIGHT["memory_modes"]
    assert _list_configurations(eight) == [
        (f"{family}-{macs}", system, mode) for family, macs, system in npus for mode in modes
    ]
    assert [row.error for row in eight.rows] == [None] * 8
    assert {row.recipe for row in eight.rows} == {"ETHOSU_U55_INT8", "ETHOSU_U85_INT8"}


def test_default_configurations_are_all_npus_and_memory_modes() -> None:
    found = _configurations(None)
    assert {c.spec.accelerator for c in found} == {npu.name for npu in vela_config.list_npus()}
    assert {c.spec.memory_mode for c in found} == set(
        vela_config.list_sections("Arm/vela.ini", vela_config.MEMORY_MODE)
    )
    assert {c.spec.system_config for c in found} == {U55, "Ethos_U65_High_End", U85}
    # The U55 writes to SRAM only.
    assert {c.spec.memory_mode for c in found if "U55" in c.recipe} == {"Sram_Only", "Shared_Sram"}
    everything = _configurations("all")
    assert {c.spec.system_config for c in everything} == set(
        vela_config.list_sections("Arm/vela.ini", vela_config.SYSTEM_CONFIG)
    )
    assert {c.spec.configuration for c in found} < {c.spec.configuration for c in everything}


def _configurations(system_configs: str | None) -> tuple[SweepConfiguration, ...]:
    options = {"calibration_samples": None, "per_channel": True, "extra_flags": None, "config_ini": None}
    return list_configurations(None, {"macs": None, "system_config": system_configs, "memory_mode": None}, options)


def test_the_ram_of_a_row_does_not_depend_on_other_rows() -> None:
    """The scratch has the same size in both memory modes. Vela places the input differently, and so the CPU's copy."""
    layers = [nn.Conv2d(3, 17, 3, 2, 1), nn.ReLU(), nn.Conv2d(17, 17, 3, padding=1, groups=17), nn.ReLU()]
    pool = [nn.Conv2d(17, 48, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)]
    model = nn.Sequential(*layers, *pool).eval()
    samples, kind = [(torch.randn(1, 3, 64, 64),)], ArmRecipeType.ETHOSU_U85_INT8
    rows = sweep(model, [kind], samples, macs=256, memory_modes=["Sram_Only", "Shared_Sram"]).rows
    scratches = {row.estimates.npu_ram_bytes for row in rows if row.estimates is not None}
    assert len(rows) == 2
    assert len(scratches) == 1
    for row in rows:
        recipe = ExportRecipe.get_recipe(kind, macs=256, memory_mode=row.memory_mode)
        ram = export(model, recipe, samples).report.ram
        assert ram is not None
        assert row.ram_bytes == ram.total_bytes
    assert rows[0].ram_bytes != rows[1].ram_bytes


def test_ram_includes_tensors_of_the_cpu_that_share_a_buffer_with_the_scratch() -> None:
    """The float input, 48 KiB, is larger than the scratch."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.Flatten(), nn.Linear(1024, 10)).eval()
    samples = [(torch.randn(1, 3, 64, 64),)]
    recipes, modes = [ArmRecipeType.ETHOSU_U55_INT8], ["Shared_Sram"]
    (row,) = sweep(model, samples=samples, recipes=recipes, macs=[64], memory_modes=modes).rows
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8, macs=64, memory_mode="Shared_Sram")
    ram = export(model, recipe, samples).report.ram
    assert ram is not None
    assert row.ram_bytes == ram.total_bytes > 48 << 10


def test_a_sweep_is_complete_even_if_its_files_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: Path, *_chunks: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(result_store, "write_file_atomically", fail)
    one: dict[str, Any] = {"macs": 128, "system_configs": U55, "memory_modes": "Shared_Sram", "cache_dir": tmp_path}
    with pytest.warns(ArmRecipesWarning, match=r"cache_dir: .* not cached, because .* No space left") as issued:
        (row,) = sweep(Small().eval(), ["ETHOSU_U55_INT8"], images(), **one).rows
    assert row.estimates is not None
    assert len([str(w.message) for w in issued if "not cached" in str(w.message)]) == 1


def test_ram_of_memory_modes_with_and_without_fast_scratch() -> None:
    """The memory plan places CPU tensors in the scratch if all of it is in one memory."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    samples = [(torch.randn(1, 3, 32, 32),)]
    modes = ["Sram_Only", "Dedicated_Sram", "Dedicated_Sram_512KB"]
    with joblib.parallel_config(n_jobs=1):
        rows = sweep(model, ["ETHOSU_U85_INT8"], samples, macs=256, memory_modes=modes).rows
    assert [row.memory_mode for row in rows] == modes
    for row in rows:
        recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=256, memory_mode=row.memory_mode)
        ram = export(model, recipe, samples).report.ram
        assert ram is not None
        assert row.ram_bytes == ram.total_bytes


@pytest.mark.parametrize("index", range(8))
def test_figures_are_those_of_an_export(eight: Sweep, index: int) -> None:
    row = eight.rows[index]
    chosen = {"macs": row.macs, "system_config": row.system_config, "memory_mode": row.memory_mode}
    result = export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType[row.recipe], **chosen), images())
    (delegate,) = result.report.delegates
    estimates = delegate.vela
    assert estimates is not None
    ram = result.report.ram
    assert ram is not None
    assert row.ram_bytes == ram.total_bytes
    assert row.estimates == ProgramEstimates(
        cycles=estimates.total_cycles,
        npu_cycles=estimates.npu_cycles,
        milliseconds=estimates.inference_seconds * 1e3,
        sram_bytes=estimates.sram_bytes,
        sram_exceeded=estimates.sram_exceeded,
        dram_bytes=estimates.dram_bytes,
        flash_bytes=estimates.flash_bytes,
        fast_scratch_bytes=estimates.fast_scratch_bytes,
        npu_ram_bytes=sum(part.bytes for part in ram.npu),
        npu_sram_bytes=sum(part.bytes for part in ram.npu if part.memory == "SRAM"),
        weight_bytes=estimates.weight_bytes,
    )
    assert row.cpu_operators == sum(operator.count for operator in result.report.cpu_operators)
    with torch.no_grad():
        expected = torch.cat([Small().eval()(*sample) for sample in images()])
    outputs = torch.cat([result.run(*sample) for sample in images()])
    assert row.accuracy == pytest.approx(sqnr(expected, outputs), abs=1e-3)


def test_alternatives_are_chosen_for_each_configuration() -> None:
    model = nn.Sequential(nn.MaxPool2d(13, 1, 6), nn.Conv2d(3, 8, 3)).eval()
    samples = [(torch.rand(1, 3, 24, 24),) for _ in range(2)]
    one: dict[str, Any] = {"macs": 256, "system_configs": U85, "memory_modes": "Sram_Only"}
    with joblib.parallel_config(n_jobs=1):
        found = [
            sweep(model, "ETHOSU_U85_INT8", samples, search_alternatives=tuning, **one).rows[0].estimates
            for tuning in (True, False)
        ]
    chosen, usual = (
        export(
            model, ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, search_alternatives=tuning), samples
        ).report.delegates
        for tuning in (True, False)
    )
    cycles = [row.vela.total_cycles for row in (*chosen, *usual) if row.vela is not None]
    assert [estimates.cycles for estimates in found if estimates is not None] == cycles
    assert cycles[0] < cycles[1]


def test_precisions_differ_in_accuracy() -> None:
    narrow: dict[str, Any] = {"macs": 256, "system_configs": U85, "memory_modes": "Sram_Only"}
    recipes: list[ArmRecipeType | str] = [ArmRecipeType.ETHOSU_U85_INT8, "ethosu_u85_a16w8"]
    with joblib.parallel_config(n_jobs=1):
        result = sweep(Small().eval(), recipes, images(), **narrow)
    int8, a16w8 = result.rows
    assert (int8.recipe, a16w8.recipe) == ("ETHOSU_U85_INT8", "ETHOSU_U85_A16W8")
    assert a16w8.accuracy is not None
    assert int8.accuracy is not None
    assert a16w8.accuracy > int8.accuracy + 5
    assert a16w8.estimates != int8.estimates


def test_a_row_adds_delegates_and_counts_cpu_operators() -> None:
    chosen = {"macs": 256, "system_config": U85, "memory_mode": "Shared_Sram"}
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, **chosen)
    delegates = export(Sorting().eval(), recipe, vectors()).report.delegates
    one, other = (delegate.vela for delegate in delegates)
    assert one is not None
    assert other is not None
    with joblib.parallel_config(n_jobs=1):
        result = sweep(
            Sorting().eval(),
            "ETHOSU_U85_INT8",
            vectors(),
            macs=256,
            system_configs=U85,
            memory_modes="Shared_Sram",
        )
    (row,) = result.rows
    assert row.estimates is not None
    assert row.estimates.cycles == one.total_cycles + other.total_cycles
    assert row.estimates.sram_bytes == max(one.sram_bytes, other.sram_bytes)
    assert row.estimates.flash_bytes == one.flash_bytes + other.flash_bytes
    assert row.cpu_operators == 1


def test_state_starts_with_the_values_of_the_model() -> None:
    model = MovingAverage().eval()
    recipes = ["ETHOSU_U85_INT8", "ETHOSU_U85_A16W8"]
    with joblib.parallel_config(n_jobs=1):
        result = sweep(model, recipes, vectors(8), macs=256, memory_modes="Sram_Only")
    assert torch.equal(model.state, torch.ones(1, 8))
    for row in result.rows:
        exported = export(MovingAverage().eval(), ExportRecipe.get_recipe(ArmRecipeType[row.recipe]), vectors(8))
        reference = MovingAverage().eval()
        with torch.no_grad():
            expected = torch.cat([reference(*sample).clone() for sample in vectors(8)])
        outputs = torch.cat([exported.run(*sample).clone() for sample in vectors(8)])
        decibels = sqnr(expected, outputs)
        assert row.accuracy == pytest.approx(decibels, abs=1e-3)
        assert decibels > 25


def test_a_metric_gets_the_outputs_and_the_whole_sample() -> None:
    labelled = [(image, index) for index, (image,) in enumerate(images())]
    seen = []

    def rank(outputs: Tensor, sample: tuple[Tensor, int]) -> float:
        seen.append((tuple(outputs.shape), sample[1]))
        return float(sample[1])

    with joblib.parallel_config(n_jobs=1):
        result = sweep(Small().eval(), "ETHOSU_U85_INT8", labelled, metric=rank, macs=256, memory_modes="Sram_Only")
    assert seen == [((1, 4), index) for index in range(4)]  # once for all system configurations
    assert {row.accuracy for row in result.rows} == {1.5}
    assert result.metric == "rank"


# Failures.


def test_a_model_without_npu_operators_is_a_row_with_the_reason() -> None:
    samples = [(torch.arange(8, dtype=torch.int32), torch.full((8,), bits, dtype=torch.int32)) for bits in (3, 5)]
    with joblib.parallel_config(n_jobs=1):
        result = sweep(Masking().eval(), None, samples, macs=256, system_configs=[U55, U85], memory_modes="Sram_Only")
    without, having = result.rows
    assert without.estimates is None
    assert without.error is not None
    assert "ethos-u55-256 runs none of the model's operators" in without.error
    assert "BITWISE_AND" in without.error
    assert having.estimates is not None
    assert having.accuracy == math.inf


def test_a_failure_of_vela_is_a_row_and_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = vela.compile_tosa

    def crashing(flatbuffer: bytes, configuration: vela.VelaConfiguration, timeout: float | None) -> Any:
        if "memory_mode_name=Shared_Sram" in configuration.system_config and configuration.accelerator == "EthosU55":
            raise WorkerDied("crashed with SIGSEGV", "")
        return compiled(flatbuffer, configuration, timeout)

    monkeypatch.setattr(vela, "compile_tosa", crashing)
    with joblib.parallel_config(n_jobs=1):
        result = sweep(Small().eval(), None, images(), cache_dir=tmp_path, **EIGHT)
    failed = [row for row in result.rows if row.estimates is None]
    assert [(row.target, row.memory_mode) for row in failed] == [
        ("ethos-u55-128", "Shared_Sram"),
        ("ethos-u55-256", "Shared_Sram"),
    ]
    assert all("Vela crashed with SIGSEGV" in (row.error or "") for row in failed)
    assert "2 failed" in str(result)
    assert "Vela crashed with SIGSEGV" in str(result)
    monkeypatch.undo()
    with joblib.parallel_config(n_jobs=1):
        assert all(
            row.estimates is not None for row in sweep(Small().eval(), None, images(), cache_dir=tmp_path, **EIGHT).rows
        )


def test_an_accuracy_that_cannot_be_measured_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from arm_recipes import RunError
    from arm_recipes.pipeline.artifact import Artifact

    def refuse(*inputs: Any, **keywords: Any) -> Any:
        raise RunError("there is no C++ compiler")

    monkeypatch.setattr(Artifact, "run", refuse)
    with joblib.parallel_config(n_jobs=1):
        result = sweep(Small().eval(), None, images(), **EIGHT)
    assert [row.accuracy for row in result.rows] == [None] * 8
    assert all(row.estimates is not None for row in result.rows)
    assert any("there is no C++ compiler" in note for note in result.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipes": "ETHOSU_U85_INT9"}, "no recipe 'ETHOSU_U85_INT9'; did you mean 'ETHOSU_U85_INT8'?"),
        ({"recipes": "TOSA_INT8"}, "TOSA_INT8: cycles and memory are estimated for Ethos-U and Cortex-M recipes only"),
        ({"recipes": []}, "recipes is empty"),
        ({"recipes": "ETHOSU_U55_INT8", "macs": [128, 512]}, "macs: 512 is valid in no configuration: macs=512"),
        ({"macs": [100]}, "macs: 100 is valid in no configuration: macs=100"),
        ({"macs": "256"}, "macs must be an int"),
        ({"memory_modes": ["Sram"]}, "memory_modes: 'Sram' is valid in no configuration: memory_mode='Sram'"),
        (
            {"recipes": "ETHOSU_U55_INT8", "memory_modes": ["Sram_Only", "Dedicated_Sram"]},
            "memory_modes: 'Dedicated_Sram' is valid in no configuration: memory_mode='Dedicated_Sram'",
        ),
        ({"system_configs": [U55, "Ethos_U85"]}, "system_configs: 'Ethos_U85' is valid in no configuration"),
        ({"recipes": ["ETHOSU_U55_INT8", "ETHOSU_U85_INT8"], "macs": 32}, "recipes: 'ETHOSU_U85_INT8' is valid"),
        ({"metric": "accuracy"}, "metric: 'accuracy' is not callable"),
        ({"config_ini": "no.ini"}, "config_ini='no.ini'"),
        ({"per_channel": 1}, "per_channel must be a bool"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_done(arguments: dict[str, Any], message: str) -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match=re.escape(message)):
        sweep(nothing, arguments.pop("recipes", None), nothing, **arguments)


def test_a_model_in_training_mode_is_compiled_in_evaluation_mode(eight: Sweep) -> None:
    narrow: dict[str, Any] = {"macs": 256, "memory_modes": "Sram_Only"}
    model = Small()
    with joblib.parallel_config(n_jobs=1), pytest.warns(ArmRecipesWarning, match="in training mode"):
        result = sweep(model, "ETHOSU_U85_INT8", images(), system_configs=U85, **narrow)
    assert result.rows == tuple(r for r in eight.rows if (r.target, r.memory_mode) == ("ethos-u85-256", "Sram_Only"))
    assert any("in training mode" in note for note in result.notes)
    assert model.training


def test_missing_samples_and_several_models_raise() -> None:
    nothing: Any = None
    with pytest.raises(ValueError, match="samples is missing"):
        sweep(Small(), None, nothing, **EIGHT)
    with pytest.raises(ValueError, match="sweep takes one"):
        sweep({"one": Small(), "two": Small()}, None, images(), **EIGHT)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache_dir: cannot create"):
        sweep(Small().eval(), None, images(), cache_dir=tmp_path / "file" / "below", **EIGHT)


# Cache.


@pytest.mark.verify
def test_a_killed_sweep_continues_from_its_cache(eight: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert len(before) == 3
    compiled = _record_compilations(monkeypatch)
    with joblib.parallel_config(n_jobs=1):
        result = sweep(Small().eval(), None, images(), cache_dir=tmp_path, **EIGHT)
    assert result == eight
    assert len(compiled) == 5
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(list(tmp_path.glob("*.json"))) == 8


def test_workers_do_not_import_pytorch() -> None:
    script = (
        "import sys, arm_recipes.explore.sweep.compile_worker\n"
        "sys.exit(' '.join({'torch', 'executorch'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def _record_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the targets that sweeps of this process compile for."""
    from arm_recipes.explore.sweep import compile_worker

    compiled = []
    work = compile_worker.compile_delegates

    def counting(index: int, spec: Any, *rest: Any) -> Any:
        compiled.append(spec.accelerator)
        return work(index, spec, *rest)

    monkeypatch.setattr("arm_recipes.explore.sweep.sweep.compile_delegates", counting)
    return compiled


def test_changed_and_damaged_results_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = _record_compilations(monkeypatch)
    narrow: dict[str, Any] = {"macs": 256, "system_configs": U85, "cache_dir": tmp_path}
    other = Small().eval()
    nn.init.constant_(other.head.weight, 0.5)
    with joblib.parallel_config(n_jobs=1):
        first = sweep(Small().eval(), "ETHOSU_U85_INT8", images(), memory_modes="Sram_Only", **narrow)
        assert sweep(Small().eval(), "ETHOSU_U85_INT8", images(), memory_modes="Sram_Only", **narrow) == first
        assert len(compiled) == 1
        sweep(other, "ETHOSU_U85_INT8", images(), memory_modes="Sram_Only", **narrow)
        assert len(compiled) == 2
        sweep(
            Small().eval(),
            "ETHOSU_U85_INT8",
            images(),
            memory_modes="Sram_Only",
            extra_flags=["--optimise=Size"],
            **narrow,
        )
        assert len(compiled) == 3
        for path in tmp_path.glob("*.json"):
            path.write_text(path.read_text()[:-20])  # damaged
        assert sweep(Small().eval(), "ETHOSU_U85_INT8", images(), memory_modes="Sram_Only", **narrow) == first
        assert len(compiled) == 4


def test_outputs_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from arm_recipes.pipeline.artifact import Artifact

    narrow: dict[str, Any] = {"macs": 256, "system_configs": U85, "cache_dir": tmp_path}
    runs = []
    run = Artifact.run

    def counting(*given: Any) -> Any:
        runs.append(given)
        return run(*given)

    monkeypatch.setattr(Artifact, "run", counting)
    with joblib.parallel_config(n_jobs=1):
        first = sweep(Small().eval(), "ETHOSU_U85_INT8", images(), **narrow)
        assert len(runs) == 4
        assert sweep(Small().eval(), "ETHOSU_U85_INT8", images(), **narrow) == first
        (row, *_) = sweep(
            Small().eval(), "ETHOSU_U85_INT8", images(), metric=lambda outputs, sample: float(outputs.sum()), **narrow
        ).rows
        assert len(runs) == 4  # cached outputs do not depend on the metric
        assert row.accuracy != first.rows[0].accuracy
        sweep(Small().eval(), "ETHOSU_U85_INT8", images(3), **narrow)
        assert len(runs) == 7


# In parallel.


def test_processes_give_the_rows_of_one_process(eight: Sweep) -> None:
    with joblib.parallel_config(n_jobs=2):
        assert sweep(Small().eval(), None, images(), **EIGHT) == eight


def test_a_joblib_backend_without_generators(eight: Sweep) -> None:
    with joblib.parallel_config(backend="multiprocessing", n_jobs=1):
        assert sweep(Small().eval(), None, images(), **EIGHT) == eight


@pytest.mark.verify
def test_on_a_dask_cluster(eight: Sweep) -> None:
    from distributed import Client, LocalCluster

    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**settings) as cluster, Client(cluster) as client, joblib.parallel_config(backend="dask"):
        assert sweep(Small().eval(), None, images(), **EIGHT) == eight
        workers = client.run(lambda: vela._worker._process is not None)
    assert len(workers) == 2
    assert all(workers.values())  # both had Vela


# Boards.


def test_boards_are_configurations() -> None:
    with joblib.parallel_config(n_jobs=1):
        found = sweep(Small().eval(), None, images(), boards=["alif-e8-u85", "Himax WE2"], progress=False)
    assert [(row.board, row.target, row.system_config, row.memory_mode) for row in found.rows] == [
        ("alif-e8-u85", "ethos-u85-256", "Ethos_U85_Alif", "Shared_Sram"),
        ("himax-we2", "ethos-u55-64", "Ethos_U55_Himax_WE2", "Shared_Sram"),
    ]
    for row in found.rows:
        recipe = ExportRecipe.get_recipe(ArmRecipeType[row.recipe], board=row.board)
        ram = export(Small().eval(), recipe, images(), progress=False).report.ram
        assert ram is not None
        assert row.ram_bytes == ram.total_bytes
    assert not any(row.exceeds_board for row in found.rows)
    assert re.search(r"\n +\*? +himax-we2 +ETHOSU_U55_INT8 ", str(found))


def test_a_program_that_does_not_fit_the_board_is_a_row() -> None:
    model, samples = nn.ConvTranspose2d(3, 64, 3, 8).eval(), [(torch.rand(1, 3, 80, 80),)]
    with joblib.parallel_config(n_jobs=1):
        (row,) = sweep(model, None, samples, boards="renesas-ra8p1", progress=False).rows
    assert row.error is None
    assert row.exceeds_board
    assert "(exceeds the board)" in str(Sweep((row,), ""))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"boards": "alif-e8-u85"}, "boards: 'alif-e8-u85' has an Ethos-U85, but recipes: ETHOSU_U55_INT8"),
        ({"boards": "himax-we2", "macs": 64}, "macs: a board determines it; give boards or macs, not both"),
        (
            {"boards": "himax-we2", "memory_modes": "Shared_Sram"},
            "memory_modes: a board determines it; give boards or memory_modes, not both",
        ),
        ({"boards": "himax-we2", "config_ini": "a.ini"}, "config_ini: a board determines it"),
        ({"boards": "himax"}, "board='himax': there is no such board; did you mean 'himax-we2'"),
    ],
)
def test_boards_that_do_not_fit_the_other_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(Small().eval(), "ETHOSU_U55_INT8", images(), **arguments)


def test_all_boards_have_a_configuration() -> None:
    fixed = {"calibration_samples": None, "config_ini": None}
    varied = {"macs": None, "system_config": None, "memory_mode": None}
    assert [found.board for found in list_configurations(None, varied, fixed, "all")] == list(BOARDS)


# Text, data frame and plot.


def _row(target: str, milliseconds: float, sram: int, **changed: Any) -> Row:
    estimates = ProgramEstimates(int(milliseconds * 1e6), 1, milliseconds, sram, False, 0, 100, 0, sram, sram, 10)
    given: dict[str, Any] = {"estimates": estimates, "cpu_operators": 0, "accuracy": 30.0, "ram_bytes": sram + 500}
    given |= changed
    return Row("ETHOSU_U85_INT8", target, 256, "System", "Mode", **given)


FAST, SMALL, NEITHER = _row("fast", 1.0, 2000), _row("small", 2.0, 1000), _row("neither", 2.0, 2000)
FAILED = _row("failed", 1.0, 1, estimates=None, cpu_operators=None, accuracy=None, error="it\nfailed")
SWEEP = Sweep((FAST, SMALL, NEITHER, FAILED), "SQNR in dB", ("mind this",))
TEXT = """\
3 configurations (* Pareto-optimal)
     recipe           target   system  memory mode  cycles     ms     RAM      SRAM     DRAM  flash  SQNR in dB  on CPU
  *  ETHOSU_U85_INT8  fast     System  Mode         1,000,000  1.000  2,500 B  2,000 B  0 B   100 B  30
  *  ETHOSU_U85_INT8  small    System  Mode         2,000,000  2.000  1,500 B  1,000 B  0 B   100 B  30
     ETHOSU_U85_INT8  neither  System  Mode         2,000,000  2.000  2,500 B  2,000 B  0 B   100 B  30
1 failed
  ETHOSU_U85_INT8  failed  System  Mode  it
Notes
  mind this"""


def test_text() -> None:
    assert str(SWEEP) == TEXT
    assert "<td>neither</td>" in SWEEP._repr_html_()


def test_pareto() -> None:
    assert SWEEP.pareto() == (FAST, SMALL)
    assert SWEEP.pareto("milliseconds") == (FAST,)
    better = _row("better", 2.0, 2000, accuracy=31.0)
    unknown = _row("unknown", 2.0, 1000, accuracy=None)
    assert Sweep((FAST, better, unknown, SMALL), "").pareto() == (FAST, better, SMALL)
    left_out = _row("left out", 0.5, 10, cpu_operators=3)
    assert Sweep((FAST, left_out), "").pareto() == (FAST, left_out)
    unmeasured = _row("unmeasured", 2.0, 2000, ram_bytes=None)
    assert Sweep((FAST, unmeasured), "").pareto() == (FAST,)
    with pytest.raises(ValueError, match="no numeric column 'speed'; there are: macs, ram_bytes, cycles"):
        SWEEP.pareto("speed")


def test_frame() -> None:
    frame = SWEEP.frame()
    assert list(frame["target"]) == ["fast", "small", "neither", "failed"]
    assert list(frame["sram_bytes"][:3]) == [2000, 1000, 2000]
    assert frame["error"][3] == "it\nfailed"


def test_rows_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert SWEEP.frame() == [row.to_dict() for row in SWEEP.rows]


def test_json(eight: Sweep) -> None:
    read = json.loads(json.dumps(eight.to_dict()))
    assert [row["cycles"] for row in read["rows"]] == [row.to_dict()["cycles"] for row in eight.rows]
    assert read["metric"] == "SQNR in dB"


def test_plot() -> None:
    figure = SWEEP.plot()
    points = [trace for trace in figure.data if trace.mode == "markers" and trace.yaxis == "y"]
    assert {(trace.name, trace.x, trace.y) for trace in points} == {
        ("fast, INT8", (1.0,), (2500,)),
        ("small, INT8", (2.0,), (1500,)),
        ("neither, INT8", (2.0,), (2500,)),
        ("Mode", (None,), (None,)),  # in the legend
    }
    front = next(trace for trace in figure.data if trace.name == "Pareto front")
    assert (front.x, front.y) == ((1.0, 2.0), (2500, 1500))
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles == ["RAM that a board needs (bytes)", "flash (bytes)", "SQNR in dB"]
    assert 'src="http' not in figure.to_html(include_plotlyjs=True)


def test_plot_without_times_has_cycles() -> None:
    estimates = ProgramEstimates(5000, 0, None, 2000, False, 0, 100, 0, 0, 0, 0)
    figure = Sweep((_row("cortex-m4", 1.0, 2000, estimates=estimates),), "").plot(y=["ram_bytes"])
    assert [trace.x for trace in figure.data if trace.mode == "markers" and trace.x != (None,)] == [(5000,)]
    assert next(figure.select_xaxes()).title.text == "cycles"


def test_plot_shows_dram_if_it_is_used(eight: Sweep) -> None:
    figure = eight.plot()
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles == ["RAM that a board needs (bytes)", "DRAM (bytes)", "flash (bytes)", "SQNR in dB"]
    axes = list(figure.select_xaxes())
    assert all(axis.showticklabels and axis.title.text == "time of an inference (ms)" for axis in axes)


def test_plot_has_a_colour_per_npu_family_and_a_size_per_npu(eight: Sweep) -> None:
    markers = {
        trace.name: (trace.marker.color, trace.marker.size)
        for trace in eight.plot().data
        if trace.mode == "markers" and trace.x != (None,)
    }
    assert len(markers) == 4
    assert len({colour for colour, _ in markers.values()}) == 2  # U55, U85
    assert len(set(markers.values())) == 4


def test_plots_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no numeric column 'target'"):
        SWEEP.plot(y=["target"])
    with pytest.raises(ValueError, match="no configuration has estimates"):
        Sweep((FAILED,), "").plot()
    with pytest.raises(ValueError, match="y: no configuration has a value of ram_bytes; see the notes"):
        Sweep((_row("not executed", 1.0, 2000, ram_bytes=None),), "").plot(y=["ram_bytes"])
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ImportError, match=r"pip install 'arm-recipes\[charts\]'"):
        SWEEP.plot()


def _run_killed_sweep(folder: str) -> None:
    """Run a sweep that is killed after it has cached three configurations."""
    keep = result_store.ResultStore.save_estimates

    def save_and_die(
        self: result_store.ResultStore, key: str, configuration: SweepConfiguration, estimates: ProgramEstimates
    ) -> None:
        keep(self, key, configuration, estimates)
        if len(list(Path(folder).glob("*.json"))) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    result_store.ResultStore.save_estimates = save_and_die  # type: ignore[method-assign]
    with joblib.parallel_config(n_jobs=1):
        sweep(Small().eval(), None, images(), cache_dir=folder, **EIGHT)


if __name__ == "__main__":
    _run_killed_sweep(sys.argv[1])


def test_npus_that_quantize_differently_have_separate_programs() -> None:
    torch.manual_seed(0)
    model, samples = ConstantHeads().eval(), [(torch.randn(4, 8, 8),) for _ in range(2)]
    recipes = ["ETHOSU_U55_INT8", "ETHOSU_U85_INT8"]
    rows = sweep(model, recipes, samples, macs=[128], memory_modes="Shared_Sram", progress=False).rows
    for row in rows:
        recipe = ExportRecipe.get_recipe(ArmRecipeType[row.recipe], macs=128, memory_mode="Shared_Sram")
        (delegate,) = export(model, recipe, samples, progress=False).report.delegates
        assert row.estimates is not None
        assert delegate.vela is not None
        assert row.estimates.cycles == delegate.vela.total_cycles
