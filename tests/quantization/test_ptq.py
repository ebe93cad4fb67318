"""Quantizing an exported program directly gives what torchao's prepare, calibration and convert give."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.export import ExportedProgram
from torchao.quantization.pt2e import prepare, qat_utils
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

from arm_backend_core import compilation_log
from arm_backend_core.delegate import delegate
from arm_backend_core.errors import ModelError
from arm_backend_core.quantization import (
    QuantizationConfig,
    TOSAQuantizer,
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
    ptq,
)
from arm_backend_core.quantization.annotator import ANNOTATION
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_recipes import ArmRecipeType, export
from tests.ops.runner import export as exported
from tests.ops.runner import make_compile_spec
from tests.small_models import Samples

Config = Callable[[], QuantizationConfig]
CONFIGS: list[Config] = [
    get_symmetric_quantization_config,
    get_symmetric_a8w4_quantization_config,
    get_symmetric_a16w8_quantization_config,
]


def _quantizer(config: Config) -> TOSAQuantizer:
    return TOSAQuantizer(make_compile_spec("int")).set_global(config())


def _quantize_directly(module: nn.Module, samples: Samples, config: Config) -> ExportedProgram:
    model = ObservedProgram(exported(module, samples[0]), _quantizer(config))
    with torch.no_grad():
        for sample in samples:
            model(*sample)
        return model.convert()


def _quantize_by_torchao(module: nn.Module, samples: Samples, config: Config) -> nn.Module:
    model = prepare_pt2e(exported(module, samples[0]).module(check_guards=False), _quantizer(config))
    with torch.no_grad():
        for sample in samples:
            model(*sample)
    converted: nn.Module = convert_pt2e(model)
    return converted


class _Branches(nn.Module):
    """Tied weights, a concatenation, a constant operand, data movement, an output that is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.linspace(0.5, 2.0, 8))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.first(x), self.second(y)], 1)
        return joined.transpose(1, 2).sigmoid(), F.silu(joined * self.scale)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _models() -> dict[str, tuple[nn.Module, list[tuple[int, ...]]]]:
    torch.manual_seed(0)
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Hardswish(), nn.Flatten()
    )
    normalized = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    return {
        "branches": (_Branches(), [(2, 3, 8), (2, 5, 8)]),
        "attention": (_Attention(), [(1, 6, 16)]),
        "convolutions": (convolutions, [(1, 3, 9, 9)]),
        "batch norm": (normalized, [(2, 3, 9, 9)]),
        "no operator": (nn.Identity(), [(2, 3)]),
    }


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", _models())
def test_quantized_programs_compute_the_values_of_torchaos(name: str, config: Config) -> None:
    module, shapes = _models()[name]
    generator = torch.Generator().manual_seed(0)
    samples = [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3)]
    ours = _quantize_directly(module.eval(), samples, config)
    theirs = _quantize_by_torchao(module.eval(), samples, config)
    with torch.no_grad():
        results = ours.module(check_guards=False)(*samples[0]), theirs(*samples[0])
    for one, other in zip(*(torch.utils._pytree.tree_leaves(result) for result in results), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_quantized_programs_hold_weights_as_int8_only() -> None:
    module, _ = _models()["branches"]
    program = _quantize_directly(
        module.eval(), [(torch.randn(2, 3, 8), torch.randn(2, 5, 8))], get_symmetric_quantization_config
    )
    held = {**program.state_dict, **program.constants}
    assert all(tensor.dtype is not torch.float32 for tensor in held.values() if tensor.dim() == 2)
    assert sum(tensor.dtype is torch.int8 and tensor.dim() == 2 for tensor in held.values()) == 1


class _Writes(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.full((2,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        y = x.add_(1.0)
        return y * self.calls


def test_calibration_leaves_inputs_and_buffers_as_they_were() -> None:
    module = _Writes().eval()
    samples: Samples = [(torch.zeros(2),) for _ in range(3)]
    program = _quantize_directly(module, samples, get_symmetric_quantization_config)
    assert all(torch.equal(sample[0], torch.zeros(2)) for sample in samples)
    assert torch.equal(module.calls, torch.full((2,), 5.0))
    assert torch.equal(program.state_dict["calls"], torch.full((2,), 5.0))


class _Accumulates(nn.Module):
    """Writes to an input and to a buffer, and reads both afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.register_buffer("total", torch.full((4,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        self.total.add_(x)
        return x + self.total.sigmoid()


@pytest.mark.parametrize("direct", [True, False])
def test_models_that_write_inputs_and_buffers_are_quantized(*, direct: bool) -> None:
    """Only the copies run on the CPU. A second run reads the values that the first wrote."""
    samples: Samples = [(torch.linspace(-1, 1.2, 4),), (torch.linspace(0.8, -1, 4),)]
    if direct:
        program = _quantize_directly(_Accumulates(), samples, get_symmetric_quantization_config)
    else:
        program = exported(_quantize_by_torchao(_Accumulates(), samples, get_symmetric_quantization_config), samples[0])
    with compilation_log.open_log() as log:
        delegated = delegate(program, make_compile_spec("int"))
    assert not log.refused_operators
    runs = []
    for made in (program, delegated):
        module, x = made.module(check_guards=False), samples[0][0].clone()
        runs.append([module(x).clone(), x.clone(), module(x).clone(), x.clone()])  # the second reads the new total
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0)  # two steps


def test_export_leaves_samples_and_buffers_as_they_were() -> None:
    module = _Writes().eval()
    samples: Samples = [(torch.zeros(2),) for _ in range(3)]
    export(module, ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), samples)
    assert all(torch.equal(sample[0], torch.zeros(2)) for sample in samples)
    assert torch.equal(module.calls, torch.full((2,), 5.0))


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
def test_non_finite_values_name_operator_and_sample(recipe: ArmRecipeType) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.log(x) * y

    samples: Samples = [(torch.full((2, 3), value), torch.ones(2, 3)) for value in (2.0, 1.0, -1.0)]
    name = r"aten.log.default \('log', .*test_ptq.py:\d+\)"
    with pytest.raises(ModelError, match=f"calibration sample 2: the result of {name} holds NaN"):
        export(Model(), ExportRecipe.get_recipe(recipe), samples)


@pytest.mark.parametrize("recipe", [ArmRecipeType.TOSA_INT8, ArmRecipeType.TOSA_A16W8])
def test_non_finite_values_that_where_discards_are_ignored(recipe: ArmRecipeType) -> None:
    """``where`` discards 0 / 0 and x / 0, so that they need no scale."""

    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.where(y > 0, x / y, 0.0)

    torch.manual_seed(0)
    samples: Samples = [(torch.randn(4, 8), torch.relu(torch.randn(4, 8)).round()) for _ in range(4)]
    samples[0][0][0] = 0
    result = export(Model().eval(), ExportRecipe.get_recipe(recipe), samples)
    expected = Model()(*samples[1])
    assert (result.run(*samples[1]) - expected).abs().max() < 0.05 * expected.abs().max()
    notes = [note for note in result.report.notes if "no result depends on it" in note]
    assert notes
    assert all("'div'" in note for note in notes)


def test_non_finite_values_that_are_compared_are_refused() -> None:
    """NaN > 0 is false, but a delegate would compute a number for 0 / 0."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x / x > 0, x + 3, x - 3)

    with pytest.raises(ModelError, match=r"'div', .* holds NaN"):
        export(Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.tensor([0.0, 1.0, -2.0]),)])


def test_non_finite_values_that_are_written_to_a_buffer_are_refused() -> None:
    """It is unknown whether later calls use the value."""

    class Model(nn.Module):
        last: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            ratio = 1 / x
            self.last.copy_(ratio)
            return torch.where(x > 0, ratio, 0.0)

    with pytest.raises(ModelError, match=r"calibration sample 0: .* holds an infinity"):
        export(
            Model().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), [(torch.tensor([0.0, 1.0, 2.0, 3.0]),)]
        )


@pytest.mark.parametrize(("shape", "axis"), [((6, 5, 3), 0), ((6, 5, 3), 1), ((40,), 0), ((6, 7), None), ((1, 1), 0)])
def test_constants_are_quantized_in_chunks(
    shape: tuple[int, ...], axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals torchao's for the whole tensor, and has the strides of the float tensor."""
    tensor = torch.randn(shape).transpose(0, -1) if axis == 1 else torch.randn(shape)
    known: tuple[object, ...] = (0.01, 3, -128, 127, torch.int8)
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    if axis is not None:
        quantize = torch.ops.quantized_decomposed.quantize_per_channel.default
        channels = tensor.shape[axis]
        known = (torch.rand(channels) + 0.01, torch.zeros(channels, dtype=torch.int64), axis, -127, 127, torch.int8)
    calls = []

    def counted(*args: object) -> Tensor:
        calls.append(args)
        return torch.as_tensor(quantize(*args))

    monkeypatch.setattr(ptq, "CHUNK_ELEMENTS", 10)
    found = ptq._quantize_constant(counted, tensor, known, torch.int8)
    assert torch.equal(found, quantize(tensor, *known))
    assert found.stride() == tensor.stride()
    assert (len(calls) > 1) is (tensor.numel() > 10)


def test_no_pattern_is_exported_for_batch_norms_that_were_only_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's passes would match a graph that has any against 96 patterns of QAT."""

    def never(*args: object, **keywords: object) -> None:
        raise AssertionError("a pattern is exported")

    monkeypatch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", never)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    samples = [(torch.randn(2, 3, 9, 9),) for _ in range(3)]
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8)
    assert recipe.quantization_recipe is not None
    recipe.quantization_recipe.post_convert_passes = [lambda module: module]  # forces torchao's passes
    result = export(model, recipe, samples)
    assert not result.report.cpu_operators
    with torch.no_grad():
        error = result.run(*samples[0]) - model(*samples[0])
    assert error.square().mean() < 1e-3


def test_long_chains_of_shared_scales_are_grouped_without_recursion() -> None:
    graph, edge_specs = torch.fx.Graph(), dict[Any, Any]()
    last = graph.placeholder("x")
    edge_specs[last] = get_symmetric_quantization_config().activation
    for _ in range(600):
        node = graph.call_function(torch.ops.aten.flip.default, (last, [0]))
        node.meta[ANNOTATION] = QuantizationAnnotation(_annotated=True)
        edge_specs[(last, node)] = SharedQuantizationSpec(last)
        edge_specs[node] = SharedQuantizationSpec((last, node))
        last = node
    limit = sys.getrecursionlimit()
    groups = ptq._group_observers(dict(reversed(edge_specs.items())))
    assert set(groups.values()) == {groups[last]}
    assert sys.getrecursionlimit() == limit


class _Recurrent(nn.Module):
    """An LSTM or a GRU, whose steps read one tensor of projected inputs."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        """Map (1, steps, 4) to (1, steps, 6)."""
        return self.layer(x)[0]


def _annotated_specs(kind: type[nn.LSTM] | type[nn.GRU], steps: int) -> tuple[Any, dict[Any, Any]]:
    """The annotated module of a recurrent layer, and its quantization specs."""
    torch.manual_seed(0)
    program = exported(_Recurrent(kind).eval(), (torch.randn(1, steps, 4),))
    observed = ObservedProgram(program, _quantizer(get_symmetric_quantization_config))
    return observed.graph_module, prepare._get_edge_or_node_to_qspec(observed.graph_module)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_groups_of_a_recurrent_layer_equal_those_of_torchao(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    _, specs = _annotated_specs(kind, 5)

    def partition(groups: dict[Any, int]) -> set[frozenset[Any]]:
        return {frozenset(x for x in groups if groups[x] == number) for number in groups.values()}

    assert partition(ptq._group_observers(specs)) == partition(prepare._get_edge_or_node_to_group_id(specs))


def test_observer_grouping_is_linear_in_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    union = prepare._union_input_edge_with

    def count(*args: Any) -> None:
        calls[0] += 1
        union(*args)

    monkeypatch.setattr(prepare, "_union_input_edge_with", count)
    counts = []
    for steps in (10, 20, 40):
        _, specs = _annotated_specs(nn.LSTM, steps)
        calls[0] = 0
        ptq._group_observers(specs)
        counts.append(calls[0])
    assert counts[2] - counts[1] <= 2 * (counts[1] - counts[0])


def test_steps_of_a_recurrent_layer_read_their_own_inputs() -> None:
    torch.manual_seed(0)
    model = _Recurrent(nn.LSTM).eval()
    program = exported(model, (torch.randn(1, 7, 4),))
    module = TOSAQuantizer(make_compile_spec("int")).transform_for_annotation(program.module(check_guards=False))
    selected = [node.args[2] for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.select.int)]
    x = torch.randn(1, 7, 4)
    assert {step: selected.count(step) for step in range(1, 7)} == dict.fromkeys(range(1, 7), 2)
    with torch.no_grad():
        torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-6)
