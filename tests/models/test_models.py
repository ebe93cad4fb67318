"""Ten networks on every recipe: is all of it delegated, is it legal TOSA, does it compute the right thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from _pytest.fixtures import SubRequest

from arm_recipes import ArmRecipeType, load
from tests.models import quantized_reference, zoo
from tests.models.exported import Exported, precision, sqnr, validate
from tests.models.quantized_reference import Difference

R = ArmRecipeType
INT8 = [recipe for recipe in R if precision(recipe) == "INT8"]
A16W8 = [recipe for recipe in R if precision(recipe) == "A16W8"]
#: The recipe that stands for a precision where the targets compute the same.
MAIN = {"INT8": R.TOSA_INT8, "A16W8": R.TOSA_A16W8}

#: What hardware cannot do: (model, family of recipes) -> the operators left on the CPU, with the reason's end.
ON_CPU = {
    ("tiny_bert", "ETHOSU_U55"): {"aten.embedding.default": "has no GATHER in hardware"},
    ("tiny_bert", "ETHOSU_U65"): {"aten.embedding.default": "has no GATHER in hardware"},
}

#: SQNR in dB against floating point over the held-out samples, INT8 and A16W8: 1 dB below what was measured.
FLOORS = {
    "ds_cnn": (37.3, 45.7),
    "deep_autoencoder": (37.2, 42.2),
    "mobilenet_v2": (24.9, 29.4),
    "mobilenet_v3_small": (31.1, 34.3),
    "resnet18": (29.8, 32.4),
    "efficientnet_b0": (33.0, 36.4),
    "squeezenet1_1": (36.9, 37.9),
    "transformer_encoder": (34.9, 41.5),
    "tiny_bert": (40.4, 59.7),
    "tiny_vit": (29.5, 36.3),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in zoo.NAMES])
def model(request: SubRequest) -> Exported:
    """One model after the other: its exports are made once, in one process, and dropped after its last test."""
    return Exported(request.param)


@pytest.mark.parametrize("recipe", R, ids=lambda recipe: recipe.name)
def test_one_legal_delegate_and_nothing_on_the_cpu(model: Exported, recipe: ArmRecipeType) -> None:
    result = model.result(recipe)
    found = {operator.operator: operator.reason for operator in result.report.cpu}
    expected = ON_CPU.get((model.name, recipe.name.rsplit("_", 1)[0]), {})
    assert found.keys() == expected.keys(), found
    for operator, reason in expected.items():
        assert found[operator].endswith(reason)
    (delegate,) = result.report.delegates
    assert delegate.payload_bytes > 0
    assert (delegate.vela is not None) == recipe.name.startswith("ETHOSU")
    assert len(result.buffer) > delegate.payload_bytes
    validate(delegate.tosa, recipe)


@pytest.mark.parametrize("recipe", [R.TOSA_FP, R.VGF_FP], ids=lambda recipe: recipe.name)
def test_float_is_eager_pytorchs(model: Exported, recipe: ArmRecipeType) -> None:
    error = (model.output(recipe, 0) - model.eager[0]).abs().max()
    assert error < 1e-4 * model.eager[0].abs().max()


@pytest.mark.parametrize("recipe", [R.TOSA_FP, R.TOSA_INT8, R.TOSA_A16W8], ids=lambda recipe: recipe.name)
def test_tosa_programs_in_executorchs_runtime(model: Exported, recipe: ArmRecipeType) -> None:
    assert torch.equal(model.output(recipe, 0), model.expected(recipe, 0))


@pytest.mark.parametrize("recipe", [R.VGF_FP, R.VGF_INT8], ids=lambda recipe: recipe.name)
def test_vgf_programs_in_executorchs_runtime(model: Exported, recipe: ArmRecipeType) -> None:
    (output,) = load(model.result(recipe).buffer).run(*model.held_out[0])
    expected = model.expected(recipe, 0)
    if recipe is R.VGF_FP:  # sums in another order
        assert (output - expected).abs().max() < 1e-4 * expected.abs().max()
    else:
        assert torch.equal(output, expected)
        assert torch.equal(output, model.output(R.TOSA_INT8, 0))


@pytest.mark.parametrize("width", [0, 1], ids=["INT8", "A16W8"])
def test_signal_to_noise(model: Exported, width: int) -> None:
    recipe = list(MAIN.values())[width]
    samples = range(len(model.held_out))
    ours = sqnr(model.eager, [model.output(recipe, i) for i in samples])
    theirs = sqnr(model.eager, [model.exact(recipe, i) for i in samples])
    assert ours >= FLOORS[model.name][width], f"{ours:.2f} dB"
    assert ours >= theirs - 0.5, f"{ours:.2f} dB; PyTorch's quantized graph in float64 has {theirs:.2f} dB"


def _share(counts: Iterable[int], found: Sequence[Difference]) -> float:
    return sum(counts) / max(sum(tensor.size for tensor in found), 1)


def test_int8_operators_are_at_most_a_step_from_pytorchs(model: Exported) -> None:
    found = quantized_reference.differences(model.quantized(R.TOSA_INT8), *model.held_out[0])
    assert max(tensor.steps for tensor in found) <= 1, [tensor for tensor in found if tensor.steps > 1]
    # Ties, and the 31 bits of a multiplier, are all that may show in 8 bits.
    narrow = [tensor for tensor in found if tensor.dtype is torch.int8]
    assert _share((tensor.count for tensor in narrow), narrow) < 1e-3


def test_a16w8_operators_are_at_most_a_step_from_pytorchs(model: Exported) -> None:
    found = quantized_reference.differences(model.quantized(R.TOSA_A16W8), *model.held_out[0])
    # Where a TABLE of 513 points crosses the corner of a hardswish, and where the mean of a large feature map rounds
    # its partial sums to int16, it is more than one of the 65,536 steps.
    assert _share((tensor.far for tensor in found), found) < 1e-4, [tensor for tensor in found if tensor.far]


def test_int8_output_is_at_most_a_step_from_pytorchs(model: Exported) -> None:
    if model.entry.kind is not zoo.CONVOLUTION:
        return  # softmax and layer normalization amplify: test_signal_to_noise is for these
    program = model.quantized(R.TOSA_INT8)
    step = quantized_reference.output_step(program)
    graph = program.module(check_guards=False)
    ours, theirs = [], []
    for i, sample in enumerate(model.held_out):
        exact = model.exact(R.TOSA_INT8, i)
        with torch.no_grad():
            theirs.append(float((graph(*sample) - exact).abs().max()) / step)
        ours.append(float((model.output(R.TOSA_INT8, i) - exact).abs().max()) / step)
    # Random networks as deep as a MobileNet amplify: PyTorch's own evaluation in float32, which differs from that in
    # float64 by one value in 100,000, ends several steps away. There its distance is what can be asked for.
    apart = max(theirs)
    limit = 1.0 if apart < 1.5 else apart + 1.0
    assert max(ours) < limit + 0.01, f"{max(ours):.2f} steps; PyTorch in float32: {apart:.2f}"


@pytest.mark.parametrize("recipe", [r for r in INT8 if r is not R.TOSA_INT8], ids=lambda recipe: recipe.name)
def test_int8_is_bit_equal_on_every_target(model: Exported, recipe: ArmRecipeType) -> None:
    assert torch.equal(model.output(recipe, 0), model.output(R.TOSA_INT8, 0))


@pytest.mark.parametrize("recipe", [r for r in A16W8 if r is not R.TOSA_A16W8], ids=lambda recipe: recipe.name)
def test_a16w8_is_as_good_on_every_target(model: Exported, recipe: ArmRecipeType) -> None:
    """A U55 has no MATMUL of int16, and works with its high and low bytes."""
    ours, tosa = (sqnr(model.eager[:1], [model.output(r, 0)]) for r in (recipe, R.TOSA_A16W8))
    assert ours >= tosa - 0.5
