"""Quantization-aware training: the prepared model computes what the exported program computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.export import ExportRecipe, QuantizationRecipe
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

from arm_backend_core.aten.layer_affine import ChannelAffine
from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_quantization_config
from arm_backend_core.quantization.fake_quant.learned_step_size import QuantizationRange, fake_quantize
from arm_backend_core.quantization.fake_quant.program import FakeQuantInterpreter, StepSettings
from arm_backend_core.quantization.fake_quant.training_layers import BatchNorm, named_tensors
from arm_backend_core.quantization.observer import RangeObserver
from arm_recipes import ArmRecipeType, ExportError, Inputs, export, prepare_qat
from arm_recipes.pipeline.pipeline import Pipeline
from arm_recipes.qat.prepared import Prepared
from tests.ops.runner import make_compile_spec
from tests.small_models import Samples
from tests.sqnr import sqnr

INT8 = ArmRecipeType.TOSA_INT8


class _Branches(nn.Module):
    """Tied weights, a concatenation, a constant operand that is trained, a chain of functions, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.first(x), self.second(y)], 1)
        return joined.transpose(1, 2).sigmoid(), F.silu(joined * self.scale)


class _Convolutions(nn.Module):
    """Standardized weights, a batch norm that cannot be folded, one that can, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.alone, self.conv, self.norm = nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, bias=False), nn.BatchNorm1d(6)
        self.up = nn.ConvTranspose1d(6, 4, 2, stride=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
        y = F.hardswish(F.conv2d(x, weight)).flatten(2)
        z: Tensor = self.up(F.relu6(self.norm(self.conv(self.alone(y)))))
        return z


class _Affine(nn.Module):
    """A normalized input; trained functions of channels after a batch norm, after pooling and before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)
        self.mean, self.std = nn.Buffer(torch.rand(3, 1, 1)), nn.Buffer(torch.rand(3, 1, 1) + 0.5)
        self.gamma, self.beta, self.scale = (nn.Parameter(torch.rand(6, 1, 1) + 0.5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv((x - self.mean) / self.std)) * self.gamma + self.beta)
        z: Tensor = self.last(F.max_pool2d(y, 2) * self.scale)
        return z


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layer(x)[0][:, -1])
        return y


class _Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.cond(x.sum() > 1e6, lambda x: self.first(x), lambda x: self.second(x).relu(), (x,))
        return y


class _State(nn.Module):
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.zeros(1, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x) + self.hidden)
        self.hidden.copy_(hidden)
        return hidden


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "branches": (_Branches, [(2, 3, 8), (2, 5, 8)]),
    "convolutions": (_Convolutions, [(2, 3, 8, 8)]),
    "affine": (_Affine, [(2, 3, 8, 8)]),
    "attention": (_attention, [(1, 6, 16)]),
    "recurrent": (_Recurrent, [(1, 5, 6)]),
    "a branch that no sample takes": (_Choice, [(1, 4)]),
    "state": (_State, [(1, 4)]),
}


def _prepared(name: str, recipe: ArmRecipeType = INT8, **options: Any) -> tuple[Prepared, Samples]:
    torch.manual_seed(0)
    make, shapes = MODELS[name]
    samples = [tuple(torch.randn(shape) for shape in shapes) for _ in range(3)]
    return prepare_qat(make(), ExportRecipe.get_recipe(recipe), samples, **options), samples


def _train(model: nn.Module, samples: Samples, steps: int = 2) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for i in range(steps):
        results = pytree.tree_leaves(model(*samples[i % len(samples)]))
        loss = torch.stack([(result - 0.5).square().mean() for result in results]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _quantized(prepared: Prepared) -> ExportedProgram:
    """What ``prepared.export`` lowers."""
    recipe = copy.copy(prepared._recipe)
    assert recipe is not None
    recipe.quantization_recipe = prepared.trained_recipe()
    prepared.model.eval()
    pipeline = Pipeline(
        recipe,
        {"forward": prepared.model},
        {"forward": prepared._examples},
        dynamic_shapes=None,
        constant_methods=None,
        strict=None,
        progress=False,
    )
    return pipeline.quantize_programs()[0].programs["forward"]


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, INT8) for name in MODELS),
        *((name, ArmRecipeType.TOSA_A8W4) for name in ("branches", "convolutions")),
        *((name, ArmRecipeType.TOSA_A16W8) for name in ("convolutions", "recurrent")),
        *(("affine", recipe) for recipe in (ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_A16W8)),
    ],
)
def test_the_prepared_model_equals_the_exported_program(name: str, recipe: ArmRecipeType) -> None:
    """Bit for bit, after some training; every parameter that a result depends on is trained."""
    prepared, samples = _prepared(name, recipe)
    before = {key: value.detach().clone() for key, value in prepared.named_parameters()}
    _train(prepared, samples)
    prepared.eval()
    buffers = copy.deepcopy(dict(prepared.model.named_buffers()))
    program = _quantized(prepared).module(check_guards=False)
    with torch.no_grad():
        ours = prepared(*samples[0])
        for key, buffer in prepared.model.named_buffers():
            buffer.copy_(buffers[key])
        theirs = program(*samples[0])
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.equal(one, other)
    still = {key for key, value in prepared.named_parameters() if torch.equal(value, before[key])}
    assert {key for key in still if key.startswith("model.")} == (
        {"model.first.weight", "model.first.bias"} if "branch that" in name else set()
    )


def test_following_ranges_are_updated_and_not_trained() -> None:
    prepared, samples = _prepared("branches", ranges="follow")
    assert all(name.startswith("model.") for name, _ in prepared.named_parameters())
    before = [span.bounds.clone() for span in prepared._quantization_ranges()]
    prepared(*(10 * x for x in samples[0]))
    after = [span.bounds for span in prepared._quantization_ranges()]
    assert all(bool((new - old).abs().max() > 0) for new, old in zip(after[:2], before[:2], strict=True))
    prepared.eval()
    before = [bounds.clone() for bounds in after]
    prepared(*samples[0])
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_pruned_weights_stay_zero_in_training_and_a_pruned_model_can_be_copied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", 0.5)
    samples: Samples = [(torch.randn(8, 16),) for _ in range(4)]
    model(*samples[0]).sum().backward()  # the computed weights have a gradient history
    prepared = prepare_qat(model, ExportRecipe.get_recipe(INT8), samples, progress=False)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        loss = prepared(*samples[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for trained in (prepared, copy.deepcopy(prepared)):
        program = trained.export().exported_programs["forward"]
        weights = [x for x in {**program.state_dict, **program.constants}.values() if x.dtype is torch.int8]
        assert [int((x == 0).sum()) >= x.numel() // 2 for x in weights] == [True, True]


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 5), (4, 3, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_folded_batch_norm_in_training_equals_pytorchs(shape: tuple[int, ...], affine: bool, is_scaled: bool) -> None:
    """A folded batch norm that normalizes by the batch: results, gradients and running statistics.

    The layer may also include a function of its channels behind the batch norm.
    """
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    layer = kind(3, affine=affine)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    if affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    z = (3 * torch.randn(shape) + 1).requires_grad_()
    twin = copy.deepcopy(layer)
    norm = BatchNorm("weight" if affine else None, "bias" if affine else None, "running_mean", "running_var", 0.1, 1e-5)
    tensors = named_tensors(twin)
    columns = [-1 if i == 1 else 1 for i in range(len(shape))]
    gain = torch.rsqrt(tensors["running_var"].clone() + 1e-5) * (tensors["weight"] if affine else 1.0)
    folded = (z - tensors["running_mean"].clone().reshape(columns)) * gain.reshape(columns)
    folded = folded + tensors["bias"].reshape(columns) if affine else folded
    expected, behind = layer(z), None
    if is_scaled:
        behind = ChannelAffine(torch.tensor([0.5, -2.0, 1.5]), torch.tensor([1.0, 0.0, -3.0]))
        folded, expected = (
            y * behind.tensors[0].reshape(columns) + behind.tensors[1].reshape(columns) for y in (folded, expected)
        )
    found = norm.normalize_by_batch(folded, tensors, behind)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(shape)
    wanted = [z, *layer.parameters()], [z, *twin.parameters()]
    gradients = [torch.autograd.grad((y * weights).sum(), of) for y, of in zip((expected, found), wanted, strict=True)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    for one, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_gain_behind_a_batch_norm_does_not_change_its_statistics() -> None:
    """Running statistics are those of the layer without the gain, and results those of PyTorch."""
    prepared, samples = _prepared("affine", ArmRecipeType.ETHOSU_U55_INT8, batch_norm_steps=1)
    twin = copy.deepcopy(prepared.model).train()
    with torch.no_grad():
        found, expected = prepared(*samples[0]), twin(*samples[0])
    assert sqnr([expected], [found]) > 15  # values beyond the calibrated range are clipped
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(prepared.model.get_buffer(name), buffer, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("form", ["norm", "producer", "depthwise"])
def test_dropout_behind_folded_operators_is_active_in_training(form: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.drop = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5)
            self.gamma, self.last = nn.Parameter(torch.rand(6, 1, 1) + 0.5), nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y = self.norm(y) if form == "norm" else (F.max_pool2d(y, 2) if form == "depthwise" else y) * self.gamma
            z: Tensor = self.last(self.drop(y))
            return z

    torch.manual_seed(0)
    samples: Samples = [(torch.randn(2, 3, 8, 8),) for _ in range(3)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8)
    prepared = prepare_qat(Model(), recipe, samples, batch_norm_steps=0, progress=False)
    prepared.train()
    assert not torch.equal(prepared(*samples[0]), prepared(*samples[0]))
    prepared.eval()
    assert torch.equal(prepared(*samples[0]), prepared(*samples[0]))


def test_batch_norms_are_frozen_after_batch_norm_steps() -> None:
    prepared, samples = _prepared("convolutions", batch_norm_steps=2)
    means = []
    for _ in range(4):
        prepared(*samples[0])
        means.append([buffer.clone() for name, buffer in prepared.model.named_buffers() if "running" in name])
    assert len(means[0]) == 4
    assert not any(torch.equal(one, other) for one, other in zip(means[0], means[1], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(means[1], means[3], strict=True))
    assert int(prepared.model.get_buffer("norm.num_batches_tracked")) == 2


def test_programs_start_from_the_state_before_training() -> None:
    torch.manual_seed(0)
    model = _State()
    samples: Samples = [(torch.randn(1, 4),) for _ in range(6)]
    model.hidden.fill_(0.5)

    def outputs(run: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.stack([run(x) for (x,) in samples])

    def train(prepared: nn.Module) -> None:
        _train(prepared, samples, 1)
        assert not torch.equal(prepared.get_buffer("model.hidden"), initial)
        expected.append(outputs(prepared.eval()))

    initial, expected = model.hidden.clone(), list[Tensor]()
    prepared = prepare_qat(copy.deepcopy(model), ExportRecipe.get_recipe(INT8), samples)
    train(prepared)
    found = [outputs(prepared.export().run)]
    assert torch.equal(prepared.get_buffer("model.hidden"), initial)
    found.append(outputs(export(model, ExportRecipe.get_recipe(INT8, qat=train), samples).run))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 1e-3  # steps of int16
        assert (one - outputs(copy.deepcopy(model).eval())).abs().max() < 0.1


def test_dropout_is_active_in_training_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.Linear(64, 4))
    x = torch.randn(4, 8)
    prepared = prepare_qat(model, ExportRecipe.get_recipe(INT8), [(x,)])
    assert not torch.equal(prepared(x), prepared(x))
    prepared.eval()
    assert torch.equal(prepared(x), prepared(x))


def test_training_resumes_exactly_from_a_state_dict() -> None:
    uninterrupted, samples = _prepared("convolutions", batch_norm_steps=3)
    _train(uninterrupted, samples)
    state = copy.deepcopy(uninterrupted.state_dict())
    resumed, _ = _prepared("convolutions", batch_norm_steps=3)
    assert {f"model.{name}" for name in resumed.model.state_dict()} <= state.keys()
    resumed.load_state_dict(state)
    for prepared in (uninterrupted, resumed):
        _train(prepared, samples)
    for (name, one), (_, other) in zip(uninterrupted.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert one == other if isinstance(one, dict) else torch.equal(one, other), name
    assert resumed.steps == 4
    twin = copy.deepcopy(resumed.eval())
    assert torch.equal(twin(*samples[0]), resumed(*samples[0]))


def test_training_with_any_batch_size_exports_batch_size_1() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    x = torch.randn(7, 1, 8, 8)
    prepared = prepare_qat(model, ExportRecipe.get_recipe(INT8), [(row,) for row in x.split(1)])
    _train(prepared, [(x,), (x[:3],)])
    prepared.eval()
    with torch.no_grad():
        together, alone = prepared(x), torch.cat([prepared(row) for row in x.split(1)])
    torch.testing.assert_close(together, alone)
    program = _quantized(prepared)
    assert [tuple(node.meta["val"].shape) for node in program.graph.nodes if node.name == "input"] == [(1, 1, 8, 8)]


def test_a_captured_program_is_trained_in_its_shapes_with_the_calibration_of_the_recipe() -> None:
    data: Any = [(torch.randn(4), 1) for _ in range(6)]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    program = torch.export.export(_model().eval(), (torch.zeros(2, 4),))
    recipe = ExportRecipe.get_recipe(INT8, calibration_samples=loader)
    for model in (program, _model()):
        prepared = prepare_qat(model, recipe).train()
        before = copy.deepcopy(prepared.state_dict())
        _train(prepared, [(torch.randn(2, 4),)])
        prepared.eval()
        assert not torch.equal(prepared.state_dict()["model.0.weight"], before["model.0.weight"])
    with pytest.raises(ValueError, match=r"is float32\[3, 4\], the model takes float32\[2, 4\]"):
        prepare_qat(program, recipe)(torch.randn(3, 4))


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, mask: Tensor) -> dict[str, Any]:
        y = self.layer(pair[0] * scale + pair[1])
        return {"y": y, "parts": [y.relu(), mask * y], "none": None}


def test_prepared_models_have_the_inputs_and_outputs_of_the_model() -> None:
    model = _Structured()
    pair, mask = (torch.randn(2, 4), torch.randn(2, 4)), torch.ones(2, 4)
    sample = Inputs(pair, scale=2.0, mask=mask)
    prepared = prepare_qat(model, ExportRecipe.get_recipe(INT8), [sample])
    found, expected = prepared(pair, mask=mask, scale=2.0), model(pair, scale=2.0, mask=mask)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    torch.testing.assert_close(found["parts"][0], expected["parts"][0], rtol=0.0, atol=0.2)


def test_fake_quantize_passes_gradients_inside_the_range_and_moves_its_bounds() -> None:
    x = torch.tensor([-9.0, 0.3, 9.0], requires_grad=True)
    scale, zero_point = torch.tensor(0.1, requires_grad=True), torch.tensor(-5.0, requires_grad=True)
    y = fake_quantize(x, (scale, zero_point), (-128, 127))
    torch.testing.assert_close(y, torch.tensor([-9.0, 0.3, 9.0]), rtol=0.0, atol=1e-5)
    far = torch.tensor([-99.0, 0.33, 99.0], requires_grad=True)
    fake_quantize(far, (scale, zero_point), (-128, 127)).sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 1.0, 0.0]
    share = (3 * 127) ** -0.5
    assert scale.grad is not None
    assert zero_point.grad is not None
    torch.testing.assert_close(scale.grad / share, torch.tensor((-128 + 5) + (3 - 3.3) + (127 + 5)))
    torch.testing.assert_close(zero_point.grad / share, torch.tensor(-0.2))


@pytest.mark.parametrize(("dtype", "limits"), [(torch.int16, (-32768, 32767)), (torch.int8, (-127, 127))], ids=str)
@pytest.mark.parametrize("bounds", [(-1.7, 1.3), (-0.4, 1.3)], ids=str)
def test_a_symmetric_range_starts_with_the_calibrated_scale(
    dtype: torch.dtype, limits: tuple[int, int], bounds: tuple[float, float]
) -> None:
    """int16 has one more integer below 0 than above: half of the width is not the scale of either bound."""
    observer = RangeObserver(dtype, qscheme=torch.per_tensor_symmetric, quant_min=limits[0], quant_max=limits[1])
    observer(torch.tensor(bounds))
    calibrated, _ = observer.calculate_qparams()
    for mode in ("learned", "follow"):
        scale, zero_point = QuantizationRange(observer, mode)()
        torch.testing.assert_close(scale.reshape(1), calibrated, rtol=3e-7, atol=0)  # 1.5e-5 with the width
        assert int(zero_point) == 0


def test_all_tensors_of_a_step_are_on_the_device_of_its_inputs() -> None:
    """The step runs with its tensors on another device. PyTorch would refuse a constant on the CPU."""
    for name in ("branches", "convolutions", "attention", "recurrent"):
        prepared, samples = _prepared(name)
        (form,) = prepared._fake_quant_programs.values()
        step = FakeQuantInterpreter(
            form, StepSettings(prepared._quantization_ranges(), named_tensors(prepared.model), False, True)
        )
        step.run(list(samples[0]))
        with FakeTensorMode():

            def moved(x: Any) -> Any:
                return torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x

            tensors = {key: moved(value) for key, value in named_tensors(prepared.model).items()}
            step._settings.tensors = tensors
            step._constants, step._device = form.update_constants(tensors), torch.device("cuda")
            step._parameters = {key: (moved(s), moved(z)) for key, (s, z) in step._parameters.items()}
            step._quantized_operands.clear()
            results = step.run([moved(x) for x in samples[0]])
            assert {result.device.type for result in results} == {"cuda"}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _errors() -> list[tuple[str, Callable[[], Any], type[Exception], str]]:
    samples = [(torch.randn(1, 4),)]
    recipe = ExportRecipe.get_recipe(INT8)

    def broken(where: str) -> Prepared:
        prepared = prepare_qat(_model(), recipe, samples)
        with torch.no_grad():
            prepared.model.get_parameter("0.weight").fill_(torch.nan)
        return prepared

    def apart() -> Any:
        prepared = prepare_qat(_model(), recipe, samples)
        prepared.model.get_submodule("2").to("meta")
        return prepared(*samples[0])

    no: Any = "no"
    floating = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)
    quantized = export(_model().eval(), recipe, samples).exported_programs["forward"]
    without = ExportRecipe("mine", QuantizationRecipe(quantizers=[_quantizer()], is_qat=True))
    return [
        ("FP", lambda: prepare_qat(_model(), floating, samples), ValueError, "does not quantize.* use an INT8"),
        ("samples", lambda: prepare_qat(_model(), recipe), ValueError, "samples is missing: give prepare_qat"),
        ("methods", lambda: prepare_qat(dict.fromkeys("ab", _model()), recipe, dict.fromkeys("ab", samples)),
         ValueError, "takes one method, not a, b: train and export each"),
        ("ranges", lambda: prepare_qat(_model(), recipe, samples, ranges=no), ValueError, "'learned' or 'follow'"),
        ("quantized", lambda: prepare_qat(quantized, recipe), ValueError, "quantized already: export keeps its scales"),
        ("inputs", lambda: prepare_qat(_model(), recipe, samples)(1, 2), ValueError, "has 2 inputs, the model takes 1"),
        ("elsewhere", lambda: prepare_qat(_model(), recipe, samples)(torch.empty(1, 4, device="meta")), ValueError,
         r"input '.*' is on meta: move .* to one device, for example prepared.to\(\"meta\"\)"),
        ("apart", apart, ValueError, "model.0.weight is on cpu and model.2.weight is on meta"),
        ("NaN", lambda: broken("step")(*samples[0]), ExportError, "holds NaN.*smaller learning rate"),
        ("NaN, exported", lambda: broken("export").export(), ExportError, "'model.0.weight' holds NaN or an infinity"),
        ("no function", lambda: export(_model(), without, samples), ValueError, "is_qat=True needs train_fn"),
    ]  # fmt: skip


def _quantizer() -> TOSAQuantizer:
    return TOSAQuantizer(make_compile_spec("int")).set_global(get_symmetric_quantization_config())


def test_errors_of_prepare_qat_name_remedies() -> None:
    for name, call, kind, message in _errors():
        with pytest.raises(kind, match=message):
            raise AssertionError(f"{name}: {call()}")


class _Permuted(nn.Module):
    """Two functions of channels behind a batch norm, the second across a permutation: one layer has both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.first = nn.Parameter(torch.tensor([0.5, 2.0, 3.0, -1.0]).reshape(4, 1, 1))
        self.second, self.shift = nn.Parameter(torch.tensor([2.0, 0.25, 1.0, 3.0])), nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) * self.first).permute(0, 2, 3, 1) * self.second + self.shift


def test_two_channel_functions_behind_a_batch_norm_are_both_trained() -> None:
    torch.manual_seed(0)
    model, samples = _Permuted(), [(torch.randn(8, 3, 6, 6) * 3 + 1,) for _ in range(4)]
    prepared = prepare_qat(copy.deepcopy(model), ExportRecipe.get_recipe(INT8), samples, progress=False)
    prepared.train()
    with torch.no_grad():
        assert sqnr([model.train()(*samples[0])], [prepared(*samples[0])]) > 25


def test_a_dropout_between_permutations_keeps_the_sum_behind_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop, self.shift = (
                nn.Conv2d(3, 4, 3),
                nn.Dropout(0.5),
                nn.Buffer(torch.full((4, 1, 1), 10.0)),
            )

        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.drop(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + self.shift
            return dropped

    torch.manual_seed(0)
    samples: Samples = [(torch.randn(8, 3, 6, 6),) for _ in range(3)]
    prepared = prepare_qat(Model(), ExportRecipe.get_recipe(INT8), samples, progress=False).train()
    result = prepared(*samples[0])
    assert ((result - 10).abs() < 0.05).float().mean() > 0.4
    assert not (result == 0).any()
