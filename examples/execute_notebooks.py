"""Execute the notebooks of this folder and store their outputs: ``make notebooks``.

    python examples/execute_notebooks.py                          # all notebooks
    python examples/execute_notebooks.py examples/2_accuracy.ipynb

Cells run in a temporary folder. Execution times and machine paths are not stored. HTML that contains a whole plotting
library is not stored either; viewers then show the text beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
_ROOT = EXAMPLES.parent
_TIMEOUT = 600  # seconds for a cell
_MAX_HTML_BYTES = 100_000


def main() -> None:
    """Execute the notebooks that the arguments name, and write them."""
    parser = argparse.ArgumentParser(description="Execute notebooks and store their outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        nbformat.write(notebook, path)
        print(f"{path.name}: {sum(len(outputs) for outputs in code_outputs(notebook))} outputs")


def execute(path: Path, folder: Path) -> Any:
    """Return the executed notebook.

    Args:
        path: the notebook. Its cells import the modules beside it.
        folder: working folder of the cells.

    Raises:
        CellExecutionError: a cell raised an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    previous = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (EXAMPLES.resolve(), _ROOT.resolve())))
    try:
        client.execute()
    finally:
        if previous is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = previous
    notebook.metadata.language_info = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", ()):
            _clean(output, (sysconfig.get_path("purelib"), str(_ROOT.resolve()), str(folder)))
    return notebook


def code_outputs(notebook: Any) -> list[list[Any]]:
    """The outputs of each code cell."""
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def _clean(output: Any, folders: tuple[str, ...]) -> None:
    """Remove what depends on the machine from an output, and HTML that is too large for a repository."""
    texts = output.get("data", output)
    for kind in ("text", "text/plain", "text/html"):
        if isinstance(texts.get(kind), str):
            for folder in folders:
                texts[kind] = texts[kind].replace(f"{folder}/", "").replace(folder, ".")
            texts[kind] = re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "cell.py", texts[kind])
    if len(texts.get("text/html", "")) > _MAX_HTML_BYTES:
        del texts["text/html"]
    if "text/html" in texts:  # the other text is the repr of a data class, which nobody reads
        texts["text/plain"] = f"{texts['text/plain'].partition('(')[0]}(...)"


if __name__ == "__main__":
    main()
