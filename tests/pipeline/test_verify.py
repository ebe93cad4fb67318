"""``verify=True``: the command stream of each delegate runs in the emulator and is compared with its TOSA graph."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executorch.export import ExportRecipe
from torch import nn

from arm_backend_core.alternatives import size_or_speed
from arm_backend_core.backends.payload import Payload
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType, ExportError, RuntimeUnavailable, export
from arm_recipes.cli.main import main
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.ethosu_payload import read_payload_content
from tests.runtime.host_programs import Counting, CpuBetween
from tests.small_models import Small, images, vectors

U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8
VERIFIED = r"verified in [\d.]+ s: {}, bit-equal with the TOSA reference model"


@pytest.mark.parametrize("quantized_io", [False, True])
def test_a_note_counts_verified_executions_and_delegates(quantized_io: bool) -> None:
    recipe = ExportRecipe.get_recipe(U85, quantized_io=quantized_io)
    result = export(Small().eval(), recipe, images(6), verify=True)
    assert re.fullmatch(VERIFIED.format("4 executions of 1 delegate"), result.report.notes[-1])


def test_every_delegate_of_every_method_is_verified() -> None:
    models: dict[str, nn.Module] = {"count": Counting().eval(), "between": CpuBetween().eval()}
    result = export(models, ExportRecipe.get_recipe(U55), dict.fromkeys(models, vectors(3)), verify=True)
    assert re.fullmatch(VERIFIED.format("9 executions of 3 delegates"), result.report.notes[-1])
    # Buffers of the result's own program are as they were.
    (x,) = vectors(1)[0]
    fresh = export(models, ExportRecipe.get_recipe(U55), dict.fromkeys(models, vectors(3)))
    assert torch.equal(result.run(x, method="count"), fresh.run(x, method="count"))


def test_a_program_without_command_streams_has_nothing_to_verify() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(ArmRecipeType.TOSA_INT8), images(), verify=True)
    assert "neither Ethos-U delegates nor int8 kernels: there is nothing" in result.report.notes[-1]


def test_a_difference_from_the_tosa_graph_is_an_error_and_writes_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one element, of the second delegate of the second method."""
    run, calls = reference_model.run, []

    def wrong(flatbuffer: bytes, inputs: Any) -> list[Any]:
        results = [np.array(array) for array in run(flatbuffer, inputs)]
        calls.append(flatbuffer)
        if len(calls) == 5:
            results[0].reshape(-1)[2] ^= 1
        return results

    monkeypatch.setattr(reference_model, "run", wrong)
    models: dict[str, nn.Module] = {"count": Counting().eval(), "between": CpuBetween().eval()}
    examples = dict.fromkeys(models, vectors(3))
    with pytest.raises(
        ExportError,
        match=r"verify: delegate '\w+' of method 'between' differs from its TOSA graph for sample "
        r"0: 1 of 4 elements of '\w+', the first at \[0, 2\]: -?\d+ instead of -?\d+\. "
        r"Its operators are aten\.linear\.default\. docs/contributors/vela\.md",
    ):
        export(models, ExportRecipe.get_recipe(U55), examples, verify=True, output=tmp_path / "model.pte")
    assert not (tmp_path / "model.pte").exists()


def _without_waits(payload: bytes) -> bytes:
    """Replace the stream's DMA_WAITs by a command without effect."""
    commands = bytes(read_payload_content(payload).commands)
    words = list(struct.unpack(f"<{len(commands) // 4}I", commands))
    place, changed = 8, 0
    while place < len(words):
        if words[place] & 0xFFFF == 17:
            words[place], changed = 19, changed + 1
        place += 2 if words[place] & 0x4000 else 1
    assert changed
    return payload.replace(commands, struct.pack(f"<{len(words)}I", *words))


def test_a_missing_dma_wait_is_an_error_despite_correct_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator runs one operation after the other. A device would not wait for the weights."""
    compile_payload = size_or_speed.compile_payload

    def compile_without_waits(*arguments: Any, **keywords: Any) -> Payload:
        payload = compile_payload(*arguments, **keywords)
        return replace(payload, data=_without_waits(payload.data))

    monkeypatch.setattr(size_or_speed, "compile_payload", compile_without_waits)
    with pytest.raises(
        ExportError,
        match=r"verify: delegate '\w+' of method 'forward' computes correct outputs in the emulator, but may differ "
        r"on a device: a program for Ethos-U55-128 failed. In its command stream, NPU_OP_\w+ at byte \d+: it may read "
        r"byte \d+ of region [18] before the operation at byte \d+ has written it: a wait is missing "
        r"\(layer-\d+, .*models\.py:\d+\)\. Its operators are aten",
    ):
        export(Small().eval(), ExportRecipe.get_recipe(U55), images(6), verify=True)


def test_the_report_has_the_counts_of_the_emulator() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(U55), images(6), verify=True)
    (record,) = result.report.delegates
    figures = result.report.measured[record.name]
    assert record.vela is not None
    assert (figures.macs, figures.peak[1]) == (record.vela.macs, record.vela.sram_bytes)
    assert sum(layer.macs for layer in figures.layers) == figures.macs
    for sums, parts in (
        (figures.bytes_read, [layer.bytes_read for layer in figures.layers]),
        (figures.bytes_written, [layer.bytes_written for layer in figures.layers]),
    ):
        assert tuple(map(sum, zip(*parts, strict=True))) == sums
    assert sum(layer.operations for layer in figures.layers) == figures.operations
    assert figures.commands - sum(layer.commands for layer in figures.layers) == 1  # NPU_OP_STOP
    estimates = [layer.origin.estimate for layer in figures.layers]
    assert [estimate.macs for estimate in estimates if estimate] == [layer.macs for layer in figures.layers]
    assert f"Emulator counts of {record.name}" in str(result.report)
    for what in (r"body\.0 +CONV2D +[\d,.]+ K?i?B read, 512 B written +\d+ cycles of Sram", r"body\.0 .* 13,824 MACs"):
        assert re.search(
            rf"Layers of {record.name} with the most (memory traffic|MACs).*\n( .*\n)* +{what}", str(result.report)
        )
    reported_layers = result.report.to_dict()["measured"][record.name]["layers"]
    assert [layer["origin"]["module"] for layer in reported_layers] == [layer.origin.module for layer in figures.layers]
    assert re.search(r"scratch +[\d,.]+ K?i?B in use, [\d,.]+ K?i?B read, [\d,.]+ K?i?B written", str(result.report))
    assert result.report.to_dict()["measured"][record.name]["macs"] == record.vela.macs
    assert export(Small().eval(), ExportRecipe.get_recipe(U55), images(6)).report.measured == {}


def test_a_missing_compiler_is_an_error_before_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise RuntimeUnavailable("there is no compiler")

    monkeypatch.setattr("arm_recipes.pipeline.export.load_plugin", unavailable)
    monkeypatch.setattr("arm_recipes.pipeline.export.Pipeline", None)
    with pytest.raises(RuntimeUnavailable, match="there is no compiler"):
        export(Small().eval(), ExportRecipe.get_recipe(U85), images(), verify=True)


def test_record_executions_ends_with_its_block() -> None:
    result = export(Small().eval(), ExportRecipe.get_recipe(U85), images())
    (x,) = images(1)[0]
    with host_backends.record_executions() as outer:
        with host_backends.record_executions() as inner:
            result.run(x)
        result.run(x)
    result.run(x)
    assert len(inner) == len(outer) == 1
    assert inner[0].checksum == result.report.delegates[0].checksum
    assert all(map(np.array_equal, inner[0].outputs, outer[0].outputs))


def test_verify_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.pt2"
    torch.export.save(torch.export.export(Small().eval(), images(1)[0]), str(path))
    arguments = ["export", str(path), "--recipe", "ETHOSU_U85_INT8", "--verify"]
    assert main(arguments) == 0
    assert re.search(VERIFIED.format("1 execution of 1 delegate"), capsys.readouterr().out)

    def unavailable() -> None:
        raise RuntimeUnavailable("there is no compiler")

    monkeypatch.setattr("arm_recipes.pipeline.export.load_plugin", unavailable)
    assert main(arguments) == 1
    assert "error: there is no compiler" in capsys.readouterr().err
