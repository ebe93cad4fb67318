"""Measurements of a device: read from a log, compared with the estimates, and refused if of another program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from arm_recipes import ArmRecipeType, ExportResult
from arm_recipes.report.measurements import Measurement, compare_measurements, read_measurements
from tests.runtime.host_programs import export_small


def _result() -> ExportResult:
    return export_small(ArmRecipeType.ETHOSU_U55_INT8)


def _line(**values: Any) -> str:
    run = {"arm_recipes_run": 1, "program_crc32": "0badcafe", "npu": "Ethos-U55-128", "method": "forward", "case": 0}
    return json.dumps({**run, "cpu_cycles": 9000, "npu_cycles": 7000, "counters": {}, **values})


def _log(folder: Path, *lines: str) -> Path:
    path = folder / "log.jsonl"
    path.write_text("\n".join(["self-test: Ethos-U55-128", *lines, "self-test: ok, 1 cases"]) + "\n")
    return path


def test_medians_are_compared_with_the_estimates(tmp_path: Path) -> None:
    result = _result()
    tensor = next(layer for layer in result.report.layers if layer.tensors).tensors[0]
    lines = [_line(case=case, npu_cycles=7000 + case, layers={tensor: 500 + case}) for case in range(3)]
    report = result.report.with_measurements(_log(tmp_path, f"[00:01] {lines[0]}", *lines[1:]))
    compared = compare_measurements(report.measurements, result.report.to_dict())
    (method,) = compared.methods
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    assert (method.runs, method.npu_cycles, method.cpu_cycles) == (3, 7001, 9000)
    assert method.estimated_npu_cycles == delegate.vela.total_cycles
    assert method.layers[0][3] == 501
    ratio = f"{7001 / delegate.vela.total_cycles - 1:+.0%}"
    for text in (str(report), str(compared)):
        assert "7,001 measured" in text
        assert f"{delegate.vela.total_cycles:,} by Vela's estimate" in text
        assert ratio in text
        assert "501 measured" in text
    assert "7,001 measured" in report.page().text
    assert "7,001 cycles of the NPU, measured; the time assumes 500 MHz on ethos-u55-128" in report.page().text
    assert len(report.to_dict()["measurements"]) == 3
    assert "Measured on the device" not in str(result.report)


def test_missing_counters_are_reported_as_not_counted(tmp_path: Path) -> None:
    line = _line(npu_cycles=None, cpu_cycles=None, counters={"axi0_reads": 12})
    text = str(_result().report.with_measurements(_log(tmp_path, line)))
    assert text.count("not counted") == 2
    assert "axi0_reads" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no measurements"),
        ([_line()[:-9]], "line 2 of .* is damaged"),
        ([_line(case="first")], "line 2 of .* is damaged"),
        ([_line(method="decode")], "measures the method 'decode', the export has forward"),
        ([_line(npu="Ethos-U85-256")], "measures an Ethos-U85-256, the export is for ethos-u55-128"),
    ],
)
def test_damaged_and_foreign_logs_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _result().report.with_measurements(_log(tmp_path, *lines))


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_measurements(tmp_path / "none.jsonl")


def test_cycles_of_an_operation_of_several_layers_are_apportioned() -> None:
    """The estimates of the layers are 300 and 100 cycles. The measured operation computes a part of both."""
    layers = [
        {"method": "forward", "module": name, "source": "", "cycles": cycles, "tensors": ["joint"]}
        for name, cycles in (("conv", 300), ("relu", 100))
    ]
    run = Measurement("Ethos-U55-128", "forward", 0, layers={"joint": 1000})
    (method,) = compare_measurements([run], {"layers": layers}).methods
    assert [(row[0], row[3]) for row in method.layers] == [("conv", 750), ("relu", 250)]
