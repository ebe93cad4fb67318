"""A8W4 and A16W8: program sizes, SQNR, and equality of VGF and TOSA programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arm_backend_core.quantization import (
    TOSAQuantizer,
    get_symmetric_a8w4_quantization_config,
)
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.targets.compile_spec import TosaCompileSpec
from arm_backend_core.targets.target import Target
from arm_recipes import ArmRecipeType as R
from arm_recipes import ExportError, ExportRecipe, ExportResult, export
from arm_recipes.recipe import options, precisions
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS
from tests.ops.runner import export as exported
from tests.small_models import Samples
from tests.sqnr import sqnr
from tests.tosa_graphs import validate_by_tosa_opt


class Net(nn.Module):
    """All operators that support int4 weights; one linear layer has most of the bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 12 * 12, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _images(count: int = 8) -> Samples:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(1, 3, 8, 8, generator=generator),) for _ in range(count)]


def _export(recipe: R, **options: object) -> ExportResult:
    return export(Net().eval(), ExportRecipe.get_recipe(recipe, require_full_delegation=True, **options), _images())


def _tosa(result: ExportResult) -> bytes:
    (delegate,) = result.report.delegates
    return delegate.tosa


WEIGHTS = 64 * 4 * 12 * 12


@pytest.mark.parametrize("precision", ["A8W4", "A16W8"])
def test_vgf_computes_what_tosa_does(precision: str) -> None:
    tosa, vgf = _export(R[f"TOSA_{precision}"]), _export(R[f"VGF_{precision}"])
    for sample in _images():
        assert torch.equal(vgf.run(*sample), tosa.run(*sample))


@pytest.mark.parametrize(("recipe", "least"), [(R.TOSA_A8W4, 20), (R.TOSA_A16W8, 40)])
def test_sqnr_of_a8w4_and_a16w8(recipe: R, least: float) -> None:
    result, model = _export(recipe), Net().eval()
    with torch.no_grad():
        pairs = [(model(*sample), result.run(*sample)) for sample in _images()]
    assert sqnr(*(torch.cat(side) for side in zip(*pairs, strict=True))) > least


@pytest.mark.parametrize(("recipe", "weights"), [(R.TOSA_A8W4, "int4"), (R.VGF_A16W8, "int8")])
def test_the_report_has_the_dtype_of_weights(recipe: R, weights: str) -> None:
    (method,) = _export(recipe).report.methods
    assert method.quantization is not None
    assert method.quantization.weights[f"{weights} per channel"] == 4


def test_tosa_packs_two_int4_weights_into_a_byte() -> None:
    a8w4, int8 = (_tosa(_export(recipe)) for recipe in (R.TOSA_A8W4, R.TOSA_INT8))
    assert len(int8) - len(a8w4) > 0.49 * WEIGHTS
    spec = "TOSA-1.0+INT+int16"
    assert validate_by_tosa_opt(int8, Target.from_tosa_spec(spec)) is None
    assert validate_by_tosa_opt(a8w4, Target.from_tosa_spec(f"{spec}+int4")) is None
    assert validate_by_tosa_opt(a8w4, Target.from_tosa_spec(spec)) is not None


def test_vgf_stores_int4_weights_as_int8() -> None:
    """VGF has no int4 tensors; the converter widens them."""
    a8w4, int8 = (_export(recipe).report.delegates[0].payload_bytes for recipe in (R.VGF_A8W4, R.VGF_INT8))
    assert abs(a8w4 - int8) < 0.05 * WEIGHTS


@pytest.mark.parametrize("family", ["U55", "U65", "U85"])
def test_vela_encodes_int4_weights_in_fewer_bits(family: str) -> None:
    a8w4, int8 = (_export(R[f"ETHOSU_{family}_{precision}"]) for precision in ("A8W4", "INT8"))
    assert len(int8.buffer) - len(a8w4.buffer) > 0.35 * WEIGHTS
    sample = _images()[-1]
    assert torch.equal(a8w4.run(*sample), a8w4.run(*sample, backend="tosa"))


def test_int4_weights_without_the_tosa_extension_give_the_same_results() -> None:
    """In the plain flow a spec may lack int4. The weights then take a byte each."""
    program = ObservedProgram(
        exported(Net().eval(), _images()[0]),
        TOSAQuantizer(TosaCompileSpec()).set_global(get_symmetric_a8w4_quantization_config()),
    )
    with torch.no_grad():
        for sample in _images():
            program(*sample)
        quantized = program.convert()
    results = [
        export(quantized, ExportRecipe.get_recipe(recipe), _images()[:1]) for recipe in (R.TOSA_INT8, R.TOSA_A8W4)
    ]
    assert len(_tosa(results[0])) - len(_tosa(results[1])) > 0.49 * WEIGHTS
    assert torch.equal(*(result.run(*_images()[0]) for result in results))


@pytest.mark.parametrize("recipe", SPEC_BUILDERS)
def test_finer_precision_is_one_that_the_recipe_accepts(recipe: str) -> None:
    """``compare`` advises it."""
    higher = precisions.higher_precision(recipe)
    precisions.check_precisions(recipe, [higher])
    assert (higher == "FP") == recipe.startswith("CORTEX_M")


@pytest.mark.parametrize("recipe", SPEC_BUILDERS)
def test_fp_is_accepted_if_the_target_computes_in_floating_point(recipe: str) -> None:
    spec = SPEC_BUILDERS[recipe](options.resolve_options(recipe, {}))
    expected = spec.target.has_fp_profile or recipe.startswith("CORTEX_M")
    assert ("FP" in precisions.allowed_precisions(recipe)) == expected


def test_a_module_that_the_model_lacks_is_an_error_of_the_option() -> None:
    with pytest.raises(
        ExportError, match=r"precisions: the model has no module 'layer' .*'layers'\? It has: layers, layers\.0"
    ):
        _export(R.TOSA_INT8, precisions={"layer": "A16W8"})


@pytest.mark.parametrize(("name", "meant"), [("int16", "A16W8"), ("INT4", "A8W4"), ("float", "FP"), ("A16W", "A16W8")])
def test_types_in_place_of_precisions(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"there is no precision '{name}'; did you mean '{meant}'"):
        ExportRecipe.get_recipe(R.TOSA_INT8, precisions={"layers.0": name})
