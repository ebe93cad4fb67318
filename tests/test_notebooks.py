"""The notebooks run from the first cell to the last, and have the outputs that a run gives, apart from numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from examples.execute_notebooks import NOTEBOOKS, code_outputs, execute

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?%?")


def _summary(output: Any) -> tuple[str, list[str], str]:
    """Type, formats and the words of the first line of an output."""
    data = output.get("data", {})
    text = output.get("text", data.get("text/plain", ""))
    return output.output_type, sorted(data), " ".join(_NUMBER.sub("#", text.split("\n")[0]).split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored(path: Path) -> None:
    outputs = code_outputs(nbformat.read(path, as_version=4))
    assert sum(map(bool, outputs)) >= 4
    assert not [x for cell in outputs for x in cell if x.output_type == "error"]
    text = json.dumps(outputs)
    assert len(text) < 200_000
    assert not re.findall(r"/(?:home|root|tmp|work|Users)/\S*", text), "run examples/execute_notebooks.py again"


@pytest.mark.verify
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    stored = code_outputs(nbformat.read(path, as_version=4))
    current = code_outputs(execute(path, tmp_path))
    assert [list(map(_summary, cell)) for cell in current] == [list(map(_summary, cell)) for cell in stored], (
        "run make notebooks"
    )
