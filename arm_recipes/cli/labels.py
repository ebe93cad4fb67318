"""Class labels on the command line: an array file with one integer for each item of the samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes.cli.parser import SAMPLES

if TYPE_CHECKING:
    from arm_recipes.cli.parser import Parser

#: Name of the labels in an ``.npz`` file of several arrays.
_ARRAY_NAME = "labels"


def add_labels(parser: Parser, purpose: str) -> None:
    """Add the argument ``--labels``."""
    parser.group(SAMPLES).add_argument(
        "--labels",
        type=Path,
        metavar="FILE",
        help=f"{purpose}: class indices, one per item of the samples, in an .npy file, or in an .npz file as its only "
        f"array or as '{_ARRAY_NAME}'",
    )


def read_labels(path: Path | None) -> Any:
    """Read the array of ``--labels``; None without the argument.

    Raises:
        ValueError: the file cannot be read, or holds no one-dimensional integer array.
    """
    if path is None:
        return None
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            names = list(loaded.files)
            name = names[0] if len(names) == 1 else _ARRAY_NAME
            if name not in names:
                raise ValueError(f"its arrays are {', '.join(names)}; name one of them '{_ARRAY_NAME}'")
            loaded = loaded[name]
    except (OSError, ValueError) as error:
        raise ValueError(f"--labels: '{path}' cannot be read as an array: {error}") from error
    if loaded.ndim != 1 or loaded.dtype.kind not in "iu":
        raise ValueError(
            f"--labels: '{path}' holds {loaded.dtype}{list(loaded.shape)}, not a one-dimensional integer array"
        )
    return loaded
