"""Recurrent layers of many steps: cycles, memory, and precision of the states."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch.export import ExportedProgram

from arm_backend_core.nodes import is_dequantize, is_quantize
from arm_backend_core.quantization import TOSAQuantizer, get_symmetric_quantization_config
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.tosa.passes import pipeline
from arm_backend_core.workers import vela
from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models.keyword_spotter import KeywordSpotter
from tests.ops.cases import Recurrent, Unrolled
from tests.ops.runner import make_compile_spec
from tests.sqnr import sqnr


@pytest.mark.parametrize("recipe", [ArmRecipeType.ETHOSU_U85_INT8, ArmRecipeType.ETHOSU_U55_INT8])
def test_keyword_spotter(recipe: ArmRecipeType) -> None:
    """The weights take 63 KB of the program, and the commands, which Ethos-U has for each step, take the rest.

    With separate scales for each step and int8 throughout, the program took 446 KB and 309,460 cycles on U85. On U55 it
    took 414 KB and 3,466,957 cycles, of which 98% read weights from flash (Vela 5.1). For U85, Vela 5.2 makes the same
    commands and counts more cycles for int32 in SRAM. For U55 it fuses fewer RESCALEs into other operations.
    """
    most_bytes, most_cycles = {
        ("ETHOSU_U85_INT8", (5, 1)): (136_000, 171_000),
        ("ETHOSU_U85_INT8", (5, 2)): (136_000, 178_000),
        ("ETHOSU_U55_INT8", (5, 1)): (147_000, 580_000),
        ("ETHOSU_U55_INT8", (5, 2)): (155_000, 580_000),
    }[recipe.name, vela.installed_release()]
    torch.manual_seed(0)
    samples = [(torch.randn(1, 49, 10),) for _ in range(2)]
    result = export(KeywordSpotter().eval(), ExportRecipe.get_recipe(recipe), samples)
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert not result.report.cpu_operators
    assert len(result.buffer) <= most_bytes
    assert delegate.vela.total_cycles <= most_cycles


def _quantized(module: nn.Module, samples: Sequence[Tensor]) -> ExportedProgram:
    quantizer = TOSAQuantizer(make_compile_spec("int")).set_global(get_symmetric_quantization_config())
    observed = ObservedProgram(torch.export.export(module, (samples[0],), strict=False), quantizer)
    for sample in samples:
        observed(sample)
    return observed.convert()


def _scales(program: ExportedProgram) -> set[tuple[object, ...]]:
    return {node.args[1:6] for node in program.graph.nodes if is_quantize(node) and isinstance(node.args[1], float)}


@pytest.mark.parametrize(
    "module",
    [
        Recurrent(nn.LSTM(3, 4, bidirectional=True)),
        Recurrent(nn.LSTM(3, 4, 2, proj_size=2)),
        Recurrent(nn.GRU(3, 4)),
        Recurrent(nn.RNN(3, 4)),
        Unrolled(nn.LSTMCell(3, 4)),
        Unrolled(nn.GRUCell(3, 4)),
    ],
    ids=["lstm", "projected", "gru", "rnn", "lstm_cell", "gru_cell"],
)
@torch.no_grad()
def test_all_steps_share_their_scales(module: nn.Module) -> None:
    """The numbers of scales may differ slightly, because some scales may happen to be equal."""
    torch.manual_seed(0)
    few, many = (_scales(_quantized(module.eval(), [torch.randn(steps, 1, 3)])) for steps in (3, 9))
    assert abs(len(few) - len(many)) < 5
    assert len(many) < 30


def _rounded(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127)


@pytest.mark.parametrize("gain", [1.0, 3.0], ids=["small gain", "large gain"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@torch.no_grad()
def test_states_cost_less_than_a_decibel(kind: type[nn.Module], gain: float) -> None:
    """Compared with float states between the same int8 input, weights and output."""
    torch.manual_seed(0)
    module = Recurrent(kind(10, 40)).eval()
    for parameter in module.parameters():
        parameter.mul_(gain if kind is not nn.RNN else gain**0.5)
    samples = [torch.randn(49, 1, 10) for _ in range(40)]
    program = _quantized(module, samples[:8])
    known = [node.args[1:3] for node in program.graph.nodes if is_dequantize(node) and isinstance(node.args[1], float)]
    floating = copy.deepcopy(module)
    for parameter in floating.parameters():
        if parameter.dim() == 2:
            scale = parameter.abs().amax(1, keepdim=True) / 127
            parameter.copy_((parameter / scale).round() * scale)
    exact, ours, theirs = (
        torch.cat([run(x) for x in samples[8:]])
        for run in (module, program.module(), lambda x: _rounded(floating(_rounded(x, *known[0])), *known[-1]))
    )
    assert sqnr(exact, ours) > sqnr(exact, theirs) - 1


@pytest.mark.parametrize("macs", [128, 256])
@pytest.mark.parametrize(
    ("module", "most"),
    [
        (Recurrent(nn.LSTM(6, 72)), 0.86),
        (Recurrent(nn.LSTM(6, 72, bidirectional=True)), 0.88),
        (Recurrent(nn.LSTM(6, 80, proj_size=60)), 1.0),  # its operand is from a convolution: rows
        (Recurrent(nn.GRU(6, 80)), 0.91),
        (Recurrent(nn.RNN(6, 130, nonlinearity="relu")), 1.0),  # rows
        (Unrolled(nn.LSTMCell(6, 72)), 0.96),
    ],
    ids=["lstm", "bidirectional", "projected", "gru", "rnn", "cell"],
)
def test_columns(module: nn.Module, most: float, macs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NPU's results equal those of the TOSA graph and those of rows. Columns take fewer cycles."""
    torch.manual_seed(0)
    samples = [(torch.randn(3, 1, 6),) for _ in range(2)]

    def exported() -> ExportResult:
        recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, macs=macs)
        return export(copy.deepcopy(module).eval(), recipe, samples)

    columns = exported()
    kept = tuple(entry for entry in pipeline.HARDWARE_PASSES if entry[0] is not pipeline.rewrite_vectors_to_columns)
    monkeypatch.setattr(pipeline, "HARDWARE_PASSES", kept)
    rows = exported()
    got, expected, plain = columns.run(*samples[1]), columns.run(*samples[1], backend="tosa"), rows.run(*samples[1])
    for one, other, third in zip(*map(_tensors, (got, expected, plain)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    ours, theirs = (result.report.delegates[0].vela for result in (columns, rows))
    assert ours is not None
    assert theirs is not None
    assert ours.total_cycles <= most * theirs.total_cycles, ours.total_cycles / theirs.total_cycles


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs
