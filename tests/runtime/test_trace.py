"""``trace``: every operation of an Ethos-U program, what it wrote, and what it was compiled from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export, load
from arm_recipes.runtime.ethosu import EthosUDelegate
from arm_recipes.runtime.trace import TracedOperation
from tests.recipes.models import images, vectors
from tests.runtime.host_programs import Between, small

#: The exported programs that they share are made once in a process.
pytestmark = pytest.mark.xdist_group("host_programs")
NPUS = [ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85")]
EACH = pytest.mark.parametrize("recipe", NPUS, ids=lambda recipe: recipe.name)


class Steps(nn.Module):
    """Operators that no compiler joins; two results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.second = nn.Conv2d(24, 24, 3, padding=1, groups=24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each operator, its line is known."""
        x = torch.tanh(self.second(self.first(x)))
        return nn.functional.max_pool2d(x, 2), x.mean((2, 3))


def _exported(recipe: ArmRecipeType, **options: Any) -> tuple[ExportResult, Tensor]:
    samples = images(3)
    return export(Steps().eval(), ExportRecipe.get_recipe(recipe, quantized_io=True, **options), samples), samples[0][0]


def _named(operations: Sequence[TracedOperation], operator: str) -> list[TracedOperation]:
    """The NPU's own operations for a TOSA operator, without the DMAs before them."""
    return [o for o in operations if o.operator == operator and o.command != "NPU_OP_DMA_START"]


@EACH
def test_names_and_numbers(recipe: ArmRecipeType) -> None:
    result, x = _exported(recipe)
    given = result.inputs[0].quantize(x)
    operations = list(result.trace(given))
    window = next(o for o in operations if o.command == "NPU_OP_DEPTHWISE")
    assert (window.operator, tuple(window.integers.shape)) == ("DEPTHWISE_CONV2D", (8, 8, 24))
    assert "conv.py:" in window.source
    (pooled,) = _named(operations, "MAX_POOL2D")
    # The pool's numbers follow from those that it read, as they were traced.
    expected = window.integers.reshape(4, 2, 4, 2, 24).amax((1, 3))
    if "U85" in recipe.name:  # which writes it as the program gives it: channels first
        expected = expected.permute(2, 0, 1)
    assert torch.equal(pooled.integers, expected)
    assert "test_trace.py:" in pooled.source
    # What the program gives is what was written last where its outputs are.
    outputs = [o for o in operations if o.scale is not None]
    for value, info in zip(result.run(given), result.outputs, strict=True):
        found = [o for o in outputs if o.scale == info.scale and o.integers.numel() == value.numel()]
        assert any(torch.equal(o.integers.flatten().sort()[0], value.flatten().sort()[0]) for o in found)
        real = found[-1].real
        assert real is not None
        assert torch.allclose(real.flatten().sort()[0], info.dequantize(value).flatten().sort()[0])


@EACH
def test_every_operation_is_there_once_and_has_names(recipe: ArmRecipeType) -> None:
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


def test_a_loaded_program_has_no_names() -> None:
    result, x = _exported(NPUS[0])
    given = result.inputs[0].quantize(x)
    program = load(result.buffer)
    ours, theirs = list(program.trace(given)), list(result.trace(given))
    assert {(o.operator, o.layer, o.source, o.scale) for o in ours} == {("", "", "", None)}
    assert all(o.real is None for o in ours)
    assert [o.offset for o in ours] == [o.offset for o in theirs]
    assert all(torch.equal(a.integers, b.integers) for a, b in zip(ours, theirs, strict=True))


def test_direct_drive_has_no_names() -> None:
    result, x = _exported(NPUS[2], extra_flags=["--cop-format=COP2"])
    operations = list(result.trace(result.inputs[0].quantize(x)))
    assert {o.operator for o in operations} == {""}
    assert len(operations) >= 4


def test_delegates_in_the_order_in_which_they_run() -> None:
    recipe = ExportRecipe.get_recipe(NPUS[0])
    result = export(Between().eval(), recipe, vectors(4))
    operations = list(result.trace(*vectors(1)[0]))
    assert sorted({o.delegate for o in operations}) == [0, 1]
    assert [o.delegate for o in operations] == sorted(o.delegate for o in operations)


def test_programs_for_others_have_no_operations() -> None:
    assert list(small(ArmRecipeType.TOSA_INT8).trace(*images(1)[0])) == []


def test_arguments_are_those_of_run() -> None:
    with pytest.raises(ValueError, match="no method 'backward'"):
        list(load(small(NPUS[0]).buffer).trace(method="backward"))


def test_tracing_leaves_runs_as_they_are() -> None:
    result, x = _exported(NPUS[0])
    given = result.inputs[0].quantize(x)
    before = result.run(given)
    steps = result.trace(result.inputs[0].quantize(-x))
    next(steps)
    assert all(map(torch.equal, result.run(given), before))
    list(steps)
    assert all(map(torch.equal, result.run(given), before))


def test_figures_of_a_delegate() -> None:
    result, x = _exported(NPUS[0])
    (delegate,) = load(result.buffer).content.methods["forward"].delegates
    emulated = EthosUDelegate(bytes(delegate.data), dict(delegate.compile_specs))
    figures = emulated.watched([np.frombuffer(result.inputs[0].quantize(x).numpy().tobytes(), np.uint8)])
    vela = result.report.delegates[0].vela
    assert vela is not None
    assert figures.peak[:2] == (vela.flash_bytes, vela.sram_bytes)
    assert figures.macs + 4 * 4 * 24 * 4 == vela.macs  # which counts what the pool compares, too
    emulated.close()
