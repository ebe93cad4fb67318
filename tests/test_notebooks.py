"""The notebooks run from the first cell to the last, as a user would."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

_EXAMPLES = Path(__file__).parents[1] / "examples"
_NOTEBOOKS = sorted(_EXAMPLES.glob("*.ipynb"))


def test_there_are_some_and_none_has_outputs() -> None:
    assert len(_NOTEBOOKS) == 3
    for path in _NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert [cell.outputs for cell in cells if cell.cell_type == "code" and cell.outputs] == []


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A notebook has the modules beside it, and writes where it is.
    monkeypatch.setenv("PYTHONPATH", f"{_EXAMPLES}:{_EXAMPLES.parent}")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    errors = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert errors == []
