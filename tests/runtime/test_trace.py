"""``trace``: every operation of an Ethos-U program, what it wrote, and what it was compiled from."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.alternatives import size_or_speed
from arm_backend_core.backends.payload import Payload
from arm_recipes import ArmRecipeType, ExportResult, export, load
from arm_recipes.runtime.errors import PayloadError, RunError
from arm_recipes.runtime.ethosu import EthosUDelegate
from arm_recipes.runtime.ethosu_payload import read_payload_content
from arm_recipes.runtime.trace import TracedOperation
from tests.runtime.host_programs import CpuBetween, export_small
from tests.small_models import images, vectors

#: The tests run in one xdist worker, so that they share exported programs.
pytestmark = pytest.mark.xdist_group("host_programs")
NPUS = [ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85")]
EACH_NPU = pytest.mark.parametrize("recipe", NPUS, ids=lambda recipe: recipe.name)


class Steps(nn.Module):
    """Operators that Vela does not fuse; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs. ``LINE`` is the line of the next statement."""
        x = torch.tanh(self.second(self.first(x)))
        return nn.functional.max_pool2d(x, 2), x.mean((2, 3))


LINE = Steps.forward.__code__.co_firstlineno + 2


def _exported(recipe: ArmRecipeType, **options: Any) -> tuple[ExportResult, Tensor]:
    samples = images(3)
    return export(Steps().eval(), ExportRecipe.get_recipe(recipe, quantized_io=True, **options), samples), samples[0][0]


def _named(operations: Sequence[TracedOperation], operator: str) -> list[TracedOperation]:
    """The NPU's own operations for a TOSA operator, without the DMAs before them."""
    return [o for o in operations if o.operator == operator and o.command != "NPU_OP_DMA_START"]


@EACH_NPU
def test_trace_has_names_and_results_of_operations(recipe: ArmRecipeType) -> None:
    result, x = _exported(recipe)
    quantized = result.inputs[0].quantize(x)
    operations = list(result.trace(quantized))
    window = next(o for o in operations if o.command == "NPU_OP_DEPTHWISE")
    assert (window.operator, tuple(window.integers.shape)) == ("DEPTHWISE_CONV2D", (8, 8, 24))
    assert (window.module, window.source) == ("second", f"{__file__}:{LINE}")
    (pooled,) = _named(operations, "MAX_POOL2D")
    # The result of the pool follows from the traced result of the convolution.
    expected = window.integers.reshape(4, 2, 4, 2, 24).amax((1, 3))
    assert torch.equal(pooled.integers, expected)
    assert (pooled.module, pooled.source) == ("", f"{__file__}:{LINE + 1}")
    # The outputs of the program are the last traced results with their scales.
    outputs = [o for o in operations if o.scale is not None]
    for value, info in zip(result.run(quantized), result.outputs, strict=True):
        found = [o for o in outputs if o.scale == info.scale and o.integers.numel() == value.numel()]
        assert any(torch.equal(o.integers.flatten().sort()[0], value.flatten().sort()[0]) for o in found)
        real = found[-1].dequantized
        assert real is not None
        assert torch.allclose(real.flatten().sort()[0], info.dequantize(value).flatten().sort()[0])


@EACH_NPU
def test_trace_has_every_operation_once_with_names(recipe: ArmRecipeType) -> None:
    result, x = _exported(recipe)
    operations = list(result.trace(result.inputs[0].quantize(x)))
    (record,) = result.report.delegates
    assert record.vela is not None
    ends = [end + 32 for layer in record.vela.layers for end in layer.commands]
    assert set(ends) <= {o.offset for o in operations}
    assert len(ends) == len(set(ends)) >= 4
    assert [o.offset for o in operations] == sorted(o.offset for o in operations)
    assert all(o.operator in record.tosa_operators and o.layer for o in operations)
    assert all(o.integers.numel() > 0 for o in operations)


def test_trace_of_a_loaded_program_has_no_names() -> None:
    result, x = _exported(NPUS[0])
    quantized = result.inputs[0].quantize(x)
    program = load(result.buffer)
    ours, theirs = list(program.trace(quantized)), list(result.trace(quantized))
    assert {(o.operator, o.layer, o.source, o.scale) for o in ours} == {("", "", "", None)}
    assert all(o.dequantized is None for o in ours)
    assert [o.offset for o in ours] == [o.offset for o in theirs]
    assert all(torch.equal(a.integers, b.integers) for a, b in zip(ours, theirs, strict=True))


def test_load_error_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that writes outside its region is refused when the program is loaded."""
    compile_payload = size_or_speed.compile_payload

    def outside(*arguments: Any, **keywords: Any) -> Payload:
        payload = compile_payload(*arguments, **keywords)
        return replace(payload, data=_move_first_ofm(payload.data))

    monkeypatch.setattr(size_or_speed, "compile_payload", outside)
    result, x = _exported(NPUS[0])
    quantized = result.inputs[0].quantize(x)
    what = r"In its command stream, NPU_OP_\w+ at byte \d+: OFM takes bytes \d+ to \d+ of a region of \d+"
    where = r" \(layer first, .*test_trace\.py:\d+\)$"
    with pytest.raises(PayloadError, match=what + where):
        result.run(quantized)
    with pytest.raises(PayloadError, match=what + "$"):  # a loaded program has no layer names
        load(result.buffer).execute(quantized)
    with pytest.raises(PayloadError, match=what + where):
        export(Steps().eval(), ExportRecipe.get_recipe(NPUS[0]), images(3), verify=True)


def _move_first_ofm(payload: bytes) -> bytes:
    """Move the first OFM of the stream beyond the end of its region."""
    commands = bytes(read_payload_content(payload).commands)
    words = list(struct.unpack(f"<{len(commands) // 4}I", commands))
    words[words.index(0x4010, 8) + 1] = 1 << 30  # NPU_SET_OFM_BASE0
    return payload.replace(commands, struct.pack(f"<{len(words)}I", *words))


class Rows(nn.Module):
    """Scaled rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 16)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the rows times ``x``."""
        return self.table(rows) * x


def test_run_error_names_the_layer() -> None:
    sample = torch.randn(1, 4, 16), torch.tensor([[5, 0, 3, 3]], dtype=torch.int32)
    result = export(Rows().eval(), ExportRecipe.get_recipe(NPUS[2]), [sample] * 2)
    with pytest.raises(RunError, match=r"NPU_OP_DMA_START at byte \d+: .* \(layer table, .*test_trace\.py:\d+\)$"):
        result.run(sample[0], sample[1] + 9)


@pytest.mark.parametrize("last", [False, True])
def test_gather_dmas_have_names(last: bool) -> None:
    """Vela reports no commands for a GATHER. Its DMAs precede the commands of the next layer, if there is one."""
    rows = torch.tensor([[5, 0, 3, 3]], dtype=torch.int32)
    model, sample = (nn.Sequential(nn.Embedding(6, 16)), (rows,)) if last else (Rows(), (torch.randn(1, 4, 16), rows))
    result = export(model.eval(), ExportRecipe.get_recipe(NPUS[2]), [sample] * 2)
    operations = list(result.trace(*sample))
    names = [(o.command, o.operator, o.module) for o in operations if o.command != "NPU_OP_POOL"]
    assert names[0] == ("NPU_OP_DMA_START", "GATHER", "0" if last else "table")
    # If the GATHER is last, the MUL is a copy of its result.
    assert names[1:] == [("NPU_OP_ELEMENTWISE", "MUL", "0" if last else "")]


def test_trace_of_direct_drive_has_the_same_names() -> None:
    traces = []
    for flags in ([], ["--cop-format=COP2"]):
        result, x = _exported(NPUS[2], extra_flags=flags)
        traces.append(list(result.trace(result.inputs[0].quantize(x))))
    names = [[(o.command, o.operator, o.layer, o.module, o.source) for o in trace] for trace in traces]
    assert names[0] == names[1]
    assert all(operator and layer and source for _, operator, layer, _, source in names[1])


def test_trace_has_delegates_in_execution_order() -> None:
    recipe = ExportRecipe.get_recipe(NPUS[0])
    result = export(CpuBetween().eval(), recipe, vectors(4))
    operations = list(result.trace(*vectors(1)[0]))
    assert sorted({o.delegate_index for o in operations}) == [0, 1]
    assert [o.delegate_index for o in operations] == sorted(o.delegate_index for o in operations)


def test_trace_of_other_targets_is_empty() -> None:
    assert list(export_small(ArmRecipeType.TOSA_INT8).trace(*images(1)[0])) == []


def test_trace_refuses_an_unknown_method() -> None:
    with pytest.raises(ValueError, match="no method 'backward'"):
        list(load(export_small(NPUS[0]).buffer).trace(method="backward"))


def test_unfinished_trace_does_not_change_runs() -> None:
    result, x = _exported(NPUS[0])
    quantized = result.inputs[0].quantize(x)
    before = result.run(quantized)
    steps = result.trace(result.inputs[0].quantize(-x))
    next(steps)
    assert all(map(torch.equal, result.run(quantized), before))
    list(steps)
    assert all(map(torch.equal, result.run(quantized), before))


def test_statistics_of_a_delegate() -> None:
    result, x = _exported(NPUS[0])
    (described,) = load(result.buffer).content.methods["forward"].delegates
    emulated = EthosUDelegate(bytes(described.data), dict(described.compile_specs))
    (record,) = result.report.delegates
    inputs = [np.frombuffer(result.inputs[0].quantize(x).numpy().tobytes(), np.uint8)]
    figures = emulated.measure(inputs)
    vela = record.vela
    assert vela is not None
    assert figures.peak[:2] == (vela.flash_bytes, vela.sram_bytes)
    assert figures.macs + 4 * 4 * 24 * 4 == vela.macs  # Vela also counts the comparisons of the pool
    (layer,) = figures.layers  # without the record there are no layer names
    assert (str(layer.origin), layer.operations, layer.bytes_read) == ("", figures.operations, figures.bytes_read)
    layers = {layer.origin.module: layer for layer in emulated.measure(inputs, record).layers if layer.macs}
    first, second = layers["first"], layers["second"]
    assert (first.macs, second.macs) == (8 * 8 * 24 * 9 * 3, 8 * 8 * 24 * 9)
    # Feature maps, and the weights, which a DMA copies from flash. The table of tanh (256 bytes) goes into the NPU.
    assert second.bytes_read[1] == second.bytes_written[1] == 8 * 8 * 24 + second.bytes_read[0] - 256
    assert second.bytes_read[0] > 256 + 24 * 10  # scales of ten bytes beside them
    assert figures.bytes_written[0] == first.bytes_written[0] == 0
    emulated.close()


class _Sum(nn.Module):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(x)
        return self.n * 1


def test_trace_restores_the_state() -> None:
    samples = [(torch.full((1, 3), 0.2 * i),) for i in range(8)]
    result = export(_Sum().eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8), samples)
    one, loaded = torch.ones(1, 3), load(result.buffer)
    expected = [result.run(one) for _ in range(5)]
    torch.testing.assert_close(expected[2], 3 * one, rtol=0, atol=0.1)
    names = [operation.command for operation in result.trace(one)]
    assert names == [operation.command for operation in loaded.trace(one)]
    for number, wanted in enumerate(expected):
        assert torch.equal(loaded.run(one), wanted)
        if number % 2:
            next(iter(loaded.trace(one)))
    assert torch.equal(result.run(one), loaded.run(one))
