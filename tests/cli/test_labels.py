"""``--labels``: array files with one integer for each item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arm_recipes.cli.labels import read_labels

_LABELS = np.array([3, 0, 1], np.uint8)


def test_files_of_labels(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", _LABELS)
    np.savez(tmp_path / "b.npz", _LABELS)
    np.savez(tmp_path / "c.npz", x=np.zeros(3), labels=_LABELS)
    for name in ("a.npy", "b.npz", "c.npz"):
        assert read_labels(tmp_path / name).tolist() == [3, 0, 1]
    assert read_labels(None) is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": _LABELS, "b": _LABELS}, "its arrays are a, b; name one of them 'labels'"),
        ({"labels": _LABELS / 2}, r"holds float64\[3\], not a one-dimensional integer array"),
        ({"labels": _LABELS.reshape(1, 3)}, r"holds uint8\[1, 3\], not"),
    ],
)
def test_files_that_hold_no_labels(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / "x.npz")


def test_a_file_that_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_text("1 2 3")
    with pytest.raises(ValueError, match="cannot be read as an array"):
        read_labels(tmp_path / "x.npy")
