"""Output SQNR: every report has it, and a warning names the operator that causes a low one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from executorch.export import ExportRecipe
from executorch.export import export as executorch_export
from torch import Tensor, nn

from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_a16w8_quantization_config
from arm_backend_core.quantization.algorithms.bias_correction import BiasCorrection
from arm_backend_core.quantization.diagnostics import output_sqnr
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_recipes import ArmRecipeType, ExportResult, export
from arm_recipes._internal.errors import AccuracyError, ArmRecipesWarning
from tests.ops.runner import FunctionModule
from tests.sqnr import sqnr


class _Ring(nn.Module):
    """The mean of the last four rows."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 4, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.rows[:, 1:], x.unsqueeze(1)], 1)
        self.rows.copy_(rows)
        return rows.mean(1) * 3


def _exported(model: nn.Module, samples: Sequence[tuple[Tensor, ...]], kind: str = "TOSA_INT8") -> ExportResult:
    return export(model.eval(), ExportRecipe.get_recipe(ArmRecipeType[kind]), list(samples))


def _output_sqnr(result: ExportResult) -> dict[str, float]:
    quantization = result.report.methods[0].quantization
    assert quantization is not None
    return quantization.sqnr


@pytest.mark.parametrize("kind", ["TOSA_INT8", "TOSA_A16W8"])
def test_reported_sqnr_is_that_of_the_program_on_the_last_sample(kind: str) -> None:
    """Weights, inputs and outputs are rounded as in the program. Integer outputs have no SQNR."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    both = FunctionModule(lambda x: (y := model(x), y.argmax(1)))
    samples = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    result = _exported(both, samples, kind)
    (decibels,) = _output_sqnr(result).values()
    assert decibels == pytest.approx(sqnr([model(*samples[-1])], [result.run(*samples[-1])[0]]), abs=1.0)
    assert f"{decibels:.1f} dB" in str(result.report)
    assert result.report.to_dict()["methods"][0]["quantization"]["sqnr"] == _output_sqnr(result)


def test_sqnr_is_computed_with_the_state_before_the_last_sample() -> None:
    torch.manual_seed(0)
    samples = [(torch.randn(1, 16) * (1 + i),) for i in range(6)]
    offline, model = _Ring(), _Ring()
    result = _exported(model, samples)
    exact = [offline(*sample) for sample in samples]
    made = [result.run(*sample) for sample in samples]
    (decibels,) = _output_sqnr(result).values()
    assert decibels == pytest.approx(sqnr(exact[-1:], made[-1:]), abs=2.0)
    assert torch.equal(model.rows, torch.zeros(1, 4, 16))


def test_a_warning_names_the_operator_with_the_largest_loss() -> None:
    torch.manual_seed(0)
    pole = FunctionModule(lambda x: (x.exp(), 1 / (x.abs() + 1e-4)))
    with pytest.warns(ArmRecipesWarning, match=r"SQNR of output 'mul' of 'forward'.*aten.reciprocal.default.*A16W8"):
        result = _exported(pole, [(torch.randn(4, 200),) for _ in range(2)])
    good, bad = _output_sqnr(result).values()
    assert good > 25 > 6 > bad
    assert any("aten.reciprocal" in note for note in result.report.notes)


def test_a_warning_names_an_operator_whose_operand_has_too_coarse_a_scale() -> None:
    frequencies = 1 + torch.arange(16) / 16  # too close to each other to be detected as a timestep embedding
    angles = FunctionModule(lambda t: torch.cos(t[:, None] * frequencies))
    torch.manual_seed(0)
    samples = [(torch.rand(8) * 1000,) for _ in range(4)]
    with pytest.warns(
        ArmRecipesWarning, match=r"most noise is added at the result of aten.cos.default .* dB before it"
    ):
        _exported(angles, samples)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ArmRecipesWarning)
        result = _exported(angles, samples, "TOSA_A16W8")
    assert sqnr([angles(*samples[-1])], [result.run(*samples[-1])]) > 27


@pytest.mark.parametrize("outlier", [100.0, 400.0])
def test_the_operator_that_adds_the_most_noise_is_named(outlier: float) -> None:
    """An outlier coarsens the input to an SQNR of 7 dB or more, but it is cosine that reduces the SQNR to -3 dB."""
    torch.manual_seed(0)
    samples = [(torch.randn(1, 4096).index_fill_(1, torch.tensor([0]), outlier),) for _ in range(2)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, algorithms=False)
    model = FunctionModule(lambda x: torch.cos(x.clamp(-3, 3) * (3000 / outlier if outlier < 400 else 9)) * 2)
    with pytest.warns(ArmRecipesWarning, match=r"most noise is added at the result of aten.cos.default") as caught:
        export(model.eval(), recipe, samples)
    assert "set such modules to A16W8" in str(caught[0].message)


def test_int16_tensors_are_not_advised_to_be_int16() -> None:
    torch.manual_seed(0)
    model = FunctionModule(lambda x: torch.cat([x * 1e6, x * 0.1], 1)[:, 16:] * 1.0)
    samples = [(torch.randn(1, 16),) for _ in range(4)]
    for kind, is_advised in (("TOSA_INT8", True), ("TOSA_A16W8", False)):
        with pytest.warns(ArmRecipesWarning, match="SQNR of output") as caught:
            _exported(model, samples, kind)
        text = next(str(each.message) for each in caught if "SQNR" in str(each.message))
        assert ("A16W8" in text) is is_advised
        assert "compare every layer" in text


def test_zero_and_boolean_outputs_have_no_sqnr() -> None:
    result = _exported(FunctionModule(lambda x: (x, x.relu() * 0 + x[:0].sum(), x > 0)), [(torch.randn(4, 4),)] * 2)
    (decibels,) = _output_sqnr(result).values()
    assert decibels > 30


class _Embedding(nn.Module):
    """Sines and cosines of real timesteps, as diffusion has them."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(-math.log(10000.0) * torch.arange(16) / 16))
        self.linear = nn.Linear(32, 8)

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        return torch.as_tensor(self.linear(torch.cat([angles.cos(), angles.sin()], -1)))


@pytest.mark.parametrize("kind", ["TOSA_INT8", "ETHOSU_U55_INT8"])
def test_angles_of_timestep_embeddings_are_int16_in_int8_programs(kind: str) -> None:
    """256 levels of four radians each cannot represent an angle."""
    torch.manual_seed(0)
    model, samples = _Embedding(), [(torch.rand(8) * 1000,) for _ in range(4)]
    result = _exported(model, samples, kind)
    assert not result.report.cpu_operators
    assert sqnr([model(*samples[-1])], [result.run(*samples[-1])]) > 28
    recipe = ExportRecipe.get_recipe(ArmRecipeType[kind], algorithms=[])
    with pytest.warns(ArmRecipesWarning, match="SQNR of output"):
        export(model.eval(), recipe, list(samples))


_INDEXED = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.bernoulli(x.sigmoid()) * x,
        lambda x: nn.functional.embedding((x * 10).long(), _INDEXED),
    ],
    ids=["random", "computed index"],
)
def test_outputs_that_differ_between_runs_have_no_sqnr(function: Callable[[Tensor], Tensor]) -> None:
    """Two runs draw different random numbers, and rounding may change an index from 9 to 10."""
    x = torch.linspace(0, 0.999999, 64)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "SQNR of output", ArmRecipesWarning)
        result = _exported(FunctionModule(function), [(x,)])
    assert _output_sqnr(result) == {}


def test_tiny_and_huge_outputs_have_an_sqnr() -> None:
    torch.manual_seed(0)
    result = _exported(FunctionModule(lambda x: (x * 1e30, x * 1e-12)), [(torch.randn(4, 8),)] * 2)
    assert all(decibels > 25 for decibels in _output_sqnr(result).values())
    assert len(_output_sqnr(result)) == 2


@pytest.mark.parametrize("per_channel", [True, False])
def test_sqnr_with_an_embedding_is_that_of_the_program(per_channel: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 8))
    samples = [(torch.randint(0, 50, (2, 5), dtype=torch.int32),) for _ in range(4)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, per_channel=per_channel)
    result = export(model.eval(), recipe, list(samples))
    (decibels,) = _output_sqnr(result).values()
    assert decibels == pytest.approx(sqnr([model(*samples[-1])], [result.run(*samples[-1])]), abs=1.0)


def test_an_sqnr_below_min_sqnr_is_an_error() -> None:
    torch.manual_seed(0)
    model, samples = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), [(torch.randn(2, 8),) for _ in range(4)]
    recipe = partial(ExportRecipe.get_recipe, ArmRecipeType.TOSA_INT8)
    (decibels,) = _output_sqnr(export(model, recipe(min_sqnr=20), samples)).values()
    with pytest.raises(
        AccuracyError, match=rf"min_sqnr=70: SQNR of output 'linear_1' of 'forward' is {decibels:.1f} dB"
    ):
        export(model, recipe(min_sqnr=70), samples)
    with pytest.raises(RuntimeError, match=r"min_sqnr: needs arm_recipes\.export, and the recipe's quantizer"):
        executorch_export(model, samples, recipe(min_sqnr=20))
    with pytest.raises(ValueError, match="min_sqnr must be a number of dB; got -3: not a positive number"):
        recipe(min_sqnr=-3)


def test_a_low_sqnr_above_min_sqnr_is_warned_about() -> None:
    torch.manual_seed(0)
    samples = [(torch.rand(2, 8) * 40,) for _ in range(4)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, min_sqnr=1e-3, algorithms=False)
    with pytest.warns(ArmRecipesWarning, match=r"SQNR of output .* is [0-5]\.\d dB"):
        export(FunctionModule(lambda x: torch.cos(x * 12)).eval(), recipe, samples)


def test_a_combined_recipe_keeps_min_sqnr() -> None:
    floating, ours = (
        ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP),
        ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, min_sqnr=90),
    )
    with pytest.raises(AccuracyError, match="min_sqnr=90: SQNR of output"):
        export(nn.Linear(8, 4), ExportRecipe.combine([ours, floating], "both"), [(torch.randn(2, 8),)])


def test_min_sqnr_refuses_a_quantized_model() -> None:
    samples = [(torch.randn(2, 8),)]
    quantized = export(nn.Linear(8, 4), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples).exported_programs
    with pytest.raises(
        AccuracyError, match=r"min_sqnr=20: .* cannot be computed. This needs a model that this export quantizes"
    ):
        export(quantized["forward"], ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, min_sqnr=20), samples)


def test_min_sqnr_refuses_outputs_without_an_sqnr() -> None:
    with pytest.raises(AccuracyError, match=r"min_sqnr=20: the SQNR of the outputs of 'forward' cannot be computed"):
        export(
            FunctionModule(lambda x: x.argmax(1)),
            ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8, min_sqnr=20),
            [(torch.randn(2, 8),)],
        )


def test_the_float_reference_has_the_biases_before_bias_correction() -> None:
    """With int16 activations, a corrected bias stays float. The reference must not contain the correction."""
    torch.manual_seed(0)
    model, sample = nn.Linear(64, 8).eval(), torch.rand(4, 64) + 0.5
    quantizer = TOSAQuantizer(TosaCompileSpec("TOSA-1.0+INT+int16")).set_global(
        get_symmetric_a16w8_quantization_config(is_per_channel=False)
    )
    observed = ObservedProgram(torch.export.export(model, (sample,)), quantizer)
    correction = BiasCorrection([observed])
    differences = []

    def inspect(program: ObservedProgram) -> None:
        (result,) = output_sqnr._FloatInterpreter(program, fake_quantize=False).run([sample])
        differences.append(float((result - model(sample)).abs().max()))

    with torch.no_grad():
        observed(sample)
        correction.apply()
        observed.convert(inspect)
    assert max(differences) < 1e-5
