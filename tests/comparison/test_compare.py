"""``compare``: layers, causes of errors, labels, workers, two programs, output formats and invalid arguments."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.utils.data import DataLoader, TensorDataset

from arm_backend_core.quantization.diagnostics.error_metrics import decibels
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, Comparison, ExportResult, RuntimeUnavailable, compare, export
from arm_recipes._internal.rendering import to_jsonable
from arm_recipes.comparison import parallel_run, program_specs, worker
from arm_recipes.comparison.worker_job import ComparisonJob, WorkItem
from arm_recipes.runtime import host_plugin
from tests.runtime.host_programs import MIXED, Counting, CpuBetween, export_mixed, export_small
from tests.small_models import MovingAverage, Samples, Small, images, vectors

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
INT8, FP = ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_FP
A16W8, A8W4 = ArmRecipeType.ETHOSU_U85_A16W8, ArmRecipeType.ETHOSU_U55_A8W4


class MutatesInput(MovingAverage):
    """Mutates its second input, and keeps a moving average in a buffer."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        """See the class."""
        average = super().forward(x)
        y.copy_(y * 0.5 + x)
        return average + y


class Stack(nn.Module):
    """Three linear layers with relu between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


class Looping(nn.Module):
    """A loop with a data-dependent trip count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        """Run the loop ``count`` times."""
        from torch._higher_order_ops import while_loop

        start = (torch.zeros((), dtype=torch.int32), self.linear(x))
        return while_loop(lambda i, y: i < count, lambda i, y: (i + 1, torch.tanh(y)), start)[1]


class Conditional(nn.Module):
    """A conditional with a layer in each branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Select the branch by the sign of the sum."""
        return torch.cond(x.sum() > 0, self.first, self.second, (x,))


def _rows(count: int = 16, size: int = 64, seed: int = 1) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1, size, generator=generator),) for _ in range(count)]


def _pairs() -> Samples:
    return [(x, torch.zeros(1, 8)) for (x,) in vectors()]


def _decibels(expected: Tensor, actual: Tensor) -> float:
    error = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / error))


@pytest.mark.parametrize("recipe", [U55, U85, A16W8, A8W4, INT8, FP])
def test_error_of_the_last_layer_is_that_of_the_output(recipe: ArmRecipeType) -> None:
    result = export_small(recipe)
    found = result.compare(images(), workers=1, progress=False)
    with torch.no_grad():
        right = torch.cat([Small().eval()(*sample) for sample in images()])
    given = torch.cat([result.run(*sample) for sample in images()])
    gap = found.outputs[0].gap
    assert gap is not None
    assert found.sqnr == gap.sqnr == pytest.approx(_decibels(right, given), abs=0.02 if recipe is not FP else 3)
    assert gap.max_error == pytest.approx(float((given - right).abs().max()), rel=0.01, abs=1e-7)
    assert gap.cosine == pytest.approx(float(torch.cosine_similarity(right.flatten(), given.flatten(), 0)), abs=1e-5)
    last = found.layers[-1]
    assert (last.module, last.operator, last.value_source) == ("head", "aten.linear.default", "program")
    assert last.gap.sqnr == pytest.approx(gap.sqnr, abs=1e-3 if recipe is not FP else 3)
    assert last.gap.max_error == pytest.approx(gap.max_error, abs=1e-7)
    assert {layer.value_source for layer in found.layers} == {"program"}
    assert not [note for note in found.notes if "int16" not in note]


def test_quantized_io_does_not_change_the_comparison() -> None:
    plain_io, integers = (export_small(A16W8, quantized_io=flag).compare(images(), workers=1) for flag in (False, True))
    assert integers.layers == plain_io.layers
    assert integers.outputs == plain_io.outputs


def test_dtype_of_the_last_layer_depends_on_quantized_io() -> None:
    dtypes = [
        export_small(INT8, quantized_io=flag).compare(images(), workers=1).layers[-1].dtype for flag in (False, True)
    ]
    assert dtypes == ["int16", "int8"]


def test_layer_errors_are_those_of_the_quantized_graph() -> None:
    """PyTorch's own run of the graph differs by a rounding step in some elements."""
    result = export_small(U85)
    program = result.exported_programs["forward"]
    values: dict[str, list[Tensor]] = {}

    class Recorder(Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            made = super().run_node(n)
            if "dequantize" in n.name and isinstance(made, Tensor):
                values.setdefault(n.name, []).append(made)
            return made

    module = program.module(check_guards=False)
    for sample in images():
        Recorder(module).run(*sample)
    found = {layer.module or layer.name: layer for layer in result.compare(images(), workers=1).layers}
    model = Small().eval()
    with torch.no_grad():
        right = torch.cat([model.body(x) for (x,) in images()])
    body = next(torch.cat(made) for made in values.values() if torch.cat(made).shape == right.shape)
    assert found["body.0"].operator == "aten.conv2d.default + aten.relu.default"
    assert found["body.0"].gap.sqnr == pytest.approx(_decibels(right, body), abs=0.1)
    assert found["x"].isolated is not None
    assert found["x"].gap.sqnr == pytest.approx(found["x"].isolated.sqnr, abs=1e-6)  # no layer precedes it


def test_value_sources_of_operators_on_the_cpu() -> None:
    """A value that a delegate reads is the program's; PyTorch computes other values from the program's."""
    result = export(CpuBetween().eval(), ExportRecipe.get_recipe(U55), vectors())
    found = result.compare(vectors(), workers=1)
    assert {layer.value_source for layer in found.layers} == {"program"}
    assert found.layers[-1].gap.sqnr == pytest.approx(found.sqnr, abs=1e-3)
    moved = next(layer for layer in found.layers if layer.operator == "aten.topk.default")
    assert moved.moves
    assert moved.isolated is None  # its values are quantized already
    assert moved.gap.sqnr < 40
    real = export(CpuBetween().eval(), ExportRecipe.get_recipe(FP), vectors()).compare(vectors(), workers=1)
    sources = {layer.operator: layer.value_source for layer in real.layers}
    assert sources == {
        "aten.linear.default": "program",
        "aten.cumsum.default": "PyTorch",
        "aten.topk.default": "program",
    }


@pytest.mark.parametrize("layer", [nn.AvgPool2d(2), nn.UpsamplingBilinear2d(scale_factor=2)])
def test_averages_are_isolated_and_maxima_are_not(layer: nn.Module) -> None:
    """An average is rounded to the scale that it shares with its operand, a maximum is exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), layer, nn.Flatten(), nn.LazyLinear(2)).eval()
    found = export(model, ExportRecipe.get_recipe(INT8), images()).compare(images(), workers=1)
    layers = {gap.module: gap for gap in found.layers}
    assert layers["1"].moves
    assert layers["1"].isolated is None
    assert not layers["2"].moves
    assert layers["2"].isolated is not None
    assert 20 < layers["2"].isolated.sqnr < 80
    assert layers["2"].isolated.advice.cause == "rounding"


@pytest.mark.parametrize("recipe", [U55, FP])
def test_state_is_kept_between_samples(recipe: ArmRecipeType) -> None:
    model = MutatesInput().eval()
    result = export(model, ExportRecipe.get_recipe(recipe), _pairs())
    with torch.no_grad():
        model(*_pairs()[0])  # changes the user's model; the comparison starts from the program's initial state
        fresh = MutatesInput().eval()
        right = torch.cat([fresh(x, y.clone()) for x, y in _pairs()])
    for _ in range(2):
        found = result.compare(_pairs(), workers=2)
        assert [output.name for output in found.outputs] == ["y_written", "output1"]
        program = result.program()
        given = torch.cat([program.execute(*sample)[-1] for sample in _pairs()])
        gap = found.outputs[-1].gap
        assert gap is not None
        assert gap.sqnr == pytest.approx(_decibels(right, given), abs=0.05 if recipe is U55 else 3)


def test_a_method_is_selected_by_name() -> None:
    models: dict[str, nn.Module] = {"count": Counting().eval(), "between": CpuBetween().eval()}
    result = export(models, ExportRecipe.get_recipe(INT8), dict.fromkeys(models, vectors(3)))
    alone = export(CpuBetween().eval(), ExportRecipe.get_recipe(INT8), vectors(3)).compare(vectors(3))
    found = result.compare(vectors(3), method="between")
    assert [layer.operator for layer in found.layers] == [layer.operator for layer in alone.layers]
    assert found.sqnr == pytest.approx(alone.sqnr, abs=3)
    with pytest.raises(ValueError, match=r"^method: the program has no 'forward'; it has: count, between$"):
        result.compare(vectors(3))


def test_a_method_of_one_input_size_is_selected() -> None:
    seq = torch.export.Dim("seq", min=1, max=16)
    samples = [(torch.randn(4, 64),), (torch.randn(2, 64),)]
    shapes: dict[str, Any] = {"dynamic_shapes": {"x": {0: seq}}, "sizes": {"seq": [2, 4]}}
    result = export(Stack().eval(), ExportRecipe.get_recipe(INT8), samples, **shapes)
    with pytest.raises(
        ValueError, match=r"'forward'; it has one method per input size: forward__seq_2, forward__seq_4"
    ):
        result.compare(samples)
    assert result.compare(samples[1:], method="forward__seq_2").layers


def test_layers_are_compared_in_branches_but_not_with_loops() -> None:
    chosen = export(Conditional().eval(), ExportRecipe.get_recipe(INT8), vectors()).compare(vectors())
    assert chosen.layers[-1].gap.sqnr == pytest.approx(chosen.sqnr, abs=1e-3)
    samples = [(x, torch.tensor(3, dtype=torch.int32)) for (x,) in vectors()]
    looping = export(Looping().eval(), ExportRecipe.get_recipe(FP, extensions=["cf"]), samples).compare(samples)
    assert looping.layers == ()
    assert looping.notes == ("layers are not compared: the captured program has a loop",)
    assert looping.sqnr > 100


def test_two_exports_with_a_loop_are_compared_without_layers() -> None:
    samples = [(x, torch.tensor(3, dtype=torch.int32)) for (x,) in vectors()]
    result = export(Looping().eval(), ExportRecipe.get_recipe(FP, extensions=["cf"]), samples)
    assert compare(result, result, samples).notes == ("layers are not compared: the captured program has a loop",)


def test_a_model_that_was_quantized_before_export_is_noted() -> None:
    program = export_small(INT8).exported_programs["forward"]
    found = export(program, ExportRecipe.get_recipe(INT8), images()).compare(images(), workers=1)
    assert any(note.startswith("the model was quantized before export") for note in found.notes)
    assert found.layers[-1].gap.sqnr == pytest.approx(found.sqnr, abs=1e-3)


# -- causes ----------------------------------------------------------------------------------------------------------


def _worst(
    model: nn.Module, calibration: Samples, samples: Samples, recipe: ArmRecipeType = INT8, **options: Any
) -> Any:
    result = export(model.eval(), ExportRecipe.get_recipe(recipe, **options), calibration)
    layer = result.compare(samples, workers=1).worst[0]
    assert layer.isolated is not None
    assert layer.isolated.advice.sqnr > layer.isolated.sqnr + 3
    return layer


def test_weights_with_outliers_are_the_worst_layer() -> None:
    model = Stack()
    with torch.no_grad():
        model.second.weight[:, 5] = 20.0 * torch.rand(64)
    layer = _worst(
        model, _rows(), _rows(seed=2), algorithms=False
    )  # cross-layer equalization would remove the outliers
    assert (layer.module, layer.isolated.advice.cause) == ("second", "weights")
    assert "'second.weight' has an SQNR of" in layer.isolated.advice.text
    assert "widened by a few large weights: bound them" in layer.isolated.advice.text
    assert layer.weights[0].sqnr < 38


def test_per_tensor_weights_are_a_cause() -> None:
    model = Stack()
    with torch.no_grad():
        model.second.weight[5] *= 50.0
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_A16W8, per_channel=False)
    layers = export(model.eval(), recipe, _rows()).compare(_rows(seed=2), workers=1).layers
    own = next(layer.isolated for layer in layers if layer.module == "second")
    assert own is not None
    assert own.advice.cause == "weights"
    assert "with one scale for all channels: use get_recipe(..., per_channel=True)" in own.advice.text


def test_int4_weights_are_a_cause() -> None:
    layer = _worst(Stack(), _rows(), _rows(seed=2), ArmRecipeType.TOSA_A8W4)
    assert layer.isolated.advice.cause == "weights"
    assert "with 15 levels: use a recipe with int8 weights" in layer.isolated.advice.text


def test_samples_beyond_the_calibrated_range_are_a_cause() -> None:
    wide = [(4 * x,) for (x,) in _rows(seed=2)]
    result = export(Stack().eval(), ExportRecipe.get_recipe(INT8), _rows())
    found = result.compare(wide, workers=1)
    assert {layer.isolated.advice.cause for layer in found.worst if layer.isolated} == {"clipping"}
    layer = found.layers[0]
    assert layer.isolated is not None
    assert layer.scale is not None
    assert (layer.name, layer.operator) == ("x", "input")
    low, high = layer.isolated.range
    values = torch.cat([x for (x,) in wide])
    clipped = float(((values < low - layer.scale / 2) | (values > high + layer.scale / 2)).double().mean())
    assert layer.isolated.clipped == pytest.approx(clipped)
    assert layer.isolated.values == (float(values.min()), float(values.max()))
    seen = torch.cat([x for (x,) in _rows()])
    assert layer.isolated.calibrated == (float(seen.min()), float(seen.max()))
    assert "of the values are clipped" in layer.isolated.advice.text
    assert (
        "calibrate with samples like these, get_recipe(..., calibration_samples=samples)" in layer.isolated.advice.text
    )


def test_activation_outliers_are_a_cause() -> None:
    samples = _rows(4, 1200)
    samples[0][0][0, 7] = 200.0

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(1200, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    layer = _worst(First(), samples, samples)
    assert (layer.name, layer.isolated.advice.cause) == ("x", "outliers")
    assert "outliers widen the range: 99.9 % of the values are within" in layer.isolated.advice.text
    assert "int16" in layer.isolated.advice.text


def test_a_calibrated_range_that_is_too_wide_is_a_cause() -> None:
    narrow = [(x / 20,) for (x,) in _rows(seed=2)]
    result = export(Stack().eval(), ExportRecipe.get_recipe(INT8), _rows())
    layer = result.compare(narrow, workers=1).layers[0]
    assert layer.isolated is not None
    assert layer.isolated.advice.cause == "range"
    assert "and calibration set the range" in layer.isolated.advice.text
    fitting = export(Stack().eval(), ExportRecipe.get_recipe(INT8), narrow).compare(narrow, workers=1).layers[0]
    assert fitting.isolated is not None
    assert fitting.isolated.sqnr == pytest.approx(layer.isolated.advice.sqnr, abs=1.5)


def test_a_fixed_range_is_not_a_calibration_error() -> None:
    class Soft(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x, 1)

    samples = _rows(4, 300)
    recipe = ExportRecipe.get_recipe(INT8, quantized_io=True)
    layer = export(Soft().eval(), recipe, samples).compare(samples, workers=1).layers[-1]
    assert layer.isolated is not None
    assert layer.isolated.advice.cause == "rounding"
    assert "and the operator's range is 0 to 0.9961" in layer.isolated.advice.text


def test_advice_for_cortex_m_is_floating_point_and_improves_sqnr() -> None:
    """The kernels of a Cortex-M have no int16 tensors."""
    recipe = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, algorithms=False)
    found = export(Stack().eval(), recipe, _rows()).compare(_rows(seed=2), workers=1)
    before = {layer.module: layer for layer in found.layers}["first"]
    assert before.isolated is not None
    assert before.isolated.advice.precision == "FP"
    assert "keep the consumers of this result, 'second', in floating point" in before.isolated.advice.text
    assert before.isolated.advice.sqnr > before.isolated.sqnr + 3
    text = str(found)
    assert "floating point for one module: get_recipe(..., precisions={'module': 'FP'})" in text
    assert "int16" not in text
    kept = ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, algorithms=False, precisions={"second": "FP"})
    after = export(Stack().eval(), kept, _rows()).compare(_rows(seed=2), workers=1)
    assert after.sqnr > found.sqnr


def test_advice_of_int16_for_consumers_predicts_the_measured_sqnr() -> None:
    """An export with the advised precision has the SQNR that the advice states."""
    result = export(Stack().eval(), ExportRecipe.get_recipe(INT8, algorithms=False), _rows())
    before = {layer.module: layer for layer in result.compare(_rows(seed=2), workers=1).layers}["first"]
    assert before.isolated is not None
    assert "for the consumers of this result, 'second'" in before.isolated.advice.text
    recipe = ExportRecipe.get_recipe(INT8, algorithms=False, precisions={"second": "A16W8"})
    found = export(Stack().eval(), recipe, _rows()).compare(_rows(seed=2), workers=1)
    after = {layer.module: layer for layer in found.layers}["first"]
    assert after.isolated is not None
    assert (before.isolated.advice.cause, after.dtype) == ("rounding", "int16")
    assert after.isolated.sqnr == pytest.approx(before.isolated.advice.sqnr, abs=1)


# -- accuracy --------------------------------------------------------------------------------------------------------


def _labelled() -> tuple[Tensor, Tensor]:
    x = torch.cat([sample for (sample,) in images(10)])
    return x, torch.arange(10) % 4


@pytest.mark.parametrize("form", [list, torch.Tensor.numpy, lambda labels: labels, lambda labels: labels.split(1)])
def test_accuracy_equals_that_of_a_python_loop(form: Callable[[Tensor], Any]) -> None:
    x, labels = _labelled()
    result, model = export_small(INT8), Small().eval()
    found = result.compare(images(10), form(labels), workers=1, layers=False).accuracy
    with torch.no_grad():
        right = torch.cat([model(one).argmax(1) for one in x.split(1)])
    given = torch.cat([result.run(one).argmax(1) for one in x.split(1)])
    assert found is not None
    assert (found.metric, found.items, found.agreeing) == ("top-1 accuracy", 10, int((right == given).sum()))
    assert found.reference == pytest.approx(float((right == labels).double().mean()))
    assert found.program == pytest.approx(float((given == labels).double().mean()))


@pytest.mark.parametrize("batch", [1, 4])
def test_labels_of_a_data_loader(batch: int) -> None:
    x, labels = _labelled()
    result = export_small(INT8)
    loader = DataLoader(TensorDataset(x, labels), batch_size=batch)
    found = result.compare(loader, workers=1, layers=False)
    assert found.accuracy == result.compare(images(10), labels, workers=1, layers=False).accuracy


def test_labels_of_pixels_with_a_partial_last_batch() -> None:
    """The class dimension is 1: removing the last one would also leave more items than there are labels."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 21, 1).eval(), torch.randn(10, 3, 8, 8)
    labels = model(x).argmax(1)
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), [(x[:4],)])
    found = result.compare(DataLoader(TensorDataset(x, labels), batch_size=4), workers=1, layers=False)
    assert found.accuracy is not None
    assert (found.accuracy.reference, found.accuracy.items) == (1.0, labels.numel())


def test_a_metric_gets_the_outputs_and_the_original_sample() -> None:
    x, labels = _labelled()

    def right(outputs: Tensor, sample: Any) -> float:
        return float(outputs.argmax(1) == sample[1])

    loader = DataLoader(TensorDataset(x, labels), batch_size=1)
    result = export_small(INT8)
    found = result.compare(loader, metric=right, workers=1, layers=False).accuracy
    by_labels = result.compare(loader, workers=1, layers=False).accuracy
    assert found is not None
    assert by_labels is not None
    assert (found.metric, found.items, found.agreeing) == ("right", 10, None)
    assert (found.reference, found.program) == pytest.approx((by_labels.reference, by_labels.program))
    with pytest.raises(ValueError, match=r"^metric: the DataLoader's 3 batches become 10 batches of the program"):
        result.compare(DataLoader(TensorDataset(x, labels), batch_size=4), metric=right)


def test_a_metric_of_a_batch_that_is_filled_up_is_refused() -> None:
    x, labels = _labelled()

    def correct(outputs: Tensor, sample: Any) -> float:
        return float((outputs.argmax(1) == sample[1]).double().mean())

    result = export(Small().eval(), ExportRecipe.get_recipe(INT8), [(x[:4],), (x[4:8],)])
    with pytest.raises(ValueError, match=r"^metric: a batch of the DataLoader, such as the last one, is smaller"):
        result.compare(DataLoader(TensorDataset(x, labels), batch_size=4), metric=correct)
    complete = DataLoader(TensorDataset(x, labels), batch_size=4, drop_last=True)
    found = result.compare(complete, metric=correct, workers=1, layers=False).accuracy
    assert found is not None
    assert found.items == 2


# -- workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.verify
def test_two_workers_give_the_results_of_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    result = export_small(U85)
    alone = result.compare(images(), [0, 1, 2, 3], workers=1)
    monkeypatch.setattr(parallel_run, "_MIN_PARALLEL_SECONDS", 0)
    capfd.readouterr()
    shared = result.compare(images(), [0, 1, 2, 3], workers=2)
    assert (shared.outputs, shared.layers, shared.accuracy) == (alone.outputs, alone.layers, alone.accuracy)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("workers", [2, None])
def test_little_work_starts_no_processes(monkeypatch: pytest.MonkeyPatch, workers: int | None) -> None:
    """A process imports PyTorch for several seconds; four small images take less than one."""
    monkeypatch.setattr(parallel_run, "starmap_unordered", lambda *_: pytest.fail("starts processes"))
    assert export_small(INT8).compare(images(), workers=workers).samples == 4


def test_much_work_starts_processes_after_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run_here(work: Any, tasks: Any) -> Any:
        asked.extend(tasks)
        return (work(*task) for task in asked)

    monkeypatch.setattr(parallel_run, "_MIN_PARALLEL_SECONDS", 0)
    monkeypatch.setattr(parallel_run, "starmap_unordered", run_here)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    result = export_small(INT8)
    found = result.compare(images(), workers=2)
    assert len(asked) == len(images()) - 1
    assert all(isinstance(value, (str, bytes, np.ndarray)) for task in asked for value in task)
    assert found.outputs == result.compare(images(), workers=1).outputs


@pytest.mark.verify
def test_on_a_dask_cluster() -> None:
    from distributed import Client, LocalCluster

    result = export_small(U85)
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**settings) as cluster, Client(cluster) as client, joblib.parallel_config(backend="dask"):
        found = result.compare(images(8))
        workers = client.run(lambda: len(worker._runners))
    assert found.layers == result.compare(images(8), workers=1).layers
    assert list(workers.values()) == [1, 1]


def test_a_program_is_lowered_for_its_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result, lowered, instrument = export_small(INT8), [], program_specs.instrument_delegates

    def counted(*arguments: Any) -> Any:
        lowered.append(arguments)
        return instrument(*arguments)

    monkeypatch.setattr(program_specs, "instrument_delegates", counted)
    result.comparison_specs.clear()  # of other tests
    first = result.compare(images(2), workers=1)
    assert result.compare(images(2), workers=1).layers == first.layers
    assert result.compare(images(2), workers=1, layers=False).outputs == first.outputs
    assert len(lowered) == 1


def test_a_worker_reads_the_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result = export_small(INT8)
    side, _ = program_specs.make_export_spec(result, result.report.methods[0], True)
    job = np.frombuffer(pickle.dumps(ComparisonJob(side, None)), np.uint8)
    read, loads = [], pickle.loads

    def counted(data: bytes) -> Any:
        read.append(len(data))
        return loads(data)

    monkeypatch.setattr(worker.pickle, "loads", counted)
    for index, (x,) in enumerate(images()):
        assert worker.run_item("job", job, pickle.dumps(WorkItem(index, [x], True)))[0] == index
    assert read.count(len(job)) == 1


# -- two programs ----------------------------------------------------------------------------------------------------


def test_two_exports_layer_by_layer() -> None:
    one, other = export_small(INT8, quantized_io=True), export_small(A16W8)
    found = compare(one, other, images(), workers=1)
    assert (found.reference, found.program) == ("TOSA_INT8", "ETHOSU_U85_A16W8")
    assert [layer.name for layer in found.layers] == [x.name for x in other.compare(images(), workers=1).layers]
    assert found.layers[-1].gap.sqnr == pytest.approx(found.sqnr, abs=1e-3)
    assert {layer.isolated for layer in found.layers} == {None}
    right = torch.cat([one.outputs[0].dequantize(one.run(one.inputs[0].quantize(x))) for (x,) in images()])
    given = torch.cat([other.run(x) for (x,) in images()])
    assert found.sqnr == pytest.approx(_decibels(right, given), abs=1e-3)


def test_programs_of_two_npus_are_equal() -> None:
    found = compare(export_small(U55), export_small(U85), images(), [0, 1, 2, 3], workers=1)
    assert {layer.gap.sqnr for layer in found.layers} == {math.inf}
    assert found.accuracy is not None
    assert found.accuracy.agreeing == 4


def test_saved_programs_by_their_outputs(tmp_path: Path) -> None:
    path = export_small(INT8).save(tmp_path / "a.pte")
    other = export_small(A16W8)
    expected = compare(export_small(INT8), other, images(), workers=1)
    for b in (other.buffer, other.program(), other):
        found = compare(path, b, images(), [0, 1, 2, 3], workers=1)
        assert found.outputs[0].gap == expected.outputs[0].gap
        assert found.layers == ()
        assert found.notes[-1].startswith("layers are not compared: this needs two ExportResults")
        assert found.accuracy is not None
    by_name = compare(path, other.buffer, [{"x": x} for (x,) in images()])
    assert by_name.outputs[0].gap == expected.outputs[0].gap


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


def _export_to_bytes(model: nn.Module) -> bytes:
    return export(model.eval(), ExportRecipe.get_recipe(FP), vectors()).buffer


def test_programs_that_differ_in_form_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^b: 'forward' takes 4 inputs in b and 1 in a; give two programs of one"):
        compare(export_small(INT8), export_mixed(INT8), images())
    with pytest.raises(ValueError, match=r"^b: 'forward' returns \[1, 8\], \[1, 8\] in b and \[1, 8\] in a; give"):
        compare(_export_to_bytes(nn.Linear(8, 8)), _export_to_bytes(_Twice()), vectors())
    with pytest.raises(ValueError, match=r"^a: must be an ExportResult or a program \(.*\), got int$"):
        compare(3, export_small(INT8), images())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^samples\[0\] has 2 tensors, the program takes 1 \(x: float32"):
        compare(export_small(INT8).buffer, export_small(INT8).buffer, [{"a": MIXED[0], "b": MIXED[1]}])


# -- output formats and invalid arguments ------------------------------------------------------------------------------


def test_text_html_frame_and_json() -> None:
    found = export_small(U85).compare(images(), [0, 1, 2, 3], workers=1)
    text = str(found)
    assert text.startswith("ETHOSU_U85_INT8 against the model: 'forward', 4 samples in ")
    for part in ("top-1 accuracy, 4 items", "predictions that agree", "Layers with the lowest isolated SQNR", "head"):
        assert part in text
    assert found._repr_html_().count("<table>") == len([line for line in text.splitlines() if line[0] != " "])
    frame = found.frame()
    assert [row["name"] for row in frame] if isinstance(frame, list) else list(frame["name"]) == _names(found)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["sqnr"] == found.sqnr
    assert [layer["name"] for layer in read["layers"]] == _names(found)
    assert read["worst"] == [layer.name for layer in found.worst]
    assert len(found.worst) <= 5


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_with_nan_or_infinity_raise(value: float) -> None:
    found = export_small(FP).compare([(torch.full((1, 3, 8, 8), value),)], progress=False)
    assert math.isnan(found.sqnr)
    assert math.isnan(found.outputs[0].gap.max_error if found.outputs[0].gap is not None else 0)
    assert "NaN" in str(found)
    assert "no signal" not in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("signal", "noise", "expected"),
    [
        (1.0, 0.0, math.inf),
        (0.0, 1.0, -math.inf),
        (1.0, math.inf, -math.inf),
        (1e-300, 1e300, -6000.0),
        (4.0, 2.0, 3.01),
    ],
)
def test_decibels_of_any_sums(signal: float, noise: float, expected: float) -> None:
    assert decibels(signal, noise) == pytest.approx(expected, abs=0.01)


def _names(found: Comparison) -> list[str]:
    return [layer.name for layer in found.layers]


def test_sqnr_of_an_exact_program_is_infinity_in_json() -> None:
    found = export_mixed(INT8).compare([MIXED], workers=1)
    assert found.sqnr == math.inf
    assert "exact" in str(found)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["outputs"][0]["gap"]["sqnr"] == "Infinity"
    assert float(read["outputs"][0]["gap"]["sqnr"]) == math.inf
    assert to_jsonable([-math.inf, math.nan, 1.5]) == ["-Infinity", "NaN", 1.5]


def test_option_layers_false_compares_only_outputs() -> None:
    found = export_small(INT8).compare(images(), layers=False, workers=1)
    assert found.layers == ()
    assert repr(found.layer_samples) == "0"  # a number also in JSON, not False
    assert found.outputs == export_small(INT8).compare(images(), workers=1).outputs


@pytest.mark.parametrize("model", [Small, Counting])
def test_option_layers_limits_the_samples_of_layers(model: type[nn.Module]) -> None:
    samples = images() if model is Small else vectors()
    result = export(model().eval(), ExportRecipe.get_recipe(INT8), samples)
    found, everything = result.compare(samples, layers=2, workers=1), result.compare(samples, workers=1)
    assert found.outputs == everything.outputs
    assert found.layers == result.compare(samples[:2], workers=1).layers
    assert (found.samples, found.layer_samples, everything.layer_samples) == (4, 2, 4)
    assert ", 2 samples" in str(found)


def test_effect_of_one_layer_on_the_output() -> None:
    """The effect is the output error of a float model with only this layer quantized."""
    found = export_small(INT8).compare(images(), workers=1)
    own = {layer.module or layer.name: layer.isolated for layer in found.layers}
    head, mean = own["head"], own["mean"]
    assert head is not None
    assert mean is not None
    assert head.output == pytest.approx(head.sqnr, abs=1e-3)
    model = Small().eval()
    layer = next(layer for layer in found.layers if layer.name == "mean")
    assert layer.scale is not None
    assert layer.zero_point is not None
    with torch.no_grad():
        means = torch.cat([model.body(x).mean((2, 3)) for (x,) in images()])
        steps = (means / layer.scale).round() + layer.zero_point
        rounded = (steps.clamp(-128, 127) - layer.zero_point) * layer.scale
        expected = _decibels(model.head(means), model.head(rounded))
    assert mean.output == pytest.approx(expected, abs=0.01)


def test_a_delegate_that_differs_from_its_tosa_graph_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    run, result = reference_model.run, export_small(U85)
    monkeypatch.setattr(reference_model, "run", lambda *given: [np.array(array) ^ 1 for array in run(*given)])
    (note,) = [x for x in result.compare(images(), workers=1).notes if "int16 for a" not in x]
    assert note.startswith("delegate 'arm_0' computes other values than its TOSA graph")


Arguments = tuple[Any, dict[str, Any], str]
WRONG: list[Arguments] = [
    ([], {}, r"^samples: there are none; give a list of input tuples"),
    (None, {}, r"^samples: there are none"),
    (3, {}, r"^samples of method 'forward' must be a list of input tuples.*got int$"),
    ([torch.zeros(1, 3, 8, 8)], {}, r"^samples\[0\] of method 'forward' must be a tuple of the model's inputs, got T"),
    ([(torch.zeros(1, 3, 9, 9),)], {}, r"^samples\[0\], input 0 \('x'\) is float32\[1, 3, 9, 9\], the model takes"),
    ([(torch.zeros(1, 3, 8, 8).int(),)], {}, r"^samples\[0\], input 0 \('x'\) is int32\[1, 3, 8, 8\], the model takes"),
    (images(), {"labels": [1, 2]}, r"^labels: there are 2, but 4 samples have 4 items; give one label for each item"),
    (images(), {"labels": [0.5] * 4}, r"^labels: must be integer class indices, got torch.float32; use metric="),
    (images(), {"labels": ["a"] * 4}, r"^labels: must be integers, one per item, in a list, an array or a tensor"),
    (images(), {"metric": 3}, r"^metric: 3 is not callable"),
    (
        images(),
        {"metric": lambda outputs, sample: "x"},
        r"^metric: <lambda>\(outputs, sample\) must return a number",
    ),
    (images(), {"method": "main"}, r"^method: the program has no 'main'; it has: forward$"),
    (images(), {"layers": -1}, r"^layers: -1 is neither a bool nor a number of samples$"),
    (images(), {"workers": 0}, r"^workers: 0 is not a number of processes"),
]


@pytest.mark.parametrize(("samples", "options", "message"), WRONG)
def test_invalid_arguments_raise(samples: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_small(INT8).compare(samples, **options)


def test_labels_need_scores() -> None:
    with pytest.raises(ValueError, match=r"^labels: the first output is torch\.int32\[4\], not class scores"):
        export_mixed(INT8).compare([MIXED], labels=[1])


def test_a_model_that_was_changed_is_refused() -> None:
    model = Small().eval()
    result: ExportResult = export(model, ExportRecipe.get_recipe(INT8), images())
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(ValueError, match=r"^the model has been changed since the export: 'head.weight' was written"):
        result.compare(images())


def test_a_machine_without_a_compiler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeUnavailable("no C++ compiler")

    monkeypatch.setattr(host_plugin, "load_plugin", none)
    with pytest.raises(RuntimeUnavailable, match="no C"):
        export_small(INT8).compare(images())
