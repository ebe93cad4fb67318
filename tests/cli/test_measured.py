"""``arm-recipes measured``: with the report of the export, and alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arm_recipes import ArmRecipeType
from arm_recipes.cli.main import main
from tests.runtime.host_programs import export_small

_LINE = (
    '12:00 {"arm_recipes_run": 1, "npu": "Ethos-U55-128", "method": "forward", "case": 0, "cpu_cycles": 9000, '
    '"npu_cycles": 7000, "counters": {}}\n'
)


def test_measured_prints_with_and_without_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, report = tmp_path / "log.jsonl", tmp_path / "report.json"
    log.write_text(_LINE)
    report.write_text(json.dumps(export_small(ArmRecipeType.ETHOSU_U55_INT8).report.to_dict()))
    assert main(["measured", str(log), "--report", str(report)]) == 0
    assert "by Vela's estimate" in capsys.readouterr().out
    assert main(["measured", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["npu_cycles"] == 7000
    report.write_text("[]")
    assert main(["measured", str(log), "--report", str(report)]) == 2
    assert "is not a report" in capsys.readouterr().err
