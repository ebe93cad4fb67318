"""``tune``: its choice and figures, continuation from its cache, and the export with its recipe."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes import ArmRecipe, ArmRecipeType, Inputs, Tuned, export, load_recipe, tune
from arm_recipes.cli import main
from arm_recipes.comparison import accuracy
from arm_recipes.explore.tune import convex_hull, plan_evaluator, regions
from arm_recipes.explore.tune.convex_hull import PrecisionChoice
from arm_recipes.explore.tune.regions import Region
from arm_recipes.pipeline.cache import key

U85 = ArmRecipeType.ETHOSU_U85_INT8


class Uneven(nn.Module):
    """The first layers are expensive and do not need int16. The last ones are cheap and gain accuracy from it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.squeeze = nn.Linear(16, 16)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(3 * self.squeeze(self.body(x).mean((2, 3)))))


def _samples(count: int = 10, seed: int = 1) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, 3, 16, 16, generator=generator) * (1 + i % 3),) for i in range(count)]


def _recipe(recipe: ArmRecipeType = U85, **options: Any) -> ArmRecipe:
    made = ExportRecipe.get_recipe(recipe, **options)
    assert isinstance(made, ArmRecipe)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Tuned:
    return tune(Uneven().eval(), _recipe(), _samples(), budget={"cycles": 1.2}, cache_dir=folder)


def test_the_chosen_program_is_more_accurate_within_the_budget(tuned: Tuned) -> None:
    assert tuned.reached
    assert tuned.chosen.cost.value("cycles") <= 1.2 * tuned.base.cost.value("cycles")
    assert tuned.chosen.accuracy > tuned.base.accuracy + 2
    assert tuned.goal == f"cycles at most {1.2 * tuned.base.cost.value('cycles'):,.0f}"


def test_figures_equal_those_of_the_program(tuned: Tuned) -> None:
    (delegate,) = tuned.best.report.delegates
    assert delegate.vela is not None
    assert delegate.vela.total_cycles == tuned.chosen.cost.cycles
    model = Uneven().eval()
    signal = noise = 0.0
    for (x,) in _samples()[3::4]:  # the test samples
        with torch.no_grad():
            right = model(x).double()
        signal += float(right.square().sum())
        noise += float((tuned.best.run(x) - right).square().sum())
    assert tuned.verified == pytest.approx(10 * torch.tensor(signal / noise).log10().item(), abs=1e-3)
    assert tuned.verified == pytest.approx(tuned.chosen.accuracy, abs=1.5)


def test_the_frontier_is_pareto_optimal(tuned: Tuned) -> None:
    for one, other in itertools.permutations(tuned.frontier, 2):
        assert one.cost.value("cycles") < other.cost.value("cycles") or one.search_accuracy > other.search_accuracy
    affordable = [c for c in tuned.candidates if c.cost.value("cycles") <= 1.2 * tuned.base.cost.value("cycles")]
    assert tuned.chosen.search_accuracy == max(c.search_accuracy for c in affordable)


def test_the_choice_does_not_depend_on_test_samples(tuned: Tuned, folder: Path) -> None:
    """With other test samples and the same search samples, only the accuracy of the choice differs."""
    samples = _samples()
    assert tuned.samples == {"calibration": 5, "search": 3, "test": 2}
    others = _samples(4, seed=7)
    recipe = _recipe(calibration_samples=samples[::2])
    found = tune(Uneven().eval(), recipe, samples[1::4], budget={"cycles": 1.2}, test_samples=others, cache_dir=folder)
    assert found.samples == {"calibration": 5, "search": 3, "test": 4}
    assert found.chosen.precisions == tuned.chosen.precisions
    assert found.chosen.search_accuracy == tuned.chosen.search_accuracy
    assert found.chosen.accuracy != tuned.chosen.accuracy
    signal = noise = 0.0
    for (x,) in others:
        right = Uneven().eval()(x).detach().double()
        signal += float(right.square().sum())
        noise += float((found.best.run(x) - right).square().sum())
    assert found.verified == pytest.approx(10 * torch.tensor(signal / noise).log10().item(), abs=1e-3)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_too_few_samples_for_test_samples_are_noted(count: int) -> None:
    model, given = _MutatesInput().layer.eval(), _vectors()[:count]
    found = tune(model, _recipe(ArmRecipeType.TOSA_INT8), given, progress=False)
    parsed = [note for note in found.notes if "by which the search selected" in note]
    assert bool(parsed) == (count < 4)
    assert all(c.accuracy == c.search_accuracy for c in found.candidates) == (count < 4)


def test_invalid_test_samples_raise() -> None:
    model, given = _MutatesInput().layer.eval(), _vectors()
    with pytest.raises(ValueError, match=r"test_samples\[0\].*float32\[4, 9\]"):
        tune(model, _recipe(ArmRecipeType.TOSA_INT8), given, test_samples=[(torch.zeros(4, 9),)])
    with pytest.raises(ValueError, match="test_samples: there are none"):
        tune(model, _recipe(ArmRecipeType.TOSA_INT8), given, test_samples=[])


class _MetricOfTestSamples:
    """A metric that is 1 for search samples and ``value`` for test samples."""

    __name__ = "judged"

    def __init__(self, test_labels: list[int], value: float) -> None:
        self._test_labels, self._value = test_labels, value

    def __call__(self, outputs: Tensor, sample: tuple[Tensor, int]) -> float:
        return self._value if sample[1] in self._test_labels else 1.0


def test_a_goal_that_only_the_search_samples_reach() -> None:
    labelled = [(x, i) for i, (x,) in enumerate(_vectors())]
    metric = _MetricOfTestSamples([3], 0.25)
    recipe = _recipe(ArmRecipeType.TOSA_INT8)
    found = tune(_MutatesInput().layer.eval(), recipe, labelled, metric=metric, min_metric=0.5, progress=False)
    assert (found.chosen.search_accuracy, found.chosen.accuracy) == (1.0, 0.25)
    assert not found.reached
    assert any("reached on the search samples (1) but not on the test samples (0.25)" in n for n in found.notes)


def test_the_tuned_recipe_exports_the_same_program(tuned: Tuned, tmp_path: Path) -> None:
    made = load_recipe(tuned.save(tmp_path / "tuned.json"))
    assert made.to_dict() == tuned.recipe.to_dict()
    assert json.loads((tmp_path / "tuned.json").read_text())["options"]["precisions"]
    again = export(Uneven().eval(), made, _samples()[::2], progress=False)
    assert again.buffer == tuned.best.buffer


def test_a_search_continues_from_its_cache(tuned: Tuned, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search compiles and measures nothing, and has the same result."""

    def never(*args: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(plan_evaluator, "compile_delegates", never)
    assert tuned.verified is not None
    result = accuracy.EvaluationResult(0.0, 0.0, tuned.verified)  # of the final program, which is exported in any case
    monkeypatch.setattr(accuracy.Evaluator, "evaluate_outputs", lambda self, outputs: result)
    again = tune(Uneven().eval(), _recipe(), _samples(), budget={"cycles": 1.2}, cache_dir=folder)
    assert again.to_dict() == tuned.to_dict()


def test_other_sources_of_the_compiler_give_another_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    samples = [Inputs(torch.zeros(1, 2))]
    before = plan_evaluator._content_digest(program, _recipe(), samples)
    assert plan_evaluator._content_digest(program, _recipe(), samples) == before
    monkeypatch.setattr(key, "source_digest", lambda: "edited")
    assert plan_evaluator._content_digest(program, _recipe(), samples) != before


def test_text_json_and_plot_of_the_result(tuned: Tuned) -> None:
    text = str(tuned)
    assert "chosen" in text
    assert f"{tuned.chosen.cost.cycles:,}" in text
    parsed = json.loads(json.dumps(tuned.to_dict(), allow_nan=False))
    assert parsed["recipe"]["recipe"] == "ETHOSU_U85_INT8"
    assert len(parsed["candidates"]) == len(tuned.candidates)
    figure = tuned.plot()
    assert [trace.name for trace in figure.data] == ["programs", "frontier", "unchanged recipe", "chosen"]
    assert list(figure.data[3].y) == [tuned.chosen.accuracy]


def test_min_metric_takes_the_cheapest_program_that_is_accurate_enough(tuned: Tuned, folder: Path) -> None:
    least = (tuned.base.search_accuracy + tuned.chosen.search_accuracy) / 2
    found = tune(Uneven().eval(), _recipe(), _samples(), min_metric=least, cache_dir=folder)
    assert found.reached
    exact = [c.cost.value("cycles") for c in found.candidates if c.search_accuracy >= least]
    assert found.chosen.search_accuracy >= least
    assert found.chosen.cost.value("cycles") == min(exact)


def test_a_goal_that_cannot_be_reached_takes_the_most_accurate_program(folder: Path) -> None:
    found = tune(Uneven().eval(), _recipe(), _samples(), min_metric=200.0, cache_dir=folder)
    assert not found.reached
    assert found.chosen.search_accuracy == max(c.search_accuracy for c in found.candidates)
    assert any("no compiled program reaches the goal" in note for note in found.notes)
    assert "not reached" in str(found)


def test_a_user_metric() -> None:
    """The metric reads labels from the samples. TOSA targets have no cycles, so that the budget limits bytes."""
    model = Uneven().eval()
    labelled = [(x, int(model(x).argmax())) for (x,) in _samples()]

    def right(scores: Tensor, sample: tuple[Tensor, int]) -> bool:
        return int(scores.argmax()) == sample[1]

    found = tune(model, _recipe(ArmRecipeType.TOSA_INT8), labelled, metric=right, max_drop=0.0)
    assert found.metric == "right"
    assert found.goal == "right at least 1"
    assert found.chosen.accuracy == found.verified == 1.0
    assert found.base.cost.cycles is None
    assert found.base.cost.traffic > 0


def test_choice_between_per_channel_and_per_tensor_scales(folder: Path) -> None:
    names = ["INT8_PER_TENSOR"]
    found = tune(Uneven().eval(), _recipe(), _samples(), candidate_precisions=names, budget={"flash": 1.0})
    assert {region.precision for region in found.regions} <= {"INT8", "INT8_PER_TENSOR"}
    assert found.chosen.cost.flash <= found.base.cost.flash
    assert found.chosen.search_accuracy >= found.base.search_accuracy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": ArmRecipeType.TOSA_FP}, "TOSA_FP does not quantize"),
        ({"budget": {"cycels": 1.1}}, "budget: unknown kind of cost 'cycels'"),
        ({"budget": {"cycles": "many"}}, "budget: cycles must be an int"),
        ({"budget": {"flash": "many"}}, "budget: flash must be bytes"),
        ({"budget": {"cycles": -1.0}}, "budget: cycles must be positive"),
        ({"budget": {"flash": float("inf")}}, "budget: flash must be positive and finite, not inf"),
        ({"budget": {}}, "budget: {} is not a dict of limits"),
        ({"min_metric": "30"}, "min_metric: '30' is not a finite number"),
        ({"min_metric": float("nan")}, "min_metric: nan is not a finite number"),
        ({"max_drop": 0.5}, "use min_metric"),
        ({"min_metric": 3.0, "max_drop": 0.5}, "give only one of them"),
        ({"metric": 3}, "metric: 3 is not callable"),
        ({"candidate_precisions": ["INT16"]}, "candidate_precisions: there is no precision 'INT16'"),
        ({"candidate_precisions": ["FP"]}, "'FP' is for VGF and Cortex-M recipes"),
        ({"candidate_precisions": ["INT8"]}, "candidate_precisions: nothing to choose from"),
        ({"samples": _samples(1)}, "samples: there is one"),
        (
            {"recipe": ArmRecipeType.TOSA_INT8, "budget": {"cycles": 1.1}},
            "'cycles' is estimated for Ethos-U and Cortex-M only",
        ),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    given = {"samples": _samples(4), "recipe": U85, **arguments}
    recipe = _recipe(given.pop("recipe"))
    with pytest.raises(ValueError, match=message.replace("{}", r"\{\}")):
        tune(Uneven().eval(), recipe, given.pop("samples"), progress=False, **given)


class _MutatesInput(nn.Module):
    """Mutates its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        x.add_(10)
        return y


def _vectors() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 8, generator=generator),) for _ in range(6)]


def test_a_model_that_mutates_its_input_does_not_change_the_samples() -> None:
    given = _vectors()
    found = tune(_MutatesInput().eval(), _recipe(ArmRecipeType.TOSA_INT8), given, progress=False)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(given, _vectors(), strict=True))
    assert found.base.accuracy > 25
    assert found.verified == pytest.approx(found.chosen.accuracy, abs=1)


def test_accuracy_of_quantized_io_is_that_of_dequantized_outputs() -> None:
    recipe = _recipe(ArmRecipeType.TOSA_INT8, quantized_io=True, algorithms={"bias_correction"})
    found = tune(_MutatesInput().layer.eval(), recipe, _vectors(), progress=False)
    assert found.best.inputs[0].dtype == "int8"
    assert found.verified == pytest.approx(found.chosen.accuracy, abs=1)


@pytest.mark.parametrize("content", ["{}", '{"sqnr": 1.0}', '{"sqnr": "a", "noise": 1.0, "metric": null}', "[", "3"])
def test_damaged_cache_files_are_replaced(content: str, tmp_path: Path) -> None:
    def search() -> dict[str, Any]:
        recipe = _recipe(ArmRecipeType.TOSA_INT8)
        return tune(_MutatesInput().layer.eval(), recipe, _vectors(), cache_dir=tmp_path, progress=False).to_dict()

    expected = search()
    for file in tmp_path.iterdir():
        file.write_text(content)
    assert search() == expected


def test_calibration_batches_of_a_loader_get_the_batch_size_of_the_program() -> None:
    """16 items in batches of 3, with labels, are 4 batches of the program's size."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(inputs, torch.zeros(16, dtype=torch.long)), batch_size=3)
    recipe = _recipe(ArmRecipeType.TOSA_INT8, calibration_samples=loader)
    found = tune(_MutatesInput().layer.eval(), recipe, _vectors(), progress=False)
    assert found.samples["calibration"] == 4
    assert found.verified == pytest.approx(found.chosen.accuracy, abs=1)


def test_results_by_a_user_metric_are_not_cached(tmp_path: Path) -> None:
    """The key of a result does not contain the metric: a later search by SQNR would read the values of the metric."""
    model, recipe = _MutatesInput().layer.eval(), _recipe(ArmRecipeType.TOSA_INT8)
    tune(model, recipe, _vectors(), metric=lambda outputs, sample: 0.25, cache_dir=tmp_path, progress=False)
    assert not any("metric" in json.loads(file.read_text()) for file in tmp_path.glob("*.json"))


def test_a_recipe_with_precisions_is_refused() -> None:
    with pytest.raises(ValueError, match="it has precisions already"):
        tune(Uneven().eval(), _recipe(precisions={"head": "A16W8"}), _samples(4))
    with pytest.raises(TypeError, match="recipe: must be ExportRecipe"):
        tune(Uneven().eval(), U85, _samples(4))  # type: ignore[arg-type]


# -- saved recipes -----------------------------------------------------------------------------------


def test_a_recipe_copies_its_options() -> None:
    precisions, algorithms = {"head": "A16W8"}, {"int16_outputs", "bias_correction"}
    recipe = _recipe(precisions=precisions, algorithms=algorithms)
    precisions["head"] = "INT8"
    algorithms.clear()
    parsed = json.loads(json.dumps(recipe.to_dict()))["options"]
    assert parsed == {"precisions": {"head": "A16W8"}, "algorithms": ["bias_correction", "int16_outputs"]}


def test_a_recipe_is_saved_and_loaded(tmp_path: Path) -> None:
    recipe = _recipe(macs=512, precisions={"head": "A16W8"}, calibration_samples=_samples(2), dump_dir=tmp_path)
    parsed = json.loads(json.dumps(recipe.to_dict()))
    options = {"macs": 512, "precisions": {"head": "A16W8"}, "dump_dir": str(tmp_path)}
    assert parsed == {"recipe": "ETHOSU_U85_INT8", "options": options}
    assert load_recipe(parsed).to_dict() == parsed
    assert load_recipe(parsed, macs=256).options["macs"] == 256


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not a recipe"),
        ("{", "is not a JSON file"),
        ('{"recipe": "ETHOSU_U58_INT8"}', "there is no recipe 'ETHOSU_U58_INT8'; did you mean"),
        ('{"recipe": "TOSA_INT8", "options": {"macs": 3}}', "unknown argument 'macs'"),
        ('{"recipe": "TOSA_INT8", "options": [1]}', "options must be a dict"),
    ],
)
def test_a_file_that_is_no_recipe(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(tmp_path / "made.json")
    with pytest.raises(ValueError, match="cannot be read"):
        load_recipe(tmp_path / "none.json")


def test_precision_of_a_missing_module_raises(tmp_path: Path) -> None:
    recipe = _recipe(precisions={"haed": "A16W8"})
    with pytest.raises(Exception, match="no module 'haed'"):
        export(Uneven().eval(), recipe, _samples(2))


def test_tune_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``export --tuned`` reads the file that ``tune`` writes."""
    program = torch.export.export(Uneven().eval(), _samples(1)[0])
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save(None, tmp_path / "unused")
    import numpy as np

    np.savez(tmp_path / "samples.npz", x=torch.cat([x for (x,) in _samples(6)]).numpy())
    base = [str(tmp_path / "model.pt2"), "--recipe", "ethosu_u85_int8"]
    wanted = ["--samples", str(tmp_path / "samples.npz"), "--cycles", "1.2", "--save", str(tmp_path / "tuned.json")]
    np.savez(tmp_path / "others.npz", x=torch.cat([x for (x,) in _samples(4, seed=7)]).numpy())
    wanted += ["--test-samples", str(tmp_path / "others.npz")]
    assert main.main(["tune", *base, *wanted, "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["reached"]
    assert parsed["samples"] == {"calibration": 3, "search": 3, "test": 4}
    assert json.loads((tmp_path / "tuned.json").read_text()) == parsed["recipe"]
    output = ["-o", str(tmp_path / "model.pte")]
    tuned = ["--tuned", str(tmp_path / "tuned.json"), "--calibration-samples", str(tmp_path / "samples.npz")]
    assert main.main(["export", str(tmp_path / "model.pt2"), *tuned, *output]) == 0
    assert (tmp_path / "model.pte").exists()


# -- regions and plans ------------------------------------------------------------------------------------------------


class _Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2)


class _Norm(nn.Module):
    """An RMS norm in elementary operators, one of them in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.last = _Square(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x * torch.rsqrt(self.square(x).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize(("algorithms", "modules"), [(True, ("", "last")), (False, ("square", "", "last"))])
def test_quantized_modules_are_those_after_the_algorithms(algorithms: bool, modules: tuple[str, ...]) -> None:
    program = torch.export.export(_Norm().eval(), _vectors()[0])
    recipe = _recipe(ArmRecipeType.TOSA_INT8, algorithms=algorithms)
    assert regions.quantized_modules(program, recipe) == modules


def test_settings_give_every_module_its_precision() -> None:
    draw = random.Random(0)
    modules = ["", "a", "a.b", "a.b.c", "a.d", "ab", "e", "e.f"]
    for _ in range(500):
        chosen = draw.sample(modules, draw.randint(1, len(modules)))
        plan = {module: draw.choice(["INT8", "A16W8", "FP"]) for module in chosen}
        settings = regions.minimal_settings(plan, "INT8")
        for module, precision in plan.items():
            above = [name for name in settings if name in ("", module) or module.startswith(name + ".")]
            assert settings.get(max(above, key=len, default=None), "INT8") == precision  # type: ignore[arg-type]
        assert len(settings) <= len(plan) + 1


def test_noisy_regions_are_subdivided() -> None:
    modules = ["stem", "a.0.x", "a.0.y", "a.1.x", "a.1", "b.0", "b.1"]
    noise = dict.fromkeys(modules, 1.0) | {"a.1.x": 50.0, "a.1": 40.0}
    measured = []

    def noise_of(region: Region) -> float:
        measured.append(region.name)
        return sum(noise[module] for module in region.modules)

    found = regions.subdivide_by_noise(regions.build_region_tree(modules), noise_of, share=0.1, max_regions=10)
    assert sorted(module for region in found for module in region.modules) == sorted(modules)
    assert {region.modules for region in found} >= {("a.1.x",), ("a.1",), ("a.0.x", "a.0.y"), ("b.0", "b.1")}
    assert len(measured) == len(set(measured)) + 1  # 'a.1' is the name of a region, and of a module in it
    few = regions.subdivide_by_noise(regions.build_region_tree(modules), noise_of, share=0.1, max_regions=3)
    assert len(few) == 3


def test_each_plan_on_the_convex_hull_has_the_least_noise_for_its_cost() -> None:
    draw = random.Random(3)
    for _ in range(40):
        choices = {
            Region(str(i), (str(i),)): [
                PrecisionChoice(name, draw.random(), draw.uniform(-1, 3)) for name in ("INT8", "A16W8", "A8W4")
            ]
            for i in range(4)
        }
        start, steps = convex_hull.hull_steps(choices)
        every = [
            (sum(c.extra_cost for c in combination), sum(c.noise for c in combination))
            for combination in itertools.product(*choices.values())
        ]
        cost = sum(choice.extra_cost for choice in start.values())
        noise = sum(choice.noise for choice in start.values())
        assert cost == pytest.approx(min(other for other, _ in every))
        for step in steps:
            cost, noise = cost + step.extra_cost, noise - step.noise_reduction
            assert step.extra_cost > 0
            assert step.noise_reduction > 0
            assert not [1 for other in every if other[0] <= cost + 1e-9 and other[1] < noise - 1e-9]
        assert noise == pytest.approx(min(other for _, other in every))


def test_affordable_steps_fill_the_budget() -> None:
    """Steps are taken by gain per cost. A step of a region needs the region's previous step."""
    a, b, c = (Region(name, (name,)) for name in "abc")
    rest = [
        convex_hull.PrecisionStep(a, PrecisionChoice("INT8", 0.0, 0.0), noise_reduction=5.0, extra_cost=2.0),
        convex_hull.PrecisionStep(b, PrecisionChoice("A16W8", 0.0, 0.0), noise_reduction=6.0, extra_cost=4.0),
        convex_hull.PrecisionStep(c, PrecisionChoice("INT8", 0.0, 0.0), noise_reduction=3.0, extra_cost=3.0),
        convex_hull.PrecisionStep(a, PrecisionChoice("A16W8", 0.0, 0.0), noise_reduction=0.5, extra_cost=1.0),
        convex_hull.PrecisionStep(b, PrecisionChoice("FP", 0.0, 0.0), noise_reduction=0.1, extra_cost=0.5),
    ]
    assert convex_hull.select_affordable(rest, 5.5) == [rest[0], rest[2]]
    assert convex_hull.select_affordable(rest, 6.5) == [rest[0], rest[1], rest[4]]
    assert convex_hull.select_affordable(rest, 7.0) == [rest[0], rest[1], rest[3]]
    assert convex_hull.select_affordable(rest, 7.0, 0.6) == [rest[0], rest[1]]
    assert convex_hull.select_affordable(rest, 7.0, 0.01) == [rest[0]]
    assert convex_hull.select_affordable(rest, 1.9) == []
    assert convex_hull.select_affordable(rest, float("inf")) == rest


@pytest.mark.verify
def test_on_a_cortex_m_float_modules_cost_cycles_and_gain_accuracy(folder: Path) -> None:
    recipe = _recipe(ArmRecipeType.CORTEX_M_INT8, cpu="cortex-m4")
    result = tune(Uneven().eval(), recipe, _samples(), budget={"cycles": 3.0}, cache_dir=folder)
    base, chosen = result.base.cost.cycles, result.chosen.cost.cycles
    assert base is not None
    assert chosen is not None
    assert base < chosen <= 3 * base
    assert result.chosen.accuracy is not None
    assert result.base.accuracy is not None
    assert result.chosen.accuracy > result.base.accuracy
    assert result.best.report.methods[0].cpu_cycles == chosen
