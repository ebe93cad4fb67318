"""``export``: its programs, reports, warnings and errors."""

from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.export import ExportRecipe, StageType
from executorch.export import export as executorch_export
from executorch.export.stages import EdgeTransformAndLowerStage
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arm_backend_core.errors import FullDelegationError
from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportError, export, load
from arm_recipes.pipeline import pipeline
from tests.small_models import Small, Sorting, images, run, vectors

INT8, FP = ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_FP
#: Quantization noise of ``Small``, relative to its largest output.
TOLERANCE = {"INT8": 0.05, "A8W4": 0.1, "A16W8": 0.01, "FP": 1e-5}


def get(recipe: ArmRecipeType, **options: Any) -> ExportRecipe:
    return ExportRecipe.get_recipe(recipe, **options)


def _close(result: Tensor, expected: Tensor, precision: str) -> None:
    error = (result - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[precision], float(error)


DELEGATING = [recipe for recipe in ArmRecipeType if recipe is not ArmRecipeType.CORTEX_M_INT8]


@pytest.mark.parametrize("recipe", DELEGATING, ids=lambda recipe: recipe.name)
def test_every_recipe_gives_one_delegate_and_the_models_results(recipe: ArmRecipeType) -> None:
    model = Small().eval()
    result = export(model, get(recipe), images())
    method = result.report.methods[0]
    assert len(method.delegates) == 1
    assert method.cpu_operators == ()
    backend = {"TOSA": "TOSABackend", "VGF": "VgfBackend", "ETHOSU": "EthosUBackend"}[recipe.name.split("_")[0]]
    assert method.delegates[0].backend == backend
    assert (method.delegates[0].vela is not None) == (backend == "EthosUBackend")
    assert result.buffer[4:6] == b"ET"  # the file identifier of a .pte
    assert backend.encode() in result.buffer
    json.dumps(result.report.to_dict())
    for sample in images(2):
        _close(run(result, *sample), model(*sample), recipe.name.rsplit("_", 1)[1])


@pytest.mark.parametrize("recipe", [INT8, ArmRecipeType.ETHOSU_U85_INT8, ArmRecipeType.VGF_INT8, FP])
def test_executorchs_own_export_takes_the_recipes(recipe: ArmRecipeType) -> None:
    session = executorch_export(Small().eval(), images(), get(recipe))
    ours = export(Small().eval(), get(recipe), images())
    assert 0 < len(ours.buffer) - len(session.get_pte_buffer()) < 500  # the names of the tensors and a checksum


@pytest.mark.parametrize("recipe", [INT8, FP])
@pytest.mark.parametrize("case", ["whole", "left on the CPU", "methods"])
def test_the_faster_stage_gives_what_executorchs_own_gives(
    case: str, recipe: ArmRecipeType, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small().eval()
    cases: dict[str, tuple[Any, Any]] = {
        "whole": (small, images()),
        "left on the CPU": (Sorting().eval(), vectors()),
        "methods": ({"a": small, "b": small}, {"a": images(2), "b": images(3)}),
    }
    models, samples = cases[case]
    options: dict[str, Any] = {"constant_methods": {"version": 2}}
    traced = 0
    run_decompositions = ExportedProgram.run_decompositions

    def counted(*arguments: Any) -> ExportedProgram:
        nonlocal traced
        traced += 1
        return run_decompositions(*arguments)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    ours = export(models, get(recipe), samples, **options)
    assert (traced > 0) == (case == "left on the CPU")
    monkeypatch.setattr(pipeline, "FastLowerStage", EdgeTransformAndLowerStage)
    assert export(models, get(recipe), samples, **options).buffer == ours.buffer
    assert traced > 0


@pytest.mark.parametrize("before", [True, False], ids=["frozen", "not frozen"])
def test_export_restores_frozen_garbage_collection(before: bool) -> None:
    counts = []

    def drawn() -> Any:
        counts.append(gc.get_freeze_count())
        yield from images(2)

    if before:
        gc.freeze()
    try:
        export(Small().eval(), get(INT8, calibration_samples=drawn), images(1))
        assert counts[0] > 1000
        assert (gc.get_freeze_count() > 1000) == before
    finally:
        gc.unfreeze()


def test_boundary_operators_are_those_of_the_firmware() -> None:
    for recipe, namespace in ((INT8, "cortex_m"), (ArmRecipeType.ETHOSU_U55_A16W8, "cortex_m")):
        boundary = export(Small().eval(), get(recipe), images()).report.methods[0].boundary
        assert boundary == {
            f"{namespace}.quantize_per_tensor.default": 1,
            f"{namespace}.dequantize_per_tensor.default": 1,
        }
    boundary = export(Small().eval(), get(ArmRecipeType.VGF_INT8), images()).report.methods[0].boundary
    assert not any(name.startswith("cortex_m") for name in boundary)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(INT8, "int8"), (ArmRecipeType.TOSA_A16W8, "int16"), (ArmRecipeType.VGF_INT8, "int8")],
)
def test_quantized_io(recipe: ArmRecipeType, dtype: str) -> None:
    model = Small().eval()
    result = export(model, get(recipe, quantized_io=True), images())
    assert result.report.methods[0].boundary == {}
    (source,), (sink,) = result.inputs, result.outputs
    assert (source.dtype, source.shape, sink.dtype, sink.shape) == (dtype, (1, 3, 8, 8), dtype, (1, 4))
    (x,) = images(1)[0]
    integers = result.run(source.quantize(x))
    assert integers.dtype == getattr(torch, dtype)
    floats = export(model, get(recipe), images()).run(x)
    # If the program returns floats, the delegate's output is int16 in any precision.
    assert sink.scale is not None
    assert torch.allclose(sink.dequantize(integers), floats, rtol=0, atol=0.51 * sink.scale)
    for name in (b"forward_input0_scale", b"forward_output0_zp"):
        assert name in result.buffer


def test_quantized_io_with_executorchs_own_export() -> None:
    session = executorch_export(Small().eval(), images(), get(INT8, quantized_io=True))
    assert session.get_executorch_program_manager().config_methods >= {
        "forward_input0_scale",
        "forward_input0_zp",
    }
    assert b"cortex_m" not in session.get_pte_buffer()


def test_per_channel_false_quantizes_weights_per_tensor() -> None:
    kinds = export(Small().eval(), get(INT8, per_channel=False), images()).report.methods[0].quantization
    assert kinds is not None
    assert kinds.weights["int8 per tensor"] == 2
    assert kinds.samples == 4


def test_full_delegation_is_refused_with_each_operator_and_reason() -> None:
    for attempt in (
        lambda: export(Sorting().eval(), get(FP, require_full_delegation=True), vectors()),
        lambda: executorch_export(Sorting().eval(), vectors(), get(FP, require_full_delegation=True)),
    ):
        with pytest.raises(FullDelegationError, match=r"aten\.topk") as caught:
            attempt()
        assert "models.py" in str(caught.value)
    export(Small().eval(), get(FP, require_full_delegation=True), images(1))


@pytest.mark.parametrize("recipe", [FP, INT8])
def test_cpu_operators_are_reported_with_reason_and_line(recipe: ArmRecipeType) -> None:
    model = Sorting().eval()
    result = export(model, get(recipe), vectors())
    assert len(result.report.delegates) == 2
    (topk,) = result.report.cpu_operators
    assert topk.operator.startswith("aten.topk")
    assert topk.reason
    assert any("models.py" in source for source in topk.sources)
    (x,) = vectors(1)[0]
    _close(result.run(x), model(x), recipe.name.rsplit("_", 1)[1])


def test_dump_dir_receives_the_tosa_graphs(tmp_path: Path) -> None:
    export(Small().eval(), get(FP, dump_dir=tmp_path / "new"), images(1))
    assert list((tmp_path / "new").glob("*.tosa"))


# Models in other forms.


@pytest.mark.parametrize("recipe", [FP, INT8])
def test_an_exported_program_is_quantized_with_its_own_inputs_and_left_alone(
    recipe: ArmRecipeType, tmp_path: Path
) -> None:
    (x,) = images(1)[0]
    program = torch.export.export(Small().eval(), (x,))
    graph, expected = str(program.graph), program.module()(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArmRecipesWarning)  # one sample
        result = export(program, get(recipe))
    _close(result.run(x), expected, recipe.name.rsplit("_", 1)[1])
    assert str(program.graph) == graph
    assert torch.equal(program.module()(x), expected)
    path = tmp_path / "small.pt2"
    torch.export.save(program, str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArmRecipesWarning)
        assert torch.equal(export(path, get(recipe)).run(x), result.run(x))


@pytest.mark.parametrize("form", ["GraphModule", "ExportedProgram"])
def test_a_quantized_model_is_not_quantized_again(form: str) -> None:
    first = export(Small().eval(), get(INT8), images())
    program = first.exported_programs["forward"]
    model = program if form == "ExportedProgram" else program.module()
    second = export(model, get(INT8), images())
    quantization = second.report.methods[0].quantization
    assert quantization is not None
    assert quantization.samples is None
    (x,) = images(1)[0]
    assert torch.equal(second.run(x), first.run(x))


def test_a_graph_module_is_quantized() -> None:
    graph = torch.export.export(Small().eval(), images(1)[0]).module()
    assert export(graph, get(INT8), images()).report.methods[0].quantization is not None


# Combined with another backend.


@pytest.mark.verify
@pytest.mark.xdist_group("pte_programs")  # imports XNNPACK's passes
def test_combined_with_xnnpack() -> None:
    model = Sorting().eval()
    (x,) = vectors(1)[0]
    xnnpack = ExportRecipe.get_recipe(XNNPackRecipeType.FP32)
    for recipes in ([get(FP), xnnpack], [xnnpack, get(FP)]):
        combined = ExportRecipe.combine(recipes)
        result = export(model, combined, vectors())
        assert len(result.report.delegates) == 2
        _close(result.run(x), model(x), "FP")
        assert executorch_export(model, vectors(), combined).get_pte_buffer()


@pytest.mark.xdist_group("pte_programs")  # imports XNNPACK's passes
def test_xnnpack_delegates_operators_that_the_target_refuses() -> None:
    combined = ExportRecipe.combine(
        [get(ArmRecipeType.ETHOSU_U55_INT8), ExportRecipe.get_recipe(XNNPackRecipeType.FP32)]
    )
    # Exported without quantization: an integer-only target can run nothing of it.
    program = torch.export.export(Small().eval(), images(1)[0])
    combined.quantization_recipe = None
    result = export(program, combined)
    assert result.report.delegates == ()
    assert set(result.report.methods[0].other_delegates) == {"XnnpackBackend"}


@pytest.mark.xdist_group("pte_programs")  # imports XNNPACK's passes
def test_combined_with_quantized_xnnpack() -> None:
    model = Small().eval()
    combined = ExportRecipe.combine(
        [get(INT8), ExportRecipe.get_recipe(XNNPackRecipeType.PT2E_INT8_STATIC_PER_CHANNEL)]
    )
    result = export(model, combined, images())
    assert len(result.report.delegates) == 1
    (x,) = images(1)[0]
    _close(result.run(x), model(x), "INT8")


# The model is not changed.


def test_export_does_not_change_the_model() -> None:
    model = Small().train()
    model.head.eval()
    state, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.warns(ArmRecipesWarning, match=r"the model of 'forward' is in training mode; it is exported in eval"):
        result = export(model, get(INT8), images())
    assert [module.training for module in model.modules()] == flags
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert any("training mode" in note for note in result.report.notes)


# Messages.


def test_a_model_that_raises_is_named_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    with pytest.raises(ExportError, match=r"tracing method 'forward' failed in 'body.1' \(Linear\) at .*") as caught:
        export(Broken().eval(), get(FP), [(torch.ones(1, 4),)])
    assert f"{__file__}:" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert str(caught.value.__cause__).splitlines()[0] in str(caught.value)
    assert capfd.readouterr().err == ""


def test_an_exception_in_forward_names_the_line() -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no weights")

    with pytest.raises(ExportError, match=r"failed in Picky at .*: KeyError: 'no weights'") as caught:
        export(Picky().eval(), get(FP), [(torch.ones(1),)])
    assert isinstance(caught.value.__cause__, KeyError)


def test_data_dependent_control_flow_is_quiet_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportError, match=r"failed in Branching at .*test_export.py:\d+: a branch, a size or an "):
        export(Branching().eval(), get(FP), [(torch.ones(1, 4),)])
    assert capfd.readouterr().err == ""


class Filtered(nn.Module):
    """The number of results depends on the input's values."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0] * 2


@pytest.mark.parametrize("recipe", [INT8, ArmRecipeType.TOSA_FP], ids=lambda recipe: recipe.name)
def test_an_exception_names_stage_operator_line_and_remedy(recipe: ArmRecipeType) -> None:
    with pytest.raises(
        ExportError,
        match=r"^\w+ing 'forward' failed at \S+ \(.*test_export.py:\d+\): .*; .* use torch.where, a mask",
    ) as caught:
        export(Filtered().eval(), get(recipe), vectors())
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("FastLowerStage", r"lowering 'forward' failed at .*test_export.py:\d+: KeyError: 'broken'"),
        (
            "EdgeProgramManagerTransformStage",
            r"preparing the boundary of 'forward' failed at .*test_export.py:\d+: KeyError: 'broken'",
        ),
        ("ExecutorchStage", r"writing the program of 'forward' failed at .*test_export.py:\d+: KeyError: 'broken'"),
    ],
)
def test_an_error_names_the_stage_that_failed(stage: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(getattr(pipeline, stage), "run", fail)
    with pytest.raises(ExportError, match=message) as caught:
        export(Small().eval(), get(FP), images(1))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_operator_named_by_an_exception_is_located_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Missing out variants: {'aten::topk'}")

    monkeypatch.setattr(pipeline.ExecutorchStage, "run", fail)
    where = (
        r"writing the program of 'forward' failed at aten.topk.default \(.*models.py:\d+\): .*; ExecuTorch cannot emit"
    )
    with pytest.raises(ExportError, match=where):
        export(Sorting().eval(), get(FP), vectors(1))


def test_an_exception_of_the_calibration_data_is_named_with_its_line() -> None:
    def samples() -> Any:
        yield from vectors(1)
        raise OSError("the disk is full")

    with pytest.raises(
        ExportError, match=r"quantizing 'forward' failed at .*test_export.py:\d+: OSError: the disk is full"
    ):
        export(Sorting().eval(), get(INT8, calibration_samples=samples), vectors(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: (x, "name"), r"output 1 of 'forward' is 'name' \(str\): a program returns tensors"),
        (lambda x: 3, "'forward' returns no tensor"),
        (
            lambda x: (x, {"spectrum": torch.fft.rfft(x)}),
            r"output 1 of 'forward' is a complex64 tensor \(.*test_export.py:\d+\): .* torch.view_as_real\(y\)",
        ),
    ],
)
def test_outputs_that_are_not_tensors_are_refused(value: Any, message: str) -> None:
    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return value(x + 1)

    with pytest.raises(ExportError, match=message):
        export(Returning().eval(), get(FP), vectors(1))


class _Count(nn.Module):
    """Returns a size that depends on data, and the result of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        """Count the positive results."""
        y = self.layer(x)
        return y, (y > 0).nonzero().shape[0] * 2


def test_a_size_that_depends_on_data_may_be_an_output() -> None:
    model = _Count().eval()
    result = export(model, get(INT8), [(torch.ones(2, 8),), (-torch.ones(2, 8),)])
    y, count = result.run(torch.ones(2, 8))
    assert count == 2 * int((y > 0).sum())


def test_a_size_computed_from_floats_is_refused() -> None:
    class Range(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.arange(int(x.abs().sum().item()))

    with pytest.raises(ExportError, match=r"aten.arange.* \(.*test_export.py:\d+\): a size depends on data"):
        export(Range().eval(), get(FP), vectors(1))


def _with_caught_exception(x: Tensor) -> Tensor:
    try:
        return x + x[:, :3]
    except RuntimeError:
        return x * 2


@dataclass
class Half:
    low: Tensor
    high: Tensor | None = None


@dataclass
class Halves:
    first: Half
    rest: list[Half]


def _halves(x: Tensor) -> Halves:
    return Halves(Half(x[:, :4] + 1), [Half(x[:, 4:] * 2, x - 1)])


@pytest.mark.parametrize("recipe", [FP, INT8], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        _with_caught_exception,
        _halves,
        lambda x: torch.vmap(torch.outer)(x, x),
        lambda x: torch.cat([x[:0], torch.zeros(0, 8), x * 2]),
    ],
    ids=["a caught exception", "dataclasses", "vmap", "empty tensors in cat"],
)
def test_exceptions_dataclasses_and_vmap_in_a_model_are_captured(
    function: Callable[[Tensor], Any], recipe: ArmRecipeType
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    samples = vectors()
    result = export(Model().eval(), get(recipe, require_full_delegation=True), samples)
    found, wanted = result.run(*samples[0]), function(*samples[0])
    assert type(found) is type(wanted)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if b is not None:
            _close(a, b, recipe.name.rpartition("_")[2])


def test_capture_falls_back_to_strict_mode() -> None:
    class OnlyStrict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():
                raise RuntimeError("not strict")
            return x + 1

    result = export(OnlyStrict().eval(), get(FP), [(torch.ones(1, 4),)])
    assert any("captured with strict=True" in note for note in result.report.notes)
    with pytest.raises(ExportError, match="not strict"):
        export(OnlyStrict().eval(), get(FP), [(torch.ones(1, 4),)], strict=False)


def test_int64_at_the_boundary_is_warned_about() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, index: Tensor) -> Tensor:
            return self.table(index)

    with pytest.warns(
        ArmRecipesWarning, match=r"input 0 \('index'\) of 'forward' is int64, which TOSA does not support"
    ):
        result = export(Lookup().eval(), get(FP), [(torch.tensor([[1, 2]]),)])
    assert any("use int32 to avoid" in note for note in result.report.notes)
    assert torch.allclose(
        result.run(torch.tensor([[3, 0]])),
        result.exported_programs["forward"].module()(torch.tensor([[3, 0]])),
    )


@pytest.mark.parametrize("recipe", [FP, ArmRecipeType.ETHOSU_U85_INT8], ids=str)
def test_int64_inputs_beyond_int32_are_warned_about_and_refused(recipe: ArmRecipeType) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, numbers + 1

    def sample(value: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3), torch.tensor([0, value, 5])

    beyond = r"input 1 \('numbers'\) of 'forward' has the value {} in the samples"
    for value in (1 << 30, -(1 << 35)):
        with pytest.warns(ArmRecipesWarning, match=beyond.format(value)):
            export(Sum().eval(), get(recipe), [sample(3), sample(value)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = export(Sum().eval(), get(recipe), [sample((1 << 30) - 1), sample(-(1 << 30))])
    assert not [x for x in caught if "in the samples" in str(x.message)]
    for value in (-(1 << 31), (1 << 30) - 1):
        assert result.run(*sample(value))[1].tolist() == [1, value + 1, 6]
    for program in (result, load(result.buffer)):
        for value in (1 << 31, -(1 << 31) - 1):
            message = rf"input 1 \('numbers'\) has the value {value}, which int32 cannot hold"
            with pytest.raises(ValueError, match=message):
                program.run(*sample(value))


def test_int64_results_are_warned_about() -> None:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).argmax(-1)

    with pytest.warns(ArmRecipesWarning, match=r"output 0 .* of 'forward' is int64"):
        export(Best().eval(), get(FP), [(torch.ones(1, 4),)])


def test_an_integer_target_says_why_it_takes_nothing_unquantized() -> None:
    recipe = get(ArmRecipeType.ETHOSU_U85_INT8)
    recipe.quantization_recipe = None
    operators = export(Small().eval(), recipe, images()).report.cpu_operators
    assert operators
    assert all("quantiz" in operator.reason for operator in operators), operators


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((FP, None), TypeError, r"recipe: got the type TOSA_FP; pass ExportRecipe.get_recipe"),
        (
            ([(1,)], None),
            TypeError,
            r"recipe must be an ExportRecipe, got list; the order is export\(model, recipe",
        ),
    ],
)
def test_a_wrong_recipe_is_an_error(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export(Small().eval(), *arguments)


def test_dynamic_shapes_without_sizes_are_refused() -> None:
    shapes = ({0: torch.export.Dim("batch", min=1, max=4)},)
    with pytest.raises(ValueError, match="Arm targets are compiled for fixed shapes"):
        export(Small().eval(), get(FP), images(), dynamic_shapes=shapes)


def test_missing_samples_and_unsupported_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="samples is missing for method 'forward'"):
        export(Small().eval(), get(FP))
    with pytest.raises(ValueError, match=r"samples\[0\]\[0\] of method 'forward' is \{3\} \(set\)"):
        export(Small().eval(), get(FP), [({3},)])


def test_pipeline_stages_must_end_in_a_program() -> None:
    recipe = get(FP)
    recipe.pipeline_stages = [StageType.TORCH_EXPORT]
    with pytest.raises(ValueError, match=r"recipe.pipeline_stages must end in TO_EXECUTORCH, not TORCH_EXPORT"):
        export(Small().eval(), recipe, images(1))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/model.pte", "cannot write '.*': there is no directory '.*missing'"),
        ("folder", "cannot write '.*folder': it is a directory"),
        ("file/model.pte", "there is no directory"),
        ("/proc/model.pte", "cannot write '/proc/model.pte': "),
    ],
)
def test_an_unwritable_output_is_an_error_before_the_export(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()

    class Untouched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the work began")

    with pytest.raises(ValueError, match=message):
        export(Untouched(), get(FP), images(1), output=tmp_path / path)
    result = export(Small().eval(), get(FP), images(1))
    with pytest.raises(ValueError, match=message):
        result.save(tmp_path / path)


def test_output_replaces_an_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "small.pte"
    path.write_bytes(b"old")
    result = export(Small().eval(), get(FP), images(1), output=path)
    assert path.read_bytes() == result.buffer
    assert [file.name for file in tmp_path.iterdir()] == ["small.pte"]
    assert path.stat().st_mode & 0o444
    assert repr(result) == f"<ExportResult arm_recipes_tosa_fp: {len(result.buffer):,} bytes>"


def test_export_prints_nothing_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    export(Small().eval(), get(INT8), images())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_the_progress_bar_names_stages_and_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    export(Small().eval(), get(INT8), images())
    shown = capsys.readouterr().err
    assert "to edge transform and lower" in shown
    assert "calibrating forward" in shown
    export(Small().eval(), get(INT8), images(), progress=False)
    assert capsys.readouterr().err == ""
